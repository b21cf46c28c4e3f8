package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler"
)

// fleet is engines that serve one model name, which keeps the fleets apart.
type fleet struct {
	name    string
	proxy   string // address that its requests go to; empty: choose says which engine
	silent  bool   // the proxy does not say how many cached tokens were predicted
	choose  func(n int) int
	open    []atomic.Int64 // requests under way, by engine, where choose goes by them
	engines []*fakevllm.Engine
	before  firstTokens
	members []string // ids, by engine
	blocks  int      // of each engine, to hold something
}

// firstTokens are those of all engines so far, and how long they took together, in
// wall time.
type firstTokens struct {
	total time.Duration
	n     uint64
}

func (f *fleet) counters() (t firstTokens) {
	for _, e := range f.engines {
		c := e.State(0).Counters
		t.total += c.FirstTokenWait
		t.n += c.FirstTokens
	}
	return t
}

// firstToken is the mean time to first token that the engines count since before,
// in their own time.
func (f *fleet) firstToken(speedup float64) time.Duration {
	now := f.counters()
	return time.Duration(float64(now.total-f.before.total) * speedup / float64(max(1, now.n-f.before.n)))
}

// leastOpen is the engine with the fewest requests under way, from another one on
// each time.
func (f *fleet) leastOpen(n int) int {
	best := n % len(f.open)
	for i := range f.open {
		if k := (n + i) % len(f.open); f.open[k].Load() < f.open[best].Load() {
			best = k
		}
	}
	return best
}

// start sets up the fleets of engines with their agents on the stage, and waits
// until the scheduler has an exact picture of every engine.
func start(ctx context.Context, s *stage.Stage, o options) ([]*fleet, error) {
	inTurn, least := &fleet{name: "round-robin"}, &fleet{name: "least-requests"}
	inTurn.choose = func(n int) int { return n % o.engines }
	least.choose = least.leastOpen
	fleets := []*fleet{inTurn, least, {name: "kvscout"}}
	for _, f := range fleets {
		f.open = make([]atomic.Int64, o.engines)
		f.blocks = int(o.capacity * fakevllm.Qwen32BBlocks)
		for i := range o.engines {
			if err := f.start(s, i, o); err != nil {
				return nil, err
			}
		}
	}
	for _, f := range fleets {
		for _, id := range f.members {
			if err := s.Until(ctx, readyTime, id, "be exact", func(m *api.MemberState) bool { return stage.Exact(m) && m.GetIneligible() == 0 }); err != nil {
				return nil, err
			}
		}
	}
	return fleets, nil
}

// start runs one engine and its agent.
func (f *fleet) start(s *stage.Stage, i int, o options) error {
	e, err := fakevllm.New(fakevllm.Config{
		Model: f.name, Blocks: f.blocks + 1, Speedup: o.speedup, // one is the null block
		// One chunk for the first token and one for the rest: the demo reads
		// no text. Agents are beside the engines, so a short ring will do.
		StreamInterval: 1 << 20, BufferSteps: 2000, Seed: o.seed,
	})
	if err != nil {
		return err
	}
	s.Go(e.Run)
	f.engines = append(f.engines, e)
	// Load is sampled every second of the engine's own time.
	second := min(time.Second, max(100*time.Millisecond, time.Duration(float64(time.Second)/o.speedup)))
	a, err := s.Agent(stage.AgentOptions{Engine: e.URL(), Pod: fmt.Sprintf("%s-%d", f.name, i), Heartbeat: second, Probe: second})
	if err != nil {
		return err
	}
	f.members = append(f.members, a.Members[0])
	return nil
}

// prepared lets the scheduler hold all blocks of all engines, and serve every
// proxy.
func prepared(at places) func(*scheduler.Config) {
	return func(c *scheduler.Config) {
		c.IndexBytes = 2 << 30
		c.GatewayAddress, c.ExtProcAddress, c.ExtProcEndpoints = at.gateway, at.picker, 2
	}
}
