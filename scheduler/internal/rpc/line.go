package rpc

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/queue"
)

// lookEvery is how often those who wait are tried again while nothing is
// reported: load samples come in, and reservations run out.
const lookEvery = 50 * time.Millisecond

// errWaited says that a request waited as long as it may.
var errWaited = errors.New("the request waited for room as long as it may")

// Line says how requests wait for room. Its zero value: they do not.
type Line struct {
	// Queue bounds the waiting. Its Length is 0 where nobody waits.
	Queue queue.Config
	// BudgetMS is the prefill that a member may have before requests wait.
	BudgetMS float64
	// Wait is how long a request waits at most.
	Wait time.Duration
}

// line lets calls wait. One loop tries them in turn, woken by whoever comes
// and by every report; the calls wait for what it found, for their end, or for
// that of the service.
type line struct {
	rules  atomic.Pointer[Line]
	queue  *queue.Queue[*waiting]
	picker *pick.Picker
	wake   chan struct{} // has room for one: a second wake-up says nothing new
}

// waiting is a call in the queue.
type waiting struct {
	request pick.Request
	came    time.Time
	done    chan outcome // has room for one
}

type outcome struct {
	decision *pick.Decision
	at       time.Time
	err      error
}

func newLine(l Line, p *pick.Picker) *line {
	to := &line{queue: queue.New[*waiting](l.Queue), picker: p, wake: make(chan struct{}, 1)}
	to.rules.Store(&l)
	return to
}

func (l *line) set(rules Line) {
	l.queue.Bound(rules.Queue)
	l.rules.Store(&rules)
	l.stir()
}

// stir makes the loop try those who wait.
func (l *line) stir() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// run tries those who wait until ctx is done.
func (l *line) run(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		case <-tick.C:
		}
		l.queue.Pass(l.try)
	}
}

// try asks for a place for one that waits.
func (l *line) try(t *queue.Ticket[*waiting], ahead map[fleet.ID]fleet.Ahead) queue.Verdict {
	w, now := t.Value, time.Now()
	w.request.Elapsed = now.Sub(w.came)
	w.request.Room = &pick.Room{BudgetMS: l.rules.Load().BudgetMS, Ahead: ahead}
	d, err := l.picker.Pick(&w.request, now)
	var full *pick.Full
	if errors.As(err, &full) {
		return queue.Verdict{Member: full.Member, Adds: full.Adds, SlackMS: full.SlackMS}
	}
	w.done <- outcome{d, now, err}
	v := queue.Verdict{Done: true}
	if err == nil {
		v.WorkMS = d.Candidates[0].Cost.Load + d.Candidates[0].Cost.Prefill
	}
	return v
}

// pick decides at once where there is room and nobody waits, and lets the
// request wait otherwise. at is when it was decided.
func (l *line) pick(ctx context.Context, rules *Line, r *pick.Request, priority int, closed <-chan struct{}, now time.Time) (d *pick.Decision, at time.Time, err error) {
	r.Room = &pick.Room{BudgetMS: rules.BudgetMS, Hold: l.queue.Stats().Waiting > 0}
	d, err = l.picker.Pick(r, now)
	var full *pick.Full
	if !errors.As(err, &full) {
		return d, now, err
	}
	w := &waiting{request: *r, came: now, done: make(chan outcome, 1)}
	t := &queue.Ticket[*waiting]{
		Value: w, Model: r.Model, Tenant: r.Tenant, Priority: priority, Came: now, SlackMS: full.SlackMS,
		Bytes: int64(len(r.Prompt.Tokens) + 8*len(r.Prompt.Keys)),
	}
	if err := l.queue.Push(t); err != nil {
		return nil, now, fmt.Errorf("model %q: no member has room, and %w: send less, try again later, add members or let more wait (-queue-length)", r.Model, err)
	}
	l.stir()
	ctx, cancel := context.WithTimeoutCause(ctx, rules.Wait, errWaited)
	defer cancel()
	select {
	case o := <-w.done:
		return o.decision, o.at, o.err
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-closed:
		err = errClosing
	}
	if !l.queue.Cancel(t) {
		// It got a place at the last moment: nobody needs it any more.
		if o := <-w.done; o.decision != nil {
			l.picker.Report(pick.Report{Decision: o.decision.ID, Outcome: fleet.Cancelled}, time.Now())
		}
	}
	l.stir()
	waited := time.Since(now)
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errWaited) {
		err = fmt.Errorf("model %q: no member had room for %v: give it a later deadline or a higher priority, or add members: %w",
			r.Model, waited.Round(time.Millisecond), err)
	}
	return nil, now, err
}
