// Command kvscout-scheduler runs the scheduler. What it can be told is in
// scheduler.Config.Flags.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/scheduler"
)

const intro = `kvscout-scheduler knows which engine holds which KV cache blocks, and answers over
gRPC where a request should go. Without -nats-url it runs a NATS server of its
own, so that it is a complete system; the agents connect to -nats-address then.
On one machine it needs no flag at all:

  kvscout-scheduler
  kvscout-agent -nats-url nats://127.0.0.1:4222
  curl 127.0.0.1:9479/v1/members

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
	opt, err := parse(args, getenv, stdout, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "kvscout-scheduler: %v\n", err)
		return 2
	}
	opt.program.Start(opt.Settings())
	checkIndex(opt.Config, settings.LimitMemory(opt.Log))
	s, err := scheduler.New(opt.Config)
	if err == nil {
		err = serve(ctx, s, opt, again, func() error {
			next, err := parse(args, getenv, io.Discard, io.Discard)
			if err != nil {
				return err
			}
			if next.program.Format != opt.program.Format {
				return fmt.Errorf("log-format: %w", scheduler.ErrNotLive)
			}
			if err := s.Reload(next.Config); err != nil {
				return err
			}
			opt.program.Level.Set(next.program.Level.Level())
			return nil
		})
	}
	if err != nil {
		opt.Log.Error("scheduler ended", "error", err)
		return 1
	}
	return 0
}

// serve runs the scheduler, and follows its file meanwhile.
func serve(ctx context.Context, s *scheduler.Scheduler, opt *options, again <-chan os.Signal, reload func() error) error {
	watching, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		settings.Watch(watching, opt.program.File, again, opt.Log, reload)
	}()
	err := s.Run(ctx)
	stop()
	<-done
	return err
}

// checkIndex warns of an index that leaves too little of the memory to the rest.
func checkIndex(cfg scheduler.Config, limit int64) {
	if limit/2 < cfg.IndexBytes {
		cfg.Log.Warn("the index may take more than half of the memory: lower -index-memory or raise the container's limit",
			"limit", limit, "index", cfg.IndexBytes)
	}
}

// options are what the command was given.
type options struct {
	scheduler.Config
	program settings.Program
}

// parse reads file, environment and flags; see settings.Program.Read.
func parse(args []string, getenv func(string) string, stdout, stderr io.Writer) (*options, error) {
	t := &options{Config: scheduler.Defaults(), program: settings.Program{Name: "kvscout-scheduler", Intro: intro, Follows: true}}
	t.Version = settings.Built().Version
	fs := flag.NewFlagSet("kvscout-scheduler", flag.ContinueOnError)
	t.Flags(fs)
	p := &t.program
	if err := p.Read(fs, args, getenv, stdout, stderr); err != nil {
		return nil, err
	}
	t.Log = p.Log
	t.Told = []settings.Setting{{Name: settings.FileFlag, Value: p.File}, {Name: "log-level", Value: p.Level.Level().String()}, {Name: "log-format", Value: p.Format}}
	return t, t.Validate()
}
