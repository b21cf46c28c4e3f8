package fleet

import "time"

// flight is how long it takes until another scheduler's decision is known here.
const flight = 5 * time.Millisecond

// echo is what other schedulers are expected to have reserved on a member and
// could not tell yet. Requests are spread over the schedulers without regard to
// what they ask for, so what each of the others does in so short a time is, on
// average, what this one does. Without it, equal requests at one moment would
// all be placed as if each scheduler were alone.
type echo struct {
	until     time.Time
	requests  int
	tokens    uint64
	prefillMS float64
}

// add expects of so many others what was reserved here.
func (e *echo) add(d *decision, others int, now time.Time) {
	if !now.Before(e.until) {
		*e = echo{until: now.Add(flight)}
	}
	e.requests += others
	e.tokens += uint64(others) * d.tokens
	e.prefillMS += float64(others) * d.prefillMS
}

// received takes off what another scheduler really reserved.
func (e *echo) received(d *decision) {
	e.requests = max(0, e.requests-1)
	e.tokens -= min(e.tokens, d.tokens)
	e.prefillMS = max(0, e.prefillMS-d.prefillMS)
}

// Expected adds what other schedulers are expected to have reserved by now. The
// sum is in more, unless there is nothing to be added.
func (r *Reserved) Expected(now time.Time, more *Reserved) *Reserved {
	if r.echo.requests == 0 {
		return r
	}
	return r.expected(now, more)
}

func (r *Reserved) expected(now time.Time, more *Reserved) *Reserved {
	e := &r.echo
	if !now.Before(e.until) {
		return r
	}
	*more = *r
	more.Tokens += e.tokens
	more.PrefillMS += e.prefillMS
	more.Prefills += e.requests
	more.Unsampled += e.requests
	more.Open += e.requests
	return more
}

// SetOthers says how many other schedulers place requests on the same members.
func (f *Fleet) SetOthers(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.others = n
}
