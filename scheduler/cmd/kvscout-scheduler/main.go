// Command kvscout-scheduler runs the scheduler. Every flag can also be given
// as an environment variable; the flag wins.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"

	"github.com/KimMachineGun/automemlimit/memlimit"

	"github.com/kvscout/kvscout/scheduler"
)

const intro = `kvscout-scheduler knows which engine holds which KV cache blocks, and answers over
gRPC where a request should go. Without -nats-url it runs a NATS server of its
own, so that it is a complete system; the agents connect to -nats-address then.
On one machine it needs no flag at all:

  kvscout-scheduler
  kvscout-agent -nats nats://127.0.0.1:4222
  curl 127.0.0.1:9090/fleet

Each flag has an environment variable of the same name (-nats-url:
KVSCOUT_NATS_URL). A flag wins over its variable, a variable over the default.
Times look like 500ms or 2s. The memory limit follows the container's; GOMEMLIMIT
overrides it. Metrics and traces go to OTEL_EXPORTER_OTLP_ENDPOINT when that is set.

Exit status: 0 after SIGINT or SIGTERM, 1 on failure, 2 for wrong usage.

`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	cfg, err := parse(args, getenv, stdout, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "kvscout-scheduler: %v\nSee kvscout-scheduler -help.\n", err)
		return 2
	}
	limitMemory(cfg)
	s, err := scheduler.New(cfg)
	if err == nil {
		err = s.Run(ctx)
	}
	if err != nil {
		cfg.Log.Error("scheduler ended", "error", err)
		return 1
	}
	return 0
}

// limitMemory lets the garbage collector keep the process within nine tenths of
// the container's memory. GOMEMLIMIT in the environment wins.
func limitMemory(cfg scheduler.Config) {
	limit, err := memlimit.Set()
	switch {
	case err != nil:
		cfg.Log.Warn("the container's memory limit is not known", "error", err)
	case limit == math.MaxInt64:
	case limit/2 < cfg.IndexBytes:
		cfg.Log.Warn("the index may take more than half of the memory: lower -index-memory or raise the container's limit",
			"limit", limit, "index", cfg.IndexBytes)
	default:
		cfg.Log.Info("memory limit", "bytes", limit)
	}
}

// parse makes a Config of flags and environment. What was asked for instead of
// a run (help, version) it writes to stdout, and returns flag.ErrHelp.
func parse(args []string, getenv func(string) string, stdout, stderr io.Writer) (scheduler.Config, error) {
	cfg := scheduler.Defaults()
	cfg.Version = version()
	level, format := slog.LevelInfo, "text"

	fs := flag.NewFlagSet("kvscout-scheduler", flag.ContinueOnError)
	fs.SetOutput(io.Discard) // errors are reported once, by run
	fs.StringVar(&cfg.Pool, "pool", cfg.Pool, "`name` of the pool of engines to serve, as given to the agents")
	fs.StringVar(&cfg.GRPCAddress, "grpc-address", cfg.GRPCAddress, "`host:port` to serve the gRPC API on")
	fs.StringVar(&cfg.AdminAddress, "admin-address", cfg.AdminAddress, "`host:port` for /healthz, /readyz, /metrics and /fleet")
	fs.StringVar(&cfg.NATSURL, "nats-url", cfg.NATSURL, "`URL` of the NATS server to use, or several with commas between; empty: an embedded one")
	fs.StringVar(&cfg.NATSCredentials, "nats-credentials", cfg.NATSCredentials, "`file` with credentials for -nats-url")
	fs.StringVar(&cfg.NATSAddress, "nats-address", cfg.NATSAddress, "`host:port` of the embedded NATS server, for the agents")
	fs.StringVar(&cfg.NATSSeed, "nats-seed", cfg.NATSSeed, "`file` with the nkey seed for -nats-url")
	fs.StringVar(&cfg.NATSUsers, "nats-users", cfg.NATSUsers, "`file` that says who may use the embedded NATS server, and for what; empty: everybody")
	fs.StringVar(&cfg.NATSTLS.Cert, "nats-tls-cert", cfg.NATSTLS.Cert, "`file` with the certificate of the embedded NATS server, or for -nats-url")
	fs.StringVar(&cfg.NATSTLS.Key, "nats-tls-key", cfg.NATSTLS.Key, "`file` with the private key of -nats-tls-cert")
	fs.StringVar(&cfg.NATSTLS.CA, "nats-tls-ca", cfg.NATSTLS.CA, "`file` with the CA of the agents' certificates, which they must have then; with -nats-url of the server's")
	fs.StringVar(&cfg.GRPCTLS.Cert, "grpc-tls-cert", cfg.GRPCTLS.Cert, "`file` with the certificate of the gRPC API; empty: plain")
	fs.StringVar(&cfg.GRPCTLS.Key, "grpc-tls-key", cfg.GRPCTLS.Key, "`file` with the private key of -grpc-tls-cert")
	fs.StringVar(&cfg.GRPCTLS.CA, "grpc-tls-ca", cfg.GRPCTLS.CA, "`file` with the CA of the callers' certificates, which they must have then; empty: callers need none")
	fs.BoolVar(&cfg.Insecure, "insecure", cfg.Insecure, "serve gRPC and NATS beyond this machine without TLS, and NATS without users")
	fs.StringVar(&cfg.Policy, "policy", cfg.Policy, "scoring policy of requests that `name` none; empty: by predicted time")
	fs.StringVar(&cfg.ShadowPolicy, "shadow-policy", cfg.ShadowPolicy, "`name` of a second policy that is asked about every request and does not decide; what it would have changed is counted; empty: none")
	fs.Var((*size)(&cfg.IndexBytes), "index-memory", "`bytes` that the index may take, like 512MiB")
	fs.IntVar(&cfg.MaxMembers, "max-members", cfg.MaxMembers, "largest `number` of members at a time")
	fs.DurationVar(&cfg.Grace, "grace", cfg.Grace, "`time` after which a silent member is forgotten")
	fs.DurationVar(&cfg.ReadyWait, "ready-wait", cfg.ReadyWait, "longest `time` to wait for exact pictures before being ready")
	fs.StringVar(&cfg.EngineAPIKey, "engine-api-key", cfg.EngineAPIKey, "`key` for asking engines to render and tokenize; better given by the environment")
	fs.DurationVar(&cfg.TokenizeTimeout, "tokenize-timeout", cfg.TokenizeTimeout, "longest `time` for turning text into tokens")
	fs.Var((*size)(&cfg.TokenizeCacheBytes), "tokenize-cache", "`bytes` for prompts that were turned into tokens")
	fs.DurationVar(&cfg.CallTimeout, "call-timeout", cfg.CallTimeout, "`time` for calls that have no deadline of their own")
	fs.DurationVar(&cfg.StopWait, "stop-wait", cfg.StopWait, "longest `time` for a graceful stop")
	fs.TextVar(&level, "log-level", level, "`level`: debug, info, warn or error")
	fs.StringVar(&format, "log-format", format, "`form` of the log: text or json")
	show := fs.Bool("version", false, "print the version and end")
	usage := func() {
		fmt.Fprint(stdout, intro)
		fs.SetOutput(stdout)
		fs.PrintDefaults()
	}

	var errs []error
	fs.VisitAll(func(f *flag.Flag) {
		name := variable(f.Name)
		if v := getenv(name); v != "" && f.Name != "version" {
			if err := fs.Set(f.Name, v); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", name, err))
			}
		}
	})
	if err := errors.Join(errs...); err != nil {
		return cfg, err
	}
	fs.Usage = func() {}
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			usage()
		}
		return cfg, err
	}
	if *show {
		fmt.Fprintln(stdout, "kvscout-scheduler", cfg.Version)
		return cfg, flag.ErrHelp
	}
	if fs.NArg() > 0 {
		return cfg, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	options := &slog.HandlerOptions{Level: level}
	switch format {
	case "text":
		cfg.Log = slog.New(slog.NewTextHandler(stderr, options))
	case "json":
		cfg.Log = slog.New(slog.NewJSONHandler(stderr, options))
	default:
		return cfg, fmt.Errorf("-log-format: %q is neither text nor json", format)
	}
	return cfg, cfg.Validate()
}

// variable is the environment variable of a flag.
func variable(flag string) string {
	return "KVSCOUT_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.Main.Version
	}
	return "unknown"
}

// size is a number of bytes with an optional unit.
type size int64

var units = []struct {
	name  string
	shift int
}{{"GiB", 30}, {"MiB", 20}, {"KiB", 10}, {"", 0}}

func (s *size) String() string {
	for _, u := range units {
		if n := int64(*s); n != 0 && n%(1<<u.shift) == 0 {
			return strconv.FormatInt(n>>u.shift, 10) + u.name
		}
	}
	return "0"
}

func (s *size) Set(text string) error {
	shift := 0
	for _, u := range units {
		if digits, ok := strings.CutSuffix(text, u.name); ok {
			text, shift = digits, u.shift
			break
		}
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < -1 || n > math.MaxInt64>>shift {
		return errors.New("want a number of bytes like 1073741824, 512MiB or 1GiB")
	}
	*s = size(n << shift)
	return nil
}
