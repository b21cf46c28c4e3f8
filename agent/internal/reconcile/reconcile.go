// Package reconcile holds the KV events of one rank against the counters of
// the engine that is believed to send them. Both tell of the same blocks: a
// request with a prompt of P tokens, H of them cached, and G tokens generated
// computes P-H+G-1 of them and announces the whole blocks among them. So what
// is announced never exceeds what was computed, and lacks less than a block for
// each request. A stream that breaks either rule is another engine's, or lost
// blocks without a gap.
//
// What the stream says is a Flow, what the engine says are Counters; a Check
// compares their growth since a moment at which both were known. Either may tell
// later what the other told, the more so the slower the engine answers; and only
// a difference that lasts counts.
package reconcile

import "time"

const (
	// One side may be later than the other by lag, and lagAnswers times the time
	// that the engine took to answer and this process to wake up; by maxLag at most.
	lag        = 100 * time.Millisecond
	lagAnswers = 10
	maxLag     = time.Second
	// A difference counts once it has lasted for confirm, in at least
	// confirmPolls polls in a row.
	confirm      = 1200 * time.Millisecond
	confirmPolls = 4
	// longPrefill is how long blocks of running requests may explain what is not
	// counted: prompts that are not looked up count when they are computed.
	longPrefill = 10 * time.Second
	// spare tokens, and spareBlocks blocks, of difference say nothing: answers
	// to aborted requests are not counted, and a page is not read in one moment.
	spare       = 256
	spareBlocks = 2
	// quietFor is how long neither side must have moved for both to be complete.
	quietFor = 800 * time.Millisecond
	// crowded is the share of the pool in use from which requests may have been
	// preempted: what they compute again is not counted again.
	crowded = 0.5
	// maxPending bounds the polls that wait for the stream to catch up, and
	// maxHistory those that are kept behind.
	maxPending = 256
	maxHistory = 256
)

// Counters of an engine's rank. Totals are since its process began, in tokens
// unless they say otherwise.
type Counters struct {
	Prompt    float64 // computed of prompts whose first token is out
	Generated float64
	Requests  float64 // whose first token is out, a number of requests
	// Admitted of prompts and not found in the prefix cache; it counts what is
	// in flight or aborted, and misses prompts that are never looked up.
	Admitted float64
	Looked   bool    // Admitted is known
	External float64 // brought in by a connector
	Preempted,
	Resets float64 // numbers of requests

	Running, Waiting float64 // requests at present
	InUse            float64 // what the blocks of running requests can hold at present
	Usage            float64 // their share of the pool
	MaxRequest       float64 // most that one request can have; 0: not known
}

func (c *Counters) computed() float64 { return c.Prompt + c.Generated }

// idleSince says that nothing runs, and that nothing happened since the other was read.
func (c *Counters) idleSince(o *Counters) bool {
	return c.Running == 0 && c.Waiting == 0 && o.Running == 0 && o.Waiting == 0 &&
		c.computed() == o.computed() && c.Admitted == o.Admitted
}

// Kind of difference.
type Kind uint8

const (
	None    Kind = iota
	Missing      // tokens were computed and never announced
	Foreign      // blocks were announced that the engine did not compute
)

// Finding is a difference that lasted.
type Finding struct {
	Kind   Kind
	Tokens float64 // by which the bound is exceeded
	// Mute: nothing at all was announced.
	Mute bool
}

// observation is one poll: what the engine said, and what its stream had
// announced at least before (before) and at most a while behind it (after).
type observation struct {
	at            time.Time
	due           time.Time // when after is known
	counters      Counters
	before, after Totals
	known         bool // before is; else it is zero
	whole         bool
}

func (o *observation) blockSize() float64 { return float64(o.after.BlockSize) }

func (o *observation) margin() float64 { return spare + spareBlocks*o.blockSize() }

// inFlight bounds the tokens of prompts whose first token was not out at a moment
// before. Prompts that are not looked up show when more were counted than admitted;
// then it may be all that was in use.
func (o *observation) inFlight(c *Counters) float64 {
	if now := &o.counters; !c.Looked || now.Admitted+o.margin() < now.Prompt {
		return c.InUse
	}
	return min(c.InUse, max(0, c.Admitted-c.Prompt))
}

// Check of one rank. The zero value begins a check. It belongs to one goroutine.
type Check struct {
	trail   trail
	pending []observation // whose stream may still be on its way
	history []observation // of the last quietFor, oldest first
	since   time.Time     // first observation
	origin  anchor        // since the check began
	near    row           // since moments of the last 10 s
	far     row           // since moments of the last 96 s
	alike   alike
	late    time.Duration // by which this process woke up later than it wanted to
	suspect streak        // any difference
	certain streak        // one that running requests don't explain
}

// streak is a row of polls that show a difference.
type streak struct {
	since time.Time
	polls int
}

func (s *streak) lasts(now time.Time, shows bool, long time.Duration) bool {
	if !shows {
		s.polls = 0
		return false
	}
	if s.polls++; s.polls == 1 {
		s.since = now
	}
	return s.polls >= confirmPolls && now.Sub(s.since) >= long
}

// Reset begins the check anew.
func (c *Check) Reset() { *c = Check{} }

// Interrupt says that the stream is not whole for a while: polls count again
// when it is.
func (c *Check) Interrupt() {
	c.pending, c.history = nil, nil
	c.suspect, c.certain = streak{}, streak{}
	c.near, c.far, c.alike = row{}, row{}, alike{}
}

// Overslept says that this process woke up later than it wanted to. It reads events
// late, too, then; later than maxLag, and nothing follows from what it has read.
func (c *Check) Overslept(by time.Duration) {
	if c.late = max(c.late, by); by > maxLag {
		c.Interrupt()
	}
}

// Announce takes what the stream has announced so far.
func (c *Check) Announce(now time.Time, flow Totals) { c.trail.add(now, flow) }

// Observe takes what a poll of the engine told, when it was asked and when it had
// answered, and what its stream has announced by then. whole says that counters
// and stream both began with the engine's process. It is judged by a later call
// of Settle.
func (c *Check) Observe(asked, now time.Time, counters Counters, flow Totals, whole bool) {
	c.trail.add(now, flow)
	late := min(maxLag, lag+lagAnswers*(now.Sub(asked)+c.late))
	c.late = 0
	before, known := c.trail.at(asked.Add(-late))
	if len(c.pending) < maxPending {
		c.pending = append(c.pending, observation{at: now, due: now.Add(late), counters: counters, before: before, known: known, whole: whole})
	}
}

// Due is when the oldest poll that is not judged yet can be; false: there is none.
func (c *Check) Due() (time.Time, bool) {
	if len(c.pending) == 0 {
		return time.Time{}, false
	}
	return c.pending[0].due, true
}

// Settle judges the polls with which the stream has had time to catch up. A
// Finding without a Kind is none.
func (c *Check) Settle(now time.Time, flow Totals) (found Finding) {
	c.trail.add(now, flow)
	for len(c.pending) > 0 && !c.pending[0].due.After(now) {
		o := c.pending[0]
		c.pending = c.pending[1:]
		o.after = c.trail.from(o.due, flow)
		if f := c.take(&o); f.Kind != None {
			found = f
		}
	}
	return found
}

// Hurries says that the next polls should come soon: the newest show a difference
// that has not lasted yet, or the check has only just begun.
func (c *Check) Hurries() bool {
	n := len(c.history)
	return c.suspect.polls > 0 || n > 0 && c.history[n-1].at.Sub(c.since) < rowLength*nearStep
}

// take judges one observation whose stream has caught up.
func (c *Check) take(o *observation) Finding {
	if n := len(c.history); n > 0 && c.history[n-1].counters.fell(&o.counters) {
		// Another process, which began after the last poll.
		last := c.history[n-1].after
		trail, pending := c.trail, c.pending
		*c = Check{trail: trail, pending: pending}
		c.origin = anchor{set: true, at: o.at, most: last.Most, fresh: o.after.Fresh}
	}
	if c.since.IsZero() {
		c.since = o.at
		if o.whole && !c.origin.set {
			c.origin = anchor{set: true, at: o.at}
		}
	}
	found, explained := c.judge(o)
	c.anchor(o, found.Kind == None)
	c.remember(o)
	c.alike.observe(&c.origin, o)
	lasts := c.suspect.lasts(o.at, found.Kind != None, longPrefill)
	certain := false
	if !explained { // what is explained speaks neither for a difference nor against it
		certain = c.certain.lasts(o.at, found.Kind != None, confirm)
	}
	if lasts || certain {
		return found
	}
	return Finding{}
}

func (c *Counters) fell(to *Counters) bool {
	return to.Requests < c.Requests || to.Generated < c.Generated
}

// judge holds an observation against all moments from which growth is measured.
// A difference is explained if running requests may be the reason.
func (c *Check) judge(o *observation) (found Finding, explained bool) {
	if a := &c.origin; a.set && !a.busy {
		a.note(o)
		if n := a.missing(o); n > 0 {
			return Finding{Kind: Missing, Tokens: n, Mute: o.after.Most == 0}, false
		}
		if n := a.foreign(o); n > 0 {
			found, explained = Finding{Kind: Foreign, Tokens: n}, n <= o.counters.InUse
			if !explained {
				return found, false
			}
		}
	}
	for _, r := range []*row{&c.near, &c.far} {
		kind, n := r.differs(o)
		switch {
		case kind == Missing, kind == Foreign && n > o.counters.InUse:
			return Finding{Kind: kind, Tokens: n, Mute: o.after.Most == 0}, false
		case kind == Foreign:
			found, explained = Finding{Kind: kind, Tokens: n}, true
		}
	}
	return found, explained
}

// anchor makes an observation one from which growth is measured. A moment without
// requests in flight is best, because nothing is then told by one side only.
func (c *Check) anchor(o *observation, fits bool) {
	quiet := len(c.history) > 0 && o.at.Sub(c.history[0].at) >= quietFor
	if quiet {
		past := &c.history[0]
		quiet = o.counters.idleSince(&past.counters) && o.after == past.after
	}
	if !quiet && !o.known {
		return
	}
	c.near.add(o, quiet, nearStep)
	c.far.add(o, quiet, farStep)
	if fits && !c.origin.set {
		c.origin = anchorAt(o, quiet)
	}
}

// remember keeps what is needed to look back by quietFor.
func (c *Check) remember(o *observation) {
	keep := max(0, len(c.history)+1-maxHistory)
	for keep+1 < len(c.history) && o.at.Sub(c.history[keep+1].at) >= quietFor {
		keep++
	}
	c.history = append(c.history[:copy(c.history, c.history[keep:])], *o)
}

// Clean says that the observations so far were enough to find a difference, and
// that there is none.
func (c *Check) Clean() bool {
	n := len(c.history)
	return n > 0 && c.suspect.polls == 0 && c.history[n-1].at.Sub(c.since) >= confirm
}
