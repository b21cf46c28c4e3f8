// Package scheduler is the service as a library: it builds the rooms below
// internal, connects them, and runs them. What a request or an event goes
// through is theirs; here are addresses, servers, and the order of start and
// stop.
package scheduler

import (
	"context"
	crypto "crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/logging"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/protocol/telemetry"
	"github.com/kvscout/kvscout/scheduler/internal/bus"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/ingest"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
	"github.com/kvscout/kvscout/scheduler/internal/outbox"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/predict"
	"github.com/kvscout/kvscout/scheduler/internal/replica"
	"github.com/kvscout/kvscout/scheduler/internal/rpc"
)

const (
	// maxWatchers bounds the open Watch streams.
	maxWatchers = 64
	// maxCalls bounds the calls under way, maxConnections the connections of
	// callers.
	maxCalls       = 16384
	maxConnections = 1024
	// longestQueue of a model and longestWait for room can be configured.
	longestQueue = 16384
	longestWait  = time.Hour
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
	limit     *logging.Limiter // in cfg.Log
	telemetry *telemetry.Telemetry
	fleet     *fleet.Fleet
	index     *index.Index
	predicted *predict.Blocks
	outbox    *outbox.Outbox
	picker    *pick.Picker
	profiles  *profiles
	spaces    *namespaces
	addresses *addresses
	intake    *intake.Intake
	rpc       *rpc.Service
	meters    *meters
	transport credentials.TransportCredentials
	age       time.Duration // of connections, by default connectionAge

	started chan struct{} // closed when addrs is set
	addrs   Addrs
	ingest  atomic.Pointer[ingest.Ingest] // nil before the bus is open
	replica atomic.Pointer[replica.Replica]
	bus     atomic.Pointer[bus.Bus]
	live    atomic.Pointer[Config] // as last reloaded
	running atomic.Bool
	refused atomic.Uint64 // connections

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
	limit := logging.Limit(cfg.Log.Handler())
	cfg.Log = slog.New(limit)
	s := &Scheduler{
		cfg:     cfg,
		limit:   limit,
		started: make(chan struct{}),
		age:     connectionAge,
		fleet:   fleet.New(fleet.Config{MaxMembers: cfg.MaxMembers, MaxDecisions: cfg.MaxDecisions, Grace: cfg.Grace, Seed: secret()}),
		index:   index.New(index.Config{MaxBytes: cfg.IndexBytes, MaxMembers: cfg.MaxMembers}),
	}
	s.live.Store(&cfg)
	var err error
	if s.transport, err = cfg.transport(); err != nil {
		return nil, err
	}
	s.predicted, s.outbox = predict.New(s.index), outbox.New()
	if s.picker, err = pick.New(pick.Config{Fleet: s.fleet, Index: s.index, Predicted: s.predicted, Outbox: s.outbox, Policies: cfg.policies(), Seed: rand.Uint64()}); err != nil {
		return nil, err
	}
	if s.spaces, err = newNamespaces(cfg.Namespaces, cfg.Log); err != nil {
		return nil, err
	}
	s.addresses = &addresses{log: cfg.Log, fleet: s.fleet, loopback: cfg.natsHere()}
	if s.addresses.allowed, err = parseAllowed(cfg.EngineAddresses); err != nil {
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
	s.telemetry, err = telemetry.New(context.Background(), telemetry.Config{Service: "kvscout-scheduler", Version: cfg.Version, Log: cfg.Log,
		Attributes: []attribute.KeyValue{attribute.String(telemetry.AttrInstance, cfg.instance())}})
	if err != nil {
		return nil, err
	}
	if s.meters, err = newMeters(s); err != nil {
		s.flush()
		return nil, err
	}
	s.rpc = rpc.New(rpc.Config{
		Intake:      s.intake,
		Picker:      s.picker,
		Fleet:       s.fleet,
		Ready:       s.ready,
		CallTimeout: cfg.CallTimeout,
		MaxWatchers: maxWatchers,
		MaxCalls:    maxCalls,
		Admission:   cfg.admission(),
		Operator:    cfg.operators(),
		Warn:        s.addresses.problem,
		Decided:     s.meters.decided,
		Reported:    s.meters.reported,
		Log:         cfg.Log.With("room", "rpc"),
	})
	return s, nil
}

// secret is a seed that nobody knows. The system's source never fails.
func secret() (seed [32]byte) {
	_, _ = crypto.Read(seed[:])
	return seed
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

// hears tells whether the bus is there and lets members be heard.
func (s *Scheduler) hears() bool {
	return s.linked() && !s.bus.Load().Deaf()
}

// errNotAllowed says that no engine of a model may be asked.
var errNotAllowed = errors.New("no engine of the model may be asked: none announces an address that its agent connects from, or that -engine-addresses allows")

// engines lists where engines of the model listen that may get the API key and
// prompts.
func (s *Scheduler) engines(model string) ([]string, error) {
	view := s.fleet.View()
	now := time.Now()
	var addresses []string
	kept := false
	for _, service := range view.Serving(model) {
		m := view.Members[service.Position]
		switch {
		case m.Info.Address == "" || m.Load.Sleeping || m.Load.Unreachable || view.Silent(m, now):
		case s.addresses.askable(m.Info):
			addresses = append(addresses, m.Info.Address)
		default:
			kept = true
		}
	}
	if kept && len(addresses) == 0 {
		return nil, errNotAllowed
	}
	return addresses, nil
}

// admit says why a member is not to be one; nil: it is.
func (s *Scheduler) admit(i *fleet.Info) error {
	if err := s.spaces.admit(s.cfg.Pool, i); err != nil {
		return err
	}
	return s.addresses.admit(i)
}

// Run serves until ctx is done, then stops in good order: calls under way are
// finished, as far as StopWait allows. Nothing of it is alive afterwards.
func (s *Scheduler) Run(ctx context.Context) error {
	if !s.running.CompareAndSwap(false, true) {
		return errors.New("scheduler: Run called twice")
	}
	defer s.limit.Start()()
	defer s.flush()
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
	defer people.Close()
	state, admin := newHealth(), s.admin()
	server := s.server(state)
	defer server.Stop()
	bus, err := bus.Open(s.cfg.bus())
	if err != nil {
		return err
	}
	defer bus.Close()
	s.bus.Store(bus)
	in, err := ingest.New(ingest.Config{
		Conn:  bus.Conn,
		Pool:  s.cfg.Pool,
		Index: s.index,
		Fleet: s.fleet,
		Admit: s.admit,
		Warn:  s.addresses.problem,
		Wait:  s.cfg.ReadyWait,
		Deaf:  bus.Deaf,
		Name:  s.cfg.instance(), Release: s.cfg.Version,
		Log: s.cfg.Log.With("room", "ingest"),
	})
	if err != nil {
		return err
	}
	s.ingest.Store(in)
	others, err := replica.New(replica.Config{Conn: bus.Conn, Pool: s.cfg.Pool, Name: s.cfg.instance(),
		Fleet: s.fleet, Predicted: s.predicted, Outbox: s.outbox, Log: s.cfg.Log.With("room", "replica")})
	if err != nil {
		return err
	}
	s.replica.Store(others)

	s.addrs = Addrs{GRPC: api.Addr().String(), Admin: people.Addr().String(), NATS: bus.Address()}
	s.cfg.warnInsecure()
	s.addresses.start(bus.Origins())
	close(s.started)
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
	g.Go(func() error { bus.Follow(ctx); return nil })
	g.Go(func() error { s.addresses.run(ctx); return nil })
	g.Go(func() error { s.spaces.run(ctx); return nil })
	g.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case <-bus.Closed:
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

// newHealth is a health service that says NOT_SERVING from the first call on;
// gRPC's own begins with SERVING.
func newHealth() *health.Server {
	state := health.NewServer()
	setHealth(state, healthpb.HealthCheckResponse_NOT_SERVING)
	return state
}

func setHealth(state *health.Server, status healthpb.HealthCheckResponse_ServingStatus) {
	state.SetServingStatus("", status)
	state.SetServingStatus(api.Scheduler_ServiceDesc.ServiceName, status)
}

// look keeps the health service up to date and lets the picker learn.
func (s *Scheduler) look(ctx context.Context, state *health.Server) {
	ready, failing := false, &leftOut{log: s.cfg.Log}
	look, tick := time.NewTicker(lookEvery), time.NewTicker(tickEvery)
	defer look.Stop()
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.picker.Tick(now)
			failing.look(s.fleet.View(), now)
		case <-look.C:
			if !ready && s.ready() {
				ready = true
				setHealth(state, healthpb.HealthCheckResponse_SERVING)
				s.cfg.Log.Info("scheduler ready", "members", s.fleet.Stats().Members)
			}
		}
	}
}

// instance is how people and other schedulers tell this process from others: its
// machine or pod, and the port that it serves.
func (c *Config) instance() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	_, port, _ := net.SplitHostPort(c.GRPCAddress)
	return net.JoinHostPort(host, port)
}

// natsName is the server's address without what is secret in it.
func (s *Scheduler) natsName() string {
	if s.addrs.NATS != "" {
		return s.addrs.NATS
	}
	return settings.RedactURLs(s.cfg.NATSURL)
}

// flush sends what is left to a collector, which may be gone: that is no
// failure of the scheduler.
func (s *Scheduler) flush() {
	ctx, cancel := context.WithTimeout(context.Background(), flushWait)
	defer cancel()
	if err := s.telemetry.Shutdown(ctx); err != nil {
		s.cfg.Log.Warn("the last telemetry was not sent", "error", err)
	}
}
