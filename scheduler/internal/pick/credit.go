package pick

import (
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// What an answer says of a candidate's cache, and what it is credited for it,
// goes by one rule, fleet.View.Believe. What was sent to a candidate that is not
// EXACT is predicted besides, and makes an APPROXIMATE of what is less, of which
// nothing is cached for sure. Predicted tokens count for the choice, and are
// promised to nobody.

// credit turns depths into cached tokens by tier, or predicted ones.
func (h *cached) credit(view *fleet.View, c *candidate, length, size int, now time.Time) {
	credit := view.Believe(c.member, now).Credit
	if credit == fleet.Uncredited {
		return
	}
	s := c.share
	gpu, host, disk := s.usable(&c.member.Picture.Rule, length, size)
	held := &c.member.Picture.Held
	s.least = s.depth[index.LaneDisk]*size >= length && held[index.LaneDisk] > held[index.LaneGPU]
	if credit == fleet.Predicted {
		s.predicted, s.last = disk*size, disk > 0
		return
	}
	s.gpu, s.host, s.disk = gpu*size, (host-gpu)*size, (disk-host)*size
}

// usable is how many blocks an engine would use of what it has on each lane.
//
// The last token of a prompt is always computed, so blocks count up to
// floor((length-1)/size). Some connectors bring a prompt of whole blocks back
// completely, others leave its last block out, and events do not say which: the
// limit holds on every lane.
//
// An engine that accepts hits only at some blocks, or drops the last one, is
// credited with what it has in GPU memory: how it follows its rule on other
// tiers is not known.
func (s *share) usable(rule *fleet.HitRule, length, size int) (gpu, host, disk int) {
	limit := rule.Limit(length, size)
	gpu = min(s.depth[index.LaneGPU], limit)
	if rule.Ends {
		gpu = s.end
	}
	if rule.Ends || rule.Dropped > 0 {
		gpu = max(0, gpu-rule.Dropped)
		return gpu, gpu, gpu
	}
	host = max(gpu, min(s.depth[index.LaneHost], limit))
	return gpu, host, max(host, min(s.depth[index.LaneDisk], limit))
}

// foresee credits what an earlier decision sent to a candidate and no event has
// confirmed yet, up to a depth in blocks.
func (h *cached) foresee(c *candidate, depth, length, size int) {
	depth = min(depth, (length-1)/size) * size
	if beyond := depth - c.cached(); beyond > c.has().predicted {
		h.of(c).predicted = beyond
	}
}

// assume credits what was sent to a candidate: to policies that ask for it,
// and as a prediction where there is no exact cache state.
func (p *Picker) assume(view *fleet.View, c *candidate, length, size int, now time.Time) {
	has := c.share
	depth := has.depth[index.LaneApproximate]
	if depth == 0 || !p.sent.Follows(index.Member(c.member.ID), c.member.Picture.Epoch) {
		return
	}
	has.sent = min(depth, (length-1)/size) * size
	if beyond := has.sent - has.cached(); beyond > 0 && !c.exact(view, now) {
		has.predicted = max(has.predicted, beyond)
		has.assumed = true
	}
}

// believe is what an answer says of a candidate's cache.
func (c *candidate) believe(view *fleet.View, now time.Time) fleet.Belief {
	b := view.Believe(c.member, now)
	if c.has().assumed && b.Credit != fleet.Credited {
		return fleet.Belief{Trust: fleet.Approximate, Reason: "no cache state: what was sent there stands for it", Credit: fleet.Predicted}
	}
	if c.has().least && b.Trust == fleet.Exact {
		b.Trust, b.Reason = fleet.Approximate, "what lies outside GPU memory may count for one block more"
	}
	return b
}

// exact tells whether events say all that is there.
func (c *candidate) exact(view *fleet.View, now time.Time) bool {
	return view.Believe(c.member, now).Trust == fleet.Exact
}

// blind tells that nothing is known of the cache of any candidate.
func (e *eligible) blind(now time.Time) bool {
	for i := range e.list {
		if e.list[i].believe(e.view, now).Credit != fleet.Uncredited {
			return false
		}
	}
	return true
}
