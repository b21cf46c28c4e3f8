package learn

import "time"

// Totals since the engine started; NaN: not known. An engine counts at three
// moments of a request, and what it counts at one is not divided by what it
// counts at another: in between are all the requests that are under way.
type Totals struct {
	Begun
	Stepped
	Ended
	// Running requests at the moment; not a total.
	Running float64
}

// Begun is counted when a prefill is done: tokens of the prompts, and those of
// them that were cached.
type Begun struct{ PromptTokens, CachedTokens float64 }

// Stepped is counted with every token that comes out.
type Stepped struct{ InterTokenSeconds, InterTokenCount float64 }

// Ended is counted when a request ends: how long its prefill took, from its
// first step to its first token, how many of its PromptLength tokens that
// computed, and how long its output was.
type Ended struct {
	Requests, PrefillSeconds, ComputedTokens float64
	PromptLength, OutputLength               float64
}

func (t Begun) values() [5]float64   { return [5]float64{t.PromptTokens, t.CachedTokens} }
func (t Stepped) values() [5]float64 { return [5]float64{t.InterTokenSeconds, t.InterTokenCount} }
func (t Ended) values() [5]float64 {
	return [5]float64{t.Requests, t.PrefillSeconds, t.ComputedTokens, t.PromptLength, t.OutputLength}
}

func (t Begun) known() bool   { return t.PromptTokens >= 0 && t.CachedTokens >= 0 }
func (t Stepped) known() bool { return t.InterTokenSeconds >= 0 && t.InterTokenCount >= 0 }
func (t Ended) known() bool   { return t.Requests >= 0 && t.PrefillSeconds >= 0 && t.ComputedTokens >= 0 }

// moment is what is counted at one.
type moment interface {
	values() [5]float64
	known() bool
}

// last is the newest sample that knew it. A sample that does not is passed
// over, so that the next difference spans both.
type last[M moment] struct {
	at     time.Time // zero: none
	totals M
}

// next takes a sample, and returns the one before and the time between them;
// false: there is no difference to learn from.
func (l *last[M]) next(at time.Time, t M) (before M, since time.Duration, ok bool) {
	if !t.known() {
		return before, 0, false
	}
	before, since, ok = l.totals, at.Sub(l.at), !l.at.IsZero()
	l.at, l.totals = at, t
	return before, since, ok
}

// behind tells whether a total is lower than it was: counters do not fall
// while an engine lives.
func (l *last[M]) behind(t M) bool {
	before, now := l.totals.values(), t.values()
	for i := range before {
		if now[i] < before[i] {
			return true
		}
	}
	return false
}
