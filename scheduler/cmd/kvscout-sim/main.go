// Command kvscout-sim plays a workload against a simulated fleet under several
// policies and prints what each came to.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/sync/errgroup"
	"golang.org/x/term"

	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/profile"
	"github.com/kvscout/kvscout/scheduler/internal/sim"
	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
	"github.com/kvscout/kvscout/scheduler/internal/sim/report"
)

const intro = `kvscout-sim puts the scheduler in front of simulated engines on a virtual clock and
says what each policy makes of a workload:

  kvscout-sim -trace conversation.jsonl -policies least-tokens,default,oracle -pods 8 -speed 2

Policies are the scheduler's, and three bounds: oracle (one cache without end for
all pods), capacity-oracle (the best that this much memory can hold) and pooled-lru
(all memory in one pool that does not know the future). The same seed gives the
same output. docs/SIMULATOR.md explains model and figures.

  kvscout-sim size       how many pods a workload needs, at which cost
  kvscout-sim calibrate  an engine's constants, from a log or from its metrics
  kvscout-sim report     every policy on every workload, as docs/ROUTING.md

Exit status: 0, 1 on failure, 2 for wrong usage.

`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	err := dispatch(ctx, args, stdout, stderr)
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case errors.Is(err, errUsage):
		fmt.Fprintf(stderr, "kvscout-sim: %v\nSee kvscout-sim -help.\n", err)
		return 2
	}
	fmt.Fprintf(stderr, "kvscout-sim: %v\n", err)
	return 1
}

// dispatch runs the command that the first argument names; without one, plays.
func dispatch(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) > 0 {
		switch args[0] {
		case "report":
			return runReport(ctx, args[1:], stdout, stderr)
		case "size":
			return runSize(ctx, args[1:], stdout, stderr)
		case "calibrate":
			return runCalibrate(args[1:], stdout, stderr)
		}
	}
	o, err := parse(args, stdout)
	if err != nil {
		return usage(err)
	}
	return o.play(ctx, stdout, stderr)
}

// errUsage says that the arguments are wrong.
var errUsage = errors.New("wrong usage")

// wrongUsage is an error that is the caller's.
type wrongUsage struct{ error }

// Is tells wrong usage from failure.
func (w wrongUsage) Is(target error) bool { return target == errUsage }

// Unwrap gives what was wrong.
func (w wrongUsage) Unwrap() error { return w.error }

func usage(err error) error { return wrongUsage{err} }

// parseFlags parses the flags of a command, none of which are positional.
func parseFlags(name, intro string, args []string, stdout io.Writer, define func(*flag.FlagSet)) error {
	fs := flag.NewFlagSet("kvscout-sim "+name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Usage = func() {}
	define(fs)
	err := fs.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(stdout, intro)
		fs.SetOutput(stdout)
		fs.PrintDefaults()
	case err == nil && fs.NArg() > 0:
		err = fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	if err != nil {
		return usage(err)
	}
	return nil
}

// options are what the flags say.
type options struct {
	sim.Config
	trace, generator string
	engine, policies string
	arrival          arrival.Options
	seeds, jobs      int
	json             bool
	plot, log        string
}

func parse(args []string, stdout io.Writer) (options, error) {
	o := options{Config: sim.Config{Pods: 8, Capacity: 1, Admission: sim.VLLM, SampleInterval: time.Second, Resync: 100 * time.Millisecond, Seed: 1}}
	fs := flag.NewFlagSet("kvscout-sim", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.StringVar(&o.trace, "trace", "", "`file` with a recorded workload: Mooncake or Qwen-Bailian JSON lines, or Azure CSV; may be gzipped")
	fs.StringVar(&o.generator, "arrivals", "", "`spec` of a generated workload in place of a trace: a name, then what differs from its defaults,\nas shared:groups=150,qps=20,seconds=60; there are\n"+strings.Join(arrival.Generators(), "\n"))
	fs.Float64Var(&o.arrival.Speed, "speed", 1, "`factor` by which a trace is played faster")
	fs.DurationVar(&o.arrival.First, "first", 0, "`time` of the run after which a trace is cut off; 0: never")
	fs.IntVar(&o.arrival.BlockSize, "block-size", 0, "`tokens` a block; 0: 512 for a trace, as public ones have, else 16")
	fs.StringVar(&o.policies, "policies", "least-tokens,default,oracle", "`names` of policies separated by commas; one that is told what it cannot know has that behind\nits name: default+curves+backlog+cache+output, or some of them")
	fs.IntVar(&o.Pods, "pods", o.Pods, "`number` of pods")
	fs.StringVar(&o.engine, "engine", sim.DefaultEngine, "`name` of an engine, or a JSON file with one; several separated by commas: the pods have them in turn. There are "+strings.Join(sim.Engines(), ", "))
	fs.Float64Var(&o.Capacity, "capacity", o.Capacity, "`multiple` of the engine's KV cache")
	fs.IntVar(&o.HostTokens, "host-tokens", 0, "`tokens` that each pod keeps in host memory")
	fs.BoolVar(&o.Hybrid, "hybrid", false, "engines accept hits only where an earlier prompt ended or parted from another, as hybrid models do")
	fs.BoolVar(&o.FullDepth, "full-depth", false, "the scheduler goes by all blocks that hybrid engines hold of a prompt, not by where a hit may end")
	fs.StringVar((*string)(&o.Admission), "admission", string(o.Admission), "`rule` by which a request begins: vllm (its prompt fits) or reserve (its whole output, too)")
	fs.BoolVar(&o.EnginePriority, "engine-priority", false, "engines serve waiting requests by the priority of the answer")
	fs.IntVar(&o.seeds, "seeds", 1, "`number` of seeds to play")
	fs.Uint64Var(&o.Seed, "seed", o.Seed, "first `seed`")
	fs.DurationVar(&o.EventLag, "event-lag", 0, "`time` from an engine's event to the scheduler")
	fs.DurationVar(&o.SampleInterval, "sample-interval", o.SampleInterval, "`time` between two load samples of an engine")
	fs.DurationVar(&o.SampleAge, "sample-age", 0, "`time` from a load sample to the scheduler")
	fs.DurationVar(&o.DecisionLag, "decision-lag", 0, "`time` from the scheduler's answer to the engine")
	fs.Float64Var(&o.Lose, "lose", 0, "`share` of event batches that are lost")
	fs.DurationVar(&o.Resync, "resync", o.Resync, "`time` in which a snapshot comes after a loss")
	fs.BoolVar(&o.NoReports, "no-reports", false, "nobody reports first tokens and ends")
	fs.Func("restart-at", "`time` at which the first pod restarts empty, or pod@time like 3@10m; may be given again", func(text string) error {
		pod, at, found := strings.Cut(text, "@")
		if !found {
			pod, at = "0", text
		}
		n, err := strconv.Atoi(pod)
		if err != nil {
			return fmt.Errorf("%q is no number of a pod", pod)
		}
		t, err := time.ParseDuration(at)
		o.Restarts = append(o.Restarts, sim.Restart{Pod: n, At: t})
		return err
	})
	fs.Func("add-at", "`time` at which an empty pod joins; may be given again", func(text string) error {
		t, err := time.ParseDuration(text)
		o.Adds = append(o.Adds, t)
		return err
	})
	fs.BoolVar(&o.ReportOutputs, "report-outputs", false, "reports say how many tokens came out, and the scheduler learns how long outputs are")
	fs.IntVar(&o.Queue.Length, "queue", 0, "`number` of requests that may wait for room; 0: none waits")
	fs.DurationVar(&o.Queue.Wait, "queue-wait", time.Minute, "longest `time` that a request waits")
	fs.Float64Var(&o.Queue.BudgetMS, "queue-budget", 1000, "`ms` of prefill that a pod may have before requests wait for it")
	fs.Func("targets", "`ms` that all requests are to keep, as ttft=500,tpot=50,tpat=10,e2e=9000; any of them", func(text string) (err error) {
		o.Targets, err = targets(text)
		return err
	})
	fs.Func("profiles", "`file` with measured profiles: of model \"model\", gpu by the engine's name", func(path string) (err error) {
		o.Measured, err = profiles(path)
		return err
	})
	fs.IntVar(&o.jobs, "jobs", min(2, runtime.NumCPU()), "`number` of runs at a time")
	fs.StringVar(&o.plot, "plot", "", "`file` for a plot of the results, as SVG")
	fs.StringVar(&o.log, "log", "", "`file` for a log of the requests, as calibrate reads it; of one policy and seed")
	fs.BoolVar(&o.json, "json", false, "print one JSON object for each policy and seed")
	fs.Usage = func() {}
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprint(stdout, intro)
			fs.SetOutput(stdout)
			fs.PrintDefaults()
		}
		return o, err
	}
	switch {
	case fs.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	case (o.trace == "") == (o.generator == ""):
		return o, errors.New("no workload: give either -trace or -arrivals")
	case o.seeds < 1 || o.jobs < 1:
		return o, errors.New("-seeds and -jobs: want at least 1")
	}
	return o, nil
}

// play runs every policy with every seed and prints in that order.
func (o options) play(ctx context.Context, stdout, stderr io.Writer) error {
	var err error
	for name := range strings.SplitSeq(o.engine, ",") {
		e, err := engine(strings.TrimSpace(name))
		if err != nil {
			return err
		}
		o.Engines = append(o.Engines, e)
	}
	workload, err := o.workload()
	if err != nil {
		return err
	}
	o.Arrivals, o.Stages = workload.Play, workload.Stages
	var configs []sim.Config
	for _, name := range names(o.policies) {
		for i := range o.seeds {
			c := o.Config
			c.Policy, c.Seed = name, o.Seed+uint64(i)
			if err := c.Validate(); err != nil {
				return err
			}
			configs = append(configs, c)
		}
	}
	var log *served
	if o.log != "" {
		if len(configs) != 1 {
			return usage(fmt.Errorf("-log is of one run: %d policies and seeds were asked for", len(configs)))
		}
		if log, err = newServed(o.log); err != nil {
			return err
		}
		configs[0].Each = log.write
	}
	results, err := runAll(ctx, configs, o.jobs, newMeter(stderr, len(configs)))
	if err != nil {
		return err
	}
	if log != nil {
		if err := log.close(); err != nil {
			return fmt.Errorf("-log: %w", err)
		}
	}
	sim.Headroom(results)
	if o.plot != "" {
		if err := draw(o.plot, fmt.Sprintf("%s, %d pods", workload.Name, o.Pods), results); err != nil {
			return err
		}
	}
	if o.json {
		encoder := json.NewEncoder(stdout)
		for i := range results {
			if err := encoder.Encode(&results[i]); err != nil {
				return err
			}
		}
		return nil
	}
	return table(stdout, results)
}

// targets reads name=ms pairs.
func targets(text string) (t policy.Targets, err error) {
	to := map[string]*float64{"ttft": &t.TTFT, "tpot": &t.TPOT, "tpat": &t.TPAT, "e2e": &t.E2E}
	for pair := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(pair, "=")
		v, ok := to[strings.TrimSpace(name)]
		if !ok {
			return t, fmt.Errorf("no target %q: want ttft, tpot, tpat or e2e", name)
		}
		if *v, err = strconv.ParseFloat(value, 64); err != nil || !(*v > 0) {
			return t, fmt.Errorf("%s: %q is no number of ms", name, value)
		}
	}
	return t, nil
}

func profiles(path string) (*profile.Set, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	list, err := profile.Parse(filepath.Base(path), text)
	if err != nil {
		return nil, err
	}
	return profile.NewSet(list)
}

// draw writes a plot of the results.
func draw(path, title string, results []sim.Result) error {
	var svg bytes.Buffer
	if err := report.Picture(&svg, title, results); err != nil {
		return fmt.Errorf("plot: %w", err)
	}
	return os.WriteFile(path, svg.Bytes(), 0o644)
}

// names splits a list of policies. A comma may also stand between parameters of
// one: what has an equals sign and no colon belongs to the name before.
func names(list string) []string {
	var names []string
	for piece := range strings.SplitSeq(list, ",") {
		piece = strings.TrimSpace(piece)
		if n := len(names); n > 0 && strings.Contains(piece, "=") && !strings.Contains(piece, ":") {
			names[n-1] += "," + piece
			continue
		}
		names = append(names, piece)
	}
	return names
}

func (o options) workload() (arrival.Workload, error) {
	if o.trace == "" {
		o.arrival.BlockSize = cmp.Or(o.arrival.BlockSize, 16)
		return arrival.Generate(o.generator, o.arrival)
	}
	o.arrival.BlockSize = cmp.Or(o.arrival.BlockSize, 512)
	return readTrace(o.trace, o.arrival)
}

func readTrace(path string, o arrival.Options) (arrival.Workload, error) {
	f, err := os.Open(path)
	if err != nil {
		return arrival.Workload{}, err
	}
	defer f.Close()
	return arrival.Trace(f, filepath.Base(path), o)
}

// engine reads a file, or takes one of the built-in names.
func engine(name string) (sim.Profile, error) {
	if slices.Contains(sim.Engines(), name) || !strings.HasSuffix(name, ".json") {
		return sim.Engine(name)
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return sim.Profile{}, err
	}
	p := sim.Profile{Name: strings.TrimSuffix(filepath.Base(name), ".json")}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&p); err != nil {
		return sim.Profile{}, fmt.Errorf("engine %s: %w", name, err)
	}
	return p, p.Validate()
}

// runAll plays the configurations, some at a time, and returns the results in
// their order.
func runAll(ctx context.Context, configs []sim.Config, jobs int, m *meter) ([]sim.Result, error) {
	results := make([]sim.Result, len(configs))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(jobs)
	for i, c := range configs {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			c.Progress = func(done, total int) { m.set(i, done, total) }
			var err error
			if results[i], err = sim.Run(c); err != nil {
				return fmt.Errorf("policy %s, seed %d: %w", c.Policy, c.Seed, err)
			}
			return nil
		})
	}
	err := g.Wait()
	m.end()
	return results, err
}

// meter shows on a terminal how far all runs are.
type meter struct {
	mu    sync.Mutex // guards what follows
	bar   *progressbar.ProgressBar
	done  []int
	sum   int
	shown int
}

func newMeter(w io.Writer, runs int) *meter {
	m := &meter{done: make([]int, runs)}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		m.bar = progressbar.NewOptions(-1, progressbar.OptionSetWriter(w), progressbar.OptionSetDescription("requests"),
			progressbar.OptionShowCount(), progressbar.OptionClearOnFinish(), progressbar.OptionThrottle(100*time.Millisecond))
	}
	return m
}

func (m *meter) set(run, done, total int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bar == nil {
		return
	}
	m.sum += done - m.done[run]
	m.done[run] = done
	if m.sum < m.shown+100 && done < total {
		return
	}
	m.shown = m.sum
	m.bar.ChangeMax(total * len(m.done))
	_ = m.bar.Set(m.sum) // it is only shown
}

func (m *meter) end() {
	if m.bar != nil {
		_ = m.bar.Finish()
	}
}
