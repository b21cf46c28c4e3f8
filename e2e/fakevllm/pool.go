package fakevllm

import "fmt"

// pool is the KV block pool of one rank: physical blocks with reference
// counts, found by hash, and a free queue.
//
//   - A block with references is never in the free queue; one without always is.
//   - Equal hashes may belong to several blocks; they are not merged. The oldest
//     is the one that is found.
//   - A free block keeps its hash, and can be found, until it is taken for
//     something else.
//   - Block 0 is the null block, which nobody gets: it stands for what a
//     sequence does not need.
//
// A pool is not safe for concurrent use.
type pool struct {
	blocks []block
	// byHash is the oldest block of each name; the others follow by nextSame.
	byHash map[name]int32
	free   int
	// head and tail of the free queue; blocks are taken at the head.
	head, tail int32
}

// name is what a block is found by: one hash means another block in each group.
type name struct {
	hash  uint64
	group int
}

type block struct {
	name               name
	hashed             bool
	refs               int32
	prev, next         int32 // free queue, none at the ends
	prevSame, nextSame int32 // blocks of the same hash, oldest first
}

const none = int32(-1)

func newPool(blocks int) *pool {
	p := &pool{
		blocks: make([]block, blocks),
		byHash: make(map[name]int32),
		head:   none,
		tail:   none,
	}
	for i := range p.blocks {
		p.blocks[i] = block{prev: none, next: none, prevSame: none, nextSame: none}
	}
	p.blocks[0].refs = 1
	for i := 1; i < blocks; i++ {
		p.pushBack(int32(i))
	}
	return p
}

// match counts the leading hashes that a group has blocks of.
func (p *pool) match(hashes []uint64, group int) int {
	for i, h := range hashes {
		if _, ok := p.byHash[name{h, group}]; !ok {
			return i
		}
	}
	return len(hashes)
}

// idle counts the blocks among ids that nobody uses: taking them takes from
// the free blocks.
func (p *pool) idle(ids []int32) int {
	n := 0
	for _, id := range ids {
		if p.blocks[id].refs == 0 {
			n++
		}
	}
	return n
}

// take adds a reference to each block.
func (p *pool) take(ids []int32) {
	for _, id := range ids {
		if id == 0 {
			continue
		}
		b := &p.blocks[id]
		if b.refs == 0 {
			p.unlink(id)
		}
		b.refs++
	}
}

// allocate takes the n oldest free blocks, which must exist, and reports each
// hash that is lost by it.
func (p *pool) allocate(dst []int32, n int, evicted func(name)) []int32 {
	if n > p.free {
		panic(fmt.Sprintf("fakevllm: allocate %d of %d free blocks", n, p.free))
	}
	for range n {
		id := p.head
		p.unlink(id)
		b := &p.blocks[id]
		if b.hashed {
			evicted(b.name)
			p.unseal(id)
		}
		b.refs = 1
		dst = append(dst, id)
	}
	return dst
}

// seal gives a full block its name.
func (p *pool) seal(id int32, n name) {
	b := &p.blocks[id]
	if b.hashed {
		panic(fmt.Sprintf("fakevllm: block %d sealed twice", id))
	}
	b.name, b.hashed = n, true
	first, ok := p.byHash[n]
	if !ok {
		p.byHash[n] = id
		return
	}
	last := first
	for p.blocks[last].nextSame != none {
		last = p.blocks[last].nextSame
	}
	p.blocks[last].nextSame = id
	b.prevSame = last
}

func (p *pool) unseal(id int32) {
	b := &p.blocks[id]
	if b.nextSame != none {
		p.blocks[b.nextSame].prevSame = b.prevSame
	}
	switch {
	case b.prevSame != none:
		p.blocks[b.prevSame].nextSame = b.nextSame
	case b.nextSame != none:
		p.byHash[b.name] = b.nextSame
	default:
		delete(p.byHash, b.name)
	}
	b.name, b.hashed, b.prevSame, b.nextSame = name{}, false, none, none
}

// release drops a reference to each block of a sequence, its tail first.
// Blocks that become free and have no hash are reused before all others.
func (p *pool) release(ids []int32) {
	for i := len(ids) - 1; i >= 0; i-- {
		if ids[i] == 0 {
			continue
		}
		b := &p.blocks[ids[i]]
		if b.refs--; b.refs > 0 {
			continue
		}
		if b.refs < 0 {
			panic(fmt.Sprintf("fakevllm: block %d released too often", ids[i]))
		}
		if b.hashed {
			p.pushBack(ids[i])
		} else {
			p.pushFront(ids[i])
		}
	}
}

// clear forgets all hashes, unless blocks are in use.
func (p *pool) clear() bool {
	if p.free != len(p.blocks)-1 {
		return false
	}
	for i := range p.blocks {
		b := &p.blocks[i]
		b.name, b.hashed, b.prevSame, b.nextSame = name{}, false, none, none
	}
	clear(p.byHash)
	return true
}

// held appends the hash of every cached block, copies included.
func (p *pool) held(dst []uint64) []uint64 {
	for i := range p.blocks {
		if p.blocks[i].hashed {
			dst = append(dst, p.blocks[i].name.hash)
		}
	}
	return dst
}

// usage is the share of blocks in use.
func (p *pool) usage() float64 {
	return 1 - float64(p.free)/float64(len(p.blocks)-1)
}

func (p *pool) pushBack(id int32) {
	b := &p.blocks[id]
	b.prev, b.next = p.tail, none
	if p.tail != none {
		p.blocks[p.tail].next = id
	} else {
		p.head = id
	}
	p.tail = id
	p.free++
}

func (p *pool) pushFront(id int32) {
	b := &p.blocks[id]
	b.prev, b.next = none, p.head
	if p.head != none {
		p.blocks[p.head].prev = id
	} else {
		p.tail = id
	}
	p.head = id
	p.free++
}

func (p *pool) unlink(id int32) {
	b := &p.blocks[id]
	if b.prev != none {
		p.blocks[b.prev].next = b.next
	} else {
		p.head = b.next
	}
	if b.next != none {
		p.blocks[b.next].prev = b.prev
	} else {
		p.tail = b.prev
	}
	b.prev, b.next = none, none
	p.free--
}
