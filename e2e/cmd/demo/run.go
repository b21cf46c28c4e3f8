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

	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/e2e/trace"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	// readyTime bounds the wait for all agents to be exact.
	readyTime = time.Minute
	// late is the share of the engines' time from which on times are not theirs.
	late = 0.05
	// patience is how long a proxy may take to serve.
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
	host, release, err := loopback.Claim()
	if err != nil {
		return err
	}
	defer release()
	at := placesOn(host)
	s, err := stage.New(ctx, stage.Options{Change: prepared(at)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	fleets, err := start(ctx, s, o)
	if err != nil {
		return err
	}
	if err := fleets[len(fleets)-1].through(ctx, s, o.proxy, at); err != nil {
		return err
	}
	intro(out, o, requests, time.Since(begin))
	fmt.Fprintf(out, "What the scheduler shows of it in a browser: http://%s/\n\n", s.Admin)

	var drivers []*driver
	for _, f := range fleets {
		drivers = append(drivers, &driver{fleet: f, engine: newStreamer(), ask: s.Client, warm: time.Duration(float64(o.warm) * o.pace())})
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

// requests are those of the trace that are due while the caches get warm and after.
func requests(o options) ([]trace.Request, error) {
	list, err := recorded(o)
	if err != nil {
		return nil, err
	}
	end := time.Duration(float64(o.warm+o.span) * o.pace())
	n := sort.Search(len(list), func(i int) bool { return list[i].At >= end })
	if n == 0 {
		return nil, errors.New("no request of the trace is due within -warm and -for")
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
	fmt.Fprintf(out, `Three fleets of %d engines get the same requests at the same moments: one in
turn, one by fewest requests, one through %s,
which asks kvscout.

Simulated: the engines. They have vLLM's wire and a real block pool, and take
the time of Qwen3-32B on two H100, %g times faster, with %g times its KV cache.
Real: all of kvscout, the proxy, the sockets between them, and the requests:
%d of %s, %.2g times denser.

One cache without bounds would hit %.1f %% of the tokens: nobody hits more.
Times are the engines' own: wall time x %g. All cache states exact after %.1f s.

`, o.engines, o.proxyName(), o.speedup, o.capacity, len(list), o.source(), o.load*float64(o.engines)/8,
		100*ceiling(list, time.Duration(float64(o.warm)*o.pace())), o.speedup, took.Seconds())
}

// ceiling is the share of the prompt tokens of the requests that count, from a time
// of the trace on, that a cache without bounds would hit: one that is warm.
func ceiling(list []trace.Request, from time.Duration) float64 {
	warm := sort.Search(len(list), func(i int) bool { return list[i].At >= from })
	hits := func(part []trace.Request) (hit, all float64) {
		for _, q := range part {
			all += float64(q.Input)
		}
		return all * trace.Ceiling(part), all
	}
	hit, all := hits(list)
	before, uncounted := hits(list[:warm])
	return (hit - before) / max(1, all-uncounted)
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
		title: fmt.Sprintf("kvscout: %d engines in turn, by fewest requests, by cached prefix", o.engines),
		at:    at, of: o.warm + o.span,
		note: fmt.Sprintf("the same requests to all; times are the engines' own (wall x %g)", o.speedup),
	}
	switch {
	case at < o.warm:
		p.note = "caches get warm: nothing counts yet"
	case at > o.warm+o.span:
		p.note = "all requests are sent; waiting for the last answers"
	}
	for _, d := range drivers {
		s, q := d.tally.read()
		f := fleetPicture{name: d.fleet.name, silent: d.fleet.silent, sum: s, ttft: q.scaled(o.speedup)}
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
		if text := d.shown.read(); text != "" {
			p.decision = text
		}
	}
	return p
}

func conclude(out *os.File, o options, drivers []*driver, took, cpu time.Duration) error {
	var list []outcome
	var lag time.Duration
	for _, d := range drivers {
		sum, q := d.tally.read()
		of := outcomeOf(d.fleet.name, sum, q.scaled(o.speedup), d.fleet.firstToken(o.speedup))
		if d.fleet.silent {
			of.Prediction = nil
		}
		list = append(list, of)
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
	fmt.Fprintf(out, `
Times are wall x %g, from a request's due time to its first token; cached tokens
are the engines' own counts. The first %v, in which caches got warm, do not
count. The run took %.0f s with %.1f cores busy; the engines lost %.1f %% of their
time to a machine that was late.
`, o.speedup, o.warm, took.Seconds(), cpu.Seconds()/took.Seconds(), 100*lag.Seconds()/engines/took.Seconds())
	if share := lag.Seconds() / engines / took.Seconds(); share > late {
		fmt.Fprintf(out, "\nThis machine was too busy: the times say more of it than of kvscout.\n")
	}
	fmt.Fprintf(out, "\n%s\n\nNext: beside your own vLLM in four commands, README.md; your proxy,\ndocs/PROXIES.md; another one here: make demo ARGS='-proxy NAME'.\n", conclusion(list))
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
