package fleet

import (
	"math"
	"sync/atomic"
	"time"
)

// Reserved is what open decisions charge to one member.
type Reserved struct {
	// Tokens to be computed, and their predicted prefill time, by requests
	// whose first token was not reported.
	Tokens    uint64
	PrefillMS float64
	// Prefills is the number of those requests, PrefillsSeen how many of them
	// the load sample must contain already.
	Prefills, PrefillsSeen int
	// Unseen requests came after the load sample, Ended are those that it
	// still contains though they were reported done.
	Unseen, Ended int
	// Open requests in all, seen or not, and the sum of their shares.
	Open  int
	Share float64
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
// not at the member yet: nobody is charged for it.
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
}

func newAccount() *account {
	a := &account{}
	a.reserved.Store(&Reserved{})
	a.reported.Store(&Reported{})
	a.failing.Store(&Failing{})
	return a
}

// ledger lists the decisions that charge a member, oldest first.
type ledger struct {
	first, last *decision
	sum         Reserved
}

func (l *ledger) add(d *decision) {
	d.prev, d.next = l.last, nil
	if l.last == nil {
		l.first = d
	} else {
		l.last.next = d
	}
	l.last = d
	l.sum.Open++
	l.sum.Share += d.share
	l.sum.Unseen++
	if d.phase == prefilling {
		l.sum.Prefills++
		l.sum.Tokens += d.tokens
		l.sum.PrefillMS += d.prefillMS
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
	l.sum.Share -= d.share
	if l.sum.Open == 0 {
		l.sum.Share = 0 // no rounding is left behind
	}
	switch {
	case !d.seen:
		l.sum.Unseen--
	case ended:
		l.sum.Ended++
	}
	d.seen = false
}

// computed frees the tokens of a decision whose prefill is done.
func (l *ledger) computed(d *decision) {
	if d.phase != prefilling {
		return
	}
	d.phase = decoding
	l.sum.Prefills--
	l.sum.Tokens -= d.tokens
	l.sum.PrefillMS -= d.prefillMS
	if d.seen {
		l.sum.PrefillsSeen--
	}
	if l.sum.Prefills == 0 {
		l.sum.PrefillMS = 0 // no rounding is left behind
	}
}

// settle marks what a sample has seen and returns how many that are.
func (l *ledger) settle(until time.Time) (seen int) {
	for d := l.last; d != nil && !d.seen; d = d.prev {
		if d.at.After(until) {
			continue
		}
		d.seen = true
		l.sum.Unseen--
		if d.phase == prefilling {
			l.sum.PrefillsSeen++
		}
	}
	l.sum.Ended = 0
	return l.sum.Open - l.sum.Unseen
}

// publishLocked lets readers see the sums of a member. The request at its turn is
// the oldest whose prefill is open; its time runs from when it became that.
func (f *Fleet) publishLocked(s *slot, now time.Time) {
	l := &s.ledger
	head := l.first
	for head != nil && head.phase != prefilling {
		head = head.next
	}
	if head == nil {
		l.sum.headMS = 0
	} else {
		if head.turn.IsZero() {
			head.turn = now
		}
		l.sum.headMS, l.sum.headAt = head.prefillMS, head.turn
	}
	sum := l.sum
	s.member.account.reserved.Store(&sum)
	f.sums[s.member.ID] = sum
}

// finite returns v where it is a number of ms that one can add, else 0.
func finite(v float64) float64 {
	if !(v >= 0 && v <= math.MaxFloat64) {
		return 0
	}
	return v
}
