// Command kvscout-agent runs the agent beside an engine. Every flag can also be
// given as an environment variable; the flag wins.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/kvscout/kvscout/agent"
	"github.com/kvscout/kvscout/protocol/settings"
)

const intro = `kvscout-agent runs beside a vLLM engine, keeps an exact mirror of its KV cache and
publishes it over NATS. For an engine on this machine it needs to know where
NATS is, and nothing else:

  vllm serve MODEL --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq",
      "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
  kvscout-agent -nats-url nats://127.0.0.1:4222

Model, block size, ranks and adapters it learns from the engine, and since vLLM
0.31 also where the events are. Without a replay endpoint every lost connection
costs the whole cache state.

Each flag has an environment variable of the same name (-pod-uid:
KVSCOUT_POD_UID), and a line of that name in the file of -config (pod-uid: ...).
A flag wins over its variable, a variable over the file, the file over the default.
Times look like 500ms or 2s. The memory limit follows the container's; GOMEMLIMIT
overrides it. Metrics go to OTEL_EXPORTER_OTLP_ENDPOINT when that is set.

Exit status: 0 after SIGINT or SIGTERM, 1 on failure, 2 for wrong usage.

kvscout-agent inject puts agents into Kubernetes' manifests, kvscout-agent webhook
into pods as they are created; each has flags of its own, which -help lists.

`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	signal.Ignore(syscall.SIGHUP) // nothing can be read again; see the scheduler's
	code := run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	if len(args) > 0 {
		switch args[0] {
		case "inject":
			return runInject(args[1:], getenv, os.Stdin, stdout, stderr)
		case "webhook":
			return runWebhook(ctx, args[1:], getenv, stdout, stderr)
		}
	}
	program := &settings.Program{Name: "kvscout-agent", Intro: intro}
	cfg, err := parse(program, args, getenv, stdout, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "kvscout-agent: %v\n", err)
		return 2
	}
	program.Start(cfg.Settings())
	settings.LimitMemory(cfg.Log)
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

// parse makes a Config of flags, environment and file; see settings.Program.Read.
func parse(program *settings.Program, args []string, getenv func(string) string, stdout, stderr io.Writer) (agent.Config, error) {
	var cfg agent.Config
	var mode string
	fs := declare(&cfg, &mode)
	if err := program.Read(fs, args, getenv, stdout, stderr); err != nil {
		return cfg, err
	}
	cfg.Log = program.Log
	switch mode {
	case "connect", "bind":
		cfg.EventsBind = mode == "bind"
	default:
		return cfg, settings.Wrong(fs, "events-mode", "%q is neither connect nor bind", mode)
	}
	cfg.Told = slices.DeleteFunc(settings.Effective(fs, func(name, value string) string {
		switch name {
		case "nats-url", "engine":
			return settings.RedactURLs(value)
		case "engine-api-key":
			return settings.Secret(value)
		}
		return value
	}), func(s settings.Setting) bool { return s.Name == "version" })
	return cfg, cfg.Validate()
}

// declare the flags, which fill cfg and the mode of its events, and their
// defaults.
func declare(cfg *agent.Config, mode *string) *flag.FlagSet {
	*cfg = agent.Defaults()
	cfg.Version = settings.Built().Version
	cfg.AdminAddress = "127.0.0.1:9478"
	fs := flag.NewFlagSet("kvscout-agent", flag.ContinueOnError)
	fs.StringVar(&cfg.NATSURL, "nats-url", cfg.NATSURL, "`URL` of the NATS server, or several separated by commas; required")
	fs.StringVar(&cfg.NATSCredentials, "nats-credentials", cfg.NATSCredentials, "`file` with credentials for -nats-url")
	fs.StringVar(&cfg.NATSSeed, "nats-seed", cfg.NATSSeed, "`file` with the nkey seed for -nats-url")
	fs.StringVar(&cfg.NATSToken, "nats-token-file", cfg.NATSToken, "`file` with the pod's service-account token for -nats-url, of the scheduler's -nats-token-audience; read again for every connection")
	fs.StringVar(&cfg.NATSTLS.CA, "nats-tls-ca", cfg.NATSTLS.CA, "`file` with the CA of the NATS server's certificate; empty: the system's")
	fs.StringVar(&cfg.NATSTLS.Cert, "nats-tls-cert", cfg.NATSTLS.Cert, "`file` with the client certificate, if NATS requires one")
	fs.StringVar(&cfg.NATSTLS.Key, "nats-tls-key", cfg.NATSTLS.Key, "`file` with the private key of -nats-tls-cert")
	fs.StringVar(&cfg.Pool, "pool", cfg.Pool, "`name` of the pool of engines, as given to the scheduler")
	fs.StringVar(&cfg.Engine, "engine", cfg.Engine, "`URL` of the engine's HTTP server")
	fs.StringVar(&cfg.EngineAPIKey, "engine-api-key", cfg.EngineAPIKey, "`key` of the engine's API; better given by the environment variable")
	fs.StringVar(&cfg.EngineTLS.CA, "engine-tls-ca", cfg.EngineTLS.CA, "`file` with the CA of the engine's certificate, where -engine begins with https; empty: the system's")
	fs.StringVar(&cfg.EngineTLS.Name, "engine-tls-name", cfg.EngineTLS.Name, "`name` in the engine's certificate; empty: the host of -engine")
	fs.StringVar(&cfg.Events, "events", cfg.Events, "`endpoint` of rank 0's KV events, like tcp://127.0.0.1:5557; empty: as the engine reports, else port 5557 on its host")
	fs.StringVar(mode, "events-mode", "connect", "`mode` of -events: connect to it, or bind it for engines that connect")
	fs.StringVar(&cfg.Replay, "replay", cfg.Replay, "`endpoint` of rank 0's replay, or \"none\"; empty: as the engine reports, else the events' port + 100")
	fs.StringVar(&cfg.Topic, "topic", cfg.Topic, "`prefix` of the topics to subscribe to; empty: all")
	fs.StringVar(&cfg.Model, "model", cfg.Model, "`name` that keys are made with; empty: the first model that the engine serves")
	fs.IntVar(&cfg.BlockSize, "block-size", cfg.BlockSize, "`tokens` in a block; 0: as the engine reports")
	fs.StringVar(&cfg.Namespace, "namespace", cfg.Namespace, "`name` of the pod's namespace")
	fs.StringVar(&cfg.Pod, "pod", cfg.Pod, "`name` of the pod; empty: the host's name")
	fs.StringVar(&cfg.PodUID, "pod-uid", cfg.PodUID, "`id` of the pod, unique in its namespace; empty: its name")
	fs.StringVar(&cfg.PodIP, "pod-ip", cfg.PodIP, "IP `address` of the pod, to make -address of")
	fs.StringVar(&cfg.Address, "address", cfg.Address, "`host:port` that requests are sent to; empty: the engine's port on -pod-ip, else -engine")
	fs.Var((*labels)(&cfg.Labels), "label", "`key=value` to announce with the member, or several separated by commas; may be repeated; kvscout.role, kvscout.workload and kvscout.gpu have a meaning")
	fs.StringVar(&cfg.StateDir, "state-dir", cfg.StateDir, "`folder`, an emptyDir of the pod, for a file that lets an agent which restarts alone go on where it was; empty: none")
	fs.StringVar(&cfg.Speculative, "speculative", cfg.Speculative, "`method` of the engine's speculative decoding, as in its --speculative-config, or none; empty: as the engine reports, which it does in development mode")
	fs.IntVar(&cfg.AttentionChunk, "attention-chunk", cfg.AttentionChunk, "`tokens` of a chunk of chunked-local attention; 0: as the engine reports, likewise")
	fs.StringVar(&cfg.Groups, "groups", cfg.Groups, "`kinds` of the engine's KV-cache groups in its order: full, sliding:WINDOW, states, chunked, separated by commas; for vLLM 0.20 and 0.21, whose events do not tell them; empty: as they tell")
	fs.StringVar(&cfg.HashSeed, "hash-seed", cfg.HashSeed, "`text` of PYTHONHASHSEED in the engine's environment, to recompute its block hashes with where its events leave blocks out; empty: its default")
	fs.DurationVar(&cfg.Audit, "audit", cfg.Audit, "`time` between two one-token requests to an idle engine that check whether a prefix believed held really is; each evicts at most two of the least used blocks; 0: none")
	fs.StringVar(&cfg.AdminAddress, "admin-address", cfg.AdminAddress, "`host:port` for /healthz, /readyz, /believed, /metrics and /config; empty: none")
	fs.DurationVar(&cfg.Heartbeat, "heartbeat", cfg.Heartbeat, "`time` between two heartbeats to the schedulers, which suspect a member that misses three")
	fs.DurationVar(&cfg.Probe, "probe", cfg.Probe, "`time` between two looks at the engine's metrics")
	fs.DurationVar(&cfg.ProbeTimeout, "probe-timeout", cfg.ProbeTimeout, "`time` that the engine may take to answer a poll")
	fs.IntVar(&cfg.ProbeFailures, "probe-failures", cfg.ProbeFailures, "`number` of polls in a row without an answer after which the engine is not eligible")
	return fs
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
