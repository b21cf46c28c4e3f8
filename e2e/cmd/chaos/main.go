// Command chaos breaks a fleet under load, one seeded random fault after the
// other, and after each compares all that the scheduler believes with what the
// engines really hold.
//
// It prints the faults by kind with the longest time to the truth, and what it
// took. Exit code 1 when an answer was wrong later than it may be, 2 when the
// fleet could not be set up. The same seed and number repeat the same faults.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/kvscout/kvscout/protocol"
)

// options are the flags.
type options struct {
	faults    int
	seed      uint64
	engines   int
	heartbeat time.Duration
	slack     float64
	children  bool
	only      string
	log       string
	verbose   bool
}

func main() {
	var o options
	flag.IntVar(&o.faults, "faults", 1000, "how many faults")
	flag.Uint64Var(&o.seed, "seed", rand.Uint64()>>44, "seed of the faults and the load")
	flag.IntVar(&o.engines, "engines", 6, "engines of the fleet")
	flag.DurationVar(&o.heartbeat, "heartbeat", protocol.HeartbeatEvery, "time between two heartbeats of an agent")
	flag.Float64Var(&o.slack, "slack", 1, "times that all limits are longer, for slow machines")
	flag.BoolVar(&o.children, "children", true, "run every third agent as a process of its own, which can be stopped and killed")
	flag.StringVar(&o.only, "only", "", "only faults whose names contain one of these separated by commas")
	flag.StringVar(&o.log, "log", "", "file for the logs of scheduler and agents")
	flag.BoolVar(&o.verbose, "v", false, "print every fault")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	good, err := run(ctx, o, os.Stdout)
	stop()
	switch {
	case errors.Is(err, context.Canceled):
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(2)
	case !good:
		os.Exit(1)
	}
}

func (o options) validate() error {
	var errs []error
	if o.faults < 1 {
		errs = append(errs, fmt.Errorf("-faults %d is not positive", o.faults))
	}
	if o.engines < 2 || o.engines > 64 {
		errs = append(errs, fmt.Errorf("-engines %d is not between 2 and 64", o.engines))
	}
	if o.heartbeat < 10*time.Millisecond || o.heartbeat > time.Second {
		errs = append(errs, fmt.Errorf("-heartbeat %v is not between 10ms and 1s", o.heartbeat))
	}
	if o.slack < 1 {
		errs = append(errs, fmt.Errorf("-slack %v is less than 1", o.slack))
	}
	return errors.Join(errs...)
}

// limit is how long something may take.
func (o options) limit(d time.Duration) time.Duration { return time.Duration(o.slack * float64(d)) }

// run is the whole of it, and tells whether all answers were right in time.
// Nothing of it is alive when it returns.
func run(ctx context.Context, o options, out io.Writer) (good bool, err error) {
	if err := o.validate(); err != nil {
		return false, err
	}
	rep := newReport(o, out)
	rep.goroutinesBefore = goroutines()
	f, err := newFleet(ctx, o)
	if err != nil {
		return false, err
	}
	err = f.play(rep)
	err = errors.Join(err, f.close())
	rep.goroutinesAfter = settled(rep.goroutinesBefore)
	rep.print()
	return rep.good(), err
}
