// Package index knows which member holds which blocks. It answers one
// question: how many leading blocks of this chain does each member hold, per
// lane? Keys are chained (a key stands for its whole prefix), so one index
// serves every model, adapter, salt and block size.
//
// The package is pure memory: no clock, no socket, no names of members.
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
	// MaxBytes of memory that the index may take; 0: no bound.
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
	// Shed counts memberships dropped at the byte bound since the start.
	Shed int64
	// Refused counts calls with a member or lane out of range.
	Refused int64
}

// Index maps block keys to their holders. All methods may run side by side.
type Index struct {
	cfg Config

	mu      sync.RWMutex // guards the rest
	holders map[blockkey.Key]map[holder]struct{}
	held    map[holder]map[blockkey.Key]struct{}
	refused int64
}

type holder struct {
	member Member
	lane   Lane
}

// New returns an empty index.
func New(cfg Config) *Index {
	if cfg.MaxMembers <= 0 {
		cfg.MaxMembers = 4096
	}
	return &Index{
		cfg:     cfg,
		holders: make(map[blockkey.Key]map[holder]struct{}),
		held:    make(map[holder]map[blockkey.Key]struct{}),
	}
}

// Store says that m holds keys, consecutive blocks of one chain: the child of
// parent first, at position. Keys that are held already change nothing.
func (x *Index) Store(m Member, l Lane, parent blockkey.Key, position uint32, keys []blockkey.Key) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if int(m) >= x.cfg.MaxMembers || l >= Lanes {
		x.refused++
		return
	}
	h := holder{m, l}
	if x.held[h] == nil {
		x.held[h] = make(map[blockkey.Key]struct{})
	}
	for _, k := range keys {
		if x.holders[k] == nil {
			x.holders[k] = make(map[holder]struct{}, 1)
		}
		x.holders[k][h] = struct{}{}
		x.held[h][k] = struct{}{}
	}
}

// Remove says that m no longer holds keys, consecutive blocks of one chain
// from position on. Keys that are not held change nothing.
func (x *Index) Remove(m Member, l Lane, position uint32, keys []blockkey.Key) {
	x.mu.Lock()
	defer x.mu.Unlock()
	h := holder{m, l}
	for _, k := range keys {
		x.removeLocked(h, k)
	}
}

func (x *Index) removeLocked(h holder, k blockkey.Key) {
	delete(x.held[h], k)
	delete(x.holders[k], h)
	if len(x.holders[k]) == 0 {
		delete(x.holders, k)
	}
}

// Forget drops all that m holds. No Match that starts after it names m.
func (x *Index) Forget(m Member) {
	for l := Lane(0); l < Lanes; l++ {
		x.ForgetLane(m, l)
	}
}

// ForgetLane drops all that m holds on l.
func (x *Index) ForgetLane(m Member, l Lane) {
	x.mu.Lock()
	defer x.mu.Unlock()
	h := holder{m, l}
	for k := range x.held[h] {
		x.removeLocked(h, k)
	}
	delete(x.held, h)
}

// Match appends to dst, in no order, one entry for each member that holds
// keys[0] on any lane: the number of leading keys held without a hole.
func (x *Index) Match(keys []blockkey.Key, dst []Depths) []Depths {
	x.mu.RLock()
	defer x.mu.RUnlock()
	base := len(dst)
	at := make(map[Member]int)
	for i, k := range keys {
		grew := false
		for h := range x.holders[k] {
			p, ok := at[h.member]
			if !ok {
				if i > 0 {
					continue
				}
				p = len(dst)
				at[h.member] = p
				dst = append(dst, Depths{Member: h.member})
			}
			if d := &dst[p].Depth[h.lane]; *d == uint32(i) {
				*d, grew = uint32(i)+1, true
			}
		}
		if !grew {
			break
		}
	}
	return dst[:base+len(at)]
}

// Count is the number of blocks that m holds on l.
func (x *Index) Count(m Member, l Lane) int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.held[holder{m, l}])
}

// Stats is cheap.
func (x *Index) Stats() Stats {
	x.mu.RLock()
	defer x.mu.RUnlock()
	s := Stats{MaxBytes: x.cfg.MaxBytes, Blocks: int64(len(x.holders)), Refused: x.refused}
	for _, held := range x.held {
		s.Memberships += int64(len(held))
	}
	return s
}
