package pick

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

const (
	// Stride: every so many blocks of a prompt are marked.
	Stride = stride
	// maxUntold bounds the decisions, and the ends, that wait to be told, and
	// maxUntoldMarks their marks. What does not fit is not told.
	maxUntold, maxUntoldMarks = 4096, 1 << 16
	// maxChargeMarks of one decision.
	maxChargeMarks = 256
)

// Charge is what other schedulers have to know of a decision.
type Charge struct {
	Decision fleet.Decision
	// Member that was charged, and Decode, the one that decodes if that is
	// another.
	Member, Decode string
	// Epoch of the member's engine that the decision stands on.
	Epoch uint64
	At    time.Time
	// Amounts of the charge, with the mark of its session; its members and names
	// are not told.
	Amounts fleet.Choice
	// Marks are the keys of every Stride-th block that will be held there, and
	// are to be believed for Life without an event.
	Marks []blockkey.Key
	Life  time.Duration
}

// News is what other schedulers do not know yet, oldest first.
type News struct {
	Charges []Charge
	Ends    []fleet.Report

	marks []blockkey.Key // behind Charges
}

// outbox keeps news until somebody takes them.
type outbox struct {
	open    atomic.Bool // somebody wants them
	dropped atomic.Uint64
	wake    chan struct{} // has an entry when there are news

	mu   sync.Mutex // guards news
	news News
}

func (o *outbox) charge(id fleet.Decision, c *fleet.Choice, keys []blockkey.Key, life time.Duration, now time.Time) {
	if !o.open.Load() {
		return
	}
	told := Charge{
		Decision: id,
		Member:   c.Member.Info.Name,
		Epoch:    c.Member.Picture.Epoch,
		At:       now,
		Amounts: fleet.Choice{
			Uncached: c.Uncached, PrefillMS: c.PrefillMS, FirstTokenMS: c.FirstTokenMS, Cached: c.Cached,
			Share: c.Share, EndMS: c.EndMS, Mark: c.SessionMark(),
		},
		Life: life,
	}
	if c.Decode != nil {
		told.Decode = c.Decode.Info.Name
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	n := &o.news
	if len(n.Charges) >= maxUntold {
		o.dropped.Add(1)
		return
	}
	from := len(n.marks)
	for i := stride - 1; i < len(keys) && len(n.marks)-from < maxChargeMarks && len(n.marks) < maxUntoldMarks; i += stride {
		n.marks = append(n.marks, keys[i])
	}
	told.Marks = n.marks[from:len(n.marks):len(n.marks)]
	n.Charges = append(n.Charges, told)
	o.ring()
}

func (o *outbox) end(r *fleet.Report) {
	if !o.open.Load() {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.news.Ends) >= maxUntold {
		o.dropped.Add(1)
		return
	}
	o.news.Ends = append(o.news.Ends, fleet.Report{Decision: r.Decision, Outcome: r.Outcome, Member: r.Member})
	o.ring()
}

func (o *outbox) ring() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// Share says how many other schedulers there are. News are kept for them if
// there is one.
func (p *Picker) Share(others int) {
	p.fleet.SetOthers(others)
	p.outbox.open.Store(others > 0)
}

// Untold has an entry when there are news.
func (p *Picker) Untold() <-chan struct{} { return p.outbox.wake }

// Take moves the news into n, which is used again: what it had is gone.
func (p *Picker) Take(n *News) {
	clear(n.Charges)
	n.Charges, n.Ends, n.marks = n.Charges[:0], n.Ends[:0], n.marks[:0]
	p.outbox.mu.Lock()
	defer p.outbox.mu.Unlock()
	*n, p.outbox.news = p.outbox.news, *n
}

// Untellable counts news that were dropped because nobody took them in time.
func (p *Picker) Untellable() uint64 { return p.outbox.dropped.Load() }

// Adopt takes a decision of another scheduler as if it had been made here. It
// returns false if it says nothing here: its member is unknown, another
// process, or the decision is known.
func (p *Picker) Adopt(c *Charge, now time.Time) bool {
	amounts := c.Amounts
	if !p.fleet.Adopt(c.Decision, c.Member, c.Epoch, c.Decode, amounts, c.At, now) {
		return false
	}
	m := p.fleet.View().Named(c.Member)
	until := c.At.Add(min(c.Life, maxForecastLife))
	if m == nil || len(c.Marks) == 0 || !until.After(now) {
		return true
	}
	p.forecast.add(c.Marks, 1, sent{member: m.ID, epoch: c.Epoch, until: until.UnixNano()}, now)
	return true
}

// Hear takes what was reported to another scheduler.
func (p *Picker) Hear(r fleet.Report, now time.Time) { p.fleet.Report(r, now) }
