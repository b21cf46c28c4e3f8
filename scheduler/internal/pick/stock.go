package pick

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// worth is the time constant of what a cached token is believed to be worth.
const worth = 5 * time.Minute

// stock knows how full the members' caches are and how much of what they hold
// is used again. Readers take no lock.
type stock struct {
	cached, computed atomic.Int64  // tokens of what was decided since the last count
	reuse            atomic.Uint64 // bits of the float: cached tokens for each computed one
	held             atomic.Pointer[[]int]

	// What follows is for Tick alone.
	at                     time.Time
	cachedSum, computedSum float64 // faded
}

// decided counts the tokens of a decision.
func (s *stock) decided(cached, computed int) {
	s.cached.Add(int64(cached))
	s.computed.Add(int64(computed))
}

// count takes stock.
func (s *stock) count(view *fleet.View, x *index.Index, now time.Time) {
	var held []int
	for _, m := range view.Members {
		for int(m.ID) >= len(held) {
			held = append(held, 0)
		}
		held[m.ID] = x.Count(index.Member(m.ID), index.LaneGPU)
	}
	s.held.Store(&held)
	keep := 0.0
	if !s.at.IsZero() {
		keep = math.Exp(-max(0, now.Sub(s.at).Seconds()) / worth.Seconds())
	}
	s.at = now
	s.cachedSum = keep*s.cachedSum + float64(s.cached.Swap(0))
	s.computedSum = keep*s.computedSum + float64(s.computed.Swap(0))
	if s.computedSum > 0 {
		s.reuse.Store(math.Float64bits(s.cachedSum / s.computedSum))
	}
}

// room is the number of tokens that a member with so much held can take without
// pushing anything out; 0 where its capacity is not known.
func room(held []int, m *fleet.Seat) int {
	if int(m.ID) >= len(held) {
		return 0
	}
	return max(0, m.Blocks-held[m.ID]) * m.BlockSize
}

// counted is what each member held when stock was last taken, by number.
func (s *stock) counted() []int {
	if held := s.held.Load(); held != nil {
		return *held
	}
	return nil
}
