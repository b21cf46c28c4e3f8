// Command kvscout-scheduler runs the scheduler. What it can be told is in
// scheduler.Config.Flags.
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
	"syscall"

	"github.com/KimMachineGun/automemlimit/memlimit"

	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/scheduler"
)

const intro = `kvscout-scheduler knows which engine holds which KV cache blocks, and answers over
gRPC where a request should go. Without -nats-url it runs a NATS server of its
own, so that it is a complete system; the agents connect to -nats-address then.
On one machine it needs no flag at all:

  kvscout-scheduler
  kvscout-agent -nats-url nats://127.0.0.1:4222
  curl 127.0.0.1:9479/fleet

Each flag has an environment variable of the same name (-nats-url:
KVSCOUT_NATS_URL), and a line of that name in the file of -config (nats-url: ...).
A flag wins over its variable, a variable over the file, the file over the
default. The file is read again when it changes and on SIGHUP: what says "live"
below changes at once, anything else is refused and nothing is changed.
Times look like 500ms or 2s. The memory limit follows the container's; GOMEMLIMIT
overrides it. Metrics and traces go to OTEL_EXPORTER_OTLP_ENDPOINT when that is set.

Exit status: 0 after SIGINT or SIGTERM, 1 on failure, 2 for wrong usage.

`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	again := make(chan os.Signal, 1)
	signal.Notify(again, syscall.SIGHUP)
	code := run(ctx, os.Args[1:], os.Getenv, again, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run serves until ctx is done. A signal on again has the settings read again.
func run(ctx context.Context, args []string, getenv func(string) string, again <-chan os.Signal, stdout, stderr io.Writer) int {
	told, err := parse(args, getenv, stdout, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "kvscout-scheduler: %v\n", err)
		return 2
	}
	for _, text := range told.unknown {
		told.Log.Warn("unknown environment variable", "problem", text)
	}
	settings.Start(told.Log, "kvscout-scheduler", told.Settings())
	limitMemory(told.Config, memlimit.FromCgroup)
	s, err := scheduler.New(told.Config)
	if err == nil {
		err = serve(ctx, s, told, again, func() error {
			next, err := parse(args, getenv, io.Discard, io.Discard)
			if err != nil {
				return err
			}
			if next.format != told.format {
				return fmt.Errorf("log-format: %w", scheduler.ErrNotLive)
			}
			if err := s.Reload(next.Config); err != nil {
				return err
			}
			told.level.Set(next.level.Level())
			return nil
		})
	}
	if err != nil {
		told.Log.Error("scheduler ended", "error", err)
		return 1
	}
	return 0
}

// serve runs the scheduler, and follows its file meanwhile.
func serve(ctx context.Context, s *scheduler.Scheduler, told *told, again <-chan os.Signal, reload func() error) error {
	watching, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		settings.Watch(watching, told.file, again, told.Log, reload)
	}()
	err := s.Run(ctx)
	stop()
	<-done
	return err
}

// limitMemory lets the garbage collector keep the process within nine tenths of
// the container's memory. GOMEMLIMIT in the environment wins.
func limitMemory(cfg scheduler.Config, container memlimit.Provider) {
	limit, err := memlimit.Set(memlimit.WithProvider(container))
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

// told is what the command was told.
type told struct {
	scheduler.Config
	file   string // of settings; may be empty
	level  slog.LevelVar
	format string
	// unknown says of variables that begin like settings that they are none.
	unknown []string
}

// parse reads file, environment and flags. What was asked for instead of a run
// (help, version) it writes to stdout, and returns flag.ErrHelp.
func parse(args []string, getenv func(string) string, stdout, stderr io.Writer) (*told, error) {
	t := &told{Config: scheduler.Defaults(), format: "text"}
	t.Version = settings.Built().Version

	fs := flag.NewFlagSet("kvscout-scheduler", flag.ContinueOnError)
	fs.SetOutput(io.Discard) // errors are reported once, by run
	t.Flags(fs)
	fs.StringVar(&t.file, settings.FileFlag, "", "`file` in YAML with settings, named like the flags; a flag or a variable wins over it, and its changes are followed")
	fs.TextVar(&t.level, "log-level", &t.level, "`level`: debug, info, warn or error; live")
	fs.StringVar(&t.format, "log-format", t.format, "`format` of the log: text or json")
	show := fs.Bool("version", false, "print version, commit, date and Go version, and end")
	fs.Usage = func() {}
	if err := settings.Read(fs, args, getenv, "version"); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprint(stdout, intro)
			fs.SetOutput(stdout)
			fs.PrintDefaults()
		}
		return nil, err
	}
	if *show {
		fmt.Fprintln(stdout, "kvscout-scheduler", settings.Built())
		return nil, flag.ErrHelp
	}
	if fs.NArg() > 0 {
		return nil, fmt.Errorf("there is no argument %q; flags begin with -, and -help lists them", fs.Arg(0))
	}
	t.unknown = settings.Unknown(fs, os.Environ(), "version")
	options := &slog.HandlerOptions{Level: &t.level}
	switch t.format {
	case "text":
		t.Log = slog.New(slog.NewTextHandler(stderr, options))
	case "json":
		t.Log = slog.New(slog.NewJSONHandler(stderr, options))
	default:
		return nil, settings.Wrong(fs, "log-format", "%q is neither text nor json", t.format)
	}
	t.Told = []settings.Setting{{Name: settings.FileFlag, Value: t.file}, {Name: "log-level", Value: t.level.Level().String()}, {Name: "log-format", Value: t.format}}
	return t, t.Validate()
}
