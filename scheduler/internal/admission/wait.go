package admission

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// rest is how long the loop rests between two passes while there is more to
// try: passes over a crowd take a fifth of one core at most.
const rest = 4 * time.Millisecond

// ErrWaited says that a request waited as long as it may.
var ErrWaited = errors.New("the request waited for room as long as it may")

// ErrClosed says that a request waited until the service stopped.
var ErrClosed = errors.New("the scheduler is stopping")

// Waits lets calls wait in a queue. One loop tries them in turn, woken by
// whoever comes and goes and by every report; the calls wait for what it found,
// for their end, or for that of the service.
type Waits struct {
	*Queue
	wake chan struct{} // has room for one: a second wake-up says nothing new
}

// NewWaits returns a queue in which nobody waits.
func NewWaits(r Rules, f *fleet.Fleet, p *pick.Picker) *Waits {
	return &Waits{Queue: New(r, f, p), wake: make(chan struct{}, 1)}
}

// Wake makes the loop try those who wait: some member may have got room.
func (w *Waits) Wake() {
	if w.Waiting() == 0 {
		return
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Set changes the rules. Those who wait go on waiting as long as they may.
func (w *Waits) Set(r Rules) {
	w.Queue.Set(r)
	w.Wake()
}

// Run tries those who wait until ctx is done.
func (w *Waits) Run(ctx context.Context) {
	poll := time.NewTicker(PollEvery)
	defer poll.Stop()
	var again <-chan time.Time
	for {
		polls := false
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		case <-again:
		case <-poll.C:
			polls = true
		}
		again = nil
		if w.Pass(time.Now, polls) {
			again = time.After(rest)
		}
	}
}

// Pick decides at once, or lets the request wait, until closed at the longest.
// Beside its prompt it takes so many bytes then. at is when it was decided. What
// panics in the loop on behalf of the request panics here.
func (w *Waits) Pick(ctx context.Context, r *pick.Request, priority int, bytes func() int64, closed <-chan struct{}, now time.Time) (d *pick.Decision, at time.Time, err error) {
	d, err = w.Try(r, now)
	var noRoom *pick.NoRoom
	if !errors.As(err, &noRoom) {
		return d, now, err
	}
	done := make(chan Outcome, 1)
	waiter, err := w.Enter(r, noRoom, priority, bytes(), now, func(o Outcome) { done <- o })
	if err != nil {
		return nil, now, err
	}
	w.Wake()
	ctx, cancel := context.WithTimeoutCause(ctx, w.Rules().Wait, ErrWaited)
	defer cancel()
	select {
	case o := <-done:
		var p *Panic
		if errors.As(o.Err, &p) {
			panic(p)
		}
		return o.Decision, o.At, o.Err
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-closed:
		err = ErrClosed
	}
	if !w.Leave(waiter) {
		// It got a place at the last moment: nobody needs it any more.
		if o := <-done; o.Decision != nil {
			w.picker.Report(pick.Report{Decision: o.Decision.ID, Outcome: fleet.Cancelled}, time.Now())
		}
	}
	w.Wake()
	waited := time.Since(now)
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrWaited) {
		err = fmt.Errorf("model %q: no member had room for %v: give it a later deadline or a higher priority, or add members: %w",
			r.Model, waited.Round(time.Millisecond), err)
	}
	return nil, now, err
}
