// Package line lets requests wait for room: it asks the picker for a place, in
// the order of the queue, until there is one. It has no clock and starts
// nothing: when those who wait are tried again, and for how long they wait, is
// up to whoever owns the line.
package line

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/queue"
)

// Rules say how requests wait.
type Rules struct {
	// Queue bounds the waiting. A Length of 0 closes the line: nobody waits who
	// comes from now on.
	Queue queue.Config
	// BudgetMS is the prefill that a member may have before requests wait.
	BudgetMS float64
	// Wait is how long a request waits at most.
	Wait time.Duration
}

// Open tells whether requests may wait.
func (r *Rules) Open() bool { return r.Queue.Length > 0 }

// Line is safe for concurrent use.
type Line struct {
	rules  atomic.Pointer[Rules]
	queue  *queue.Queue[*Waiting]
	picker *pick.Picker
}

// Waiting is a request in the line.
type Waiting struct {
	request pick.Request
	came    time.Time
	done    func(*pick.Decision, time.Time, error)
	ticket  queue.Ticket[*Waiting]
}

// New returns a line without anybody in it.
func New(r Rules, p *pick.Picker) *Line {
	l := &Line{queue: queue.New[*Waiting](r.Queue), picker: p}
	l.rules.Store(&r)
	return l
}

// Rules that are in force; not to be changed.
func (l *Line) Rules() *Rules { return l.rules.Load() }

// Set changes the rules. Those who wait go on waiting.
func (l *Line) Set(r Rules) {
	l.queue.Bound(r.Queue)
	l.rules.Store(&r)
}

// Stats returns the queue's counts.
func (l *Line) Stats() queue.Stats { return l.queue.Stats() }

// Try decides at once where there is room and nobody waits, or the line is
// closed. It fails with a pick.Full where the request has to enter the line.
func (l *Line) Try(r *pick.Request, now time.Time) (*pick.Decision, error) {
	r.Room = nil
	if rules := l.Rules(); rules.Open() {
		r.Room = &pick.Room{BudgetMS: rules.BudgetMS, Hold: l.queue.Stats().Waiting > 0}
	}
	return l.picker.Pick(r, now)
}

// Enter lets a request wait, or fails with queue.ErrFull. done is called once,
// from a Pass, with what became of it and when; it must not call the line.
func (l *Line) Enter(r *pick.Request, full *pick.Full, priority int, now time.Time, done func(*pick.Decision, time.Time, error)) (*Waiting, error) {
	w := &Waiting{request: *r, came: now, done: done}
	w.ticket = queue.Ticket[*Waiting]{
		Value: w, Model: r.Model, Tenant: r.Tenant, Priority: priority, Came: now, SlackMS: full.SlackMS,
		Bytes: int64(len(r.Prompt.Tokens) + 8*len(r.Prompt.Keys)),
	}
	if err := l.queue.Push(&w.ticket); err != nil {
		return nil, fmt.Errorf("model %q: no member has room, and %w: send less, try again later, add members or let more wait (-queue-length)", r.Model, err)
	}
	return w, nil
}

// Leave takes a request out. It returns false if done was or will be called.
func (l *Line) Leave(w *Waiting) bool { return l.queue.Cancel(&w.ticket) }

// Pass tries those who wait, in turn, at the time that now says.
func (l *Line) Pass(now func() time.Time) {
	budget := l.Rules().BudgetMS
	l.queue.Pass(func(t *queue.Ticket[*Waiting], ahead map[fleet.ID]fleet.Ahead) queue.Verdict {
		w, at := t.Value, now()
		w.request.Elapsed = at.Sub(w.came)
		w.request.Room = &pick.Room{BudgetMS: budget, Ahead: ahead}
		d, err := l.picker.Pick(&w.request, at)
		var full *pick.Full
		if errors.As(err, &full) {
			return queue.Verdict{Member: full.Member, Adds: full.Adds, SlackMS: full.SlackMS}
		}
		v := queue.Verdict{Done: true}
		if err == nil {
			v.WorkMS = d.Candidates[0].Cost.Load + d.Candidates[0].Cost.Prefill
		}
		w.done(d, at, err)
		return v
	})
}
