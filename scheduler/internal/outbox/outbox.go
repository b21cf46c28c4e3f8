// Package outbox keeps what other schedulers have to know of this one's
// decisions until somebody sends it. It is bounded: what does not fit is
// counted and not sent.
package outbox

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/predict"
)

const (
	// maxPending bounds the reservations, and the ends, that wait to be sent, and
	// maxPendingMarks their marks.
	maxPending, maxPendingMarks = 4096, 1 << 16
	// maxMarks of one reservation.
	maxMarks = 256
)

// Reservation is what other schedulers have to know of a decision.
type Reservation struct {
	Decision fleet.Decision
	// Member with the reservation, and Decode, the one that decodes if that is
	// another.
	Member, Decode string
	// Epoch of the member's engine that the decision stands on.
	Epoch uint64
	// At is when it was made. Others get its age, so that only the difference
	// to another reading of this process's clock counts.
	At time.Time
	// Amounts of the reservation, with the mark of its session; its members and names
	// are not sent.
	Amounts fleet.Choice
	// Marks, as in predict, are of blocks that will be held there, and are to be
	// believed for TTL without an event.
	Marks []blockkey.Key
	TTL   time.Duration
}

// Pending is what other schedulers do not know yet, oldest first.
type Pending struct {
	Reservations []Reservation
	Ends         []fleet.Report

	marks []blockkey.Key // behind Reservations
}

// Outbox is safe for concurrent use.
type Outbox struct {
	open    atomic.Bool // somebody wants what is pending
	dropped atomic.Uint64
	wake    chan struct{} // has an entry when something is pending

	mu      sync.Mutex // guards pending
	pending Pending
}

// New returns an outbox that keeps nothing until it is opened.
func New() *Outbox { return &Outbox{wake: make(chan struct{}, 1)} }

// Open says whether there is anybody to send to. While there is not, nothing is
// kept.
func (o *Outbox) Open(on bool) { o.open.Store(on) }

// Reserve notes a decision, with the keys that are predicted at its member for
// life.
func (o *Outbox) Reserve(id fleet.Decision, c *fleet.Choice, keys []blockkey.Key, ttl time.Duration, now time.Time) {
	if !o.open.Load() {
		return
	}
	made := Reservation{
		Decision: id,
		Member:   c.Member.Info.Name,
		Epoch:    c.Member.CacheState.Epoch,
		At:       now,
		Amounts: fleet.Choice{
			Uncached: c.Uncached, PrefillMS: c.PrefillMS, FirstTokenMS: c.FirstTokenMS, Cached: c.Cached,
			Share: c.Share, EndMS: c.EndMS, Mark: c.SessionMark(),
		},
		TTL: ttl,
	}
	if c.Decode != nil {
		made.Decode = c.Decode.Info.Name
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	p := &o.pending
	if len(p.Reservations) >= maxPending {
		o.dropped.Add(1)
		return
	}
	from := len(p.marks)
	p.marks = predict.Marks(p.marks, keys, min(maxMarks, maxPendingMarks-from))
	made.Marks = p.marks[from:len(p.marks):len(p.marks)]
	p.Reservations = append(p.Reservations, made)
	o.wakeLocked()
}

// End notes a report.
func (o *Outbox) End(r *fleet.Report) {
	if !o.open.Load() {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.pending.Ends) >= maxPending {
		o.dropped.Add(1)
		return
	}
	o.pending.Ends = append(o.pending.Ends, fleet.Report{Decision: r.Decision, Outcome: r.Outcome, Member: r.Member})
	o.wakeLocked()
}

func (o *Outbox) wakeLocked() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// Wake has an entry when something is pending.
func (o *Outbox) Wake() <-chan struct{} { return o.wake }

// Take moves what is pending into p, which is used again: what it had is gone.
func (o *Outbox) Take(p *Pending) {
	clear(p.Reservations)
	p.Reservations, p.Ends, p.marks = p.Reservations[:0], p.Ends[:0], p.marks[:0]
	o.mu.Lock()
	defer o.mu.Unlock()
	*p, o.pending = o.pending, *p
}

// Dropped counts what was not kept because nobody took it in time.
func (o *Outbox) Dropped() uint64 { return o.dropped.Load() }
