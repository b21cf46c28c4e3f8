package policy

import "math"

// Targets of a request in ms; 0: none.
type Targets struct {
	// TTFT: to the first token. TPOT: a token of output, TPAT: a token of
	// prompt or output. E2E: to the end.
	TTFT, TPOT, TPAT, E2E float64
}

// None tells that there is no target at all.
func (t Targets) None() bool { return !(t.TTFT > 0 || t.TPOT > 0 || t.TPAT > 0 || t.E2E > 0) }

// slack is what the predicted times leave of the target; NaN without one. A
// target for tokens is one for the end.
func (t Targets) slack(first, end, prompt, output float64) float64 {
	switch {
	case t.TPOT > 0:
		return t.TPOT*output + max(t.TTFT, 0) - end
	case t.TTFT > 0:
		return t.TTFT - first
	case t.TPAT > 0:
		return t.TPAT*(prompt+output) - end
	case t.E2E > 0:
		return t.E2E - end
	}
	return math.NaN()
}

// step is the time in ms that a step may take; 0: nothing says so.
func (t Targets) step(first, prompt, output float64) float64 {
	least := math.Inf(1)
	if t.TPOT > 0 {
		least = t.TPOT
	}
	if t.TPAT > 0 {
		least = min(least, (t.TPAT*(prompt+output)-first)/output)
	}
	if t.E2E > 0 {
		least = min(least, (t.E2E-first)/output)
	}
	if math.IsInf(least, 1) {
		return 0
	}
	return max(least, 1e-3)
}

// SLO is how a request fits on a candidate within its targets.
type SLO struct {
	// Group is the number of the candidate's profile in this round.
	Group int
	// Targets that count on this candidate.
	Targets Targets
	// RPS, E2E, TTFT and TPOT were measured of such members for such lengths,
	// in requests a second and ms; NaN: unknown.
	RPS, E2E, TTFT, TPOT float64
	// InFlight is the sum of the shares reserved on the candidate.
	InFlight float64

	// What follows is written by Measure.

	// Share of the candidate that the request takes until its end, and Used
	// what others take of it; NaN: not known.
	Share, Used float64
	// SlackMS is what the predicted time leaves of the target; NaN: no target.
	SlackMS float64
	// EndMS is the predicted time to the end.
	EndMS float64
}

// Measure completes r.SLOs; Estimate comes before it.
//
// A member that is measured takes RPS requests a second of E2E each, so by
// Little's law RPS*E2E at a time, and one request is 1/(RPS*E2E) of it. A
// member that is not measured takes as many more than it has as its steps may
// become longer, up to the target: each adds its own step, and its prefill
// spread over its output. Where nothing limits the steps, shares are unknown.
func Measure(r *Round) {
	for g := range r.Slack {
		r.Slack[g] = math.Inf(-1)
	}
	for i := range r.SLOs {
		f, c, cost := &r.SLOs[i], &r.Candidates[i], &r.Costs[i]
		output := max(r.ExpectedOutput(i), 1)
		prompt := float64(c.Uncached + c.cached())
		step, prefill := c.Speed.StepMS, cost.Load+cost.Prefill
		if f.TPOT > 0 {
			step = f.TPOT
		}
		if f.TTFT > 0 && !c.Speed.Learned {
			prefill = f.TTFT
		}
		first := c.Load.WaitMS + prefill
		f.EndMS = first + output*step
		f.SlackMS = f.Targets.slack(first, f.EndMS, prompt, output) - r.Elapsed
		if slack := f.SlackMS; math.IsNaN(slack) {
			r.Slack[f.Group] = 0 // without a target all kinds are in time
		} else {
			r.Slack[f.Group] = max(r.Slack[f.Group], slack)
		}
		f.Share, f.Used = math.NaN(), math.NaN()
		if share := 1000 / (f.RPS * f.E2E); share > 0 && share <= math.MaxFloat64 {
			f.Share, f.Used = share, f.InFlight
			continue
		}
		if limit := f.Targets.step(first, prompt, output); limit > 0 {
			now := c.Speed.StepMS
			room := c.Load.Requests + (limit-now)/(prefill/output+c.Speed.StepRequestMS)
			f.Share = 1 / max(room, 1)
			f.Used = c.Load.Requests * f.Share
		}
	}
}

// full is the score from which on a policy that pulls says "not now".
const full = 1e6

// fits tells whether the request is within the candidate's capacity. One that
// is larger than all of it fits where nobody else is.
func (f *SLO) fits(l *Load) bool {
	return f.Used+f.Share <= 1+1e-9 || l.idle()
}

// Delay adds to scores in ms the time until the request's share becomes free:
// what is in use of a member ends evenly over the time that a request takes.
func Delay(r *Round, scores []float64) {
	for i := range r.SLOs {
		f := &r.SLOs[i]
		if !math.IsNaN(f.Share) && !f.fits(&r.Candidates[i].Load) {
			scores[i] += (f.Used + f.Share - 1) * f.EndMS
		}
	}
}

// HasRoom tells whether candidate i, with that score, should get the request now
// rather than later. A policy that pushes always says so, one that pulls says it
// by the score. The others do where the candidate is idle, and else where its
// prefill before and with the request stays within budget ms and the request's
// share of it, if known, is free.
func (p *Policy) HasRoom(r *Round, i int, score, budget float64) bool {
	l, known := &r.Candidates[i].Load, i < len(r.SLOs) && !math.IsNaN(r.SLOs[i].Share)
	switch {
	case p.Pushes:
		return true
	case p.Pulls && known:
		return score < full
	case l.idle():
		return true
	case known && !r.SLOs[i].fits(l):
		return false
	}
	return l.WaitMS+r.Costs[i].Load+r.Costs[i].Prefill <= budget
}
