package pick

import (
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/books"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// account tells the books where each token of the prompt is as the request is
// placed.
func (p *Picker) account(m *draft, r *Request, pol policy.Policy, id fleet.Decision, now time.Time) {
	best := &m.eligible.list[m.best]
	length, view := r.Prompt.length(), m.eligible.view
	place := books.Placement{
		Decision: uint64(id), Model: r.Model, Prompt: length, Priced: pol.Times,
		Chosen: soon(best), Exact: best.exact(view, now),
		Member: uint32(best.member.ID), Epoch: best.member.CacheState.Epoch,
		Writes: m.round.Candidates[m.best].Uncached + int(m.round.ExpectedOutput(m.best)),
	}
	if best.scope >= 0 && !r.SkipsCache {
		s := &m.keys.scopes[best.scope]
		s.hash(r, books.MaxBlocks)
		place.Keys, place.BlockSize = s.keys[:min(len(s.keys), books.MaxBlocks)], s.BlockSize
		place.Limit = max(length-1, 0) / s.BlockSize * s.BlockSize
	}
	if len(m.cached.prefixes) > 0 {
		m.elsewhere(&place, now)
	}
	place.Ideal = min(m.cached.ideal, place.Limit)
	p.books.Place(&place, func(member uint32) books.Home {
		h := view.Member(fleet.ID(member))
		if h == nil {
			return books.Home{}
		}
		return books.Home{
			Present: true, Epoch: h.CacheState.Epoch, Exact: view.Believe(h, now).Trust == fleet.Exact,
			Tokens: h.Info.Blocks * uint64(max(h.Info.BlockSize, 0)),
		}
	}, now)
}

// elsewhere finds what other candidates have, and at what price.
func (m *draft) elsewhere(place *books.Placement, now time.Time) {
	best, holder := -1, (*candidate)(nil)
	for i := range m.eligible.list {
		c := &m.eligible.list[i]
		if c.prefix == nil {
			continue
		}
		if n := soon(c); n > place.Feasible || best >= 0 && n == place.Feasible && m.round.Costs[i].Total < m.round.Costs[best].Total {
			best, place.Feasible = i, n
		}
		if n := min(max(c.prefix.depth[index.LaneGPU], c.prefix.depth[index.LaneHost], c.prefix.depth[index.LaneDisk])*c.row.BlockSize, place.Limit); n > place.Held {
			holder, place.Held = c, n
		}
	}
	if best >= 0 {
		place.PriceMS = m.round.Costs[best].Total - m.round.Costs[m.best].Total
	}
	if holder != nil {
		place.Distrusted = m.eligible.view.Believe(holder.member, now).Credit == fleet.Uncredited
	}
}

// soon is what a candidate will have of the prompt when the request starts.
func soon(c *candidate) int { return c.cached() + c.has().predicted }

// leastLoad is the candidate with the fewest requests, any of several.
func (m *draft) leastLoad() *candidate {
	least := 0
	var weight uint64
	for i := range m.eligible.list {
		load := m.round.Candidates[i].Load.Requests
		fewest := m.round.Candidates[least].Load.Requests
		if load > fewest {
			continue
		}
		if own := mix(m.round.Random ^ m.eligible.list[i].row.Hash); load < fewest || own > weight || i == least {
			least, weight = i, own
		}
	}
	return &m.eligible.list[least]
}
