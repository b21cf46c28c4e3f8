package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvscout/kvscout/agent"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler"
)

// fleet is engines that serve one model name, which keeps the fleets apart.
type fleet struct {
	name    string
	inTurn  bool // served round robin, else by the scheduler's picks
	engines []*fakevllm.Engine
	blocks  int // of each engine, to hold something
}

// firstToken is the mean time to first token that the engines count, in their
// own time.
func (f *fleet) firstToken(speedup float64) time.Duration {
	var total time.Duration
	n := uint64(0)
	for _, e := range f.engines {
		c := e.State(0).Counters
		total += c.FirstTokenWait
		n += c.FirstTokens
	}
	return time.Duration(float64(total) * speedup / float64(max(1, n)))
}

// stage is all that runs: the scheduler with its own NATS, and two fleets of
// engines with their agents. ctx ends when any of it fails.
type stage struct {
	ctx       context.Context
	fail      context.CancelCauseFunc
	group     sync.WaitGroup
	scheduler string // gRPC address
	fleets    []*fleet
}

func startStage(ctx context.Context, o options) (s *stage, err error) {
	s = &stage{}
	s.ctx, s.fail = context.WithCancelCause(ctx)
	defer func() {
		if err != nil {
			s.stop()
		}
	}()
	sched, err := scheduler.New(scheduler.Config{
		GRPCAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", NATSAddress: "127.0.0.1:0",
		IndexBytes: 2 << 30, StopWait: time.Second,
	})
	if err != nil {
		return s, err
	}
	s.run("scheduler", sched.Run)
	select {
	case <-sched.Started():
	case <-s.ctx.Done():
		return s, context.Cause(s.ctx)
	}
	s.scheduler = sched.Addrs().GRPC
	for _, f := range []*fleet{{name: "round-robin", inTurn: true}, {name: "kvscout"}} {
		f.blocks = int(o.capacity * fakevllm.Qwen32BBlocks)
		for i := range o.engines {
			if err := s.engine(f, i, o, "nats://"+sched.Addrs().NATS); err != nil {
				return s, err
			}
		}
		s.fleets = append(s.fleets, f)
	}
	return s, nil
}

// engine starts one engine and its agent.
func (s *stage) engine(f *fleet, i int, o options, nats string) error {
	e, err := fakevllm.New(fakevllm.Config{
		Model: f.name, Blocks: f.blocks + 1, Speedup: o.speedup, // one is the null block
		// One chunk for the first token and one for the rest: the demo reads
		// no text. Agents are beside the engines, so a short ring will do.
		StreamInterval: 1 << 20, BufferSteps: 2000, Seed: o.seed,
	})
	if err != nil {
		return err
	}
	s.run("engine", e.Run)
	f.engines = append(f.engines, e)
	name := fmt.Sprintf("%s-%d", f.name, i)
	// Load is sampled every second of the engine's own time.
	second := max(100*time.Millisecond, time.Duration(float64(time.Second)/o.speedup))
	a, err := agent.New(agent.Config{
		NATSURL: nats, Engine: e.URL(),
		Namespace: "demo", Pod: name, PodUID: name,
		Heartbeat: min(time.Second, second), Probe: min(time.Second, second),
	})
	if err != nil {
		return err
	}
	s.run("agent", a.Run)
	return nil
}

// run starts a part; if it ends before its time everything ends.
func (s *stage) run(name string, part func(context.Context) error) {
	s.group.Go(func() {
		err := part(s.ctx)
		if s.ctx.Err() == nil {
			if err == nil {
				err = errors.New("ended by itself")
			}
			s.fail(fmt.Errorf("%s: %w", name, err))
		}
	})
}

// stop ends everything and waits for it.
func (s *stage) stop() {
	s.fail(context.Canceled)
	s.group.Wait()
}

// ready waits until the scheduler has an exact picture of every engine.
func (s *stage) ready(ctx context.Context, ask pb.SchedulerClient) error {
	ctx, cancel := context.WithTimeout(ctx, readyTime)
	defer cancel()
	want, exact := 0, 0
	for _, f := range s.fleets {
		want += len(f.engines)
	}
	ticks := time.NewTicker(50 * time.Millisecond)
	defer ticks.Stop()
	for {
		resp, err := ask.Fleet(ctx, &pb.FleetRequest{})
		if err == nil {
			exact = 0
			for _, m := range resp.GetMembers() {
				if m.GetPicture().GetTrust() == pb.Trust_TRUST_EXACT && m.GetChosen() {
					exact++
				}
			}
			if exact == want {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return fmt.Errorf("%d of %d engines are exact after %v (last error: %w)", exact, want, readyTime, err)
			}
			return ctx.Err()
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		case <-ticks.C:
		}
	}
}
