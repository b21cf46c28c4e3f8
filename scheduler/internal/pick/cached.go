package pick

import (
	"slices"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/predict"
)

// cached is how much of the prompt the candidates have.
type cached struct {
	prefixes []prefix // of those that have something; candidates point to them
	ideal    int      // longest prefix in tokens that any member has, candidate or not
	feasible int      // longest that a candidate has

	held index.Answer
	ends []index.End
	sent predict.Search
}

func (h *cached) release() { h.prefixes, h.ideal, h.feasible = h.prefixes[:0], 0, 0 }

// prefix is what a candidate has of the prompt.
type prefix struct {
	depth [index.Lanes]int // leading blocks that it holds
	least bool             // what is credited is a lower bound
	end   int              // blocks to where a hit ends; only where the member's rule has ends
	// cached tokens by tier, and those beyond that are only predicted
	gpu, host, disk, predicted int
	promised                   int  // tokens that it holds, before reports are heeded
	sent                       int  // tokens that went there before, and may still be there
	assumed                    bool // predicted stands on what was sent
	last                       bool // predicted stands on the last known cache state
}

func (p *prefix) cached() int { return p.gpu + p.host + p.disk }

// none of the prompt; not to be changed.
var none prefix

// has is what the candidate has of the prompt; not to be changed.
func (c *candidate) has() *prefix {
	if c.prefix == nil {
		return &none
	}
	return c.prefix
}

// of is the candidate's, to be changed.
func (h *cached) of(c *candidate) *prefix {
	if c.prefix == nil {
		h.prefixes = append(h.prefixes, prefix{}) // never beyond its capacity: see match
		c.prefix = &h.prefixes[len(h.prefixes)-1]
	}
	return c.prefix
}

func (c *candidate) cached() int { return c.has().cached() }

// match finds how much of the prompt each candidate has, or is about to have.
func (p *Picker) match(h *cached, e *eligible, k *keys, r *Request, now time.Time) {
	h.prefixes = slices.Grow(h.prefixes, len(e.list))
	for i := range k.scopes {
		if s := &k.scopes[i]; s.blocks > 0 {
			p.search(h, e, s, i, r, now)
		}
	}
}

// search asks the index and the forecast about one scope.
func (p *Picker) search(h *cached, e *eligible, s *scope, at int, r *Request, now time.Time) {
	sent := &h.sent
	sent.Reset()
	for blocks := firstBlocks; ; blocks *= 4 {
		s.hash(r, blocks)
		p.index.Match(s.keys, &h.held)
		deepest := 0
		for _, depth := range h.held.All() {
			deepest = max(deepest, int(depth))
		}
		h.ideal = max(h.ideal, min(deepest, (r.Prompt.length()-1)/s.BlockSize)*s.BlockSize)
		deepest = max(deepest, p.predicted.Match(s.keys, sent, now))
		s.known = deepest
		if deepest < len(s.keys) || len(s.keys) == s.blocks {
			break
		}
	}
	if r.SkipsCache {
		return
	}
	length := r.Prompt.length()
	for m, depth := range h.held.All() {
		if c := e.of(fleet.ID(m.Member())); c != nil && int(c.scope) == at {
			has := h.of(c)
			for l := range has.depth {
				if m.On(index.Lane(l)) {
					has.depth[l] = int(depth)
				}
			}
		}
	}
	p.findEnds(h, e, s, at, length)
	// Who is not found has nothing, and nothing is credited.
	for m := range h.held.All() {
		if c := e.of(fleet.ID(m.Member())); c != nil && int(c.scope) == at {
			h.credit(e.view, c, length, s.BlockSize, now)
			h.feasible = max(h.feasible, c.cached())
		}
	}
	for _, m := range sent.Found {
		if c := e.of(fleet.ID(m.Member)); c != nil && int(c.scope) == at && c.member.CacheState.Epoch == m.Epoch {
			h.foresee(c, m.Depth, length, s.BlockSize)
		}
	}
	if p.sent.Tracks() {
		for m := range h.held.All() {
			if c := e.of(fleet.ID(m.Member())); c != nil && int(c.scope) == at {
				p.assume(e.view, c, length, s.BlockSize, now)
			}
		}
	}
}

// findEnds asks the index where hits end at members whose engines accept only
// some of the blocks that they hold.
func (p *Picker) findEnds(h *cached, e *eligible, s *scope, at, length int) {
	h.ends = h.ends[:0]
	for m, depth := range h.held.All() {
		if c := e.of(fleet.ID(m.Member())); c != nil && int(c.scope) == at && m.On(index.LaneGPU) && c.member.CacheState.Rule.Ends {
			limit := min(int(depth), c.member.CacheState.Rule.Limit(length, s.BlockSize))
			h.ends = append(h.ends, index.End{Member: m.Member(), Limit: uint32(max(limit, 0))})
		}
	}
	if len(h.ends) == 0 {
		return
	}
	p.index.Ends(s.keys, h.ends)
	for _, end := range h.ends {
		e.of(fleet.ID(end.Member)).prefix.end = int(end.Blocks)
	}
}
