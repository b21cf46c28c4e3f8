package estimate

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// worth is the time constant of what a cached token is believed to be worth.
const worth = 5 * time.Minute

// Caches knows how full the members' caches are and how much of what they hold
// is used again. Readers take no lock.
type Caches struct {
	cached, computed atomic.Int64  // tokens of what was decided since the last count
	reuse            atomic.Uint64 // bits of the float: cached tokens for each computed one
	held             atomic.Pointer[Held]

	// What follows is for count alone.
	at                     time.Time
	cachedSum, computedSum float64 // faded
}

// Decided counts the tokens of a decision.
func (c *Caches) Decided(cached, computed int) {
	c.cached.Add(int64(cached))
	c.computed.Add(int64(computed))
}

// count is for one caller at a time.
func (c *Caches) count(view *fleet.View, x *index.Index, now time.Time) {
	var held Held
	for _, m := range view.Members {
		for int(m.ID) >= len(held) {
			held = append(held, 0)
		}
		held[m.ID] = x.Count(index.Member(m.ID), index.LaneGPU)
	}
	c.held.Store(&held)
	keep := 0.0
	if !c.at.IsZero() {
		keep = math.Exp(-max(0, now.Sub(c.at).Seconds()) / worth.Seconds())
	}
	c.at = now
	c.cachedSum = keep*c.cachedSum + float64(c.cached.Swap(0))
	c.computedSum = keep*c.computedSum + float64(c.computed.Swap(0))
	if c.computedSum > 0 {
		c.reuse.Store(math.Float64bits(c.cachedSum / c.computedSum))
	}
}

// Reuse is how many prompt tokens were found cached lately for each one that
// was computed.
func (c *Caches) Reuse() float64 { return math.Float64frombits(c.reuse.Load()) }

// Held is what members held at one moment, in blocks by number.
type Held []int

// Held returns the last count.
func (c *Caches) Held() Held {
	if held := c.held.Load(); held != nil {
		return *held
	}
	return nil
}

// Spare is the number of tokens that a member can take without pushing anything
// out; 0 where its capacity is not known.
func (h Held) Spare(m *fleet.Row) int {
	if int(m.ID) >= len(h) {
		return 0
	}
	return max(0, m.Blocks-h[m.ID]) * m.BlockSize
}
