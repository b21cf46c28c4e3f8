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
func (w *work) shade(pol policy.Policy) Counterfactual {
	was := w.best
	w.ownLast(pol)
	w.choosing = w.choose(pol)
	from, to := &w.round.Costs[was], &w.round.Costs[w.best]
	return Counterfactual{
		Policy:       pol.Name,
		Member:       w.candidates[w.best].member,
		Same:         was == w.best,
		FirstTokenMS: to.FirstToken() - from.FirstToken(),
		TotalMS:      to.Total - from.Total,
		CachedTokens: w.candidates[w.best].cached() - w.candidates[was].cached(),
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
	ask.Reserve, ask.Top = false, 0
	return p.decide(&ask, shadow, true, now)
}
