package pick

import (
	"math"
	"slices"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/profile"
)

// SetProfiles replaces what was measured beforehand; nil: nothing was.
func (p *Picker) SetProfiles(s *profile.Set) { p.profiles.Store(s) }

// fit collects how the request fits on each candidate within its targets, if
// anybody wants to know. Targets are the request's, else those of the
// candidate's profile, else the configured ones.
func (p *Picker) fit(k *ranking, list []candidate, r *Request, needs policy.Needs) {
	k.round.Fits, k.round.Slack, k.groups = k.round.Fits[:0], k.round.Slack[:0], k.groups[:0]
	if needs&policy.NeedsSLO == 0 && r.Room == nil && r.Targets.None() {
		return
	}
	k.round.Elapsed = float64(r.Elapsed) / float64(time.Millisecond)
	set, usual := p.profiles.Load(), p.usual.Load().Targets
	nan := math.NaN()
	k.round.Fits = slices.Grow(k.round.Fits, len(list))
	for i := range list {
		c, at := &list[i], &k.round.Candidates[i]
		f := policy.SLO{RPS: nan, E2E: nan, TTFT: nan, TPOT: nan}
		var measured *profile.Profile
		if set.Len() > 0 {
			info := c.member.Info
			measured = set.Of(profile.Key{
				Namespace: info.Namespace, Workload: info.Labels[fleet.WorkloadLabel],
				Model: info.Model(), GPU: info.Labels[fleet.GPULabel],
			})
		}
		if measured != nil {
			// The lengths are of what is left to do: a hit makes a request light.
			cell := measured.At(k.round.ExpectedOutput(i), float64(max(at.Uncached, 1)))
			f.RPS, f.E2E, f.TTFT, f.TPOT = cell.RPS, 1000*cell.E2E, 1000*cell.TTFT, 1000*cell.TPOT
			if r.Reserve && !(f.RPS > 0 && f.E2E > 0) {
				p.unmeasured.Add(1)
			}
			t := measured.Targets
			f.Targets = policy.Targets{TTFT: 1000 * t.TTFT, TPOT: 1000 * t.TPOT, TPAT: 1000 * t.TPAT, E2E: 1000 * t.E2E}
		}
		switch {
		case !r.Targets.None():
			f.Targets = r.Targets
		case f.Targets.None():
			f.Targets = usual
		}
		if f.Group = slices.Index(k.groups, measured); f.Group < 0 {
			f.Group, k.groups = len(k.groups), append(k.groups, measured)
		}
		k.round.Fits = append(k.round.Fits, f)
	}
	k.round.Slack = slices.Grow(k.round.Slack, len(k.groups))[:len(k.groups)]
}

// ahead adds what waits for a candidate to its load.
func (m *making) ahead() {
	if m.ranking.admission == nil || len(m.ranking.admission.Ahead) == 0 {
		return
	}
	for i := range m.eligible.list {
		id := int(m.eligible.list[i].seat.ID)
		if id >= len(m.ranking.admission.Ahead) {
			continue
		}
		a, l := &m.ranking.admission.Ahead[id], &m.ranking.round.Candidates[i].Load
		l.WaitMS += a.MS
		l.Requests += float64(a.Requests)
		m.ranking.round.Fits[i].InFlight += a.Share
	}
}

// roomWithin tells whether a request that may wait finds room on any of those
// that are as good as the best. The others of them are no choice then.
func (m *making) roomWithin(limit float64, pol *policy.Policy) bool {
	if m.ranking.admission == nil {
		return false
	}
	for i, s := range m.ranking.scores {
		if s <= limit && pol.Room(&m.ranking.round, i, s, m.ranking.admission.BudgetMS) {
			return true
		}
	}
	return false
}

// full returns why the request should wait, or nil.
func (m *making) full(pol *policy.Policy) *Full {
	if m.ranking.admission == nil || (!m.ranking.admission.Hold || pol.Pushes) && pol.Room(&m.ranking.round, m.ranking.best, m.ranking.scores[m.ranking.best], m.ranking.admission.BudgetMS) {
		return nil
	}
	cost, f := &m.ranking.round.Costs[m.ranking.best], &m.ranking.round.Fits[m.ranking.best]
	share := f.Share
	if !(share >= 0) {
		share = 0
	}
	return &Full{
		Member:  m.eligible.list[m.ranking.best].member.ID,
		Adds:    fleet.Ahead{Requests: 1, MS: cost.Load + cost.Prefill, Share: share},
		SlackMS: f.SlackMS + m.ranking.round.Elapsed,
	}
}

// among lists the candidates for whoever lets the request wait.
func (m *making) among(r *Request) {
	if r.Room.Among == nil {
		return
	}
	list := (*r.Room.Among)[:0]
	for i := range m.eligible.list {
		if r.not == nil {
			list = append(list, m.eligible.list[i].seat.ID)
		}
	}
	*r.Room.Among = list
}

// expect predicts the output of a request that does not say it.
func (p *Picker) expect(r *Request, random uint64) {
	if r.ExpectedOutput <= 0 {
		r.ExpectedOutput = p.estimates.Outputs.Predict(r.Model, r.Tenant, r.Prompt.length(), random)
	}
}
