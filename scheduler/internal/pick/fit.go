package pick

import (
	"math"
	"slices"
	"sync"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/profile"
)

// SetProfiles replaces what was measured beforehand; nil: nothing was.
func (p *Picker) SetProfiles(s *profile.Set) { p.profiles.Store(s) }

// fit collects how the request fits on each candidate within its targets, if
// anybody wants to know. Targets are the request's, else those of the
// candidate's profile, else the configured ones.
func (p *Picker) fit(w *work, r *Request, needs policy.Needs) {
	w.round.Fits, w.round.Slack, w.groups = w.round.Fits[:0], w.round.Slack[:0], w.groups[:0]
	w.room = r.Room
	if needs&policy.NeedsFit == 0 && r.Room == nil && r.Targets.None() {
		return
	}
	w.round.Elapsed = float64(r.Elapsed) / float64(time.Millisecond)
	set, usual := p.profiles.Load(), p.usual.Load().Targets
	nan := math.NaN()
	w.round.Fits = slices.Grow(w.round.Fits, len(w.candidates))
	for i := range w.candidates {
		c, at := &w.candidates[i], &w.round.Candidates[i]
		f := policy.Fit{RPS: nan, E2E: nan, TTFT: nan, TPOT: nan}
		var measured *profile.Profile
		if set.Len() > 0 {
			info := c.member.Info
			measured = set.Of(profile.Key{
				Namespace: info.Namespace, Workload: info.Labels[fleet.WorkloadLabel],
				Model: info.Model(), GPU: info.Labels[fleet.GPULabel],
			})
		}
		if measured != nil {
			output := w.round.Output
			if !(output > 0) {
				output = c.speed.OutputTokens
			}
			// The lengths are of what is left to do: a hit makes a request light.
			cell := measured.At(output, float64(max(at.Uncached, 1)))
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
		if f.Group = slices.Index(w.groups, measured); f.Group < 0 {
			f.Group, w.groups = len(w.groups), append(w.groups, measured)
		}
		w.round.Fits = append(w.round.Fits, f)
	}
	w.round.Slack = slices.Grow(w.round.Slack, len(w.groups))[:len(w.groups)]
}

// ahead adds what waits for a candidate to its load.
func (w *work) ahead() {
	if w.room == nil || len(w.room.Ahead) == 0 {
		return
	}
	for i := range w.candidates {
		id := int(w.candidates[i].seat.ID)
		if id >= len(w.room.Ahead) {
			continue
		}
		a, l := &w.room.Ahead[id], &w.round.Candidates[i].Load
		l.WaitMS += a.MS
		l.Requests += float64(a.Requests)
		w.round.Fits[i].InFlight += a.Share
	}
}

// roomWithin tells whether a request that may wait finds room on any of those
// that are as good as the best. The others of them are no choice then.
func (w *work) roomWithin(limit float64, pol *policy.Policy) bool {
	if w.room == nil {
		return false
	}
	for i, s := range w.scores {
		if s <= limit && pol.Room(&w.round, i, s, w.room.BudgetMS) {
			return true
		}
	}
	return false
}

// full returns why the request should wait, or nil.
func (w *work) full(pol *policy.Policy) *Full {
	if w.room == nil || (!w.room.Hold || pol.Pushes) && pol.Room(&w.round, w.best, w.scores[w.best], w.room.BudgetMS) {
		return nil
	}
	cost, f := &w.round.Costs[w.best], &w.round.Fits[w.best]
	share := f.Share
	if !(share >= 0) {
		share = 0
	}
	return &Full{
		Member:  w.candidates[w.best].member.ID,
		Adds:    fleet.Ahead{Requests: 1, MS: cost.Load + cost.Prefill, Share: share},
		SlackMS: f.SlackMS + w.round.Elapsed,
	}
}

// among lists the candidates for whoever lets the request wait.
func (w *work) among(r *Request) {
	if r.Room.Among == nil {
		return
	}
	list := (*r.Room.Among)[:0]
	for i := range w.candidates {
		if r.not == nil {
			list = append(list, w.candidates[i].seat.ID)
		}
	}
	*r.Room.Among = list
}

// outputs learns the lengths of outputs from reports. Predicting takes no lock.
type outputs struct {
	mu      sync.Mutex // held to observe and to publish
	lengths learn.Outputs
}

func (o *outputs) observe(a fleet.Asked, output uint64, now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lengths.Observe(a.Model, a.Tenant, a.PromptTokens, int(min(output, math.MaxInt32)), now)
}

func (o *outputs) publish(now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lengths.Publish(now)
}

// expect predicts the output of a request that does not say it.
func (p *Picker) expect(r *Request, random uint64) {
	if r.ExpectedOutput <= 0 {
		r.ExpectedOutput = p.outputs.lengths.Predict(r.Model, r.Tenant, r.Prompt.length(), random)
	}
}
