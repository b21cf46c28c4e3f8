// Command scale is a large fleet as load: members by the hundred, each with the
// agent's own publisher and a cache that is computed, publish over NATS what busy
// engines do, while callers ask a scheduler for picks. NATS, the agents and the
// scheduler are processes of their own.
//
// It reports memory, start, lag, picks, what restarts do to them and what a batch
// costs, with the aim beside each figure, and compares the answers with what the
// members hold all along. Exit code 1 when an answer was wrong, 2 when it could not be
// measured; a missed aim is said and is no failure, for it may be the machine's.
package main

import (
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
	Members    int
	Blocks     int
	Shared     float64
	Holders    int
	Rate       float64
	Picks      float64
	Processes  int
	Schedulers int
	For        time.Duration
	Faults     bool

	outage    time.Duration
	scheduler string
	index     string
	profile   string
	json      bool
}

func main() {
	if name := os.Getenv(partVariable); name != "" {
		if err := runPart(name); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	var o options
	flag.IntVar(&o.Members, "members", 1000, "members of the fleet")
	flag.IntVar(&o.Blocks, "blocks", 100_000, "blocks that each of them holds")
	flag.Float64Var(&o.Shared, "shared", 0.4, "share of them that others hold, too")
	flag.IntVar(&o.Holders, "holders", 8, "members at least that hold a shared block")
	flag.Float64Var(&o.Rate, "rate", 30, "batches that an engine publishes in a second; some do 1.6 times as many, some 0.7 times")
	flag.Float64Var(&o.Picks, "picks", 5000, "picks that are asked for in a second")
	flag.IntVar(&o.Processes, "processes", 1, "processes that the agents share")
	flag.IntVar(&o.Schedulers, "schedulers", 1, "schedulers that follow all members and share the picks")
	flag.DurationVar(&o.For, "for", 20*time.Second, "how long to measure events alone, and then events beside picks")
	flag.BoolVar(&o.Faults, "faults", true, "restart one member, then 50, then lose 300 for a while; fewer in a small fleet")
	flag.DurationVar(&o.outage, "outage", 5*time.Second, "how long these are gone")
	flag.StringVar(&o.scheduler, "scheduler", "", "`program` kvscout-scheduler to measure; empty: this program runs the same package")
	flag.StringVar(&o.index, "index-memory", "1GiB", "what the index may take")
	flag.StringVar(&o.profile, "cpuprofile", "", "`file` for the scheduler's CPU profile, without -scheduler")
	flag.BoolVar(&o.json, "json", false, "print the result as JSON too, as the last line")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := o.validate()
	var r *result
	if err == nil {
		r, err = run(ctx, o, os.Stderr)
	}
	if r != nil {
		r.print(os.Stdout)
		if o.json {
			err = errors.Join(err, r.printJSON(os.Stdout))
		}
	}
	stop()
	switch {
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		os.Exit(130)
	case errors.Is(err, errWrong):
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1)
	case err != nil:
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(2)
	}
}

func (o options) validate() error {
	var errs []error
	check := func(good bool, format string, args ...any) {
		if !good {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(flag.NArg() == 0, "unexpected argument %q", flag.Arg(0))
	check(o.Members >= 1 && o.Members <= 4000, "-members %d is not between 1 and 4000", o.Members)
	check(o.Blocks >= 1 && o.Blocks <= 10_000_000, "-blocks %d is not between 1 and 10,000,000", o.Blocks)
	check(o.Shared > 0 && o.Shared < 1, "-shared %g is not between 0 and 1", o.Shared)
	check(o.Holders >= 1 && o.Holders <= o.Members, "-holders %d is not between 1 and the number of members", o.Holders)
	check(o.Rate >= 0.1 && o.Rate <= 1000, "-rate %g is not between 0.1 and 1000", o.Rate)
	check(o.Picks >= 1 && o.Picks <= 1e6, "-picks %g is not between 1 and 1,000,000", o.Picks)
	check(o.Processes >= 1 && o.Processes <= o.Members, "-processes %d is not between 1 and the number of members", o.Processes)
	check(o.Schedulers >= 1 && o.Schedulers <= 16, "-schedulers %d is not between 1 and 16", o.Schedulers)
	check(o.For >= 100*time.Millisecond && o.For <= 24*time.Hour, "-for %v is not between 0.1s and 24h", o.For)
	check(o.outage >= 100*time.Millisecond && o.outage <= 25*time.Second, "-outage %v is not between 0.1s and 25s, when members are forgotten", o.outage)
	check(o.profile == "" || o.scheduler == "" && o.Schedulers == 1, "-cpuprofile is of this program's own scheduler and of one, not of -scheduler")
	if len(errs) == 0 {
		_, err := newContent(o.Members, o.Blocks, o.Holders, o.Shared)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
