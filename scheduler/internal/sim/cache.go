package sim

import (
	"math"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// cache is the KV memory of one engine, in blocks, as vLLM keeps it: every
// block is counted by the requests that use it, and one that nobody uses waits
// in the queue of free blocks, where it keeps its content until it is taken.
// Whoever needs a block takes the first of the queue. A request gives its
// blocks back from its tail to its head, so that heads live longest, and so
// that a block is never taken before what follows it.
type cache struct {
	limit  int // blocks in all
	blocks []block
	queue  list // of free blocks
	byKey  map[blockkey.Key]int32
	change func(held bool, at int32)
	// marked, if set, hears of blocks at which a hit may end, and of such that are
	// about to be forgotten.
	marked func(end bool, at int32)
}

// block is one block of KV memory.
type block struct {
	key        blockkey.Key // 0: no content that could be found
	before     []blockkey.Key
	position   int32 // in its chain
	users      int32
	end        bool  // a hit may end here
	next, prev int32 // in the queue; none at its ends and outside
}

// parent is the key before a block's, 0 if its chain begins with it.
func (b *block) parent() blockkey.Key {
	if len(b.before) == 0 {
		return 0
	}
	return b.before[len(b.before)-1]
}

type list struct {
	first, last int32
	size        int
}

const none = -1

// boundless is the limit of a cache that never lacks a block.
const boundless = math.MaxInt32

func newCache(blocks int) *cache {
	return &cache{
		limit:  blocks,
		queue:  list{first: none, last: none},
		byKey:  make(map[blockkey.Key]int32),
		change: func(bool, int32) {},
		marked: func(bool, int32) {},
	}
}

// room is the number of blocks that could be taken.
func (c *cache) room() int { return c.limit - len(c.blocks) + c.queue.size }

// used is the number of blocks in use by requests.
func (c *cache) used() int { return len(c.blocks) - c.queue.size }

// match returns how many of the leading keys are held, at most limit.
func (c *cache) match(keys []blockkey.Key, limit int) int {
	keys = keys[:min(len(keys), limit)]
	for i, k := range keys {
		if _, ok := c.byKey[k]; !ok {
			return i
		}
	}
	return len(keys)
}

// lastEnd is how many of the keys, all held, there are up to the last at which a
// hit may end.
func (c *cache) lastEnd(keys []blockkey.Key) int {
	for n := len(keys); n > 0; n-- {
		if c.blocks[c.byKey[keys[n-1]]].end {
			return n
		}
	}
	return 0
}

// mark lets hits end at a key, if it is held.
func (c *cache) mark(key blockkey.Key) {
	if at, ok := c.byKey[key]; ok && !c.blocks[at].end {
		c.blocks[at].end = true
		c.marked(true, at)
	}
}

// unused counts those of the keys, all held, whose blocks nobody uses: to use
// them takes that much of the room.
func (c *cache) unused(keys []blockkey.Key) int {
	n := 0
	for _, k := range keys {
		if c.blocks[c.byKey[k]].users == 0 {
			n++
		}
	}
	return n
}

// use takes a block that holds key, if there is one.
func (c *cache) use(key blockkey.Key) (int32, bool) {
	at, ok := c.byKey[key]
	if !ok {
		return none, false
	}
	b := &c.blocks[at]
	if b.users == 0 {
		c.unlink(at)
	}
	b.users++
	return at, true
}

// take takes a block for new content; there must be room.
func (c *cache) take() int32 {
	at := c.queue.first
	if (at == none || c.blocks[at].key != 0) && len(c.blocks) < c.limit {
		at = int32(len(c.blocks))
		c.blocks = append(c.blocks, block{next: none, prev: none})
	} else {
		c.unlink(at)
		c.forget(at)
	}
	c.blocks[at].users = 1
	return at
}

// name says that a block in use holds the one at a position of a chain. If
// another block holds the same already, this one stays without a name.
func (c *cache) name(at int32, chain []blockkey.Key, position int) {
	key := chain[position]
	if _, ok := c.byKey[key]; ok {
		return
	}
	b := &c.blocks[at]
	b.key, b.before, b.position = key, blockkey.Before(chain, position), int32(position)
	c.byKey[key] = at
	c.change(true, at)
}

// named lists the blocks that hold something.
func (c *cache) named() []*block {
	list := make([]*block, 0, len(c.byKey))
	for at := range c.blocks {
		if c.blocks[at].key != 0 {
			list = append(list, &c.blocks[at])
		}
	}
	return list
}

// forget drops the content of a block.
func (c *cache) forget(at int32) {
	b := &c.blocks[at]
	if b.key == 0 {
		return
	}
	if b.end {
		b.end = false
		c.marked(false, at)
	}
	c.change(false, at)
	delete(c.byKey, b.key)
	b.key = 0
}

// release gives a block back. Without keep its content is of no use to
// anybody, and it is the next to be taken.
func (c *cache) release(at int32, keep bool) {
	b := &c.blocks[at]
	b.users--
	switch {
	case b.users > 0:
	case keep:
		c.pushBack(at)
	default:
		c.pushFront(at)
	}
}

func (c *cache) pushBack(at int32) {
	b := &c.blocks[at]
	b.prev, b.next = c.queue.last, none
	if b.prev == none {
		c.queue.first = at
	} else {
		c.blocks[b.prev].next = at
	}
	c.queue.last = at
	c.queue.size++
}

func (c *cache) pushFront(at int32) {
	b := &c.blocks[at]
	b.prev, b.next = none, c.queue.first
	if b.next == none {
		c.queue.last = at
	} else {
		c.blocks[b.next].prev = at
	}
	c.queue.first = at
	c.queue.size++
}

func (c *cache) unlink(at int32) {
	b := &c.blocks[at]
	if b.prev == none {
		c.queue.first = b.next
	} else {
		c.blocks[b.prev].next = b.next
	}
	if b.next == none {
		c.queue.last = b.prev
	} else {
		c.blocks[b.next].prev = b.prev
	}
	b.next, b.prev = none, none
	c.queue.size--
}
