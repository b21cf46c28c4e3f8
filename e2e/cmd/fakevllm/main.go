// Command fakevllm runs a fake vLLM engine as a process of its own, so that it
// can be killed.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/kvscout/kvscout/e2e/fakevllm"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "fakevllm:", err)
		os.Exit(1)
	}
}

func run() error {
	var cfg fakevllm.Config
	flag.StringVar(&cfg.Model, "model", "fake", "served model name")
	flag.StringVar(&cfg.Version, "engine-version", "0.32.0", "what /version says")
	flag.StringVar(&cfg.Host, "host", "127.0.0.1", "address to listen on")
	flag.IntVar(&cfg.Port, "port", 8000, "HTTP port, 0 for a free one")
	flag.IntVar(&cfg.EventsPort, "events-port", 5557, "port of the KV events of rank 0, 0 for a free one")
	flag.IntVar(&cfg.ReplayPort, "replay-port", 5657, "port of the replay of rank 0, 0 for a free one")
	flag.StringVar(&cfg.Topic, "topic", "kv", "topic of the KV events")
	flag.IntVar(&cfg.BufferSteps, "buffer-steps", 10000, "batches kept for replay")
	flag.IntVar(&cfg.ReplayHWM, "replay-hwm", 1000, "messages of a replay that may wait, 0 for all")
	flag.BoolVar(&cfg.NoEvents, "no-events", false, "send no KV events")
	flag.BoolVar(&cfg.NoReplay, "no-replay", false, "answer no replay")
	arrays := flag.Bool("arrays", false, "KV events and replay as vLLM 0.23 has them: arrays, three frames")
	flag.IntVar(&cfg.Ranks, "data-parallel-size", 1, "data-parallel ranks, each with a cache and ports of its own")
	flag.IntVar(&cfg.BlockSize, "block-size", 16, "tokens in a block")
	groups := flag.String("groups", "", "KV cache groups of a hybrid model: sliding:WINDOW, chunked:TOKENS, states, full separated by commas")
	flag.BoolVar(&cfg.Dense, "dense", false, "keep every block of every group, as before 0.30")
	flag.BoolVar(&cfg.Drops, "drops", false, "drop the last block of each hit, as EAGLE makes it")
	flag.IntVar(&cfg.Blocks, "num-gpu-blocks", fakevllm.Qwen32BBlocks, "blocks of a rank")
	flag.IntVar(&cfg.MaxModelLen, "max-model-len", 0, "longest prompt and answer, 0 for what fits")
	flag.IntVar(&cfg.MaxBatchedTokens, "max-num-batched-tokens", 8192, "tokens computed in a step")
	flag.IntVar(&cfg.MaxSequences, "max-num-seqs", 256, "requests that run at once")
	flag.BoolVar(&cfg.Preemption, "preemption", false, "admit what its prompt fits and preempt when blocks run out")
	flag.BoolVar(&cfg.PriorityScheduling, "priority", false, "serve by priority")
	flag.IntVar(&cfg.StreamInterval, "stream-interval", 1, "tokens in a streamed chunk")
	flag.BoolVar(&cfg.ScaleOut, "enable-scale-out", false, "enable the render endpoints")
	flag.Float64Var(&cfg.Speedup, "speedup", 1, "how much faster than the profile")
	flag.Uint64Var(&cfg.Seed, "seed", 0, "seed of what is generated")
	adapters := flag.String("adapters", "", "LoRA adapters as NAME=PATH separated by commas")
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flag.Arg(0))
	}
	var err error
	if cfg.Groups, err = fakevllm.ParseGroups(*groups); err != nil {
		return err
	}
	if *arrays {
		cfg.Era, cfg.ThreeFrameReplay = fakevllm.Arrays, true
	}
	for s := range strings.SplitSeq(*adapters, ",") {
		if s == "" {
			continue
		}
		name, path, ok := strings.Cut(s, "=")
		if !ok || name == "" || path == "" {
			return fmt.Errorf("adapter %q is not NAME=PATH", s)
		}
		cfg.Adapters = append(cfg.Adapters, fakevllm.Adapter{Name: name, Path: path})
	}
	e, err := fakevllm.New(cfg)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	fmt.Printf("http %s\n", e.URL())
	for r := range cfg.Ranks {
		if p := e.Events(r); p != nil {
			fmt.Printf("rank %d events %s replay %s\n", r, p.Endpoint(), p.ReplayEndpoint())
		}
	}
	return e.Run(ctx)
}
