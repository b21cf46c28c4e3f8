package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/e2e/wire"
	"github.com/kvscout/kvscout/protocol/client"
)

const (
	model     = "fake"
	blockSize = 16
	// readyTime bounds the wait for the whole fleet at the start.
	readyTime = time.Minute
)

// fleet is a NATS server, a scheduler, and engines with their agents.
type fleet struct {
	o       options
	ctx     context.Context
	cancel  context.CancelFunc
	log     *slog.Logger
	logFile *os.File
	dir     string // of the agent's program
	program string
	http    *http.Client
	prompts []prompt
	load    *load

	nats    *broker.Broker
	bus     *wire.Proxy // between scheduler and NATS
	stage   *stage.Stage
	proxy   *client.Client
	members []*member
	resyncs float64 // of schedulers that are gone
}

func newFleet(ctx context.Context, o options) (*fleet, error) {
	f := &fleet{o: o, log: slog.New(slog.DiscardHandler), prompts: population(o.seed)}
	f.ctx, f.cancel = context.WithCancel(ctx)
	f.http = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8}}
	err := f.setUp()
	if err == nil {
		err = f.untilTrue(readyTime)
	}
	if err != nil {
		return nil, errors.Join(err, f.close())
	}
	f.load = newLoad(f)
	return f, nil
}

func (f *fleet) setUp() (err error) {
	if f.o.log != "" {
		if f.logFile, err = os.Create(f.o.log); err != nil {
			return err
		}
		f.log = slog.New(slog.NewTextHandler(f.logFile, nil))
	}
	if f.o.children {
		if f.dir, err = os.MkdirTemp("", "kvscout-chaos-"); err != nil {
			return err
		}
		f.program = filepath.Join(f.dir, "kvscout-agent")
		build := exec.CommandContext(f.ctx, "go", "build", "-o", f.program, "github.com/kvscout/kvscout/agent/cmd/kvscout-agent")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if text, err := build.CombinedOutput(); err != nil {
			return fmt.Errorf("build the agent: %w\n%s", err, text)
		}
	}
	if f.nats, err = broker.Open(); err != nil {
		return err
	}
	if f.bus, err = wire.New(f.nats.Address(), wire.NATS, nil); err != nil {
		return err
	}
	if f.stage, err = stage.New(f.ctx, stage.Options{NATS: "nats://" + f.bus.Addr(), Log: f.log}); err != nil {
		return err
	}
	if f.proxy, err = f.stage.Proxy(requestTime); err != nil {
		return err
	}
	for i := range f.o.engines {
		m, err := newMember(f, i)
		if m != nil {
			f.members = append(f.members, m)
		}
		if err != nil {
			return fmt.Errorf("member %d: %w", i, err)
		}
	}
	return nil
}

func (f *fleet) stopScheduler() {
	f.resyncs += f.counted()
	f.stage.StopScheduler()
}

// counted is how often the running scheduler has forgotten a cache state and asked
// for it again.
func (f *fleet) counted() (resyncs float64) {
	ctx, cancel := context.WithTimeout(f.ctx, time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+f.stage.Admin+"/metrics", nil)
	if err != nil {
		return 0
	}
	page, err := f.http.Do(req)
	if err != nil {
		return 0
	}
	defer page.Body.Close()
	text, _ := io.ReadAll(page.Body)
	for line := range strings.Lines(string(text)) {
		if labels, value, ok := strings.Cut(line, "} "); ok && strings.Contains(labels, `"resync"`) {
			v, _ := strconv.ParseFloat(strings.TrimSpace(value), 64)
			resyncs += v
		}
	}
	return resyncs
}

func (f *fleet) allResyncs() int { return int(f.counted() + f.resyncs) }

// close ends everything and gives what failed while it ran.
func (f *fleet) close() (err error) {
	if f.load != nil {
		f.load.close()
	}
	for _, m := range f.members {
		m.close()
	}
	if f.proxy != nil {
		err = f.proxy.Close()
	}
	if f.stage != nil {
		err = errors.Join(err, f.stage.Close())
	}
	if f.bus != nil {
		f.bus.Close()
	}
	if f.nats != nil {
		f.nats.Close()
	}
	f.cancel()
	f.http.CloseIdleConnections()
	if f.dir != "" {
		_ = os.RemoveAll(f.dir)
	}
	if f.logFile != nil {
		_ = f.logFile.Close()
	}
	return err
}
