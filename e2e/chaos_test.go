package e2e

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

var chaosSeed = flag.Uint64("chaos.seed", 0, "seed of TestChaos; 0: those of every day")

// Faults in random order, some at the same time. Whenever all is connected the
// cache state must become one that promises nothing the engine does not hold, and
// after a new incarnation of the engine it must be the truth.
func TestChaos(t *testing.T) {
	seeds := []uint64{1, 2}
	if *chaosSeed != 0 {
		seeds = []uint64{*chaosSeed}
	}
	for _, seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 7))
			p := open(t, stage.Options{})
			e := p.engine(fakevllm.Config{Blocks: 64, BufferSteps: 32})
			events, replay := e.behind(t, "pod")
			heads := several(seed, 8)
			var log []string
			var asked []prompt
			ask := func(n int) {
				for range n {
					q := heads[r.IntN(len(heads))].branch(size*r.IntN(4), r.Uint64(), 40)
					e.complete(q)
					asked = append(asked, q)
				}
				asked = asked[max(0, len(asked)-20):]
			}
			faults := []struct {
				name string
				do   func()
			}{
				{"engine restarts", e.restart},
				{"cache reset", func() { e.act("/reset_prefix_cache", nil); ask(1) }},
				{"network parts", func() { events.Refuse(true) }},
				{"network heals", func() { events.Refuse(false) }},
				{"replay parts", func() { replay.Refuse(true) }},
				{"replay heals", func() { replay.Refuse(false) }},
				{"messages are lost", func() { events.drop(1 + r.IntN(4)) }},
				{"ring moves on", func() { ask(40) }},
				{"scheduler restarts", func() {
					if err := p.RestartScheduler(); err != nil {
						t.Fatal(err)
					}
				}},
				{"agent restarts", func() {
					e.agent.Stop()
					a, err := p.Agent(stage.AgentOptions{Engine: e.URL(), Pod: "pod", Events: events.endpoint(), Replay: replay.endpoint()})
					if err != nil {
						t.Fatal(err)
					}
					e.agent = a
				}},
			}
			defer func() {
				if t.Failed() {
					t.Logf("%q", log)
				}
			}()
			for round := range 5 {
				for range 3 {
					fault := faults[r.IntN(len(faults))]
					log = append(log, fault.name)
					fault.do()
					ask(r.IntN(4))
				}
				events.Refuse(false)
				replay.Refuse(false)
				events.drop(0)
				log = append(log, "all is well")
				ask(1) // a last message that was lost shows with the next
				e.untilMember(e.id(), "stand on the newest batch", func(m *api.MemberState) bool {
					return m != nil && m.GetCacheState().GetEngineBatches() == e.Events(0).Stats().Next && stage.Settled(m)
				})
				for i, q := range asked {
					if got, state := e.promised(q); got > e.held(q) || stage.Exact(&api.MemberState{CacheState: state}) && got != e.held(q) {
						t.Fatalf("round %d, prompt %d: promised %d, held %d; %v", round, i, got, e.held(q), state)
					}
				}
			}
			e.restart()
			ask(5)
			start := time.Now()
			e.truth(patience, asked...)
			t.Log("true after", time.Since(start))
		})
	}
}
