package fleet

import (
	"math"
	"time"
)

const (
	// overdue is how often the predicted time to the first token a
	// reservation is believed without a report, plus a second.
	overdue = 2
	// longestPrefill bounds the life of reserved tokens without a report.
	longestPrefill = 2 * time.Minute
	// longestDecision bounds the life of a decision after its last report.
	longestDecision = 10 * time.Minute
	// maxUnreported is how many reservations run out in a row until nobody is believed
	// to report, as nobody is before the first report.
	maxUnreported = 32
)

// Decision is the number of one decision; never 0. Who knows it may report, so
// it cannot be guessed: the numbers of a fleet are a stream of a strong random
// generator, and those of all schedulers and of all their lives differ but for
// a chance of 2^-64 a pair.
type Decision uint64

// Choice is what a decision reserves on a member.
type Choice struct {
	Member *Member
	// Session whose last member this becomes; may be empty. Then Mark is what
	// the conversation can be recognised by; 0: nothing.
	Session string
	Mark    uint64
	// Uncached tokens to compute, and how long that takes.
	Uncached  uint64
	PrefillMS float64
	// FirstTokenMS is the predicted time to the first token, wait included. It
	// bounds the steps after which the engine's gauges have the request.
	FirstTokenMS float64
	// Cached is the number of prompt tokens predicted as cached.
	Cached uint64
	// Promised is the number of those that Member holds by its cache state alone,
	// without its Bias; 0: that cannot be judged by what the engine will find.
	Promised uint64
	// Anyway chooses the member even if it is left out for its failures:
	// nobody else could be chosen.
	Anyway bool
	// Share of the member that the request takes until its end; 0: not known.
	Share float64
	// EndMS is the predicted time to the end. Where nobody reports, slot and
	// share are reserved so long; 0: not known, no longer than the prefill is
	// believed.
	EndMS float64
	// Decode is another member that decodes what Member prefills, and on
	// which a slot is reserved; nil: Member does both.
	Decode *Member
	// Asked comes back with the reports.
	Asked Asked
}

// SessionMark is what the session or the conversation is recognised by; 0: none.
func (c *Choice) SessionMark() uint64 {
	if c.Session != "" {
		return SessionMark(c.Session)
	}
	return c.Mark
}

// Asked is what a request was, for whoever learns from its end.
type Asked struct {
	Model, Tenant string
	PromptTokens  int
	Forecast      Forecast
	// GivenUp before a first token was reported: the prompt may never be computed.
	GivenUp bool
	// Moved: another member than the chosen one served it. Counted: this report
	// brought the engine's own counts, and was the first to do so.
	Moved, Counted bool
}

// Forecast is what was predicted of the time to the first token. The zero
// value: nothing, here.
type Forecast struct {
	Member            ID
	Name              string // of the member; empty: nothing was predicted
	WaitMS, PrefillMS float64
	Host, Disk        int // tokens to be loaded
}

// Outcome of a decision.
type Outcome uint8

const (
	// FirstToken: prefill is done, decoding goes on.
	FirstToken Outcome = iota + 1
	Finished
	Failed
	// Cancelled: never sent, or given up by the client.
	Cancelled
)

// Report is what a caller tells of a decision.
type Report struct {
	Decision Decision
	Outcome  Outcome
	// Member that served the request; empty: the one that was chosen.
	Member string
	// Counts: the engine's own counts follow, for the first time of this
	// decision.
	Counts               bool
	PromptTokens, Cached uint64
}

type phase uint8

const (
	prefilling phase = iota // reserves tokens and a slot
	decoding                // reserves a slot
	released                // reserves nothing, and can still be reported
)

type decision struct {
	id         Decision
	slot       *slot
	phase      phase
	sampled    bool      // by the member's load sample; the ledger's
	counted    bool      // the engine's counts were reported
	guessed    bool      // its prefill ends at the predicted time
	begun      bool      // its first token was reported
	moved      bool      // another member than the chosen one served it
	lost       bool      // who served it is none of ours
	at         time.Time // of the decision
	ready      time.Time // when the engine could begin it, but for those before it
	from       time.Time // a load sample of this time or later has seen it
	turn       time.Time // since when it is the first that is not computed
	prompt     uint64    // its tokens, cached or not
	tokens     uint64    // of it that are to be computed
	prefillMS  float64
	cached     uint64
	promised   uint64
	epoch      uint64 // of the member's engine
	session    uint64 // 0: none
	share      float64
	end        time.Time // until which it is reserved unreported; zero: not known
	asked      Asked
	mate       *decision // on the member that decodes; nil: none
	deadline   time.Time
	index      int       // in the heap of deadlines
	prev, next *decision // in the ledger of its member
}

// reserves tells whether the decision is in its member's ledger.
func (d *decision) reserves() bool { return d.phase != released }

// dropMemberLocked forgets all decisions on a member.
func (f *Fleet) dropMemberLocked(s *slot) {
	for _, d := range f.open.byID {
		if d.slot != s {
			continue
		}
		f.open.drop(d)
		if m := d.mate; m != nil && f.open.byID[m.id] == m && m.slot != s {
			f.open.drop(m)
			if m.reserves() {
				m.slot.ledger.remove(m, false)
				f.publishLocked(m.slot, time.Time{})
			}
		}
	}
	s.ledger = ledger{sampled: s.ledger.sampled, sum: Reserved{Last: s.ledger.sum.Last}}
	f.publishLocked(s, time.Time{})
}

// Decide calls choose with the fleet locked, so that what it is given is true
// until its choice is reserved: the session's last member, if known, and what is
// reserved by number of the member, which choose must not change or keep. It
// returns false to reserve nothing. It must be short and must not call the
// Fleet. Decide returns false if nothing was reserved: choose said so, the member left, or it
// is left out for failures by now.
func (f *Fleet) Decide(session string, now time.Time, choose func(last ID, known bool, reserved []Reserved) (Choice, bool)) (Decision, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.expireLocked(now)
	last, known := f.sessions.last(session)
	c, ok := choose(last, known, f.sums)
	if !ok {
		return 0, false
	}
	s := f.slotLocked(c.Member.ID)
	if s == nil || s.member.account != c.Member.account {
		return 0, false
	}
	if !c.Anyway && !s.breaker.state.Until(now).IsZero() {
		return 0, false
	}
	f.stats.Decided++
	return f.reserveLocked(s, c, 0, now, now).id, true
}

// Peek calls choose as Decide does, and changes nothing, whatever it says.
func (f *Fleet) Peek(session string, choose func(last ID, known bool, reserved []Reserved) (Choice, bool)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	last, known := f.sessions.last(session)
	choose(last, known, f.sums)
}

// Adopt reserves what another scheduler decided at a time, under its number. It
// returns false if the member is not there, or is another process by now than
// that of the epoch, or the decision is known.
func (f *Fleet) Adopt(id Decision, name string, epoch uint64, decode string, c Choice, at, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.expireLocked(now)
	s := f.names[name]
	if s == nil || s.member.CacheState.Epoch != epoch || f.open.byID[id] != nil {
		return false
	}
	if other := f.names[decode]; other != nil {
		c.Decode = other.member
	}
	f.stats.Adopted++
	f.reserveLocked(s, c, id, at, now)
	return true
}

// reserveLocked opens a decision of a time; without a number it gets one.
func (f *Fleet) reserveLocked(s *slot, c Choice, id Decision, at, now time.Time) *decision {
	for len(f.open.byID) >= f.cfg.MaxDecisions {
		f.endLocked(f.open.least(), now, false)
		f.stats.Evicted++
	}
	d := &decision{
		id:        id,
		slot:      s,
		at:        at,
		from:      at.Add(f.cfg.lag(c.FirstTokenMS)),
		prompt:    c.Uncached + c.Cached,
		tokens:    c.Uncached,
		prefillMS: finite(c.PrefillMS),
		cached:    c.Cached,
		promised:  c.Promised,
		epoch:     s.member.CacheState.Epoch,
	}
	patience := time.Second
	if ms := finite(c.FirstTokenMS); ms < float64(longestPrefill/time.Millisecond) {
		patience += time.Duration(overdue * ms * float64(time.Millisecond))
	} else {
		patience = longestPrefill
	}
	d.deadline = at.Add(min(patience, longestPrefill))
	d.share, d.asked = finite(c.Share), c.Asked
	if ms := finite(c.EndMS); ms > 0 {
		d.end = at.Add(min(milliseconds(ms), longestDecision))
	}
	if f.unreported >= maxUnreported {
		d.guess(finite(c.FirstTokenMS), s.ledger.sum.Wait(at))
	}
	if mark := c.SessionMark(); mark != 0 {
		d.session = f.sessions.hash(mark)
		f.sessions.setHash(d.session, s.member.ID, at)
	}
	f.open.add(d)
	s.ledger.add(d)
	switch {
	case id != 0:
		s.ledger.sum.echo.received(d)
	case f.others > 0:
		s.ledger.sum.echo.add(d, f.others, now)
	}
	s.ledger.sum.Last = f.stats.Decided + f.stats.Adopted
	f.publishLocked(s, now)
	s.breaker.reserved(now)
	f.publishBreakerLocked(s)
	if c.Decode != nil && c.Decode.ID != s.member.ID {
		f.pairLocked(d, &c, now)
	}
	return d
}

// guess lets the prefill end at the predicted time, and leaves the slot reserved
// for as long as it was to be. Where nobody reports, what is so reserved on a member is what
// it has left to compute. To wait for a report that does not come reserves it for
// longer than it takes, and ever longer: each request is predicted to wait for
// those before it, and is believed the longer for that. backlogMS is what is to be
// computed before it.
func (d *decision) guess(firstTokenMS, backlogMS float64) {
	d.guessed = true
	d.ready = d.at.Add(milliseconds(max(firstTokenMS-d.prefillMS-backlogMS, 0)))
	if d.end.IsZero() {
		d.end = d.deadline
	}
	if due := d.at.Add(milliseconds(firstTokenMS)); due.Before(d.deadline) {
		d.deadline = due
	}
}

// foresee predicts when a guessed prefill ends, that of those before it ends at
// a time; and from when on samples have its request.
func (f *Fleet) foresee(d *decision, before time.Time) {
	begins := d.ready
	if before.After(begins) {
		begins = before
	}
	due := begins.Add(milliseconds(d.prefillMS))
	if last := d.at.Add(longestPrefill); due.After(last) {
		due = last
	}
	f.open.postpone(d, due)
	if !d.sampled {
		d.from = d.at.Add(f.cfg.lag(float64(due.Sub(d.at)) / float64(time.Millisecond)))
		d.slot.ledger.mark(d)
	}
}

// foreseeLocked predicts anew when the guessed prefills of a member end: one
// after the other, from the one that is at its turn.
func (f *Fleet) foreseeLocked(s *slot) {
	var before time.Time
	for d := s.ledger.turn; d != nil; d = d.next {
		if d.phase == prefilling && d.guessed {
			if before.IsZero() {
				before = d.turn
			}
			f.foresee(d, before)
			before = d.deadline
		}
	}
}

// Reprice says that what a member has left to compute takes so many times as
// long as was believed.
func (f *Fleet) Reprice(id ID, by float64, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.expireLocked(now)
	s := f.slotLocked(id)
	if s == nil || s.ledger.sum.Prefills == 0 || !(by > 0) || by > math.MaxFloat32 {
		return
	}
	s.ledger.reprice(by)
	f.foreseeLocked(s)
	f.expireLocked(now)
	f.publishLocked(s, now)
}

// pairLocked reserves a slot on the member that decodes, which gets the request
// when it is prefilled. One that left meanwhile gets no reservation: the caller hears
// of it from its engine.
func (f *Fleet) pairLocked(d *decision, c *Choice, now time.Time) {
	s := f.slotLocked(c.Decode.ID)
	if s == nil || s.member.account != c.Decode.account {
		return
	}
	prefilled := min(milliseconds(c.FirstTokenMS), longestPrefill)
	d.mate = &decision{slot: s, phase: decoding, prompt: d.prompt, at: d.at, from: d.from.Add(prefilled), end: d.end, deadline: d.at.Add(longestDecision)}
	if !d.end.IsZero() {
		d.mate.deadline = d.end
	}
	f.open.add(d.mate)
	s.ledger.add(d.mate)
	s.ledger.sum.Last = f.stats.Decided + f.stats.Adopted
	f.publishLocked(s, now)
}

// Recall returns the last member of the conversation that has the first of
// these marks that anyone has.
func (f *Fleet) Recall(marks []uint64) (ID, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range marks {
		if id, ok := f.sessions.lastOf(f.sessions.hash(m)); ok {
			return id, true
		}
	}
	return 0, false
}

// Report tells what became of a decision: the first token frees the tokens, an
// end frees the slot as well. Naming another member moves what is left there.
// It returns what was asked, and false if the decision is not, or no longer,
// known.
func (f *Fleet) Report(r Report, now time.Time) (Asked, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	d, ok := f.open.byID[r.Decision]
	if !ok {
		return Asked{}, false
	}
	f.unreported = 0
	f.moveLocked(d, r.Member, now)
	d.asked.Counted = r.Counts && !d.counted
	if d.asked.Counted {
		d.counted = true
		f.countLocked(d, r)
	}
	f.judgeLocked(d, r.Outcome, now)
	d.asked.Moved = d.moved
	d.asked.GivenUp = !d.begun && (r.Outcome == Failed || r.Outcome == Cancelled)
	switch r.Outcome {
	case FirstToken:
		d.begun = true
		if d.reserves() {
			d.slot.ledger.begun(d, now)
			d.slot.ledger.computed(d)
			f.publishLocked(d.slot, now)
		}
		if d.mate != nil && d.reserves() {
			// The member that prefilled is done, the one that decodes goes on.
			d.slot.ledger.remove(d, true)
			f.publishLocked(d.slot, now)
			f.open.release(d, d.deadline)
		}
		f.open.postpone(d, now.Add(longestDecision))
		if d.mate != nil && f.open.byID[d.mate.id] == d.mate {
			if d.mate.reserves() {
				d.mate.slot.ledger.begun(d.mate, now)
				f.publishLocked(d.mate.slot, now)
			}
			f.open.postpone(d.mate, now.Add(longestDecision))
		}
	case Finished, Failed, Cancelled:
		f.endLocked(d, now, true)
	}
	return d.asked, true
}

// judgeLocked keeps the record of the member that served a decision, if it is
// one of ours.
func (f *Fleet) judgeLocked(d *decision, o Outcome, now time.Time) {
	s := d.slot
	switch {
	case d.lost:
		return
	case o == FirstToken || o == Finished:
		s.breaker.well(d.at)
	case o == Failed:
		f.stats.Failures++
		if s.breaker.failed(d.at, now) {
			f.stats.Paused++
		}
	default:
		return
	}
	f.publishBreakerLocked(s)
}

// moveLocked moves the reservation to the member that really serves it. A name
// that nobody has leaves it where it is not: nothing is reserved.
func (f *Fleet) moveLocked(d *decision, name string, now time.Time) {
	if name == "" || name == d.slot.member.Info.Name || d.mate != nil && name == d.mate.slot.member.Info.Name {
		return
	}
	was := d.phase
	if d.reserves() {
		d.slot.ledger.remove(d, false)
		f.publishLocked(d.slot, now)
	}
	d.moved = true
	to, ok := f.names[name]
	d.lost = !ok
	if !ok {
		f.open.release(d, d.deadline)
		return
	}
	d.slot, d.phase, d.turn = to, was, time.Time{}
	if d.session != 0 {
		f.sessions.setHash(d.session, to.member.ID, now)
	}
	if d.reserves() {
		to.ledger.add(d)
		f.publishLocked(to, now)
	}
}

func (f *Fleet) countLocked(d *decision, r Report) {
	if d.moved {
		return // the prediction was for another member
	}
	all := &f.stats.Delivered
	all.Prompt += r.PromptTokens
	all.Predicted += d.cached
	all.Cached += r.Cached
	a := d.slot.member.account
	sum := *a.reported.Load()
	sum.Requests++
	sum.PromptTokens += r.PromptTokens
	sum.CachedTokens += r.Cached
	sum.PredictedTokens += d.cached
	a.reported.Store(&sum)
	if d.promised == 0 || d.epoch != d.slot.member.CacheState.Epoch {
		return
	}
	before := a.bias.Load()
	after := d.slot.observed.observe(d.epoch, d.promised, r.Cached, before)
	a.bias.Store(after)
	if before.Tokens == 0 && after.Tokens > 0 {
		f.stats.Biased++
	}
}

// endLocked forgets a decision. ended: its request is known to be over.
func (f *Fleet) endLocked(d *decision, now time.Time, ended bool) {
	f.open.drop(d)
	if d.reserves() {
		d.slot.ledger.remove(d, ended)
		f.publishLocked(d.slot, now)
	}
	if d.mate != nil && f.open.byID[d.mate.id] == d.mate {
		f.endLocked(d.mate, now, ended)
	}
}

// releaseLocked takes the reservation off a decision and keeps it for a late report.
// ended: its request is believed to be over.
func (f *Fleet) releaseLocked(d *decision, ended bool) {
	d.slot.ledger.remove(d, ended)
	f.open.release(d, d.at.Add(longestDecision))
}

// expireLocked ends what was not reported in time.
func (f *Fleet) expireLocked(now time.Time) {
	for d := f.open.overdue(now); d != nil; d = f.open.overdue(now) {
		if d.phase == decoding && now.Before(d.at.Add(longestDecision)) {
			f.releaseLocked(d, d.guessed)
			f.publishLocked(d.slot, now)
			continue
		}
		if d.phase != prefilling {
			f.endLocked(d, now, false)
			continue
		}
		f.stats.Expired++
		f.unreported++
		if d.mate == nil && d.end.After(now) {
			if d.guessed {
				d.slot.ledger.begun(d, d.deadline.Add(f.cfg.Settle))
			}
			d.slot.ledger.computed(d)
			f.open.postpone(d, d.end)
		} else {
			f.releaseLocked(d, false)
		}
		f.publishLocked(d.slot, now)
	}
}

// sampleLocked lets a load sample replace what it has seen: such requests are
// among its gauges, and there can be no more of them than these say. The
// oldest of those beyond have ended without a report.
func (f *Fleet) sampleLocked(s *slot, l *Load, now time.Time) {
	s.ledger.settle(l.At)
	if l.Running >= 0 && l.Waiting >= 0 {
		prefills := s.ledger.sum.Prefills
		for s.ledger.inSample() > l.Running+l.Waiting {
			f.releaseLocked(s.ledger.oldestSampled(), false)
		}
		if s.ledger.sum.Prefills < prefills {
			f.publishLocked(s, now) // another is at its turn
			f.foreseeLocked(s)
			f.expireLocked(now)
		}
	}
	f.publishLocked(s, now)
}

// Expires is when a decision is forgotten if nothing more is reported of it;
// the zero time: it is not known.
func (f *Fleet) Expires(id Decision) time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	d, ok := f.open.byID[id]
	switch {
	case !ok:
		return time.Time{}
	case d.phase != prefilling:
		return d.deadline
	case d.mate == nil && !d.guessed && d.end.After(d.deadline):
		return d.end
	}
	return d.at.Add(longestDecision)
}
