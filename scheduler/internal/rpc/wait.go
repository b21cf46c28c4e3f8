package rpc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/line"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// lookEvery is how often those who wait are tried again while nothing is
// reported: load samples come in, and reservations run out.
const lookEvery = 50 * time.Millisecond

// errWaited says that a request waited as long as it may.
var errWaited = errors.New("the request waited for room as long as it may")

// waits lets calls wait in a line. One loop tries them in turn, woken by
// whoever comes and by every report; the calls wait for what it found, for
// their end, or for that of the service.
type waits struct {
	*line.Line
	picker *pick.Picker
	wake   chan struct{} // has room for one: a second wake-up says nothing new
}

type outcome struct {
	decision *pick.Decision
	at       time.Time
	err      error
}

func newWaits(r line.Rules, p *pick.Picker) *waits {
	return &waits{Line: line.New(r, p), picker: p, wake: make(chan struct{}, 1)}
}

// stir makes the loop try those who wait.
func (l *waits) stir() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// run tries those who wait until ctx is done.
func (l *waits) run(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		case <-tick.C:
		}
		l.Pass(time.Now)
	}
}

// pick decides at once, or lets the request wait. at is when it was decided.
func (l *waits) pick(ctx context.Context, r *pick.Request, priority int, closed <-chan struct{}, now time.Time) (d *pick.Decision, at time.Time, err error) {
	d, err = l.Try(r, now)
	var full *pick.Full
	if !errors.As(err, &full) {
		return d, now, err
	}
	done := make(chan outcome, 1)
	w, err := l.Enter(r, full, priority, now, func(d *pick.Decision, at time.Time, err error) { done <- outcome{d, at, err} })
	if err != nil {
		return nil, now, err
	}
	l.stir()
	ctx, cancel := context.WithTimeoutCause(ctx, l.Rules().Wait, errWaited)
	defer cancel()
	select {
	case o := <-done:
		return o.decision, o.at, o.err
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-closed:
		err = errClosing
	}
	if !l.Leave(w) {
		// It got a place at the last moment: nobody needs it any more.
		if o := <-done; o.decision != nil {
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
