// Package index knows which member holds which blocks. It answers one
// question: how many leading blocks of this chain does each member hold, per
// lane? Keys are chained (a key stands for its whole prefix), so one index
// serves every model, adapter, salt and block size.
//
// The package is pure memory: no clock, no socket, no names of members.
// docs/INDEX.md has the structure and the argument for it.
package index

import (
	"sync"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// Member is the dense number of a member. A number may be used again for
// another member after Forget.
type Member uint32

// Lane is one prefix-closed picture of a member's cache.
type Lane uint8

// The lanes. GPU, host and disk are nested and exact; predicted and
// approximate blocks are assumptions of the scheduler.
const (
	LaneGPU Lane = iota
	LaneHost
	LaneDisk
	LanePredicted
	LaneApproximate

	Lanes = 5
)

// Depths says how many leading blocks of a query one member holds, per lane.
type Depths struct {
	Member Member
	Depth  [Lanes]uint32
}

// Config bounds an index.
type Config struct {
	// MaxBytes of memory that the index may take, at least 4 MiB; 0: no
	// bound.
	MaxBytes int64
	// MaxMembers bounds member numbers; 0: 4,096.
	MaxMembers int
}

// Stats describes the state of an index.
type Stats struct {
	// Bytes taken, of at most MaxBytes (0: no bound).
	Bytes, MaxBytes int64
	// Blocks is the number of distinct blocks, Memberships the number of
	// (member, lane, block) triples held.
	Blocks, Memberships int64
	// Runs are pieces of unbranched content, Sets the distinct holder sets
	// of more than one member.
	Runs, Sets int64
	// LoadFactor of the key table, 0..1.
	LoadFactor float64
	// Shed counts memberships dropped or not taken at the byte bound
	// since the start.
	Shed int64
	// Refused counts calls with a member or lane out of range.
	Refused int64
}

// Index maps block keys to their holders. All methods may run side by side.
// Match takes no lock and waits for nobody; the others take turns.
type Index struct {
	cfg    Config
	heads  *table // keys that begin a run: all that readers look up
	pages  *slab[pages]
	runs   *slab[runs]
	lists  *slab[lists]
	blocks *slab[blocks]
	grace  grace
	places sync.Pool // of *[]uint32 by member, for readers

	mu      sync.Mutex // guards the rest, and the writers' halves of the above
	inner   *table     // keys at even offsets of runs but 0, and tips
	sets    sets
	holders []*holder // by member*Lanes + lane
	loose   map[uint32][]span

	content, memberships, spans, shed, refused int64

	stamp, hand      uint32    // calls of Store; the run that shedOne saw last
	ceiling, cutoffs int64     // of live bytes, 0: none; bytes of all holders' cutoffs
	changing         uint32    // the run that changed last, 0 if it died
	alone            [1]uint64 // groups' answer for a run with one group
	next             []uint64  // groups that move builds
	touched          uint64    // keeps touches of memory alive
	spots            [batch]spot
	keys             [batch]uint64
	cells            [batch]uint32
}

// New returns an empty index.
func New(cfg Config) *Index {
	if cfg.MaxMembers <= 0 {
		cfg.MaxMembers = 4096
	}
	cfg.MaxMembers = min(cfg.MaxMembers, maxID)
	if cfg.MaxBytes > 0 {
		cfg.MaxBytes = max(cfg.MaxBytes, minBytes)
	}
	x := &Index{
		cfg:    cfg,
		pages:  newSlab[pages](pagesBits, (1<<pagesBits)*(pageKeys+1)*8),
		runs:   newSlab[runs](runsBits, (1<<runsBits)*lineBytes),
		lists:  newSlab[lists](listsBits, (1<<listsBits)*8),
		blocks: newSlab[blocks](blockBits, (1<<blockBits)*4),
	}
	x.places.New = func() any {
		places := make([]uint32, cfg.MaxMembers)
		return &places
	}
	x.heads, x.inner = newTable(x.pages, true), newTable(x.pages, false)
	x.sets = sets{blocks: x.blocks, grace: &x.grace, byHash: make(map[uint64]holders)}
	x.grace.reclaim = x.reclaim
	return x
}

// reclaim takes back what no reader can reach.
func (x *Index) reclaim(r retired) {
	switch r.kind {
	case retiredPage:
		x.pages.free(r.number)
	case retiredRun:
		x.runs.free(r.number)
	case retiredList:
		x.lists.free(r.number)
	case retiredBlock:
		x.blocks.free(r.number)
	}
}

// Store says that m holds keys, consecutive blocks of one chain: the child of
// parent first, at position. Keys that are held already change nothing.
// Parent and position only help to find the place: what counts are the keys.
func (x *Index) Store(m Member, l Lane, parent blockkey.Key, position uint32, keys []blockkey.Key) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if int(m) >= x.cfg.MaxMembers || l >= Lanes {
		x.refused++
		return
	}
	if len(keys) == 0 {
		return
	}
	if !x.room(len(keys)) {
		x.shed += int64(len(keys))
		return
	}
	x.stamp++
	h := x.holder(m, l)
	n, offset, found := x.behind(h, parent, position)
	if !found {
		n, offset, found = x.place(parent, position, keys[0])
	}
	for {
		// If found, keys[0] belongs at offset of run n: it stands there, or
		// begins another run, or is not in the index.
		var r *run
		var count int
		if found {
			r = x.run(n)
			if offset == r.length || x.key(r, offset) != uint64(keys[0]) {
				if c, begins := x.heads.find(uint64(keys[0])); begins {
					n, offset = x.locate(c)
					r = x.run(n)
				} else if found = false; offset == r.length {
					count = x.extend(n, r, keys)
				}
			}
		}
		if found {
			count = x.common(r, offset, keys)
		} else if count == 0 {
			n, offset = x.newRun(position), 0
			r = x.run(n)
			count = x.extend(n, r, keys)
		}
		r.stamp = x.stamp
		x.cover(h, n, r, offset, offset+uint32(count))
		h.last = n
		if keys = keys[count:]; len(keys) == 0 {
			return
		}
		position += uint32(count)
		offset += uint32(count)
		found = true
	}
}

// holder of (m, l), made if need be.
func (x *Index) holder(m Member, l Lane) *holder {
	id := int(m)*Lanes + int(l)
	for id >= len(x.holders) {
		x.holders = append(x.holders, nil)
	}
	if x.holders[id] == nil {
		x.holders[id] = &holder{member: m, lane: 1 << l, id: uint32(id)}
	}
	return x.holders[id]
}

// behind is the place behind the block parent, if it lies in the run that h
// changed last.
func (x *Index) behind(h *holder, parent blockkey.Key, position uint32) (n, offset uint32, ok bool) {
	r := x.recent(h)
	if r == nil || position == 0 {
		return 0, 0, false
	}
	offset = position - r.start
	if offset-1 >= r.length || x.key(r, offset-1) != uint64(parent) {
		return 0, 0, false
	}
	return h.last, offset, true
}

// recent is the run that h changed last, or nil. It may have died since, and
// its number may belong to another run: what is in it must be compared.
func (x *Index) recent(h *holder) *run {
	if h.last == 0 {
		return nil
	}
	c := x.runs.chunk(h.last)
	if c == nil {
		return nil
	}
	return &c[h.last&(1<<runsBits-1)]
}

// place is where key is, or where it would be if its parent's run went on.
//
// A key at an odd offset follows its parent, which stands at an even one or
// begins the run, and so is found. If neither is found, key is new. Only who
// names a false parent is misled: it may get less than it holds.
func (x *Index) place(parent blockkey.Key, position uint32, key blockkey.Key) (n, offset uint32, ok bool) {
	if position > 0 {
		if n, offset, ok = x.find(parent); ok {
			return n, offset + 1, true
		}
	}
	if n, offset, ok = x.find(key); ok || position > 0 {
		return n, offset, ok
	}
	n, offset, ok = x.find(parent)
	return n, offset + 1, ok
}

// Remove says that m no longer holds keys, consecutive blocks of one chain
// from position on. Keys that are not held change nothing. Position only
// helps to find the place.
func (x *Index) Remove(m Member, l Lane, position uint32, keys []blockkey.Key) {
	x.mu.Lock()
	defer x.mu.Unlock()
	h := x.known(m, l)
	if h == nil {
		return
	}
	if len(keys) == 0 {
		return
	}
	n, offset, found := x.heldAt(h, position, keys)
	for {
		count := 1
		if found {
			r := x.run(n)
			count = x.common(r, offset, keys)
			x.uncover(h, n, r, offset, offset+uint32(count))
			h.last = n
		}
		if keys = keys[count:]; len(keys) == 0 {
			return
		}
		// A key that neither begins a run nor stands at an even offset
		// follows the one before it, and that was not in this run, or not
		// there at all.
		n, offset, found = x.find(keys[0])
	}
}

// heldAt is the place of keys[0], if h holds it.
func (x *Index) heldAt(h *holder, position uint32, keys []blockkey.Key) (n, offset uint32, ok bool) {
	if r := x.recent(h); r != nil {
		if offset = position - r.start; offset < r.length && x.key(r, offset) == uint64(keys[0]) {
			return h.last, offset, true
		}
	}
	n, offset, ok = x.find(keys[0])
	if !ok && len(keys) > 1 {
		n, offset, ok = x.find(keys[1])
		ok = ok && offset > 0 && x.key(x.run(n), offset-1) == uint64(keys[0])
		offset--
	}
	if ok && x.holds(h, n, offset) {
		return n, offset, true
	}
	if at, o, held := x.search(h, position, keys[0]); held {
		return at, o, true
	}
	return n, offset, ok
}

// search looks for a block in all that h holds: first where its position says.
func (x *Index) search(h *holder, position uint32, key blockkey.Key) (n, offset uint32, ok bool) {
	for n := range h.pieces() {
		r := x.run(n)
		if offset = position - r.start; offset < r.length && x.key(r, offset) == uint64(key) {
			return n, offset, true
		}
	}
	for n := range h.pieces() {
		r := x.run(n)
		for offset := uint32(1); offset < r.length; offset += 2 {
			if x.key(r, offset) == uint64(key) {
				return n, offset, true
			}
		}
	}
	return 0, 0, false
}

// known is the holder of (m, l), or nil if it holds nothing.
func (x *Index) known(m Member, l Lane) *holder {
	if id := int(m)*Lanes + int(l); l < Lanes && int(m) < x.cfg.MaxMembers && id < len(x.holders) {
		return x.holders[id]
	}
	return nil
}

// Forget drops all that m holds. No Match that starts after it names m.
func (x *Index) Forget(m Member) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for l := range Lane(Lanes) {
		x.forgetLocked(m, l)
	}
	x.grace.flush()
}

// ForgetLane drops all that m holds on l.
func (x *Index) ForgetLane(m Member, l Lane) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.forgetLocked(m, l)
	x.grace.flush()
}

func (x *Index) forgetLocked(m Member, l Lane) {
	h := x.known(m, l)
	if h == nil {
		return
	}
	for n := range h.loose {
		x.tighten(h, n, x.run(n), 0, maxRun)
		x.cut(n, x.run(n))
	}
	for _, e := range h.runs.entries {
		if e != 0 {
			n := uint32(e >> 32)
			r := x.run(n)
			x.move(r, m, h.lane, uint32(e), 0)
			x.cut(n, r)
		}
	}
	x.memberships -= h.held
	x.cutoffs -= h.runs.bytes()
	x.holders[h.id] = nil
}

// Count is the number of blocks that m holds on l.
func (x *Index) Count(m Member, l Lane) int {
	x.mu.Lock()
	defer x.mu.Unlock()
	if h := x.known(m, l); h != nil {
		return int(h.held)
	}
	return 0
}

// Stats is cheap: it counts nothing that is not counted already.
func (x *Index) Stats() Stats {
	x.mu.Lock()
	defer x.mu.Unlock()
	return Stats{
		Bytes:       x.bytes(),
		MaxBytes:    x.cfg.MaxBytes,
		Blocks:      x.content,
		Memberships: x.memberships,
		Runs:        x.runs.cells,
		Sets:        int64(len(x.sets.byHash)),
		LoadFactor:  float64(x.inner.used) / float64(x.inner.cells),
		Shed:        x.shed,
		Refused:     x.refused,
	}
}
