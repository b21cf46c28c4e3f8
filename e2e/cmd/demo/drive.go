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
	client *client
	ask    api.SchedulerClient
	tally  tally
	picks  stopwatch
}

// placement is where a request goes.
type placement struct {
	address   string
	predicted int
	decision  string // to report; empty: none was taken
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
	r, err := d.client.complete(ctx, place.address, d.fleet.name, prompt, q.Output, func(now time.Time) {
		started = true
		d.tally.first(now.Sub(due) - place.aside)
		d.report(ctx, place, &api.Report{Outcome: api.Outcome_OUTCOME_FIRST_TOKEN})
	})
	if err != nil {
		d.report(context.WithoutCancel(ctx), place, &api.Report{Outcome: api.Outcome_OUTCOME_CANCELLED})
		d.end(ctx, err, due, started)
		return
	}
	d.tally.finish(r, place.predicted)
	tokens, cached, output := uint32(r.prompt), uint32(r.cached), uint32(r.output)
	d.report(ctx, place, &api.Report{
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
		resp, err := d.ask.Pick(ctx, &api.PickRequest{Request: req})
		if err != nil {
			return placement{}, fmt.Errorf("pick: %w", err)
		}
		d.picks.add(time.Since(begin))
		list := resp.GetRanking().GetCandidates()
		if len(list) == 0 {
			return placement{}, fmt.Errorf("pick: nobody to choose from")
		}
		return placement{address: list[0].GetMember().GetAddress(), predicted: cachedTokens(list[0]), decision: resp.GetDecisionId()}, nil
	}
	address := d.fleet.engines[n%len(d.fleet.engines)].Addr()
	req.Candidates = []*api.MemberRef{{Ref: &api.MemberRef_Address{Address: address}}}
	resp, err := d.ask.Score(ctx, &api.ScoreRequest{Request: req})
	if err != nil {
		return placement{}, fmt.Errorf("score: %w", err)
	}
	p := placement{address: address, aside: time.Since(begin)}
	if list := resp.GetRanking().GetCandidates(); len(list) > 0 {
		p.predicted = cachedTokens(list[0])
	}
	return p, nil
}

func cachedTokens(c *api.Candidate) int {
	t := c.GetCachedTokens()
	return int(t.GetGpu() + t.GetHost() + t.GetDisk() + t.GetPredicted())
}

// report is optional, so what goes wrong with it is not the request's fault.
func (d *driver) report(ctx context.Context, p placement, r *api.Report) {
	if p.decision == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	r.DecisionId = p.decision
	_, _ = d.ask.Report(ctx, &api.ReportRequest{Reports: []*api.Report{r}})
}
