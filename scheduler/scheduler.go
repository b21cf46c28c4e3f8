// Package scheduler is the service as a library: it builds the rooms below
// internal, connects them, and runs them. What a request or an event goes
// through is theirs; here are addresses, servers, and the order of start and
// stop.
package scheduler

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/protocol/telemetry"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/ingest"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/replica"
	"github.com/kvscout/kvscout/scheduler/internal/rpc"
)

const (
	// maxWatchers bounds the open Watch streams.
	maxWatchers = 64
	// maxCalls bounds the calls under way, maxConnections the connections of
	// callers and maxPeople those of probes, collectors and people.
	maxCalls       = 16384
	maxConnections = 1024
	maxPeople      = 64
	// tickEvery is how often the picker learns.
	tickEvery = 500 * time.Millisecond
	// lookEvery is how often readiness is looked at for the health service.
	lookEvery = 50 * time.Millisecond
	// flushWait bounds the last export of telemetry.
	flushWait = 2 * time.Second
)

// Scheduler is one process of the service. It runs once.
type Scheduler struct {
	cfg       Config
	telemetry *telemetry.Telemetry
	fleet     *fleet.Fleet
	index     *index.Index
	picker    *pick.Picker
	profiles  *profiles
	intake    *intake.Intake
	rpc       *rpc.Service
	meters    *meters
	transport credentials.TransportCredentials

	started  chan struct{} // closed when addrs is set
	addrs    Addrs
	ingest   atomic.Pointer[ingest.Ingest] // nil before the bus is open
	replica  atomic.Pointer[replica.Replica]
	refusals atomic.Pointer[refusals]
	live     atomic.Pointer[Config] // as last reloaded
	running  atomic.Bool
	refused  atomic.Uint64 // connections

	reloading sync.Mutex // held by Reload
}

// Addrs are the addresses that are really bound.
type Addrs struct {
	GRPC, Admin string
	// NATS is that of the embedded server; empty when there is none.
	NATS string
}

// New checks the configuration and builds the rooms.
func New(cfg Config) (*Scheduler, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	cfg = cfg.withDefaults()
	s := &Scheduler{
		cfg:     cfg,
		started: make(chan struct{}),
		fleet:   fleet.New(fleet.Config{MaxMembers: cfg.MaxMembers, Grace: cfg.Grace, Instance: rand.Uint32()}),
		index:   index.New(index.Config{MaxBytes: cfg.IndexBytes, MaxMembers: cfg.MaxMembers}),
	}
	s.live.Store(&cfg)
	var err error
	if s.transport, err = cfg.transport(); err != nil {
		return nil, err
	}
	if s.picker, err = pick.New(pick.Config{Fleet: s.fleet, Index: s.index, Policy: cfg.Policy, Shadow: cfg.ShadowPolicy, Targets: cfg.targets(),
		Disaggregate: cfg.Disaggregate, PullMS: ms(cfg.PullTokenTime), Seed: rand.Uint64()}); err != nil {
		return nil, err
	}
	s.profiles = &profiles{path: cfg.Profiles, use: s.picker.SetProfiles, log: cfg.Log}
	if cfg.Profiles != "" {
		if err := s.profiles.load(); err != nil {
			return nil, err
		}
	}
	s.intake = intake.New(intake.Config{
		Engines:    s.engines,
		APIKey:     cfg.EngineAPIKey,
		Timeout:    cfg.TokenizeTimeout,
		CacheBytes: cfg.TokenizeCacheBytes,
		Sessions:   cfg.sessions(),
	})
	s.telemetry, err = telemetry.New(context.Background(), telemetry.Config{Service: "kvscout-scheduler", Version: cfg.Version})
	if err != nil {
		return nil, err
	}
	if s.meters, err = newMeters(s); err != nil {
		return nil, errors.Join(err, s.flush())
	}
	s.rpc = rpc.New(rpc.Config{
		Intake:      s.intake,
		Picker:      s.picker,
		Fleet:       s.fleet,
		Ready:       s.ready,
		Linked:      s.linked,
		CallTimeout: cfg.CallTimeout,
		MaxWatchers: maxWatchers,
		MaxCalls:    maxCalls,
		Line:        cfg.line(),
		Decided:     s.meters.decided,
		Reported:    s.meters.reported,
		Log:         cfg.Log.With("room", "rpc"),
	})
	return s, nil
}

// Started is closed when Run has bound all addresses.
func (s *Scheduler) Started() <-chan struct{} { return s.started }

// Addrs waits for the start. It must not be called without Run.
func (s *Scheduler) Addrs() Addrs {
	<-s.started
	return s.addrs
}

// ready tells whether the pictures are complete, or the wait for that is over.
func (s *Scheduler) ready() bool {
	in := s.ingest.Load()
	return in != nil && in.Ready()
}

// linked tells whether the bus is there.
func (s *Scheduler) linked() bool {
	in := s.ingest.Load()
	return in != nil && in.Connected()
}

// engines lists where engines of the model listen.
func (s *Scheduler) engines(model string) []string {
	view := s.fleet.View()
	now := time.Now()
	var addresses []string
	for _, service := range view.Serving(model) {
		m := view.Members[service.Position]
		if m.Info.Address != "" && !m.Load.Sleeping && !m.Load.Unreachable && !view.Silent(m, now) {
			addresses = append(addresses, m.Info.Address)
		}
	}
	return addresses
}

// Run serves until ctx is done, then stops in good order: calls under way are
// finished, as far as StopWait allows. Nothing of it is alive afterwards.
func (s *Scheduler) Run(ctx context.Context) (err error) {
	if !s.running.CompareAndSwap(false, true) {
		return errors.New("scheduler: Run called twice")
	}
	defer func() { err = errors.Join(err, s.flush()) }()
	defer s.intake.Close()

	api, err := net.Listen("tcp", s.cfg.GRPCAddress)
	if err != nil {
		return fmt.Errorf("gRPC address: %w", err)
	}
	api = &listener{Listener: api, limit: maxConnections, refused: &s.refused}
	defer api.Close()
	people, err := net.Listen("tcp", s.cfg.AdminAddress)
	if err != nil {
		return fmt.Errorf("admin address: %w", err)
	}
	people = &listener{Listener: people, limit: maxPeople, refused: &s.refused}
	defer people.Close()
	state, admin := health.NewServer(), s.admin()
	server := s.server(state)
	defer server.Stop()
	bus, err := openBus(&s.cfg)
	if err != nil {
		return err
	}
	defer bus.close()
	s.refusals.Store(bus.refused)
	in, err := ingest.New(ingest.Config{
		Conn:  bus.conn,
		Pool:  s.cfg.Pool,
		Index: s.index,
		Fleet: s.fleet,
		Wait:  s.cfg.ReadyWait,
		Log:   s.cfg.Log.With("room", "ingest"),
	})
	if err != nil {
		return err
	}
	s.ingest.Store(in)
	others, err := replica.New(replica.Config{Conn: bus.conn, Pool: s.cfg.Pool, Picker: s.picker, Log: s.cfg.Log.With("room", "replica")})
	if err != nil {
		return err
	}
	s.replica.Store(others)

	s.addrs = Addrs{GRPC: api.Addr().String(), Admin: people.Addr().String(), NATS: bus.address()}
	s.cfg.warnInsecure()
	close(s.started)
	s.logSettings()
	s.cfg.Log.Info("scheduler started", "grpc", s.addrs.GRPC, "admin", s.addrs.Admin, "pool", s.cfg.Pool,
		"nats", s.natsName(), "embedded", s.addrs.NATS != "")

	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return in.Run(ctx) })
	g.Go(func() error { return others.Run(ctx) })
	g.Go(func() error { s.look(ctx, state); return nil })
	g.Go(func() error { return s.rpc.Run(ctx) })
	if s.cfg.Profiles != "" {
		g.Go(func() error { s.profiles.follow(ctx); return nil })
	}
	g.Go(func() error { bus.follow(ctx); return nil })
	g.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case <-bus.closed:
			return errors.New("the connection to NATS was closed for good")
		}
	})
	g.Go(func() error {
		// A stop that comes before the start is no failure.
		if err := server.Serve(api); !errors.Is(err, grpc.ErrServerStopped) {
			return err
		}
		return nil
	})
	g.Go(func() error {
		if err := admin.Serve(people); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		s.cfg.Log.Info("scheduler stopping")
		state.Shutdown()
		s.rpc.Close()
		s.stop(server, admin)
		return nil
	})
	return g.Wait()
}

// stop ends both servers gracefully, or after StopWait at once.
func (s *Scheduler) stop(server *grpc.Server, admin *http.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), s.live.Load().StopWait)
	defer cancel()
	hard := context.AfterFunc(ctx, func() {
		s.cfg.Log.Warn("calls cut off", "after", s.live.Load().StopWait)
		server.Stop()
	})
	server.GracefulStop()
	hard()
	if err := admin.Shutdown(ctx); err != nil {
		admin.Close()
	}
}

// look keeps the health service up to date and lets the picker learn.
func (s *Scheduler) look(ctx context.Context, state *health.Server) {
	set := func(status healthpb.HealthCheckResponse_ServingStatus) {
		state.SetServingStatus("", status)
		state.SetServingStatus(pb.Scheduler_ServiceDesc.ServiceName, status)
	}
	ready := false
	set(healthpb.HealthCheckResponse_NOT_SERVING)
	look, tick := time.NewTicker(lookEvery), time.NewTicker(tickEvery)
	defer look.Stop()
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.picker.Tick(now)
		case <-look.C:
			if !ready && s.ready() {
				ready = true
				set(healthpb.HealthCheckResponse_SERVING)
				s.cfg.Log.Info("scheduler ready", "members", s.fleet.Stats().Members)
			}
		}
	}
}

// natsName is the server's address without what is secret in it.
func (s *Scheduler) natsName() string {
	if s.addrs.NATS != "" {
		return s.addrs.NATS
	}
	return settings.RedactURLs(s.cfg.NATSURL)
}

func (s *Scheduler) flush() error {
	ctx, cancel := context.WithTimeout(context.Background(), flushWait)
	defer cancel()
	return s.telemetry.Shutdown(ctx)
}
