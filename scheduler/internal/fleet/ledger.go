package fleet

import (
	"math"
	"sync/atomic"
	"time"
)

// Reserved is what open decisions reserve on one member.
type Reserved struct {
	// Tokens to be computed, and their predicted prefill time, by requests
	// whose first token was not reported.
	Tokens    uint64
	PrefillMS float64
	// Prefills is the number of those requests, PrefillsSampled how many of them
	// the load sample must contain already.
	Prefills, PrefillsSampled int
	// Unsampled requests came after the load sample, Ended are those that it
	// still contains though they were reported done.
	Unsampled, Ended int
	// Open requests in all, seen or not, with the tokens of their prompts and the
	// sum of their shares.
	Open   int
	Prompt uint64
	Share  float64
	// Last is the number of the decision that chose the member last, counted
	// over the fleet; 0: none.
	Last uint64

	echo   echo    // expected of other schedulers
	headMS float64 // prefill time of the request that is at its turn
	headAt time.Time
}

// Wait is the predicted time in ms until the reserved prefills are done. The
// engine works them off in order: the request at its turn counts by what is
// left of it, but never less than a tenth before its first token is reported
// or its reservation runs out.
func (r *Reserved) Wait(now time.Time) float64 {
	if r.Prefills == 0 {
		return 0
	}
	return r.left(now)
}

func (r *Reserved) left(now time.Time) float64 {
	done := float64(now.Sub(r.headAt)) / float64(time.Millisecond)
	return max(0, r.PrefillMS-min(max(done, 0), 0.9*r.headMS))
}

// Ahead is what waits for a member and will be served before a request, but is
// not at the member yet: nothing is reserved for it.
type Ahead struct {
	Requests  int
	MS, Share float64
}

// Reported is the sum of what callers reported of the requests that a member
// served, beside what had been predicted for them.
type Reported struct {
	Requests, PromptTokens, CachedTokens, PredictedTokens uint64
}

// account is the part of a member that changes between views. Its values are
// replaced under Fleet.mu and may be read without.
type account struct {
	reserved atomic.Pointer[Reserved]
	reported atomic.Pointer[Reported]
	failing  atomic.Pointer[Failing]
	bias     atomic.Pointer[Bias]
}

func newAccount() *account {
	a := &account{}
	a.reserved.Store(&Reserved{})
	a.reported.Store(&Reported{})
	a.failing.Store(&Failing{})
	a.bias.Store(&Bias{})
	return a
}

// ledger lists the decisions with a reservation on a member in the order in which they
// were made, which need not be the order in which they come: those of other
// schedulers come late, and so does one that another member served than was
// reserved.
//
// The load sample at hand has seen a decision, if and only if it is of
// decision.from or later. What it has seen is among its gauges, what it has not
// is counted besides, so each request counts once.
type ledger struct {
	first, last *decision
	turn        *decision // the first that is prefilling; nil: none is
	sampled     time.Time // the load sample at hand; zero: none
	sum         Reserved
}

// longestStep of an engine in ms: a step computes so many tokens of prompts at
// most, 8,192 as a rule.
const longestStep = 1000

// lag is how long after a decision a load sample surely has its request.
//
// An engine takes requests up between two steps and counts those that it has at
// the end of each, so that its gauges show a request at the end of the first step
// that begins after the request has come: up to two steps later, and a sample
// says how things stood at the end of the last step before it. Decoding takes
// milliseconds a step, which Settle covers; a step that computes prompts takes as
// long as they do. None that this request waits for, its own among them, is
// longer than the time that is predicted to its first token.
//
// Taken too short, the gauges seem to say that somebody has ended, and a reservation
// is dropped for good; taken too long, a request counts twice until the next
// sample. So this is the latest, unless a report says that it was sooner.
func (c *Config) lag(firstTokenMS float64) time.Duration {
	return c.Settle + time.Duration(2*min(finite(firstTokenMS), longestStep)*float64(time.Millisecond))
}

func (l *ledger) add(d *decision) {
	before := l.last
	for before != nil && before.at.After(d.at) {
		before = before.prev
	}
	d.prev = before
	if before == nil {
		d.next, l.first = l.first, d
	} else {
		d.next, before.next = before.next, d
	}
	if d.next == nil {
		l.last = d
	} else {
		d.next.prev = d
	}
	l.sum.Open++
	l.sum.Prompt += d.prompt
	l.sum.Share += d.share
	l.sum.Unsampled++
	if d.phase == prefilling {
		if l.turn == nil || l.turn.at.After(d.at) {
			l.turn = d
		}
		l.sum.Prefills++
		l.sum.Tokens += d.tokens
		l.sum.PrefillMS += d.prefillMS
	}
	l.mark(d)
}

// mark marks the decision if the sample at hand has seen it.
func (l *ledger) mark(d *decision) {
	if d.sampled || d.from.After(l.sampled) {
		return
	}
	d.sampled = true
	l.sum.Unsampled--
	if d.phase == prefilling {
		l.sum.PrefillsSampled++
	}
}

// reprice lets open prefills take so many times as long. What the one at its
// turn has waited are prefills, too: it began that much sooner or later.
func (l *ledger) reprice(by float64) {
	l.sum.PrefillMS = 0
	for d := l.turn; d != nil; d = d.next {
		if d.phase != prefilling {
			continue
		}
		if d == l.turn && d.guessed && d.turn.After(d.at) {
			d.turn = d.at.Add(time.Duration(by * float64(d.turn.Sub(d.at))))
		}
		d.prefillMS *= by
		l.sum.PrefillMS += d.prefillMS
	}
}

// begun says that the engine has begun the request by now, so that samples from
// here on have it.
func (l *ledger) begun(d *decision, now time.Time) {
	if d.from.After(now) {
		d.from = now
		l.mark(d)
	}
}

// remove takes the decision off the member. ended: its request is over, and
// the sample at hand may still contain it.
func (l *ledger) remove(d *decision, ended bool) {
	l.computed(d)
	if d.prev == nil {
		l.first = d.next
	} else {
		d.prev.next = d.next
	}
	if d.next == nil {
		l.last = d.prev
	} else {
		d.next.prev = d.prev
	}
	d.prev, d.next = nil, nil
	l.sum.Open--
	l.sum.Prompt -= d.prompt
	l.sum.Share -= d.share
	if l.sum.Open == 0 {
		l.sum.Share = 0 // no rounding is left behind
	}
	switch {
	case !d.sampled:
		l.sum.Unsampled--
	case ended:
		l.sum.Ended++
	}
	d.sampled = false
}

// computed frees the tokens of a decision whose prefill is done.
func (l *ledger) computed(d *decision) {
	if d.phase != prefilling {
		return
	}
	d.phase = decoding
	for l.turn != nil && l.turn.phase != prefilling {
		l.turn = l.turn.next
	}
	l.sum.Prefills--
	l.sum.Tokens -= d.tokens
	l.sum.PrefillMS -= d.prefillMS
	if d.sampled {
		l.sum.PrefillsSampled--
	}
	if l.sum.Prefills == 0 {
		l.sum.PrefillMS = 0 // no rounding is left behind
	}
}

// settle takes a sample of a time later than the last.
func (l *ledger) settle(at time.Time) {
	l.sampled, l.sum.Ended = at, 0
	for d, left := l.last, l.sum.Unsampled; left > 0; d = d.prev {
		if !d.sampled {
			left--
			l.mark(d)
		}
	}
}

// inSample is how many decisions the sample at hand has seen.
func (l *ledger) inSample() int { return l.sum.Open - l.sum.Unsampled }

// oldestSampled of them; there must be one.
func (l *ledger) oldestSampled() *decision {
	d := l.first
	for !d.sampled {
		d = d.next
	}
	return d
}

// publishLocked lets readers see the sums of a member. The request at its turn is
// the oldest whose prefill is open; its time runs from when it became that.
func (f *Fleet) publishLocked(s *slot, now time.Time) {
	l := &s.ledger
	if d := l.turn; d == nil {
		l.sum.headMS = 0
	} else {
		if d.turn.IsZero() {
			d.turn = now
		}
		l.sum.headMS, l.sum.headAt = d.prefillMS, d.turn
	}
	sum := l.sum
	s.member.account.reserved.Store(&sum)
	f.sums[s.member.ID] = sum
}

// milliseconds is a time in ms, a week at most.
func milliseconds(ms float64) time.Duration {
	return time.Duration(min(finite(ms), 7*24*3600*1000) * float64(time.Millisecond))
}

// finite returns v where it is a number of ms that one can add, else 0.
func finite(v float64) float64 {
	if !(v >= 0 && v <= math.MaxFloat64) {
		return 0
	}
	return v
}
