package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kvscout/kvscout/e2e/trace"
	"github.com/kvscout/kvscout/protocol/client"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// driver sends the requests of a trace to one fleet, each at its time, whether
// or not earlier ones are answered.
type driver struct {
	fleet  *fleet
	engine *streamer
	proxy  *client.Client
	ask    api.SchedulerClient
	tally  tally
	picks  stopwatch
}

// placement is where a request goes.
type placement struct {
	*client.Placement
	predicted int
	// aside is time that went into a prediction that the choice did not need.
	aside time.Duration
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
		d.tally.begin()
		group.Go(func() { d.serve(ctx, i, q, due) })
	}
	stop := time.AfterFunc(grace, cut)
	defer stop.Stop()
	group.Wait()
}

// serve takes the request of that number from its due time to its end.
func (d *driver) serve(ctx context.Context, n int, q trace.Request, due time.Time) {
	prompt := q.AppendTokens(make([]uint32, 0, q.Input))
	place, err := d.place(ctx, n, prompt)
	if err != nil {
		d.end(ctx, err, due, false)
		return
	}
	started := false
	r, err := d.engine.complete(ctx, place.Address, d.fleet.name, prompt, q.Output, func(now time.Time) {
		started = true
		d.tally.first(now.Sub(due) - place.aside)
		place.FirstToken()
	})
	if err != nil {
		place.Report(&api.Report{Outcome: api.Outcome_OUTCOME_CANCELLED})
		d.end(ctx, err, due, started)
		return
	}
	d.tally.finish(r, place.predicted)
	tokens, cached, output := uint32(r.prompt), uint32(r.cached), uint32(r.output)
	place.Report(&api.Report{
		Outcome: api.Outcome_OUTCOME_FINISHED, PromptTokens: &tokens, CachedTokens: &cached, OutputTokens: &output,
	})
}

func (d *driver) end(ctx context.Context, err error, due time.Time, started bool) {
	if ctx.Err() != nil {
		d.tally.cut(time.Since(due), started)
		return
	}
	d.tally.fail(err)
}

// place asks the scheduler; a fleet that is served in turn asks it only what
// the engine whose turn it is has cached.
func (d *driver) place(ctx context.Context, n int, prompt []uint32) (placement, error) {
	req := &api.Request{Model: d.fleet.name, Prompt: api.TokenIDs(prompt), MaxCandidates: 1}
	begin := time.Now()
	if !d.fleet.inTurn {
		picked, err := d.proxy.Pick(ctx, req)
		if err != nil {
			return placement{}, fmt.Errorf("pick: %w", err)
		}
		d.picks.add(time.Since(begin))
		return placement{Placement: picked, predicted: cachedTokens(picked.Candidate())}, nil
	}
	address := d.fleet.engines[n%len(d.fleet.engines)].Addr()
	req.Candidates = []*api.MemberRef{{Ref: &api.MemberRef_Address{Address: address}}}
	resp, err := d.ask.Score(ctx, &api.ScoreRequest{Request: req})
	if err != nil {
		return placement{}, fmt.Errorf("score: %w", err)
	}
	p := placement{Placement: &client.Placement{Address: address}, aside: time.Since(begin)}
	if list := resp.GetRanking().GetCandidates(); len(list) > 0 {
		p.predicted = cachedTokens(list[0])
	}
	return p, nil
}

func cachedTokens(c *api.Candidate) int {
	t := c.GetCachedTokens()
	return int(t.GetGpu() + t.GetHost() + t.GetDisk() + t.GetPredicted())
}
