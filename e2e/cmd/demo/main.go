// Command demo shows kvscout at work: identical fleets of fake engines get the same
// requests of a recorded trace at the same moments, one in turn, one by the fewest
// requests under way, one through a proxy that asks kvscout.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvscout/kvscout/e2e/proxies"
	"github.com/kvscout/kvscout/e2e/trace"
)

// options are the flags.
type options struct {
	trace    string
	proxy    string
	warm     time.Duration
	span     time.Duration
	json     bool
	engines  int
	speedup  float64
	load     float64
	capacity float64
	seed     uint64
}

func main() {
	var o options
	flag.StringVar(&o.trace, "trace", "", "`file` of requests in Mooncake's form; empty: the conversation trace")
	flag.StringVar(&o.proxy, "proxy", gateway, "`name` of the proxy before kvscout's fleet: "+strings.Join(proxyNames(), ", ")+"; make test-NAME installs it")
	flag.DurationVar(&o.warm, "warm", 20*time.Second, "how long to send requests before those that count")
	flag.DurationVar(&o.span, "for", 60*time.Second, "how long to send requests that count")
	flag.BoolVar(&o.json, "json", false, "print the result as JSON too, as the last line")
	flag.IntVar(&o.engines, "engines", 8, "engines of each fleet")
	flag.Float64Var(&o.speedup, "speedup", 4, "how much faster than real the engines are")
	flag.Float64Var(&o.load, "load", 1.5, "how much denser than recorded the requests come, for 8 engines")
	flag.Float64Var(&o.capacity, "capacity", 4, "KV cache of an engine, in multiples of two H100 with Qwen3-32B")
	flag.Uint64Var(&o.seed, "seed", 1, "seed of the arrival times within the trace's ticks")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	if flag.NArg() > 0 {
		err = fmt.Errorf("unexpected argument %q", flag.Arg(0))
	} else {
		err = run(ctx, o, os.Stdout)
	}
	stop()
	if errors.Is(err, context.Canceled) {
		os.Exit(130)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func (o options) validate() error {
	var errs []error
	if o.engines < 1 || o.engines > 64 {
		errs = append(errs, fmt.Errorf("-engines %d is not between 1 and 64", o.engines))
	}
	if !slices.Contains(proxyNames(), o.proxy) {
		errs = append(errs, fmt.Errorf("-proxy %q is none of %s", o.proxy, strings.Join(proxyNames(), ", ")))
	} else if o.proxy != gateway {
		if _, err := proxies.ByName(o.proxy).Find(); err != nil {
			errs = append(errs, fmt.Errorf("-proxy %s: %w", o.proxy, err))
		}
	}
	if o.span <= 0 || o.warm < 0 || o.speedup <= 0 || o.load <= 0 || o.capacity <= 0 {
		errs = append(errs, errors.New("-for, -speedup, -load and -capacity must be positive, -warm not negative"))
	} else if need := time.Duration(float64(o.warm+o.span) * o.pace()); o.trace == "" && need > trace.ConversationSpan {
		errs = append(errs, fmt.Errorf("-warm and -for %v at this pace need %v of the trace, and %v are at hand", o.warm+o.span, need, trace.ConversationSpan))
	}
	return errors.Join(errs...)
}

// proxyName is how people call the proxy.
func (o options) proxyName() string {
	if o.proxy == gateway {
		return "kvscout's own gateway"
	}
	return proxies.ByName(o.proxy).Name
}

// pace is how many seconds of the trace pass in a second.
func (o options) pace() float64 {
	return o.load * o.speedup * float64(o.engines) / 8
}

// source names the trace.
func (o options) source() string {
	if o.trace == "" {
		return "the Mooncake conversation trace"
	}
	return o.trace
}

// grace is how long after the last request its answers may take: long enough
// for the longest answer, and for a queue that is not hopeless.
func (o options) grace() time.Duration {
	return o.span/2 + time.Duration(float64(80*time.Second)/o.speedup)
}
