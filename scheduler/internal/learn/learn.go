// Package learn fits how fast members are from the totals that their engines
// count: prefill, step and queue times, and the share of time spent in
// prefill. It is arithmetic on samples handed in: no clock, no metric names,
// and nothing about where a sample came from.
//
// What is missing, negative, infinite, not a number or zero where it divides
// teaches nothing. A member that has not shown enough has the speed of the
// median of its model's others, and before there is any, a broad prior.
package learn

import (
	"math"
	"slices"
	"time"
)

const (
	// memory is the time constant of what is smoothed over time.
	memory = 30 * time.Second
	// forget is the time constant of the prefill fit. A member that was thought
	// slow and is avoided comes back to the median in that time, and is tried.
	forget = 5 * time.Minute
	// slow weighs an observation that took longer than the fit says. Engines
	// count a prefill's time with all that shared its steps, so under load the
	// quick ones tell how fast the engine is, and the others how busy it was.
	slow = 0.1
	// noise is the difference, as a logarithm, that fits of equal engines
	// under load have.
	noise = 0.25
	// enough is the number of prefilled requests from which on a member's own
	// fit is used for others too.
	enough = 10
	// longestPrefill in seconds, longestPrompt in tokens and maxBatch are more
	// than there is: a total that jumps further says nothing.
	longestPrefill, longestPrompt, maxBatch = 600, 1 << 24, 1 << 16
	// maxBusy keeps the price of a miss finite.
	maxBusy = 0.9
)

// Totals since the engine started; NaN: not known.
type Totals struct {
	PrefillSeconds, PrefillTokens, PrefillRequests float64
	InterTokenSeconds, InterTokenCount             float64
	QueueSeconds, QueueRequests                    float64
	GenerationTokens                               float64
	// PromptTokens and CachedTokens of requests as they begin.
	PromptTokens, CachedTokens float64
	// Running requests at the moment; not a total.
	Running float64
}

// Curves are the fits of all members. The zero value is empty. It has no lock.
type Curves struct {
	members []fit // by number
}

// fit is what was learned of one member.
type fit struct {
	model string
	at    time.Time // of the last sample; zero: none
	last  Totals
	// rr, rt, tt, ry, ty are the faded sums of the normal equations of
	// seconds = a*requests + b*tokens.
	rr, rt, tt, ry, ty float64
	requests           float64 // faded number of prefilled requests
	step, queue        average
	prompt, output     average // tokens a request
	busy               float64
	busyKnown          bool
	lone               lone
	steps              steps
	served             served
}

// Observe takes a member's totals at a time. Totals that went back are those
// of another engine process: they start a new difference. Samples that are not
// later than the last are passed over.
func (c *Curves) Observe(member uint32, model string, at time.Time, t Totals) {
	for int(member) >= len(c.members) {
		c.members = append(c.members, fit{})
	}
	f := &c.members[member]
	if f.model != model {
		*f = fit{model: model}
	}
	if at.IsZero() || !at.After(f.at) {
		return
	}
	before, since := f.last, at.Sub(f.at)
	first := f.at.IsZero()
	f.last, f.at = t, at
	if first || t.behind(before) {
		return
	}
	f.learn(t, before, since)
}

// Forget drops what was learned of a member that left.
func (c *Curves) Forget(member uint32) {
	if int(member) < len(c.members) {
		c.members[member] = fit{}
	}
}

func (f *fit) learn(t, before Totals, since time.Duration) {
	if since > 0 {
		f.fade(math.Exp(-float64(since) / float64(forget)))
	}
	seconds := t.PrefillSeconds - before.PrefillSeconds
	tokens := t.PrefillTokens - before.PrefillTokens
	requests := t.PrefillRequests - before.PrefillRequests
	if positive(seconds) && positive(tokens) && positive(requests) && seconds <= longestPrefill*requests && tokens <= longestPrompt*requests {
		// Divided by the number of requests, so that each observation is a
		// mean request and a busy second weighs by its square root.
		w := 1 / math.Sqrt(requests)
		cached, known := t.context(before, tokens)
		c := f.curve(Prior().Curve, 1)
		if 1000*seconds > 1.05*requests*c.Prefill(tokens/requests, cached/requests) {
			w *= slow
		}
		if known && requests <= lonely {
			f.lone.add(w, requests, tokens/requests, cached/requests, 1000*seconds)
		}
		f.rr += w * requests * requests
		f.rt += w * requests * tokens
		f.tt += w * tokens * tokens
		f.ry += w * requests * seconds
		f.ty += w * tokens * seconds
		f.requests += requests
		f.prompt.add(tokens/requests, requests)
	}
	if n, s := t.InterTokenCount-before.InterTokenCount, t.InterTokenSeconds-before.InterTokenSeconds; positive(n) && positive(s) {
		f.step.add(1000*s/n, n)
		if batch := (t.Running + before.Running) / 2; batch >= 1 && batch <= maxBatch {
			f.steps.add(1000*s/n, batch, n)
		}
	}
	if n, s := t.QueueRequests-before.QueueRequests, t.QueueSeconds-before.QueueSeconds; positive(n) && (s == 0 || positive(s)) {
		f.queue.add(1000*s/n, n)
	}
	if n := t.GenerationTokens - before.GenerationTokens; positive(n) && positive(requests) {
		f.output.add(n/requests, requests)
	}
	if (tokens == 0 || positive(tokens)) && (requests == 0 || positive(requests)) && since > 0 {
		curve := f.curve(Prior().Curve, 1)
		share := curve.busySeconds(requests, tokens) / since.Seconds()
		keep := math.Exp(-float64(since) / float64(memory))
		if !f.busyKnown {
			f.busyKnown, f.busy = true, 0
		}
		// A prefill is counted at once when its request ends, though it took long.
		f.busy = keep*f.busy + (1-keep)*min(share, 1+memory.Seconds()/since.Seconds())
	}
}

// fade keeps a share of the prefill fit.
func (f *fit) fade(keep float64) {
	for _, sum := range []*float64{&f.rr, &f.rt, &f.tt, &f.ry, &f.ty, &f.requests} {
		*sum *= keep
	}
	f.lone.fade(keep)
	f.steps.fade(keep)
}

// curve solves the fit around a prior that weighs as so many requests of 2,000
// tokens.
func (f *fit) curve(prior Curve, priorRequests float64) Curve {
	const priorTokens = 2000.0
	a0, b0 := prior.A/1000, prior.B/1000
	rr := f.rr + priorRequests
	tt := f.tt + priorRequests*priorTokens*priorTokens
	ry := f.ry + priorRequests*a0
	ty := f.ty + priorRequests*priorTokens*priorTokens*b0
	det := rr*tt - f.rt*f.rt
	a, b := (ry*tt-ty*f.rt)/det, (ty*rr-ry*f.rt)/det
	if !(a >= 0) {
		a, b = 0, ty/tt
	}
	if !(b > 0) {
		a, b = ry/rr, b0/100
	}
	if !positive(b) || !(a >= 0 && a <= math.MaxFloat64) {
		return prior
	}
	return f.lone.curve(Curve{A: 1000 * a, B: 1000 * b, C: prior.C})
}

// Fit returns the speeds of all members by number, as of now.
func (c *Curves) Fit(now time.Time) []Speed {
	byModel := make(map[string][]Speed)
	for i := range c.members {
		if f := &c.members[i]; f.requests >= enough {
			byModel[f.model] = append(byModel[f.model], f.speed(Prior(), false, now))
		}
	}
	priors := make(map[string]Speed, len(byModel))
	for model, list := range byModel {
		priors[model] = medians(list)
	}
	speeds := make([]Speed, len(c.members))
	for i := range c.members {
		f := &c.members[i]
		prior, ok := priors[f.model]
		if !ok {
			prior = Prior()
		}
		speeds[i] = f.speed(prior, ok, now)
	}
	return speeds
}

// speed is the fit around a prior: a median of others weighs more than a guess.
func (f *fit) speed(prior Speed, median bool, now time.Time) Speed {
	s := prior
	s.Learned = f.requests >= enough
	if median {
		s.Curve = f.curve(prior.Curve, 3).towards(prior.Curve, prior.PromptTokens)
	} else {
		s.Curve = f.curve(prior.Curve, 1)
	}
	s.StepMS = f.step.or(prior.StepMS)
	s.StepBaseMS, s.StepRequestMS = f.steps.fit(s.StepMS)
	s.HostMS = f.served.host.or(prior.HostMS)
	s.DiskMS = f.served.disk.or(prior.DiskMS)
	s.OverheadMS = f.served.overhead.or(prior.OverheadMS)
	s.QueueMS = f.queue.or(prior.QueueMS)
	s.PromptTokens = f.prompt.or(prior.PromptTokens)
	s.OutputTokens = f.output.or(prior.OutputTokens)
	s.Busy = math.NaN()
	if f.busyKnown && now.Sub(f.at) <= memory {
		s.Busy = min(f.busy, maxBusy)
	}
	return s
}

// context returns the cached tokens before those that were computed since. It
// is known where the requests that began are those that ended: what they had to
// compute is what was computed.
func (t Totals) context(before Totals, computed float64) (cached float64, known bool) {
	prompt := t.PromptTokens - before.PromptTokens
	cached = t.CachedTokens - before.CachedTokens
	if !positive(prompt) || !(cached >= 0) || math.Abs(prompt-cached-computed) > 0.5 {
		return 0, false
	}
	return cached, true
}

// behind tells whether any total is lower than before: counters do not fall
// while an engine lives.
func (t Totals) behind(before Totals) bool {
	return t.PrefillSeconds < before.PrefillSeconds || t.PrefillTokens < before.PrefillTokens ||
		t.PrefillRequests < before.PrefillRequests || t.InterTokenSeconds < before.InterTokenSeconds ||
		t.InterTokenCount < before.InterTokenCount || t.QueueSeconds < before.QueueSeconds ||
		t.QueueRequests < before.QueueRequests || t.GenerationTokens < before.GenerationTokens ||
		t.PromptTokens < before.PromptTokens || t.CachedTokens < before.CachedTokens
}

// average is a mean in which the newest weigh most and none more than half.
type average struct{ sum, weight float64 }

func (a *average) add(v, n float64) {
	n = min(n, 100)
	keep := 1 - min(n/200, 0.5)
	a.sum = keep*a.sum + n*v
	a.weight = keep*a.weight + n
}

func (a *average) or(prior float64) float64 {
	if a.weight <= 0 {
		return prior
	}
	return a.sum / a.weight
}

func medians(list []Speed) Speed {
	s := Prior()
	median := func(of func(Speed) float64) float64 {
		v := make([]float64, len(list))
		for i := range list {
			v[i] = of(list[i])
		}
		slices.Sort(v)
		return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
	}
	s.A = median(func(s Speed) float64 { return s.A })
	s.B = median(func(s Speed) float64 { return s.B })
	s.C = median(func(s Speed) float64 { return s.C })
	s.StepMS = median(func(s Speed) float64 { return s.StepMS })
	s.HostMS = median(func(s Speed) float64 { return s.HostMS })
	s.DiskMS = median(func(s Speed) float64 { return s.DiskMS })
	s.OverheadMS = median(func(s Speed) float64 { return s.OverheadMS })
	s.QueueMS = median(func(s Speed) float64 { return s.QueueMS })
	s.PromptTokens = median(func(s Speed) float64 { return s.PromptTokens })
	s.OutputTokens = median(func(s Speed) float64 { return s.OutputTokens })
	return s
}

// positive is false for NaN and infinity as well, and for more than any engine
// counts between two samples, so that no sum overflows.
func positive(v float64) bool { return v > 0 && v <= 1e12 }
