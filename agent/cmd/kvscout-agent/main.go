// Command kvscout-agent runs the agent beside an engine. Every flag can also be
// given as an environment variable; the flag wins.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"github.com/KimMachineGun/automemlimit/memlimit"

	"github.com/kvscout/kvscout/agent"
	"github.com/kvscout/kvscout/protocol/settings"
)

const intro = `kvscout-agent runs beside a vLLM engine, keeps an exact mirror of its KV cache and
publishes it over NATS. For an engine on this machine it needs to know where
NATS is, and nothing else:

  vllm serve MODEL --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq",
      "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
  kvscout-agent -nats nats://127.0.0.1:4222

Model, block size, ranks and adapters it learns from the engine, and since vLLM
0.31 also where the events are. Without a replay endpoint every lost connection
costs the whole picture.

Each flag has an environment variable of the same name (-pod-uid:
KVSCOUT_POD_UID), and a line of that name in the file of -config (pod-uid: ...).
A flag wins over its variable, a variable over the file, the file over the default.
Times look like 500ms or 2s. The memory limit follows the container's; GOMEMLIMIT
overrides it. Metrics go to OTEL_EXPORTER_OTLP_ENDPOINT when that is set.

Exit status: 0 after SIGINT or SIGTERM, 1 on failure, 2 for wrong usage.

`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Getenv, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, getenv func(string) string, stderr io.Writer) int {
	cfg, err := parse(args, getenv, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "kvscout-agent: %v\n", err)
		return 2
	}
	limitMemory(cfg.Log, memlimit.FromCgroup)
	a, err := agent.New(cfg)
	if err == nil {
		err = a.Run(ctx)
	}
	if err != nil {
		cfg.Log.Error("agent ended", "error", err)
		return 1
	}
	return 0
}

// limitMemory lets the garbage collector keep the process within nine tenths of
// the container's memory. GOMEMLIMIT in the environment wins.
func limitMemory(log *slog.Logger, container memlimit.Provider) {
	limit, err := memlimit.Set(memlimit.WithProvider(container))
	switch {
	case err != nil:
		log.Warn("the container's memory limit is not known", "error", err)
	case limit < math.MaxInt64:
		log.Info("memory limit", "bytes", limit)
	}
}

// parse makes a Config of flags and environment.
func parse(args []string, getenv func(string) string, out io.Writer) (agent.Config, error) {
	cfg := agent.Defaults()
	cfg.Version = version()
	cfg.Listen = "127.0.0.1:9478"
	level, format, mode := slog.LevelInfo, "text", "connect"

	fs := flag.NewFlagSet("kvscout-agent", flag.ContinueOnError)
	fs.SetOutput(out)
	fs.StringVar(&cfg.NATSURL, "nats", cfg.NATSURL, "`URL` of the NATS server, or several with commas between; required")
	fs.StringVar(&cfg.NATSCredentials, "nats-credentials", cfg.NATSCredentials, "`file` with credentials for -nats")
	fs.StringVar(&cfg.NATSSeed, "nats-seed", cfg.NATSSeed, "`file` with the nkey seed for -nats")
	fs.StringVar(&cfg.NATSTLS.CA, "nats-tls-ca", cfg.NATSTLS.CA, "`file` with the CA of the NATS server's certificate; empty: the system's")
	fs.StringVar(&cfg.NATSTLS.Cert, "nats-tls-cert", cfg.NATSTLS.Cert, "`file` with our certificate, where NATS demands one")
	fs.StringVar(&cfg.NATSTLS.Key, "nats-tls-key", cfg.NATSTLS.Key, "`file` with the private key of -nats-tls-cert")
	fs.StringVar(&cfg.Pool, "pool", cfg.Pool, "`name` of the pool of engines, as given to the scheduler")
	fs.StringVar(&cfg.Engine, "engine", cfg.Engine, "`URL` of the engine's HTTP server")
	fs.StringVar(&cfg.EngineAPIKey, "engine-api-key", cfg.EngineAPIKey, "`key` of the engine's API; better given by the environment")
	fs.StringVar(&cfg.Events, "events", cfg.Events, "`endpoint` of rank 0's KV events, like tcp://127.0.0.1:5557; empty: as the engine says, else port 5557 on its host")
	fs.StringVar(&mode, "events-mode", mode, "`mode` of -events: connect to it, or bind it for engines that connect")
	fs.StringVar(&cfg.Replay, "replay", cfg.Replay, "`endpoint` of rank 0's replay, or \"none\"; empty: as the engine says, else the events' port + 100")
	fs.StringVar(&cfg.Topic, "topic", cfg.Topic, "`prefix` of the topics to subscribe to; empty: all")
	fs.StringVar(&cfg.Model, "model", cfg.Model, "`name` that keys are made with; empty: the first model that the engine serves")
	fs.IntVar(&cfg.BlockSize, "block-size", cfg.BlockSize, "`tokens` in a block; 0: as the engine says")
	fs.StringVar(&cfg.Namespace, "namespace", cfg.Namespace, "`name` of the pod's namespace")
	fs.StringVar(&cfg.Pod, "pod", cfg.Pod, "`name` of the pod; empty: the host's name")
	fs.StringVar(&cfg.PodUID, "pod-uid", cfg.PodUID, "`id` of the pod, unique in its namespace; empty: its name")
	fs.StringVar(&cfg.PodIP, "pod-ip", cfg.PodIP, "IP `address` of the pod, to make -address of")
	fs.StringVar(&cfg.Address, "address", cfg.Address, "`host:port` that requests are sent to; empty: the engine's port on -pod-ip, else -engine")
	fs.Var((*labels)(&cfg.Labels), "label", "`key=value` to announce with the member, or several with commas between; may be repeated; kvscout.role, kvscout.workload and kvscout.gpu have a meaning")
	fs.StringVar(&cfg.StateDir, "state-dir", cfg.StateDir, "`folder`, an emptyDir of the pod, for a file that lets an agent which restarts alone go on where it was; empty: none")
	fs.DurationVar(&cfg.Audit, "audit", cfg.Audit, "`time` between two one-token requests to an idle engine that check whether a prefix believed held really is; each evicts at most two of the least used blocks; 0: none")
	fs.StringVar(&cfg.Listen, "listen", cfg.Listen, "`host:port` for /healthz, /readyz and /metrics; empty: none")
	fs.DurationVar(&cfg.Heartbeat, "heartbeat", cfg.Heartbeat, "`time` between two heartbeats to the schedulers, which doubt who misses three")
	fs.DurationVar(&cfg.Probe, "probe", cfg.Probe, "`time` between two looks at the engine's metrics")
	fs.String(settings.FileFlag, "", "`file` in YAML with settings, named like the flags; a flag or a variable wins over it")
	fs.TextVar(&level, "log-level", level, "`level`: debug, info, warn or error")
	fs.StringVar(&format, "log-format", format, "`form` of the log: text or json")
	show := fs.Bool("version", false, "print the version and end")
	fs.Usage = func() {
		fmt.Fprint(out, intro)
		fs.PrintDefaults()
	}

	if err := settings.Read(fs, args, getenv, "version"); err != nil {
		return cfg, err
	}
	if *show {
		fmt.Fprintln(out, "kvscout-agent", cfg.Version)
		return cfg, flag.ErrHelp
	}
	if fs.NArg() > 0 {
		return cfg, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	switch mode {
	case "connect", "bind":
		cfg.EventsBind = mode == "bind"
	default:
		return cfg, fmt.Errorf("-events-mode: %q is neither connect nor bind", mode)
	}
	options := &slog.HandlerOptions{Level: level}
	switch format {
	case "text":
		cfg.Log = slog.New(slog.NewTextHandler(out, options))
	case "json":
		cfg.Log = slog.New(slog.NewJSONHandler(out, options))
	default:
		return cfg, fmt.Errorf("-log-format: %q is neither text nor json", format)
	}
	return cfg, cfg.Validate()
}

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.Main.Version
	}
	return "unknown"
}

// labels are key=value pairs.
type labels map[string]string

func (l *labels) String() string {
	var pairs []string
	for _, key := range slices.Sorted(maps.Keys(*l)) {
		pairs = append(pairs, key+"="+(*l)[key])
	}
	return strings.Join(pairs, ",")
}

func (l *labels) Set(text string) error {
	for pair := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return fmt.Errorf("%.80q is not key=value", pair)
		}
		if *l == nil {
			*l = make(labels)
		}
		(*l)[key] = value
	}
	return nil
}
