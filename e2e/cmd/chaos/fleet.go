package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvscout/kvscout/e2e/wire"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler"
)

const (
	local     = "127.0.0.1:0"
	model     = "fake"
	blockSize = 16
	// readyTime bounds the wait for the whole fleet at the start.
	readyTime = 20 * time.Second
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

	nats      *server.Server
	natsPort  int
	bus       *wire.Proxy // between scheduler and NATS
	scheduler part
	grpc      string
	conn      *grpc.ClientConn
	members   []*member

	mu      sync.Mutex // guards what follows
	client  pb.SchedulerClient
	admin   string
	resyncs float64 // of schedulers that are gone
	errs    []error
}

// part is a piece that runs until it is stopped.
type part struct {
	cancel context.CancelFunc
	done   chan struct{}
}

func (p part) stop() {
	p.cancel()
	<-p.done
}

func (f *fleet) start(run func(context.Context) error) part {
	ctx, cancel := context.WithCancel(f.ctx)
	p := part{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		defer cancel()
		if err := run(ctx); err != nil && ctx.Err() == nil {
			f.failed(err)
		}
	}()
	return p
}

func (f *fleet) failed(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errs = append(f.errs, err)
}

func (f *fleet) err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Join(f.errs...)
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
	if err := f.startNATS(); err != nil {
		return err
	}
	if f.bus, err = wire.New(f.natsAddress(), wire.NATS, nil); err != nil {
		return err
	}
	if err := f.startScheduler(); err != nil {
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

func (f *fleet) natsAddress() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(f.natsPort)) }

func (f *fleet) startNATS() error {
	port := f.natsPort
	if port == 0 {
		port = server.RANDOM_PORT
	}
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: port, NoSigs: true, NoLog: true})
	if err != nil {
		return err
	}
	s.Start()
	if !s.ReadyForConnections(5 * time.Second) {
		s.Shutdown()
		return errors.New("NATS did not start")
	}
	f.nats, f.natsPort = s, s.Addr().(*net.TCPAddr).Port
	return nil
}

func (f *fleet) stopNATS() {
	if f.nats != nil {
		f.nats.Shutdown()
		f.nats.WaitForShutdown()
		f.nats = nil
	}
}

func (f *fleet) startScheduler() error {
	address := f.grpc
	if address == "" {
		address = local
	}
	s, err := scheduler.New(scheduler.Config{
		GRPCAddress: address, AdminAddress: local, NATSURL: "nats://" + f.bus.Addr(),
		StopWait: 200 * time.Millisecond, Log: f.log.With("part", "scheduler"),
	})
	if err != nil {
		return err
	}
	f.scheduler = f.start(s.Run)
	select {
	case <-s.Started():
	case <-f.scheduler.done:
		return errors.Join(errors.New("the scheduler did not start"), f.err())
	}
	addrs := s.Addrs()
	f.grpc = addrs.GRPC
	if f.conn, err = grpc.NewClient(addrs.GRPC, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.client, f.admin = pb.NewSchedulerClient(f.conn), addrs.Admin
	return nil
}

func (f *fleet) stopScheduler() {
	n := f.counted()
	f.mu.Lock()
	f.resyncs += n
	f.mu.Unlock()
	f.scheduler.stop()
	if f.conn != nil {
		_ = f.conn.Close()
	}
}

func (f *fleet) ask() pb.SchedulerClient {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.client
}

// counted is how often the running scheduler has forgotten a picture and asked
// for it again.
func (f *fleet) counted() (resyncs float64) {
	f.mu.Lock()
	admin := f.admin
	f.mu.Unlock()
	ctx, cancel := context.WithTimeout(f.ctx, time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+admin+"/metrics", nil)
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

func (f *fleet) allResyncs() int {
	n := f.counted()
	f.mu.Lock()
	defer f.mu.Unlock()
	return int(n + f.resyncs)
}

// close ends everything and gives what failed while it ran.
func (f *fleet) close() error {
	if f.load != nil {
		f.load.close()
	}
	for _, m := range f.members {
		m.close()
	}
	if f.scheduler.cancel != nil {
		f.scheduler.stop()
	}
	if f.conn != nil {
		_ = f.conn.Close()
	}
	if f.bus != nil {
		f.bus.Close()
	}
	f.stopNATS()
	f.cancel()
	f.http.CloseIdleConnections()
	if f.dir != "" {
		_ = os.RemoveAll(f.dir)
	}
	if f.logFile != nil {
		_ = f.logFile.Close()
	}
	return f.err()
}
