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
	"sync/atomic"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// Member is the dense number of a member. A number may be used again for
// another member after Forget.
type Member uint32

// Lane is one prefix-closed member's cache state.
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
	ends   endTable
	grace  grace
	places sync.Pool // of *[]uint32 by member, for readers

	mu      sync.Mutex // guards the rest, and the writers' halves of the above
	inner   *table     // first keys of runs' other pages
	sets    sets
	holders []*holder // by member*Lanes + lane
	loose   map[uint32][]span

	content, memberships, spans, shed, refused int64

	stamp, hand      uint32                  // calls of Store; the run that shedOne saw last
	ceiling, cutoffs int64                   // of live bytes, 0: none; bytes of all holders' cutoffs
	alone            [1]uint64               // groups' answer for a run with one group
	next             []uint64                // groups that move builds
	touched          uint64                  // keeps touches of memory alive
	spots            [maxRun / pageKeys]spot // of a run's pages
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
	x.ends.dir.Store(new([]atomic.Pointer[pageEnds]))
	x.grace.reclaim = x.reclaim
	return x
}

// reclaim takes back what no reader can reach.
func (x *Index) reclaim(r retired) {
	switch r.kind {
	case retiredPage:
		x.pages.free(r.number)
		if x.pages.chunk(r.number) == nil {
			x.ends.drop(r.number)
		}
	case retiredRun:
		x.runs.free(r.number)
	case retiredList:
		x.lists.free(r.number)
	case retiredBlock:
		x.blocks.free(r.number)
	}
}

// Store says that m holds keys, consecutive blocks of one chain from position
// on. Keys that are held already change nothing. before are the keys before
// them, parent last: at least blockkey.Lead of them, or all there are. Position
// only helps to find the place.
func (x *Index) Store(m Member, l Lane, before []blockkey.Key, position uint32, keys []blockkey.Key) {
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
	n, offset, found := x.place(h, before, position)
	if !found {
		n, offset, found = x.find(keys[0])
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

// place is where the block behind before belongs: behind its parent. If the
// parent is in the index, it is found: it or one of the Lead-1 keys before it
// is the first of a page of its run.
func (x *Index) place(h *holder, before []blockkey.Key, position uint32) (n, offset uint32, ok bool) {
	last := len(before) - 1
	if last < 0 {
		return 0, 0, false
	}
	if r := x.recent(h); r != nil {
		offset = position - r.start
		if offset-1 < r.length && x.key(r, offset-1) == uint64(before[last]) {
			return h.last, offset, true
		}
	}
	// Most runs begin at a multiple of pageKeys.
	likely := last - int((position-1)%pageKeys)
	if likely >= 0 {
		if n, offset, ok = x.behind(before[likely:]); ok {
			return n, offset, true
		}
	}
	for i := last; i >= max(0, last-pageKeys+1); i-- {
		if i != likely {
			if n, offset, ok = x.behind(before[i:]); ok {
				return n, offset, true
			}
		}
	}
	return 0, 0, false
}

// behind is the place behind keys, if the first of them has an entry and they
// are in one run.
func (x *Index) behind(keys []blockkey.Key) (n, offset uint32, ok bool) {
	n, offset, ok = x.find(keys[0])
	if !ok {
		return 0, 0, false
	}
	last := uint32(len(keys) - 1)
	r := x.run(n)
	return n, offset + last + 1, offset+last < r.length && x.key(r, offset+last) == uint64(keys[last])
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

// Remove says that m no longer holds keys, consecutive blocks of one chain
// from position on. Keys that are not held change nothing. before and position
// are as in Store.
func (x *Index) Remove(m Member, l Lane, before []blockkey.Key, position uint32, keys []blockkey.Key) {
	x.mu.Lock()
	defer x.mu.Unlock()
	h := x.known(m, l)
	if h == nil {
		return
	}
	x.pieces(h, before, position, keys, func(n uint32, r *run, from, to uint32) {
		x.uncover(h, n, r, from, to)
		h.last = n
	})
}

// pieces calls see for each piece [from, to) of a run that is among keys,
// consecutive blocks of one chain. before and position are as in Store.
func (x *Index) pieces(h *holder, before []blockkey.Key, position uint32, keys []blockkey.Key, see func(n uint32, r *run, from, to uint32)) {
	if len(keys) == 0 {
		return
	}
	n, from, found := x.at(h, before, position, keys[0])
	for {
		count := 1
		if found {
			r := x.run(n)
			count = x.common(r, from, keys)
			see(n, r, from, from+uint32(count))
		}
		if keys = keys[count:]; len(keys) == 0 {
			return
		}
		// A key that begins no run follows the one before it, and that was
		// not in this run, or not there at all.
		n, from, found = x.find(keys[0])
	}
}

// at is the place of key.
func (x *Index) at(h *holder, before []blockkey.Key, position uint32, key blockkey.Key) (n, offset uint32, ok bool) {
	if r := x.recent(h); r != nil {
		if offset = position - r.start; offset < r.length && x.key(r, offset) == uint64(key) {
			return h.last, offset, true
		}
	}
	if n, offset, ok = x.place(h, before, position); ok {
		if r := x.run(n); offset < r.length && x.key(r, offset) == uint64(key) {
			return n, offset, true
		}
	}
	return x.find(key)
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
			if h.ends > 0 {
				x.mark(h, r, 0, uint32(e), false)
			}
			x.move(&r.groups, m, h.lane, uint32(e), 0)
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
