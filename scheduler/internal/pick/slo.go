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

// measureSLOs collects how the request fits on each candidate within its targets, if
// anybody wants to know. Targets are the request's, else those of the
// candidate's profile, else the configured ones.
func (p *Picker) measureSLOs(k *ranking, list []candidate, r *Request, needs policy.Needs) {
	k.round.SLOs, k.round.Slack, k.groups = k.round.SLOs[:0], k.round.Slack[:0], k.groups[:0]
	if needs&policy.NeedsSLO == 0 && r.Admission == nil && r.Targets.None() {
		return
	}
	k.round.Elapsed = float64(r.Elapsed) / float64(time.Millisecond)
	set, usual := p.profiles.Load(), p.usual.Load().Targets
	nan := math.NaN()
	k.round.SLOs = slices.Grow(k.round.SLOs, len(list))
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
		k.round.SLOs = append(k.round.SLOs, f)
	}
	k.round.Slack = slices.Grow(k.round.Slack, len(k.groups))[:len(k.groups)]
}

// ahead adds what waits for a candidate to its load.
func (m *draft) ahead() {
	if m.admission == nil || len(m.admission.Ahead) == 0 {
		return
	}
	for i := range m.eligible.list {
		id := int(m.eligible.list[i].row.ID)
		if id >= len(m.admission.Ahead) {
			continue
		}
		a, l := &m.admission.Ahead[id], &m.round.Candidates[i].Load
		l.WaitMS += a.MS
		l.Requests += float64(a.Requests)
		m.round.SLOs[i].InFlight += a.Share
	}
}

// roomWithin tells whether a request that may wait finds room on any of those
// that are as good as the best. The others of them are no choice then.
func (m *draft) roomWithin(limit float64, pol *policy.Policy) bool {
	if m.admission == nil {
		return false
	}
	for i, s := range m.scores {
		if s <= limit && pol.HasRoom(&m.round, i, s, m.admission.BudgetMS) {
			return true
		}
	}
	return false
}

// noRoom returns why the request should wait, or nil.
func (m *draft) noRoom(pol *policy.Policy) *NoRoom {
	if m.admission == nil || (!m.admission.Hold || pol.Pushes) && pol.HasRoom(&m.round, m.best, m.scores[m.best], m.admission.BudgetMS) {
		return nil
	}
	cost, f := &m.round.Costs[m.best], &m.round.SLOs[m.best]
	share := f.Share
	if !(share >= 0) {
		share = 0
	}
	return &NoRoom{
		Member:  m.eligible.list[m.best].member.ID,
		Adds:    fleet.Ahead{Requests: 1, MS: cost.Load + cost.Prefill, Share: share},
		SlackMS: f.SlackMS + m.round.Elapsed,
	}
}

// among lists the candidates for whoever lets the request wait.
func (m *draft) among(r *Request) {
	if r.Admission.Among == nil {
		return
	}
	list := (*r.Admission.Among)[:0]
	for i := range m.eligible.list {
		if r.not == nil {
			list = append(list, m.eligible.list[i].row.ID)
		}
	}
	*r.Admission.Among = list
}

// expect predicts the output of a request that does not say it.
func (p *Picker) expect(r *Request, random uint64) {
	if r.ExpectedOutput <= 0 {
		r.ExpectedOutput = p.estimates.Outputs.Predict(r.Model, r.Tenant, r.Prompt.length(), random)
	}
}
