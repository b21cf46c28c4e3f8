package pick

import (
	"slices"

	"github.com/kvscout/kvscout/scheduler/internal/approx"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// history tells the policy what the candidates were sent lately, what the
// request would push out, and whom its prefix was moved or copied to.
func (p *Picker) history(m *draft, r *Request) {
	n := len(m.eligible.list)
	m.belongs.histories = slices.Grow(m.belongs.histories[:0], n)[:n]
	clear(m.belongs.histories)
	for i := range m.belongs.histories {
		m.round.Candidates[i].History = &m.belongs.histories[i]
	}
	for i := range m.keys.scopes {
		s := &m.keys.scopes[i]
		s.hash(r, s.blocks)
		var moved bool
		m.belongs.owners, moved = p.sent.Owners(s.keys, m.belongs.owners[:0])
		for _, id := range m.belongs.owners {
			if c := m.eligible.of(fleet.ID(id)); c != nil && int(c.scope) == i {
				m.round.Candidates[m.eligible.at[id]-1].History.Placed = true
				m.round.Moved = m.round.Moved || moved
			}
		}
	}
	at := func(id index.Member) *policy.Candidate {
		if m.eligible.of(fleet.ID(id)) == nil {
			return nil
		}
		return &m.round.Candidates[m.eligible.at[id]-1]
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
