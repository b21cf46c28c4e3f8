package pick

import (
	"fmt"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// Counterfactual is what a policy that does not decide would have done at the
// same moment with the same candidates. Differences are its figure less that
// of the policy that decides.
type Counterfactual struct {
	// Policy that was compared; empty: none was.
	Policy string
	// Member where the request would have gone; Same: where it goes anyway.
	Member *fleet.Member
	Same   bool
	// FirstTokenMS and TotalMS are predicted times, CachedTokens those found in
	// the cache.
	FirstTokenMS, TotalMS float64
	CachedTokens          int
}

// shade asks the policy that does not decide about the round that was decided,
// and leaves its scores and its best in place of the other's.
func (m *draft) shade(pol policy.Policy) Counterfactual {
	was := m.best
	m.ownLast(pol)
	m.choosing = m.choose(pol)
	from, to := &m.round.Costs[was], &m.round.Costs[m.best]
	return Counterfactual{
		Policy:       pol.Name,
		Member:       m.eligible.list[m.best].member,
		Same:         was == m.best,
		FirstTokenMS: to.FirstToken() - from.FirstToken(),
		TotalMS:      to.Total - from.Total,
		CachedTokens: m.eligible.list[m.best].cached() - m.eligible.list[was].cached(),
	}
}

// Explain ranks all candidates by the policy that would decide, and by another
// one: the picker's shadow where none is named, nil where there is neither. It
// changes nothing.
func (p *Picker) Explain(r *Request, shadow string, now time.Time) (d, other *Decision, err error) {
	if err := p.usual.Load().allows(shadow); err != nil {
		return nil, nil, fmt.Errorf("shadow: %w", err)
	}
	if shadow == "" {
		shadow = p.usual.Load().Shadow
	}
	ask := *r
	ask.Reserve, ask.Top = false, -1
	return p.decide(&ask, shadow, true, now)
}
