package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sort"
	"sync"
	"syscall"
	"time"

	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/e2e/trace"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	// readyTime bounds the wait for all agents to be exact.
	readyTime = time.Minute
	// patience is how long a request waits for its place.
	patience = 10 * time.Second
)

// run is the whole demo. Nothing of it is alive when it returns.
func run(ctx context.Context, o options, out *os.File) (err error) {
	if err := o.validate(); err != nil {
		return err
	}
	requests, err := requests(o)
	if err != nil {
		return err
	}
	begin := time.Now()
	s, err := stage.New(ctx, stage.Options{Change: large})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	fleets, err := start(ctx, s, o)
	if err != nil {
		return err
	}
	proxy, err := s.Proxy(patience)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, proxy.Close()) }()
	intro(out, o, requests, time.Since(begin))

	var drivers []*driver
	for _, f := range fleets {
		drivers = append(drivers, &driver{fleet: f, engine: newStreamer(), proxy: proxy, ask: s.Client})
	}
	driving, cut := context.WithCancel(ctx)
	defer cut()
	began := time.Now()
	used := cpuTime()
	var group sync.WaitGroup
	for _, d := range drivers {
		group.Go(func() { d.run(driving, requests, began, o.pace(), o.grace()) })
	}
	done := make(chan struct{})
	go func() { group.Wait(); close(done) }()
	show(out, o, s.Operator, drivers, began, done)
	<-done
	took := time.Since(began)
	for _, d := range drivers {
		d.engine.http.CloseIdleConnections()
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return conclude(out, o, drivers, took, cpuTime()-used)
}

// requests are those of the trace that are due within the span.
func requests(o options) ([]trace.Request, error) {
	list, err := recorded(o)
	if err != nil {
		return nil, err
	}
	end := time.Duration(float64(o.span) * o.pace())
	n := sort.Search(len(list), func(i int) bool { return list[i].At >= end })
	if n == 0 {
		return nil, errors.New("no request of the trace is due within -for")
	}
	return list[:n], nil
}

// recorded is the whole trace.
func recorded(o options) ([]trace.Request, error) {
	if o.trace == "" {
		list, err := trace.Conversation()
		if err != nil {
			return nil, err
		}
		trace.Spread(list, trace.ConversationTick, rand.New(rand.NewPCG(o.seed, 0)))
		return list, nil
	}
	f, err := os.Open(o.trace)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	list, err := trace.Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o.trace, err)
	}
	return list, nil
}

func intro(out *os.File, o options, list []trace.Request, took time.Duration) {
	fmt.Fprintf(out, "Two fleets of %d engines, each with its agent, one scheduler; all exact after %.1f s.\n", o.engines, took.Seconds())
	fmt.Fprintf(out, "Engines are fakes with vLLM's wire and a real block pool: Qwen3-32B on two H100, %g times its KV cache, steps %g times faster than real.\n", o.capacity, o.speedup)
	fmt.Fprintf(out, "%d requests of %s, %g times denser than recorded, at the same moments to both fleets.\n", len(list), o.source(), o.load*float64(o.engines)/8)
	fmt.Fprintf(out, "One cache without bounds for a whole fleet would hit %.1f %% of their prompt tokens: no choice of engines can hit more.\n", 100*trace.Ceiling(list))
	fmt.Fprintf(out, "All times below are the engines' own: wall time x %g.\n\n", o.speedup)
}

// show draws the run until it is done.
func show(out *os.File, o options, admin api.AdminClient, drivers []*driver, start time.Time, done <-chan struct{}) {
	every := 5 * time.Second
	view := newScreen(out)
	if view != nil {
		every = 250 * time.Millisecond
		defer view.close()
	}
	ticks := time.NewTicker(every)
	defer ticks.Stop()
	trust := make(map[string]string) // by address, as last heard
	for {
		select {
		case <-done:
			return
		case <-ticks.C:
		}
		ctx, cancel := context.WithTimeout(context.Background(), every)
		if resp, err := admin.ListMembers(ctx, &api.ListMembersRequest{}); err == nil {
			for _, m := range resp.GetMembers() {
				trust[m.GetMember().GetAddress()] = trustName(m.GetCacheState().GetTrust())
			}
		}
		cancel()
		p := look(o, trust, drivers, time.Since(start))
		if view != nil {
			view.draw(p)
		} else {
			fmt.Fprintln(out, p.line())
		}
	}
}

// look takes the picture: load and cache from the engines, trust as the
// scheduler says.
func look(o options, trust map[string]string, drivers []*driver, at time.Duration) picture {
	p := picture{
		title: fmt.Sprintf("kvscout: %d engines in turn, %d by exact cached prefix, the same requests to both", o.engines, o.engines),
		at:    at, of: o.span,
		note: fmt.Sprintf("%s; TTFT in the engines' own time (wall x %g); cache: blocks that can be hit", o.source(), o.speedup),
	}
	if at > o.span {
		p.note = "all requests are sent; waiting for the last answers"
	}
	for _, d := range drivers {
		s, q := d.tally.read()
		f := fleetPicture{name: d.fleet.name, sum: s, ttft: q.scaled(o.speedup)}
		for i, e := range d.fleet.engines {
			state := e.State(0)
			f.members = append(f.members, memberPicture{
				name:    fmt.Sprintf("%d", i),
				cached:  share(state.Cached, d.fleet.blocks),
				used:    state.Usage,
				running: state.Running, waiting: state.Waiting,
				hitRate: share(int(state.Counters.Hits), int(state.Counters.Queries)),
				trust:   trust[e.Addr()],
			})
		}
		p.fleets = append(p.fleets, f)
	}
	return p
}

func conclude(out *os.File, o options, drivers []*driver, took, cpu time.Duration) error {
	var list []outcome
	var lag time.Duration
	for _, d := range drivers {
		sum, q := d.tally.read()
		list = append(list, outcomeOf(d.fleet.name, sum, q.scaled(o.speedup), d.fleet.firstToken(o.speedup)))
		if sum.failed > 0 {
			fmt.Fprintf(out, "%s: %d requests failed, the last with: %s\n", d.fleet.name, sum.failed, sum.lastError)
		}
		for _, e := range d.fleet.engines {
			lag += e.State(0).Counters.Lag
		}
	}
	fmt.Fprintln(out)
	if err := table(out, list); err != nil {
		return err
	}
	engines := float64(o.engines * len(drivers))
	fmt.Fprintf(out, "\nTimes are wall x %g, from a request's due time to its first token; cached tokens are the engines' own counts.\n", o.speedup)
	for _, d := range drivers {
		if !d.fleet.inTurn {
			q := d.picks.read()
			fmt.Fprintf(out, "A pick over gRPC took %.1f ms of wall time at the median and %.1f ms at the 99th percentile.\n", q.p50.Seconds()*1000, q.p99.Seconds()*1000)
		}
	}
	fmt.Fprintf(out, "Whole run %.0f s with %.1f cores busy; the engines lost %.1f %% of their time to a machine that was late.\n",
		took.Seconds(), cpu.Seconds()/took.Seconds(), 100*lag.Seconds()/engines/took.Seconds())
	if o.json {
		return object(out, list)
	}
	return nil
}

func trustName(t api.Trust) string {
	const prefix = len("TRUST_")
	if name := t.String(); len(name) > prefix {
		return name[prefix:]
	}
	return t.String()
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
