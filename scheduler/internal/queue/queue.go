// Package queue holds the requests that wait for room, and says who is next:
// rank, fairness, bounds. It is the only place where a request can wait. It
// does no waiting itself, has no clock and scores nothing: whoever asks for a
// pass tries each request and says what became of it.
//
// Rank. A request is due when its target leaves no more time than it is
// predicted to take, but never later than Age after it came, with a target or
// without, and never before it came. The first due is the first tried. A step
// of priority counts as one Age. So nobody is passed by a request of the same
// priority and tenant that came more than Age later.
//
// Fairness. What a tenant was served is counted in ms of predicted work, from
// the least that any waiting tenant had when it began to wait. A tenant that
// is more than Quantum ahead of the least served is tried after all others.
//
// A request that is tried in vain is ahead, on the member that it waits for,
// of all that are tried after it. So whoever needs a whole member gets it when
// it has drained, and those behind go elsewhere as the wait grows.
package queue

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// ErrFull says that a request may not wait, as too many do.
var ErrFull = errors.New("the queue is full")

// Config bounds a Queue. Every zero value stands for the default named.
type Config struct {
	// Length in requests; 1024. Bytes that they may take; 256 MiB.
	Length int
	Bytes  int64
	// Age is how long a request can be passed by later ones; 10 s.
	Age time.Duration
	// QuantumMS is how much more work one tenant may get than another before
	// it has to stand back; 2000.
	QuantumMS float64
	// Window is how many requests for one model are tried in vain in one pass;
	// 64. It bounds the work of a pass.
	Window int
}

func (c Config) withDefaults() Config {
	c.Length = cmp.Or(max(c.Length, 0), 1024)
	c.Bytes = cmp.Or(max(c.Bytes, 0), 256<<20)
	c.Age = cmp.Or(max(c.Age, 0), 10*time.Second)
	if !(c.QuantumMS > 0) {
		c.QuantumMS = 2000
	}
	c.Window = cmp.Or(max(c.Window, 0), 64)
	return c
}

// maxPriority bounds what priorities differ in: beyond it the oldest of all
// would wait for hours.
const maxPriority = 100

// Ticket is a request that waits. What is set before Push stays as it is.
type Ticket[T any] struct {
	Value         T
	Model, Tenant string
	// Priority: larger is more important, within +-100.
	Priority int
	// Bytes that the request takes while it waits.
	Bytes int64
	Came  time.Time
	// SlackMS is what the predicted time leaves of the target, from Came on;
	// NaN: no target. A pass may change it.
	SlackMS float64

	tenant *tenant[T] // nil: does not wait
	due    int64      // in ns
	number uint64
}

// tenant is a line, the first due in front.
type tenant[T any] struct {
	name   string
	served float64 // ms
	line   []*Ticket[T]
	next   int // in a pass: the first that was not tried
}

// Verdict is what became of a request that was tried.
type Verdict struct {
	// Done: it does not wait any more, and WorkMS were spent on it.
	Done   bool
	WorkMS float64
	// Otherwise: the member that it waits for, what it adds to what waits
	// there, and its slack as in Ticket.
	Member  fleet.ID
	Adds    fleet.Ahead
	SlackMS float64
}

// Queue is safe for concurrent use.
type Queue[T any] struct {
	mu      sync.Mutex // guards what follows, tickets that wait included
	cfg     Config
	tenants map[string]*tenant[T]
	ahead   map[fleet.ID]fleet.Ahead
	vain    map[string]int // by model, in a pass
	number  uint64
	stats   Stats
}

// Stats counts what happened since New.
type Stats struct {
	// Waiting requests, and what they take.
	Waiting int
	Bytes   int64
	// Pushed, Admitted and Cancelled requests; Refused had no room to wait.
	Pushed, Admitted, Cancelled, Refused uint64
}

// New returns an empty queue.
func New[T any](cfg Config) *Queue[T] {
	return &Queue[T]{
		cfg:     cfg.withDefaults(),
		tenants: make(map[string]*tenant[T]),
		ahead:   make(map[fleet.ID]fleet.Ahead),
		vain:    make(map[string]int),
	}
}

// Bound changes the bounds. Those who wait go on waiting, also beyond them.
func (q *Queue[T]) Bound(cfg Config) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.cfg = cfg.withDefaults()
	q.sortLocked()
}

// Stats returns the counts.
func (q *Queue[T]) Stats() Stats {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.stats
}

// Push lets a request wait, or fails with ErrFull. The ticket is the queue's
// until it is admitted or cancelled.
func (q *Queue[T]) Push(t *Ticket[T]) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.stats.Waiting >= q.cfg.Length:
		q.stats.Refused++
		return fmt.Errorf("%d requests wait: %w", q.stats.Waiting, ErrFull)
	case q.stats.Waiting > 0 && q.stats.Bytes+t.Bytes > q.cfg.Bytes:
		q.stats.Refused++
		return fmt.Errorf("requests of %d bytes wait: %w", q.stats.Bytes, ErrFull)
	}
	n, ok := q.tenants[t.Tenant]
	if !ok {
		n = &tenant[T]{name: t.Tenant}
		q.tenants[t.Tenant] = n
	}
	if least, waits := q.leastLocked(); len(n.line) == 0 && waits {
		n.served = max(n.served, least)
	}
	q.number++
	t.tenant, t.number = n, q.number
	t.rank(q.cfg.Age)
	at, _ := slices.BinarySearchFunc(n.line, t, before)
	n.line = slices.Insert(n.line, at, t)
	q.stats.Waiting++
	q.stats.Bytes += t.Bytes
	q.stats.Pushed++
	return nil
}

// Cancel takes a request out of the queue. It returns false if it does not
// wait, as it was admitted before.
func (q *Queue[T]) Cancel(t *Ticket[T]) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.tenant == nil {
		return false
	}
	q.removeLocked(t)
	q.stats.Cancelled++
	q.pruneLocked()
	return true
}

// Pass tries those who wait in the order of their rank, and lets go whom try
// says is done. try must not call the queue, nor keep ahead, which is what
// waits before the request by member.
func (q *Queue[T]) Pass(try func(t *Ticket[T], ahead map[fleet.ID]fleet.Ahead) Verdict) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.stats.Waiting == 0 {
		return
	}
	clear(q.ahead)
	clear(q.vain)
	for _, n := range q.tenants {
		n.next = 0
	}
	for {
		n := q.nextLocked()
		if n == nil {
			break
		}
		t := n.line[n.next]
		if q.vain[t.Model] >= q.cfg.Window {
			n.next++
			continue
		}
		v := try(t, q.ahead)
		if v.Done {
			if v.WorkMS > 0 && v.WorkMS <= math.MaxFloat64 {
				n.served += v.WorkMS
			}
			q.removeLocked(t)
			q.stats.Admitted++
			continue
		}
		n.next++
		q.vain[t.Model]++
		t.SlackMS = v.SlackMS
		a := q.ahead[v.Member]
		a.Requests += v.Adds.Requests
		a.MS += v.Adds.MS
		a.Share += v.Adds.Share
		q.ahead[v.Member] = a
	}
	q.sortLocked()
	q.pruneLocked()
}

// sortLocked ranks all who wait.
func (q *Queue[T]) sortLocked() {
	for _, n := range q.tenants {
		for _, t := range n.line {
			t.rank(q.cfg.Age)
		}
		slices.SortFunc(n.line, before)
	}
}

// nextLocked is the tenant whose next request is to be tried: the first due of
// those who have not had too much, else of the others; nil: all were tried.
func (q *Queue[T]) nextLocked() *tenant[T] {
	least, _ := q.leastLocked()
	limit := least + q.cfg.QuantumMS
	var best *tenant[T]
	for _, n := range q.tenants {
		if n.next >= len(n.line) {
			continue
		}
		if best == nil {
			best = n
			continue
		}
		over, bestOver := n.served > limit, best.served > limit
		if over != bestOver {
			if bestOver {
				best = n
			}
			continue
		}
		if before(n.line[n.next], best.line[best.next]) < 0 {
			best = n
		}
	}
	return best
}

// leastLocked is the least that a waiting tenant was served; false: none waits.
func (q *Queue[T]) leastLocked() (least float64, waits bool) {
	for _, n := range q.tenants {
		if len(n.line) > 0 && (!waits || n.served < least) {
			least, waits = n.served, true
		}
	}
	return least, waits
}

func (q *Queue[T]) removeLocked(t *Ticket[T]) {
	n := t.tenant
	at, _ := slices.BinarySearchFunc(n.line, t, before)
	n.line = slices.Delete(n.line, at, at+1)
	t.tenant = nil
	q.stats.Waiting--
	q.stats.Bytes -= t.Bytes
}

// pruneLocked forgets tenants that do not wait and are not ahead of any that
// do, or all that do not wait where there are too many of them.
func (q *Queue[T]) pruneLocked() {
	least, waits := q.leastLocked()
	crowd := len(q.tenants) > 2*q.cfg.Length
	for name, n := range q.tenants {
		if len(n.line) == 0 && (!waits || n.served <= least || crowd) {
			delete(q.tenants, name)
		}
	}
}

// rank sets when the request is due.
func (t *Ticket[T]) rank(age time.Duration) {
	slack := age
	if ms := t.SlackMS; !math.IsNaN(ms) {
		slack = time.Duration(min(max(ms, 0), float64(age)/1e6) * 1e6)
	}
	priority := min(max(t.Priority, -maxPriority), maxPriority)
	t.due = t.Came.Add(slack).UnixNano() - int64(priority)*int64(age)
}

func before[T any](a, b *Ticket[T]) int {
	return cmp.Or(cmp.Compare(a.due, b.due), cmp.Compare(a.number, b.number))
}
