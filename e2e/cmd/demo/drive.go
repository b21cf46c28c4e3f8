package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kvscout/kvscout/e2e/trace"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// driver sends the requests of a trace to one fleet, each at its time, whether
// or not earlier ones are answered.
type driver struct {
	fleet  *fleet
	engine *streamer
	ask    api.SchedulerClient
	// warm is how far into the trace requests do not count.
	warm    time.Duration
	warming tally
	tally   tally
	shown   decision
}

// run sends each request when it is due, pace times faster than the trace, and
// waits for the answers: until grace after the last one was due.
func (d *driver) run(ctx context.Context, list []trace.Request, start time.Time, pace float64, grace time.Duration) {
	ctx, cut := context.WithCancel(ctx)
	defer cut()
	var group sync.WaitGroup
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i, q := range list {
		due := start.Add(time.Duration(float64(q.At) / pace))
		timer.Reset(time.Until(due))
		select {
		case <-ctx.Done():
			group.Wait()
			return
		case <-timer.C:
		}
		into := &d.tally
		if q.At < d.warm {
			into = &d.warming
		} else if d.tally.empty() {
			d.fleet.before = d.fleet.counters()
		}
		into.begin()
		group.Go(func() { d.serve(ctx, into, i, q, due) })
	}
	stop := time.AfterFunc(grace, cut)
	defer stop.Stop()
	group.Wait()
}

// serve takes the request of that number from its due time to its end.
func (d *driver) serve(ctx context.Context, into *tally, n int, q trace.Request, due time.Time) {
	prompt := q.AppendTokens(make([]uint32, 0, q.Input))
	begin := time.Now()
	address, predicted, err := d.fleet.proxy, 0, error(nil)
	if d.fleet.proxy == "" {
		k := d.fleet.choose(n)
		d.fleet.open[k].Add(1)
		defer d.fleet.open[k].Add(-1)
		address = d.fleet.engines[k].Addr()
		predicted, err = d.predict(ctx, address, prompt)
	} else {
		d.show(ctx, n, prompt)
	}
	aside := time.Since(begin) // went into what is shown, not into the choice
	started := false
	var r result
	if err == nil {
		r, err = d.engine.complete(ctx, address, d.fleet.name, prompt, q.Output, func(now time.Time) {
			started = true
			into.first(now.Sub(due) - aside)
		})
	}
	switch {
	case err == nil:
		if d.fleet.proxy != "" {
			predicted = r.predicted // as it says with its answer
		}
		into.finish(r, predicted)
	case ctx.Err() != nil:
		into.cut(time.Since(due), started)
	default:
		into.fail(err)
	}
}

// predict asks what of a prompt is cached at an address.
func (d *driver) predict(ctx context.Context, address string, prompt []uint32) (int, error) {
	resp, err := d.ask.Score(ctx, &api.ScoreRequest{Request: &api.Request{Model: d.fleet.name, Prompt: api.TokenIDs(prompt), MaxCandidates: 1,
		Candidates: []*api.MemberRef{{Ref: &api.MemberRef_Address{Address: address}}}}})
	if err != nil {
		return 0, fmt.Errorf("score: %w", err)
	}
	if list := resp.GetRanking().GetCandidates(); len(list) > 0 {
		return cachedTokens(list[0]), nil
	}
	return 0, nil
}

// decision is the last one that is shown.
type decision struct {
	mu   sync.Mutex // guards what follows
	at   time.Time
	text string
}

// showEvery is the time between two decisions that people see.
const showEvery = 3 * time.Second

// show asks now and then what a request would be answered, with the reason.
func (d *driver) show(ctx context.Context, n int, prompt []uint32) {
	s := &d.shown
	s.mu.Lock()
	due := time.Since(s.at) > showEvery
	if due {
		s.at = time.Now()
	}
	s.mu.Unlock()
	if !due {
		return
	}
	resp, err := d.ask.Score(ctx, &api.ScoreRequest{Request: &api.Request{Model: d.fleet.name, Prompt: api.TokenIDs(prompt), MaxCandidates: 1}})
	if err != nil || len(resp.GetRanking().GetCandidates()) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text = fmt.Sprintf("request %d: %s", n, resp.GetRanking().GetExplanation())
}

func (s *decision) read() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text
}

func cachedTokens(c *api.Candidate) int {
	t := c.GetCachedTokens()
	return int(t.GetGpu() + t.GetHost() + t.GetDisk() + t.GetPredicted())
}
