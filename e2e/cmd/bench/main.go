// Command bench measures kvscout from outside. It plays an engine: what it writes on ZeroMQ goes to a real agent in a process of its
// own, over real NATS, to a real scheduler in another.
//
//   - Latency: from an event written until Score, over gRPC, counts its blocks.
//   - Throughput of the agent alone, on one core: what it publishes is counted
//     and verified by a plain NATS subscriber.
//   - Throughput into a scheduler, until its cache state is verified to be all of it.
//   - Picks at a constant rate on one stream: how long each waits from when it was
//     due, whether those before it were answered or not.
//
// Every case runs several times, each time with new processes. A run in which
// anything is lost is an error.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// options are the flags.
type options struct {
	span    time.Duration
	runs    int
	json    bool
	only    string
	profile string
}

func main() {
	if name := os.Getenv(partVariable); name != "" {
		if err := runPart(name); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
			os.Exit(1)
		}
		return
	}
	var o options
	var seconds float64
	flag.Float64Var(&seconds, "seconds", 4, "how long one run sends events")
	flag.IntVar(&o.runs, "runs", 3, "runs of each case")
	flag.BoolVar(&o.json, "json", false, "print the result as JSON too, as the last line")
	flag.StringVar(&o.only, "only", "", "one case alone: latency, agent, scheduler or picks")
	flag.StringVar(&o.profile, "cpuprofile", "", "`file` for the CPU profile of the agent's last run; of the scheduler's, for picks")
	flag.Parse()
	o.span = time.Duration(seconds * float64(time.Second))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := o.validate()
	if err == nil {
		err = run(ctx, o)
	}
	stop()
	if errors.Is(err, context.Canceled) {
		os.Exit(130)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func (o options) validate() error {
	var errs []error
	if flag.NArg() > 0 {
		errs = append(errs, fmt.Errorf("unexpected argument %q", flag.Arg(0)))
	}
	if o.span < 100*time.Millisecond || o.span > 10*time.Minute {
		errs = append(errs, fmt.Errorf("-seconds %g is not between 0.1 and 600", o.span.Seconds()))
	}
	if o.runs < 1 || o.runs > 100 {
		errs = append(errs, fmt.Errorf("-runs %d is not between 1 and 100", o.runs))
	}
	switch o.only {
	case "", "latency", "agent", "scheduler", "picks":
	default:
		errs = append(errs, fmt.Errorf("-only %q is neither latency, agent, scheduler nor picks", o.only))
	}
	return errors.Join(errs...)
}

func run(ctx context.Context, o options) error {
	res := result{Machine: machine(), Runs: o.runs, Seconds: o.span.Seconds()}
	if cmp.Or(o.only, "latency") == "latency" {
		for _, c := range latencyCases {
			times, err := repeat(ctx, o, c.name, func() (latency, error) { return measureLatency(ctx, o, c) })
			if err != nil {
				return err
			}
			res.Latency = append(res.Latency, latencyResult{Name: c.name, PerSecond: c.rate, Runs: times})
		}
	}
	for _, into := range []string{"agent", "scheduler"} {
		if cmp.Or(o.only, into) != into {
			continue
		}
		for _, s := range throughputShapes {
			name := into + ", " + s.name
			rates, err := repeat(ctx, o, name, func() (throughput, error) { return measureThroughput(ctx, o, s, into) })
			if err != nil {
				return err
			}
			res.Throughput = append(res.Throughput, throughputResult{Into: into, Name: s.name, Runs: rates})
		}
	}
	if cmp.Or(o.only, "picks") == "picks" {
		for _, c := range pickCases {
			runs, err := repeat(ctx, o, "picks, "+c.name, func() (picks, error) { return measurePicks(ctx, o, c) })
			if err != nil {
				return err
			}
			res.Picks = append(res.Picks, picksResult{Name: c.name, PerSecond: c.rate, Runs: runs})
		}
	}
	res.print(os.Stdout)
	if o.json {
		return res.printJSON(os.Stdout)
	}
	return nil
}

// repeat measures as often as asked for.
func repeat[T fmt.Stringer](ctx context.Context, o options, name string, measure func() (T, error)) ([]T, error) {
	var all []T
	for i := range o.runs {
		one, err := measure()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil {
			return nil, fmt.Errorf("%s, run %d: %w", name, i+1, err)
		}
		fmt.Fprintf(os.Stderr, "%-34s %d/%d  %v\n", name, i+1, o.runs, one)
		all = append(all, one)
	}
	return all, nil
}
