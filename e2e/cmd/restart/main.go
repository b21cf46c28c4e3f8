// Command restart measures how long a scheduler that starts with nothing needs
// until every cache state is EXACT again, and how much memory that takes. The
// members are simulated by a process of their own, which speaks the protocol of
// agents and runs the NATS server.
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

	"github.com/kvscout/kvscout/protocol"
)

// options are the flags.
type options struct {
	members int
	blocks  int
	shared  float64
	beat    time.Duration
	runs    int
	index   int64
	agents  bool
}

func main() {
	var o options
	flag.IntVar(&o.members, "members", 100, "members of the fleet")
	flag.IntVar(&o.blocks, "blocks", 100_000, "blocks that each of them holds")
	flag.Float64Var(&o.shared, "shared", 0.3, "share of its blocks that a member has in common with others")
	flag.DurationVar(&o.beat, "heartbeat", protocol.HeartbeatEvery, "time between two heartbeats of a member")
	flag.IntVar(&o.runs, "runs", 3, "how often the scheduler starts")
	flag.Int64Var(&o.index, "index", 1<<30, "bytes that the index may take")
	flag.BoolVar(&o.agents, "agents", false, "be the process of the members")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	switch {
	case o.members < 1 || o.blocks < 1 || o.runs < 1 || o.shared < 0 || o.shared > 1 || o.beat <= 0:
		err = errors.New("a flag is out of its range")
	case o.agents:
		err = serve(ctx, o, os.Stdin, os.Stdout)
	default:
		err = run(ctx, o, os.Stdout)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "restart:", err)
		os.Exit(1)
	}
}
