// Package learn fits how fast members are from the totals that their engines
// count: prefill and step times, lengths, and the share of time spent in
// prefill. It is arithmetic on samples handed in: no clock, no metric names,
// and nothing about where a sample came from.
//
// What is missing, negative, infinite, not a number or zero where it divides
// teaches nothing. A member counts by the evidence that it is different: until
// that is strong it has the speed of its model's others, and before anything is
// known of them, a broad prior.
package learn

import (
	"math"
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
	// enough is the number of requests that ended from which on a member's own
	// samples are said to have told its speed.
	enough = 10
	// longestPrefill in seconds, longestPrompt in tokens and maxBatch are more
	// than there is: a total that jumps further says nothing.
	longestPrefill, longestPrompt, maxBatch = 600, 1 << 24, 1 << 16
	// maxBusy keeps the price of a miss finite.
	maxBusy = 0.9
	// idle is how long an engine is taken to have been idle before its first
	// sample: the first seconds alone do not tell how busy it is.
	idle = 5 * time.Second
)

// Curves are the fits of all members. The zero value is empty. It has no lock.
type Curves struct {
	members []fit // by number
}

// fit is what was learned of one member.
type fit struct {
	model   string
	at      time.Time // of the last sample; zero: none
	begun   last[Begun]
	stepped last[Stepped]
	ended   last[Ended]
	running float64 // at the last sample
	line    line
	lone    lone
	// requests that ended, faded.
	requests       float64
	step           average
	prompt, output average // tokens a request
	busy           busy
	steps          steps
	served         served
}

// Observe takes a member's totals at a time. Totals that went back are those
// of another engine process: they start new differences. Samples that are not
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
	if !f.at.IsZero() {
		f.fade(math.Exp(-float64(at.Sub(f.at)) / float64(forget)))
	}
	f.at = at
	if f.begun.behind(t.Begun) || f.stepped.behind(t.Stepped) || f.ended.behind(t.Ended) {
		f.begun, f.stepped, f.ended = last[Begun]{}, last[Stepped]{}, last[Ended]{}
	}
	if before, since, ok := f.begun.next(at, t.Begun); ok {
		f.learnBegun(t.Begun, before, since)
	}
	if before, _, ok := f.stepped.next(at, t.Stepped); ok {
		f.learnStepped(t.Stepped, before, (t.Running+f.running)/2)
	}
	if before, _, ok := f.ended.next(at, t.Ended); ok {
		f.learnEnded(t.Ended, before)
	}
	f.running = t.Running
}

// Forget drops what was learned of a member that left.
func (c *Curves) Forget(member uint32) {
	if int(member) < len(c.members) {
		c.members[member] = fit{}
	}
}

// learnBegun learns how busy an engine is with prefill. A prefill is counted
// at once when it is done, though it took long.
func (f *fit) learnBegun(t, before Begun, since time.Duration) {
	tokens := t.PromptTokens - before.PromptTokens - (t.CachedTokens - before.CachedTokens)
	if tokens != 0 && !positive(tokens) {
		return
	}
	c := f.curve()
	mean := f.prompt.or(Prior().PromptTokens)
	share := c.busySeconds(tokens/mean, tokens) / since.Seconds()
	f.busy.add(min(share, 1+memory.Seconds()/since.Seconds()), since, f.at)
}

func (f *fit) learnStepped(t, before Stepped, batch float64) {
	n, s := t.InterTokenCount-before.InterTokenCount, t.InterTokenSeconds-before.InterTokenSeconds
	if !positive(n) || !positive(s) {
		return
	}
	f.step.add(1000*s/n, n)
	if batch >= 1 && batch <= maxBatch {
		f.steps.add(1000*s/n, batch, n)
	}
}

func (f *fit) learnEnded(t, before Ended) {
	requests := t.Requests - before.Requests
	if !positive(requests) {
		return
	}
	if n := t.OutputLength - before.OutputLength; positive(n) {
		f.output.add(n/requests, requests)
	}
	seconds, tokens := t.PrefillSeconds-before.PrefillSeconds, t.ComputedTokens-before.ComputedTokens
	if !positive(seconds) || !positive(tokens) || seconds > longestPrefill*requests || tokens > longestPrompt*requests {
		return
	}
	// Divided by the number of requests, so that each observation is a mean
	// request and a busy second weighs by its square root.
	w := 1 / math.Sqrt(requests)
	cached := t.PromptLength - before.PromptLength - tokens
	c := f.curve()
	if 1000*seconds > 1.05*requests*c.Prefill(tokens/requests, max(cached, 0)/requests) {
		w *= slow
	}
	if cached >= 0 && requests <= lonely {
		f.lone.add(w, requests, tokens/requests, cached/requests, 1000*seconds)
	}
	f.line.add(w, requests, tokens, 1000*seconds)
	f.requests += requests
	f.prompt.add(tokens/requests, requests)
}

// fade keeps a share of what prefills and steps told.
func (f *fit) fade(keep float64) {
	f.requests *= keep
	f.line.fade(keep)
	f.lone.fade(keep)
	f.steps.fade(keep)
}

// curve is the member's own fit, of which little is guessed.
func (f *fit) curve() Curve {
	c, _, _ := f.line.curve(Prior().Curve, ownWeight, guessTokens, guess)
	return f.lone.curve(c)
}

// beside is what a member shows beside its curve, around a prior.
func (f *fit) beside(prior Speed) Speed {
	s := prior
	s.StepMS = f.step.or(prior.StepMS)
	s.HostMS = f.served.host.or(prior.HostMS)
	s.DiskMS = f.served.disk.or(prior.DiskMS)
	s.OverheadMS = f.served.overhead.or(prior.OverheadMS)
	return s
}

// Fit returns the speeds of all members by number, as of now.
func (c *Curves) Fit(now time.Time) []Speed {
	pools := make(map[string]*pool)
	for i := range c.members {
		f := &c.members[i]
		p := pools[f.model]
		if p == nil {
			p = &pool{}
			pools[f.model] = p
		}
		p.members = append(p.members, f)
	}
	for _, p := range pools {
		p.settle()
	}
	speeds := make([]Speed, len(c.members))
	for i := range c.members {
		speeds[i] = pools[c.members[i].model].of(&c.members[i], now)
	}
	return speeds
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

// around is the mean, drawn to a prior that counts as so many values.
func (a *average) around(prior, n float64) float64 {
	return (a.sum + n*prior) / (a.weight + n)
}

// join adds the values of another.
func (a *average) join(b average) {
	a.sum += b.sum
	a.weight += b.weight
}

// busy is a share of time, smoothed over memory.
type busy struct {
	sum, weight float64
	at          time.Time // of the newest; zero: none
}

func (b *busy) add(share float64, since time.Duration, at time.Time) {
	if b.at.IsZero() {
		b.weight = 1 - math.Exp(-float64(idle)/float64(memory))
	}
	keep := math.Exp(-float64(since) / float64(memory))
	b.sum = keep*b.sum + (1-keep)*share
	b.weight = keep*b.weight + (1 - keep)
	b.at = at
}

// share is not known without a sample for as long as memory.
func (b *busy) share(now time.Time) (float64, bool) {
	return b.sum / b.weight, !b.at.IsZero() && now.Sub(b.at) <= memory
}

// positive is false for NaN and infinity as well, and for more than any engine
// counts between two samples, so that no sum overflows.
func positive(v float64) bool { return v > 0 && v <= 1e12 }
