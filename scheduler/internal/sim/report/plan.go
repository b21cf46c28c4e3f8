package report

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// Cell is one workload under one setting, for several policies to play.
type Cell struct {
	Name string // of its file
	// Trace is a file of the folder of traces, played at Speed; Arrivals the
	// spec of a generator. One of them is set.
	Trace, Arrivals string
	Speed           float64
	First           time.Duration // of the trace, as it is played; 0: all
	BlockSize       int
	Pods            int
	Engine          string
	Capacity        float64
	Policies        []string
	Spoil           Spoil
}

// Spoil is what makes a cell harder for a scheduler than to see everything at
// once, or easier.
type Spoil struct {
	EventLag, SampleInterval time.Duration
	Lose                     float64
	NoReports                bool
	EnginePriority           bool
	HostTokens               int
	Restarts                 []sim.Restart
	Adds                     []time.Duration
}

// Section is a chapter of the page.
type Section struct {
	Title, Text string
	Cells       []Cell
	// Chart says how the section is drawn: by capacity, or a picture of each
	// cell.
	Chart chart
}

type chart int

const (
	byCell chart = iota
	byCapacity
	noChart
)

// everyone is every policy of the scheduler, each under one of its names, and
// the bounds.
func everyone() []string {
	names := slices.DeleteFunc(policy.Names(), func(name string) bool { return name == "slo-least-load-pulling" })
	return append(names, sim.PooledLRU, sim.CapacityOracle, sim.Oracle)
}

// few are those that other settings are compared with.
var few = []string{sim.LeastTokens, "weighted", "sticky", policy.Default, sim.PooledLRU, sim.CapacityOracle, sim.Oracle}

// ablated are the cells of which the page says what knowledge is worth.
var ablated = []string{
	"conversation-2x-c1", "conversation-2x-c4", "conversation-2x-c12", "conversation-3x-c4", "synthetic-2x-c1", "synthetic-2x-c4",
	"conversation-2x-c4-noreports", "agent", "chat", "unshared",
}

// Traces that the plan plays.
const (
	conversation = "mooncake_conversation_trace.jsonl.gz"
	synthetic    = "mooncake_synthetic_trace.jsonl.gz"
)

func traced(name, file string, speed, capacity float64) Cell {
	return Cell{Name: fmt.Sprintf("%s-%gx-c%g", name, speed, capacity), Trace: file, Speed: speed, BlockSize: 512, Pods: 8,
		Engine: sim.DefaultEngine, Capacity: capacity, Policies: everyone()}
}

func generated(name, spec string, pods int, engine string) Cell {
	return Cell{Name: name, Arrivals: spec, BlockSize: 16, Pods: pods, Engine: engine, Capacity: 1, Policies: everyone()}
}

func spoiled(c Cell, suffix string, s Spoil) Cell {
	c.Name, c.Spoil, c.Policies = c.Name+"-"+suffix, s, few
	return c
}

// Plan is what the page reports.
func Plan() []Section {
	var conv, synth []Cell
	for _, speed := range []float64{1, 2, 3} {
		for _, capacity := range []float64{1, 4, 12} {
			conv = append(conv, traced("conversation", conversation, speed, capacity))
			synth = append(synth, traced("synthetic", synthetic, speed, capacity))
		}
	}
	fine := traced("conversation", conversation, 2, 1)
	fine.Name, fine.BlockSize, fine.Policies = "conversation-2x-c1-b16", 16, few
	base := traced("conversation", conversation, 2, 4)
	unknown := base
	unknown.Name, unknown.First = "conversation-2x-c4-first600s", 10*time.Minute
	unknown.Policies = append([]string{"round-robin"}, few...)
	beginning := unknown
	beginning.Name, beginning.First = "conversation-2x-c4-first150s", 150*time.Second
	code := generated("code", "code", 10, sim.DefaultEngine)
	code.BlockSize = 64
	agents := generated("agent", "agent", 8, sim.DefaultEngine)
	agents.BlockSize = 64
	closed := []Cell{code, agents, generated("chat", "chat", 8, sim.DefaultEngine)}
	for i := range closed { // what comes depends on when others end, and nobody knows that beforehand
		closed[i].Policies = slices.DeleteFunc(closed[i].Policies, func(name string) bool { return name == sim.CapacityOracle })
	}
	sections := []Section{
		{"Chat: the conversation trace", "One hour of an online chat service, 12,031 requests. All share one first block of 512 tokens, so prefix hash, which goes by the first block, sees one and the same prompt; three quarters of the blocks are never used again.", append(conv, fine), byCapacity},
		{"Long shared documents: the synthetic trace", "3,993 requests made from public data sets, many with long documents in common.", synth, byCapacity},
		{"The engine serves by the answer's priority", "vLLM with `--scheduling-policy priority`, and the proxy passes the answer's priority on. Compare with the cells of the same name without it.", []Cell{
			spoiled(traced("conversation", conversation, 2, 1), "priority", Spoil{EnginePriority: true}),
			spoiled(traced("conversation", conversation, 3, 4), "priority", Spoil{EnginePriority: true}),
			spoiled(traced("synthetic", synthetic, 2, 1), "priority", Spoil{EnginePriority: true}),
		}, noChart},
		{"Host memory behind the GPU's", "400 GB of host memory a pod, which is 1.53 million tokens of this model. A block that comes from there costs a copy.", []Cell{
			spoiled(traced("conversation", conversation, 2, 1), "host", Spoil{HostTokens: 1_530_000}),
			spoiled(traced("synthetic", synthetic, 2, 1), "host", Spoil{HostTokens: 1_530_000}),
		}, noChart},
		{"What is late or lost", "The conversation trace at twice its speed with four times the memory, while the scheduler learns things late or not at all.", []Cell{
			spoiled(base, "lag1s", Spoil{EventLag: time.Second}),
			spoiled(base, "lag10s", Spoil{EventLag: 10 * time.Second}),
			spoiled(base, "sample10s", Spoil{SampleInterval: 10 * time.Second}),
			spoiled(base, "lose1", Spoil{Lose: .01}),
			spoiled(base, "noreports", Spoil{NoReports: true}),
			spoiled(base, "restart", Spoil{Restarts: []sim.Restart{{Pod: 0, At: 10 * time.Minute}}}),
			spoiled(base, "coldpod", Spoil{Adds: []time.Duration{10 * time.Minute}}),
		}, noChart},
		{"A fleet that knows nothing", "The first ten minutes of the conversation trace at twice its speed with four times the memory, and their first quarter: nothing is cached and nothing is learned when they begin.", []Cell{unknown, beginning}, noChart},
		{"Groups with long heads, rising load: llm-d's load stages on Qwen3-32B", "150 groups of 5 prompts, 6,000 + 1,200 tokens, 500 to generate.", []Cell{generated("r1", "r1", 8, sim.DefaultEngine)}, byCell},
		{"The same on Llama-70B", "83 groups of 3 prompts, 8,000 + 1,000 tokens, 1,000 to generate, evenly spaced.", []Cell{generated("r2", "r2", 4, "llama-3.1-70b-h100-tp4")}, byCell},
		{"Closed loops", "Sessions that ask their next turn when the last was answered; what was generated is part of the next prompt.", closed, byCell},
		{"Do no harm", "Workloads in which there is little or nothing to share.", []Cell{
			generated("unshared", "unshared", 8, sim.DefaultEngine),
			generated("hot", "hot", 2, sim.DefaultEngine),
		}, byCell},
	}
	for _, section := range sections {
		for i := range section.Cells {
			if c := &section.Cells[i]; slices.Contains(ablated, c.Name) {
				c.Policies = append(slices.Clone(c.Policies), sim.Ablation(policy.Default)...)
			}
		}
	}
	return sections
}

// Short is the part of the plan that every change can afford, with one seed.
func Short() []Cell {
	hot, unshared := generated("hot", "hot", 2, sim.DefaultEngine), generated("unshared", "unshared:stages=8x60+16x60", 8, sim.DefaultEngine)
	unshared.BlockSize = 512
	cells := []Cell{traced("conversation", conversation, 2, 1), traced("conversation", conversation, 2, 4), traced("conversation", conversation, 3, 4), traced("synthetic", synthetic, 2, 1), hot, unshared}
	for i := range cells {
		cells[i].Policies = []string{sim.LeastTokens, policy.Default, sim.Oracle}
	}
	return cells
}

// Config of a run of the cell. Arrivals and engine are the caller's to find.
func (c Cell) Config(policyName string, seed uint64) sim.Config {
	return sim.Config{
		Seed: seed, Policy: policyName, Pods: c.Pods, Capacity: c.Capacity,
		EventLag: c.Spoil.EventLag, SampleInterval: c.Spoil.SampleInterval, Lose: c.Spoil.Lose, NoReports: c.Spoil.NoReports,
		EnginePriority: c.Spoil.EnginePriority, HostTokens: c.Spoil.HostTokens, Restarts: c.Spoil.Restarts, Adds: c.Spoil.Adds,
	}
}

// traces is where the repository keeps them.
const traces = "scheduler/internal/sim/testdata"

// Command plays the cell alone, but for seeds and policies.
func (c Cell) Command() string {
	var b strings.Builder
	b.WriteString("go run ./scheduler/cmd/kvscout-sim")
	if c.Trace != "" {
		fmt.Fprintf(&b, " -trace %s/%s -speed %g", traces, c.Trace, c.Speed)
		if c.First > 0 {
			fmt.Fprintf(&b, " -first %v", c.First)
		}
	} else {
		fmt.Fprintf(&b, " -arrivals %s", c.Arrivals)
	}
	fmt.Fprintf(&b, " -block-size %d -pods %d -capacity %g", c.BlockSize, c.Pods, c.Capacity)
	if c.Engine != sim.DefaultEngine {
		fmt.Fprintf(&b, " -engine %s", c.Engine)
	}
	s := c.Spoil
	for _, f := range []struct {
		set  bool
		text string
	}{
		{s.EventLag > 0, fmt.Sprintf(" -event-lag %v", s.EventLag)},
		{s.SampleInterval > 0, fmt.Sprintf(" -sample-interval %v", s.SampleInterval)},
		{s.Lose > 0, fmt.Sprintf(" -lose %g", s.Lose)},
		{s.NoReports, " -no-reports"},
		{s.EnginePriority, " -engine-priority"},
		{s.HostTokens > 0, fmt.Sprintf(" -host-tokens %d", s.HostTokens)},
	} {
		if f.set {
			b.WriteString(f.text)
		}
	}
	for _, r := range s.Restarts {
		fmt.Fprintf(&b, " -restart-at %d@%v", r.Pod, r.At)
	}
	for _, at := range s.Adds {
		fmt.Fprintf(&b, " -add-at %v", at)
	}
	return b.String()
}
