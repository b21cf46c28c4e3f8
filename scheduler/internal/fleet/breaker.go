package fleet

import "time"

// A member that fails by report is left out for a while. The rule: failLimit
// failures within failWindow, and no request in between that went well, leave
// it out for failPause, twice as long each further time, up to failPauseMax.
// Then it is on probation: the next request may go to it, and for probation
// no other. A failure leaves it out again. A first token or an end takes it
// back, and so does a probation without a word, since reports are optional.
//
// Failures are the engine's of that time: one that begins anew, or answers its
// agent again after it did not, begins without a record, and what was sent before
// says nothing of it.
const (
	failLimit    = 3
	failWindow   = 10 * time.Second
	failPause    = 5 * time.Second
	failPauseMax = time.Minute
	probation    = 5 * time.Second
)

// breaker is a member's record, guarded by Fleet.mu. The zero value is that of
// a member that does well.
type breaker struct {
	failures [failLimit]time.Time // a ring
	next     int
	pause    time.Duration // the last one
	born     time.Time     // the engine answers since then; zero: not known
	state    Failing
}

// Failing says whether a member is left out. The zero value: it does well.
type Failing struct {
	until time.Time // left out; zero: no failures
	probe time.Time // end of the probation that a request began; zero: none
}

// Until is when requests may go to the member again; zero: now.
func (f Failing) Until(now time.Time) time.Time {
	switch {
	case now.Before(f.until):
		return f.until
	case now.Before(f.probe):
		return f.probe
	}
	return time.Time{}
}

// failed takes a failure of a request decided at a time, and tells whether it
// begins a pause.
func (b *breaker) failed(decided, now time.Time) bool {
	switch f := b.state; {
	case now.Before(f.until), decided.Before(b.born):
		return false // of a request that was sent before
	case !f.probe.IsZero() && !now.Before(f.probe):
		*b = breaker{born: b.born} // the probation went well
	}
	b.failures[b.next] = now
	b.next = (b.next + 1) % failLimit
	first := b.failures[b.next]
	if b.state.until.IsZero() && (first.IsZero() || now.Sub(first) > failWindow) {
		return false
	}
	b.pause = min(max(failPause, 2*b.pause), failPauseMax)
	b.state = Failing{until: now.Add(b.pause)}
	return true
}

// well takes a request, decided at a time, that went well. During a pause, and
// on probation if it is older than that, it says nothing.
func (b *breaker) well(decided time.Time) {
	if !decided.Before(b.state.until) {
		*b = breaker{born: b.born}
	}
}

// reserved takes a request that goes to the member.
func (b *breaker) reserved(now time.Time) {
	if !b.state.until.IsZero() && !now.Before(b.state.until) && b.state.probe.IsZero() {
		b.state.probe = now.Add(probation)
	}
}

// reborn tells whether the engine of this sample is another process than that of
// the one before, or answers again.
func (l *Load) reborn(before *Load) bool {
	if before.Unreachable || l.Unreachable {
		return before.Unreachable && !l.Unreachable
	}
	return before.ProcessStart != 0 && l.ProcessStart != 0 && l.ProcessStart != before.ProcessStart
}
