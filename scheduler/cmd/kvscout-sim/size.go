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
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
	"github.com/kvscout/kvscout/scheduler/internal/sim/sizing"
)

const sizeIntro = `kvscout-sim size finds the fewest pods that a workload needs, for each policy and
size of host memory, and which of these fleets is the cheapest:

  kvscout-sim size -trace conversation.jsonl -ttft-p90 2s

It takes for granted that more pods are not slower. The default prices are round
figures for two H100 and for server memory, a pod and a GB an hour: give your own.

`

// size is what its flags say.
type size struct {
	options
	goal   sizing.Goal
	price  sizing.Price
	ttft   time.Duration
	hostGB string
}

func (o *size) flags(fs *flag.FlagSet) {
	fs.StringVar(&o.trace, "trace", "", "`file` with a recorded workload")
	fs.StringVar(&o.generator, "arrivals", "", "`spec` of a generated workload in place of a trace")
	fs.Float64Var(&o.arrival.Speed, "speed", 1, "`factor` by which a trace is played faster")
	fs.IntVar(&o.arrival.BlockSize, "block-size", 0, "`tokens` a block; 0: 512 for a trace, else 16")
	fs.StringVar(&o.engine, "engine", sim.DefaultEngine, "`name` of an engine, or a JSON file with one")
	fs.StringVar(&o.policies, "policies", "least-tokens,default", "`names` of policies separated by commas")
	fs.Uint64Var(&o.Seed, "seed", 1, "`seed` of the runs")
	fs.DurationVar(&o.ttft, "ttft-p90", 2*time.Second, "`time` to the first token within which nine of ten requests shall be")
	fs.IntVar(&o.goal.MaxPods, "max-pods", 128, "`pods` beyond which the search gives up")
	fs.StringVar(&o.hostGB, "host-gb", "0,100,400", "`sizes` of host memory for KV blocks to try, GB a pod")
	fs.Float64Var(&o.price.Pod, "pod-price", 6, "`price` of a pod an hour")
	fs.Float64Var(&o.price.HostGB, "host-gb-price", .005, "`price` of a GB of host memory an hour")
	fs.IntVar(&o.jobs, "jobs", min(2, runtime.NumCPU()), "`number` of searches at a time")
	fs.StringVar(&o.plot, "plot", "", "`file` for a plot, as SVG")
	fs.BoolVar(&o.json, "json", false, "print one JSON object for each policy and size of host memory")
}

func runSize(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var o size
	if err := parseFlags("size", sizeIntro, args, stdout, o.flags); err != nil {
		return err
	}
	o.goal.TTFTP90 = o.ttft.Seconds()
	switch {
	case (o.trace == "") == (o.generator == ""):
		return usage(errors.New("no workload: give either -trace or -arrivals"))
	case o.ttft <= 0 || o.goal.MaxPods < 1 || o.goal.MaxPods > 4096 || o.jobs < 1:
		return usage(errors.New("-ttft-p90: want more than 0; -max-pods: 1 to 4096; -jobs: at least 1"))
	case !(o.price.Pod >= 0) || !(o.price.HostGB >= 0):
		return usage(errors.New("-pod-price and -host-gb-price: want at least 0"))
	}
	var sizes []float64
	for piece := range strings.SplitSeq(o.hostGB, ",") {
		gb, err := strconv.ParseFloat(strings.TrimSpace(piece), 64)
		if err != nil || !(gb >= 0 && gb <= 1e6) {
			return usage(fmt.Errorf("-host-gb: %q: want GB from 0 to 1000000 separated by commas", piece))
		}
		sizes = append(sizes, gb)
	}
	kind, err := engine(o.engine)
	if err != nil {
		return err
	}
	if kind.KVBytes == 0 && o.hostGB != "0" {
		return fmt.Errorf("engine %s does not say kv_bytes, so host memory has no size in tokens: add it, or use -host-gb 0", kind.Name)
	}
	w, err := o.workload()
	if err != nil {
		return err
	}
	var fleets []sizing.Fleet
	for _, name := range names(o.policies) {
		for _, gb := range sizes {
			fleets = append(fleets, sizing.Fleet{Policy: name, HostGB: gb})
		}
	}
	if err := o.search(ctx, w, kind, fleets, newMeter(stderr, len(fleets))); err != nil {
		return err
	}
	if o.plot != "" {
		var svg bytes.Buffer
		title := fmt.Sprintf("%s: TTFT p90 within %v", w.Name, o.ttft)
		if err := sizing.Plot(&svg, title, fleets); err != nil {
			return err
		}
		if err := os.WriteFile(o.plot, svg.Bytes(), 0o644); err != nil {
			return err
		}
	}
	if !o.json {
		return sizing.Table(stdout, o.goal, fleets)
	}
	encoder := json.NewEncoder(stdout)
	for _, f := range fleets {
		if err := encoder.Encode(f); err != nil {
			return err
		}
	}
	return nil
}

// search fills in pods, cost and result of the fleets.
func (o *size) search(ctx context.Context, w arrival.Workload, kind sim.Profile, fleets []sizing.Fleet, m *meter) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(o.jobs)
	for i := range fleets {
		f := &fleets[i]
		g.Go(func() error {
			var err error
			f.Pods, f.Result, err = sizing.Smallest(o.goal, func(pods int) (sim.Result, error) {
				if err := ctx.Err(); err != nil {
					return sim.Result{}, err
				}
				return sim.Run(sim.Config{
					Arrivals: w.Play, Stages: w.Stages, Seed: o.Seed, Policy: f.Policy, Pods: pods, Engines: []sim.Profile{kind},
					HostTokens: int(f.HostGB * 1e9 / float64(cmp.Or(kind.KVBytes, 1))),
					Progress:   func(done, total int) { m.set(i, done, total) },
				})
			})
			f.Cost = o.price.Of(f.Pods, f.HostGB)
			return err
		})
	}
	err := g.Wait()
	m.end()
	return err
}
