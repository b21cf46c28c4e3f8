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
	s := c.prefix
	gpu, host, disk := s.usable(&c.member.CacheState.Rule, length, size)
	if credit == fleet.Credited {
		s.promised = disk * size
		less := disk - c.short(size)
		gpu, host, disk = max(0, min(gpu, less)), max(0, min(host, less)), max(0, less)
	}
	s.least = s.depth[index.LaneDisk]*size >= length && c.member.Info.Offloads
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
func (p *prefix) usable(rule *fleet.HitRule, length, size int) (gpu, host, disk int) {
	limit := rule.Limit(length, size)
	gpu = min(p.depth[index.LaneGPU], limit)
	if rule.Ends {
		gpu = p.end
	}
	if rule.Ends || rule.Dropped > 0 {
		gpu = max(0, gpu-rule.Dropped)
		return gpu, gpu, gpu
	}
	host = max(gpu, min(p.depth[index.LaneHost], limit))
	return gpu, host, max(host, min(p.depth[index.LaneDisk], limit))
}

// short is how many blocks less than it holds, by reports, the candidate's engine
// finds.
func (c *candidate) short(size int) int { return (c.member.Bias().Tokens + size - 1) / size }

// foresee credits what earlier decisions sent to a candidate and no event has
// confirmed yet, up to a depth in blocks: it will be cached when this request
// starts. An engine admits requests in the order in which they came, and what a
// step is about to compute can be found by those that are admitted behind it in
// the same step.
//
// An engine that accepts hits only at some blocks keeps the end of each prompt
// for one that is equal; where a prompt parts from an equal beginning, the first
// that does so finds nothing.
func (h *cached) foresee(c *candidate, depth, length, size int) {
	rule := &c.member.CacheState.Rule
	if rule.Ends && depth < (length-1)/size {
		return
	}
	depth = max(0, min(depth, rule.Limit(length, size))-rule.Dropped-c.short(size)) * size
	if beyond := depth - c.cached(); beyond > c.has().predicted {
		h.of(c).predicted = beyond
	}
}

// assume credits what was sent to a candidate: to policies that ask for it,
// and as a prediction where there is no exact cache state.
func (p *Picker) assume(view *fleet.View, c *candidate, length, size int, now time.Time) {
	has := c.prefix
	depth := has.depth[index.LaneApproximate]
	if depth == 0 || !p.sent.Follows(index.Member(c.member.ID), c.member.CacheState.Epoch) {
		return
	}
	has.sent = max(0, min(depth, (length-1)/size)-c.short(size)) * size
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
	if c.hidden && b.Trust == fleet.Exact {
		b.Trust, b.Reason = fleet.Approximate, "its engine's events name no cache salts and no multimodal items"
	}
	if c.has().least && b.Trust == fleet.Exact {
		b.Trust, b.Reason = fleet.Approximate, "what lies outside GPU memory may count for one block more"
	}
	return b
}

// exact tells whether events say all that is there.
func (c *candidate) exact(view *fleet.View, now time.Time) bool {
	return !c.hidden && view.Believe(c.member, now).Trust == fleet.Exact
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
