package pick

import (
	"slices"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/approx"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// send notes where the prompt went, if anyone may want to know that.
func (p *Picker) send(m *making, r *Request, now time.Time) {
	c := &m.eligible.list[m.ranking.best]
	if c.scope < 0 {
		return
	}
	sent, history := p.sent.Wanted.Now(now)
	exact := c.exact(m.eligible.view, now)
	if exact && !sent && !history {
		return
	}
	s := &m.keys.scopes[c.scope]
	s.hash(r, s.blocks)
	p.sent.Add(approx.Prompt{
		Member:       index.Member(c.member.ID),
		Epoch:        c.member.Picture.Epoch,
		Blocks:       int(min(c.member.Info.Blocks, 1<<31)),
		Lane:         !exact || sent,
		Keys:         s.keys,
		BlockSize:    s.BlockSize,
		Cached:       (c.cached() + c.has().predicted) / s.BlockSize,
		FirstTokenMS: m.ranking.round.Costs[m.ranking.best].FirstToken(),
	}, now)
}

// history tells the policy what the candidates were sent lately, what the
// request would push out, and whom its prefix was moved or copied to.
func (p *Picker) history(m *making, r *Request) {
	n := len(m.eligible.list)
	m.belongs.histories = slices.Grow(m.belongs.histories[:0], n)[:n]
	clear(m.belongs.histories)
	for i := range m.belongs.histories {
		m.ranking.round.Candidates[i].History = &m.belongs.histories[i]
	}
	for i := range m.keys.scopes {
		s := &m.keys.scopes[i]
		s.hash(r, s.blocks)
		var moved bool
		m.belongs.owners, moved = p.sent.Owners(s.keys, m.belongs.owners[:0])
		for _, id := range m.belongs.owners {
			if c := m.eligible.of(fleet.ID(id)); c != nil && int(c.scope) == i {
				m.ranking.round.Candidates[m.eligible.at[id]-1].History.Placed = true
				m.ranking.round.Moved = m.ranking.round.Moved || moved
			}
		}
	}
	at := func(id index.Member) *policy.Candidate {
		if m.eligible.of(fleet.ID(id)) == nil {
			return nil
		}
		return &m.ranking.round.Candidates[m.eligible.at[id]-1]
	}
	p.sent.Histories(func(id index.Member) int {
		if c := at(id); c != nil && c.BlockSize > 0 {
			return max(c.Uncached, 0) / c.BlockSize
		}
		return 0
	}, func(id index.Member, h approx.History) {
		if c := at(id); c != nil {
			c.History.Lately, c.History.Victims = h.Lately, h.Victims
		}
	})
}
