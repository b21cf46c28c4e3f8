// Package approx is the cache state that the scheduler makes itself of what members
// hold: what was sent there, as long as it would fit into the member's cache if
// the longest unused blocks leave first. It stands in for members without a
// cache state of their own, for policies that go by what was sent, and for those
// that ask what a member was sent lately.
//
// What a member is believed to hold is prefix-closed at every moment, and it
// stands in the index on index.LaneApproximate, where it is wanted. The
// package has no clock and decides nothing.
package approx

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

const (
	// Window is the time that counts as lately.
	Window = 3 * time.Minute
	// maxHits bounds the prompts of the window; the oldest leave sooner.
	maxHits = 1 << 16
	// tokens of a cache whose size is not known.
	tokens = 500_000
	// weight of a piece of content in memory, as a number of blocks.
	weight = 32
)

// Config bounds a Mirror.
type Config struct {
	Index *index.Index
	// MaxBlocks that all members together are believed to hold; 4,194,304.
	// Members share it evenly, where their caches are larger.
	MaxBlocks int
}

// Mirror is safe for concurrent use.
type Mirror struct {
	Wanted Wanted

	index   *index.Index
	max     int
	tracked atomic.Int32 // members that are followed

	mu      sync.Mutex // guards the rest
	nodes   []node     // 0 is none
	spare   []int32    // nodes not in use
	heads   map[blockkey.Key]int32
	places  []place // 0 is none
	unused  []int32 // places not in use
	members map[index.Member]*member
	hits    []hit // of the window, from first on
	first   int
	path    []int32
	lead    [blockkey.Lead]blockkey.Key
	live    int // nodes in use
	stats   Stats
}

// Stats describes a Mirror.
type Stats struct {
	// Members followed, Blocks that they are believed to hold, Pieces of
	// content, Prompts of the window.
	Members, Blocks, Pieces, Prompts int
	// Added prompts, Evicted blocks and Resets of members since the start.
	Added, Evicted, Resets uint64
	// Moved and Copied pieces, see Balance.
	Moved, Copied uint64
}

// node is a piece of content: consecutive blocks of one chain. A piece ends
// where prompts went apart.
type node struct {
	parent   int32
	start    uint32 // position of the first block
	size     uint32 // tokens a block
	children int32
	keys     []blockkey.Key
	places   []int32

	// Of the window: prompts that went through, their blocks, and those of
	// them that were cached where they went.
	count      int
	asked, hit int
	share      learn.Work // charged to each member that holds it
	owners     []index.Member
	moved      bool // it belongs to owners alone
}

// place is a member that holds the first blocks of a node, in the member's
// order of use.
type place struct {
	node       int32
	member     *member
	cut        uint32
	prev, next int32
	slot       int32 // in node.places
}

// member is what one member is believed to hold. A node is used after all that
// hang below it, so the longest unused place has nothing below.
type member struct {
	id       index.Member
	epoch    uint64
	lane     bool // it stands in the index
	capacity int
	held     int
	prompts  int // of the window
	newest   int32
	oldest   int32
	at       map[int32]int32 // node -> place
	lately   learn.Work
}

// hit is one prompt of the window.
type hit struct {
	at            time.Time
	node          int32 // where it ends
	member        *member
	asked, cached int
	firstTokenMS  float64
}

// New returns an empty mirror.
func New(cfg Config) *Mirror {
	if cfg.MaxBlocks <= 0 {
		cfg.MaxBlocks = 1 << 22
	}
	return &Mirror{
		index:   cfg.Index,
		max:     cfg.MaxBlocks,
		nodes:   make([]node, 1),
		places:  make([]place, 1),
		heads:   make(map[blockkey.Key]int32),
		members: make(map[index.Member]*member),
	}
}

// Prompt is one that was sent to a member.
type Prompt struct {
	Member index.Member
	// Epoch of the member: in another one it begins empty.
	Epoch uint64
	// Blocks that its cache has; 0: not known.
	Blocks int
	// Lane: the member's cache state is to stand in the index.
	Lane bool
	// Keys of the whole blocks, each of BlockSize tokens. They are copied.
	Keys      []blockkey.Key
	BlockSize int
	// Cached blocks where it went, and the time to the first token as
	// predicted.
	Cached       int
	FirstTokenMS float64
}

// Add notes that a prompt was sent.
func (x *Mirror) Add(p Prompt, now time.Time) {
	if len(p.Keys) == 0 || p.BlockSize <= 0 {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.expireLocked(now)
	m := x.memberLocked(&p)
	deepest := x.walkLocked(p.Keys, uint32(p.BlockSize))
	if deepest == 0 {
		return
	}
	x.useLocked(m, p.Keys)
	x.countLocked(m, deepest, &p, now)
	for m.held > x.shareOf(m) || len(m.at) > max(64, x.max/weight/len(x.members)) {
		x.evictLocked(m)
	}
	x.stats.Added++
}

// shareOf is the number of blocks that m may be believed to hold.
func (x *Mirror) shareOf(m *member) int { return max(1, min(m.capacity, x.max/len(x.members))) }

func (x *Mirror) memberLocked(p *Prompt) *member {
	m := x.members[p.Member]
	if m != nil && m.epoch != p.Epoch {
		x.forgetLocked(m)
		x.stats.Resets++
		m = nil
	}
	if m == nil {
		m = &member{id: p.Member, epoch: p.Epoch, lane: p.Lane, at: make(map[int32]int32)}
		x.members[p.Member] = m
		x.tracked.Store(int32(len(x.members)))
		if p.Lane {
			x.index.ForgetLane(m.id, index.LaneApproximate)
		}
	}
	x.laneLocked(m, p.Lane)
	if m.capacity = p.Blocks; m.capacity <= 0 {
		m.capacity = max(1, tokens/p.BlockSize)
	}
	return m
}

// Tracks tells whether any member is followed. It takes no lock.
func (x *Mirror) Tracks() bool { return x.tracked.Load() > 0 }

// Follows tells whether the member is followed in this epoch.
func (x *Mirror) Follows(id index.Member, epoch uint64) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	m := x.members[id]
	return m != nil && m.epoch == epoch
}

// Members that are followed.
func (x *Mirror) Members() []index.Member {
	x.mu.Lock()
	defer x.mu.Unlock()
	list := make([]index.Member, 0, len(x.members))
	for id := range x.members {
		list = append(list, id)
	}
	return list
}

// Lane puts what the member is believed to hold into the index, or takes it
// out.
func (x *Mirror) Lane(id index.Member, on bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if m := x.members[id]; m != nil {
		x.laneLocked(m, on)
	}
}

func (x *Mirror) laneLocked(m *member, on bool) {
	if m.lane == on {
		return
	}
	m.lane = on
	x.index.ForgetLane(m.id, index.LaneApproximate)
	if !on {
		return
	}
	// The most recent first: what hangs below comes after.
	for i := m.newest; i != 0; i = x.places[i].next {
		p := &x.places[i]
		n := &x.nodes[p.node]
		x.index.Store(m.id, index.LaneApproximate, x.before(p.node, 0), n.start, n.keys[:p.cut])
	}
}

// before is the keys before one of a node, as many as the index asks for. They
// are valid until the next call.
func (x *Mirror) before(id int32, offset uint32) []blockkey.Key {
	at := len(x.lead)
	for keys := x.nodes[id].keys[:offset]; ; keys = x.nodes[id].keys {
		for i := len(keys) - 1; i >= 0 && at > 0; i-- {
			at--
			x.lead[at] = keys[i]
		}
		if id = x.nodes[id].parent; id == 0 || at == 0 {
			return x.lead[at:]
		}
	}
}

// Forget drops a member and all that it is believed to hold.
func (x *Mirror) Forget(id index.Member) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if m := x.members[id]; m != nil {
		x.forgetLocked(m)
	}
}

func (x *Mirror) forgetLocked(m *member) {
	if m.lane {
		x.index.ForgetLane(m.id, index.LaneApproximate)
	}
	m.lane = false
	for m.oldest != 0 {
		x.dropLocked(m.oldest)
	}
	delete(x.members, m.id)
	x.tracked.Store(int32(len(x.members)))
}

// Stats returns the counts.
func (x *Mirror) Stats() Stats {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.stats
	s.Members, s.Pieces, s.Prompts = len(x.members), x.live, len(x.hits)-x.first
	for _, m := range x.members {
		s.Blocks += m.held
	}
	return s
}
