package sim

import (
	"cmp"
	"container/heap"
	"errors"
	"math"
	"slices"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// The arms that no scheduler can be: they know what no scheduler knows, and
// show how far there is to go.
const (
	// Oracle places by least tokens in front of engines that share one cache
	// without bounds, and never lack memory. No router can hit more.
	Oracle = "oracle"
	// CapacityOracle places by least tokens in front of engines that have
	// their own memory for the requests they run, and find cached what the
	// best of all pools of that much memory would hold.
	//
	// The argument that no router with this memory can hit more, requests
	// taken in the order in which they come: whatever blocks the pods hold at
	// a moment, a pool of all their memory could hold them too, each once.
	// Which of its blocks a pool keeps is best chosen by Belady's rule, the
	// furthest next use goes first, with the choice of not keeping a block at
	// all; and that pool is given two things that no engine has: blocks need
	// no block before them to count, and running requests take no memory from
	// it. Only a router that lets requests pass each other could gain a little
	// by bringing those together that share a prefix.
	CapacityOracle = "capacity-oracle"
	// PooledLRU is CapacityOracle with a pool that does not know the future: of
	// the blocks of prompts, and of output that has keys, the one goes that was
	// used longest ago, tails before heads. What a router without knowledge of the
	// future can reach; one that keeps what is used once apart from what is used
	// again may do better.
	PooledLRU = "pooled-lru"
)

// Bound tells whether a name is that of an arm that no scheduler can be.
func Bound(name string) bool {
	return name == Oracle || name == CapacityOracle || name == PooledLRU || Told(name)
}

// pooled places requests on engines as if all that any of them has cached were
// at hand everywhere: where the least tokens are still to be computed, then
// the fewest requests are. It sees the present state of every engine.
type pooled struct {
	pods   []*pod
	loads  []pooledLoad
	at     map[*request]int // its pod
	charge map[*request]int // tokens to compute
	held   func(r *request) int
	limit  int
	seen   map[blockkey.Key]struct{}
	lru    *lruPool
}

type pooledLoad struct{ tokens, requests int }

func newPooled(held func(r *request) int) *pooled {
	return &pooled{at: make(map[*request]int), charge: make(map[*request]int), held: held}
}

// newOracle has a cache without bounds.
func newOracle() *pooled {
	p := newPooled(nil)
	p.limit = boundless
	p.seen = make(map[blockkey.Key]struct{})
	p.held = p.everHeld
	return p
}

// newCapacityOracle takes the hits of every request in blocks.
func newCapacityOracle(hits []int32) *pooled {
	return newPooled(func(r *request) int { return int(hits[r.ID]) })
}

// newPooledLRU has a pool of so many blocks.
func newPooledLRU(blocks int) *pooled {
	lru := &lruPool{cache: newCache(blocks), found: make(map[int]int)}
	p := newPooled(func(r *request) int { return lru.found[r.ID] })
	p.lru = lru
	return p
}

// everHeld looks up what was ever sent to any engine.
func (p *pooled) everHeld(r *request) int {
	n := 0
	for ; n < len(r.Keys); n++ {
		if _, ok := p.seen[r.Keys[n]]; !ok {
			break
		}
	}
	return n
}

func (p *pooled) join(q *pod) {
	q.cache.limit = max(q.cache.limit, p.limit)
	q.held = func(r *request) int {
		n := p.held(r)
		if prompt := min(len(r.Keys), r.Length/q.blockSize); p.seen != nil && n < prompt {
			for _, k := range r.Keys[n:prompt] { // present from admission on
				p.seen[k] = struct{}{}
			}
		}
		return n
	}
	p.pods = append(p.pods, q)
	p.loads = append(p.loads, pooledLoad{})
}

func (p *pooled) place(r *request) (*pod, error) {
	best := 0
	for i := range p.loads {
		if cmp.Or(cmp.Compare(p.loads[i].tokens, p.loads[best].tokens), cmp.Compare(p.loads[i].requests, p.loads[best].requests)) < 0 {
			best = i
		}
	}
	size := p.pods[best].blockSize
	if p.lru != nil && r.resent == 0 {
		p.lru.found[r.ID] = p.lru.use(r.Keys[:min(len(r.Keys), r.Length/size)])
	}
	tokens := r.Length - min(p.held(r), (r.Length-1)/size)*size
	p.at[r], p.charge[r] = best, tokens
	p.loads[best].tokens += tokens
	p.loads[best].requests++
	return p.pods[best], nil
}

func (p *pooled) firstToken(r *request) {
	p.loads[p.at[r]].tokens -= p.charge[r]
	p.charge[r] = 0
}

func (p *pooled) end(r *request, outcome fleet.Outcome) {
	p.firstToken(r)
	p.loads[p.at[r]].requests--
	delete(p.at, r)
	delete(p.charge, r)
	// Its output can be had, too.
	if p.seen != nil {
		for _, k := range r.Keys {
			p.seen[k] = struct{}{}
		}
	}
	if p.lru != nil && outcome == fleet.Finished {
		delete(p.lru.found, r.ID)
		if size := p.pods[0].blockSize; len(r.Keys) > r.Length/size {
			p.lru.use(r.Keys)
		}
	}
}

func (p *pooled) step(*pod)    {}
func (p *pooled) restart(*pod) {}

// lruPool is one cache of all pods' memory, of which running requests take
// nothing: blocks are used for a moment, in the order in which requests come.
type lruPool struct {
	*cache
	found map[int]int // leading blocks that were held when a request came, by its number
}

// use looks up a chain and keeps it whole, or as much of it as the pool has room
// for: its head the longest. It returns how many leading blocks were held.
func (p *lruPool) use(keys []blockkey.Key) int {
	held := p.match(keys, len(keys))
	used := make([]int32, 0, len(keys))
	for i, k := range keys {
		at, ok := p.cache.use(k)
		if !ok {
			if p.room() == 0 {
				break
			}
			at = p.take()
			p.name(at, keys, i)
		}
		used = append(used, at)
	}
	for _, at := range slices.Backward(used) {
		p.release(at, true)
	}
	return held
}

// errClosed says why a closed loop has no capacity oracle.
var errClosed = errors.New(CapacityOracle + " must know all requests beforehand, and these depend on when others end: leave it out")

// bestHits plays the requests in their order against one pool of so many
// blocks and returns how many blocks of each it has: Belady's rule with bypass.
func bestHits(s arrival.Source, blocks int) ([]int32, error) {
	type use struct {
		block int32
		next  int32 // position in uses of the block's next use
	}
	const never = math.MaxInt32
	var uses []use
	var ends []int // of each request, in uses
	var most []int // blocks of each request that count
	last := make(map[blockkey.Key]int32)
	numbers := make(map[blockkey.Key]int32)
	for {
		r, ok := s.Next()
		if !ok {
			break
		}
		for _, k := range r.Keys[:min(len(r.Keys), r.Length/s.BlockSize())] {
			n, ok := numbers[k]
			if !ok {
				n = int32(len(numbers))
				numbers[k] = n
			} else {
				uses[last[k]].next = int32(len(uses))
			}
			last[k] = int32(len(uses))
			uses = append(uses, use{n, never})
		}
		ends = append(ends, len(uses))
		most = append(most, (r.Length-1)/s.BlockSize())
	}
	if len(ends) < s.Len() {
		return nil, errClosed
	}
	hits := make([]int32, len(ends))
	p := pool{due: make([]int32, len(numbers)), place: slices.Repeat([]int32{none}, len(numbers))}
	from := 0
	for i, end := range ends {
		for at, u := range uses[from:end] {
			held := p.place[u.block] != none
			if held && at < most[i] {
				hits[i]++
			}
			p.due[u.block] = u.next
			switch {
			case held && u.next == never:
				heap.Remove(&p, int(p.place[u.block]))
			case held:
				heap.Fix(&p, int(p.place[u.block]))
			case u.next == never:
			case len(p.heap) < blocks:
				heap.Push(&p, u.block)
			case u.next < p.due[p.heap[0]]:
				heap.Pop(&p)
				heap.Push(&p, u.block)
			}
		}
		from = end
	}
	return hits, nil
}

// pool is a heap of held blocks, that with the furthest next use first.
type pool struct {
	heap  []int32
	due   []int32 // next use by block
	place []int32 // in heap by block
}

func (p *pool) Len() int           { return len(p.heap) }
func (p *pool) Less(i, j int) bool { return p.due[p.heap[i]] > p.due[p.heap[j]] }
func (p *pool) Swap(i, j int) {
	p.heap[i], p.heap[j] = p.heap[j], p.heap[i]
	p.place[p.heap[i]], p.place[p.heap[j]] = int32(i), int32(j)
}
func (p *pool) Push(x any) {
	b := x.(int32)
	p.place[b] = int32(len(p.heap))
	p.heap = append(p.heap, b)
}
func (p *pool) Pop() any {
	b := p.heap[len(p.heap)-1]
	p.heap = p.heap[:len(p.heap)-1]
	p.place[b] = none
	return b
}
