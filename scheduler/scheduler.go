// Package scheduler is the service as a library: it builds the packages below
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
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"golang.org/x/sync/errgroup"

	"github.com/kvscout/kvscout/protocol/kube"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/logging"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/protocol/telemetry"
	"github.com/kvscout/kvscout/scheduler/internal/books"
	"github.com/kvscout/kvscout/scheduler/internal/bus"
	"github.com/kvscout/kvscout/scheduler/internal/cluster"
	"github.com/kvscout/kvscout/scheduler/internal/extproc"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/gateway"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/ingest"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
	"github.com/kvscout/kvscout/scheduler/internal/membership"
	"github.com/kvscout/kvscout/scheduler/internal/observe"
	"github.com/kvscout/kvscout/scheduler/internal/outbox"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/predict"
	"github.com/kvscout/kvscout/scheduler/internal/profile"
	"github.com/kvscout/kvscout/scheduler/internal/replica"
	"github.com/kvscout/kvscout/scheduler/internal/rpc"
	"github.com/kvscout/kvscout/scheduler/internal/serve"
)

const (
	// maxWatchers bounds the open Watch streams.
	maxWatchers = 64
	// maxCalls bounds the calls under way.
	maxCalls = 16384
	// longestQueue of a model can be configured.
	longestQueue = 16384
	// tickEvery is how often the picker learns.
	tickEvery = 500 * time.Millisecond
	// pollEvery is how often readiness is polled for the health service.
	pollEvery = 50 * time.Millisecond
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
	books     *books.Books
	picker    *pick.Picker
	profiles  *profile.Files
	members   *membership.Membership
	kube      *kube.Client
	cluster   *cluster.Cluster // nil: Kubernetes is not asked
	intake    *intake.Intake
	rpc       *rpc.Service
	observer  *observe.Observer
	extproc   *extproc.Server
	gateway   *gateway.Gateway
	serving   serve.Config

	started chan struct{} // closed when addrs is set
	addrs   Addrs
	ingest  atomic.Pointer[ingest.Ingest] // nil before the bus is open
	replica atomic.Pointer[replica.Replica]
	bus     atomic.Pointer[bus.Bus]
	live    atomic.Pointer[Config] // as last reloaded
	running atomic.Bool
	// stopping is set when Run is to end.
	stopping atomic.Bool
	refused  atomic.Uint64 // connections

	reloading sync.Mutex // held by Reload
}

// Addrs are the addresses that are really bound.
type Addrs struct {
	serve.Addrs
	// NATS is that of the embedded server; empty when there is none.
	NATS string
}

// New checks the configuration and builds what it is made of.
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
		fleet:   fleet.New(fleet.Config{MaxMembers: cfg.MaxMembers, MaxDecisions: cfg.MaxDecisions, Grace: cfg.Grace, Seed: secret()}),
		index:   index.New(index.Config{MaxBytes: cfg.IndexBytes, MaxMembers: cfg.MaxMembers}),
	}
	s.live.Store(&cfg)
	transport, gateways, err := cfg.transport()
	if err != nil {
		return nil, err
	}
	s.predicted, s.outbox, s.books = predict.New(s.index), outbox.New(), books.New()
	if s.picker, err = pick.New(pick.Config{Fleet: s.fleet, Index: s.index, Predicted: s.predicted, Outbox: s.outbox, Books: s.books, Policies: cfg.policies(), Seed: rand.Uint64()}); err != nil {
		return nil, err
	}
	if s.members, err = membership.New(membership.Config{
		Pool: cfg.Pool, Fleet: s.fleet, Namespaces: cfg.Namespaces, Addresses: cfg.EngineAddresses, Here: cfg.natsHere(), Log: cfg.Log,
	}); err != nil {
		return nil, err
	}
	s.kube = cfg.kube()
	s.cluster = cfg.cluster(s.kube, s.review)
	if s.profiles, err = profile.Open(cfg.Profiles, s.picker.SetProfiles, cfg.Log); err != nil {
		return nil, err
	}
	engines, err := cfg.EngineTLS.Config()
	if err != nil {
		return nil, &settings.Error{Name: "engine-tls-ca", Why: err.Error(), Example: "/etc/kvscout/engine-ca.crt"}
	}
	s.intake = intake.New(intake.Config{
		Engines:    s.members.Engines,
		TLS:        engines,
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
	if s.observer, err = observe.New(s.telemetry, cfg.Log); err == nil {
		err = meter(s)
	}
	if err != nil {
		s.flush()
		return nil, err
	}
	s.rpc = rpc.New(rpc.Config{
		Intake:      s.intake,
		Picker:      s.picker,
		Fleet:       s.fleet,
		Ready:       s.ready,
		Self:        s.self,
		Books:       s.books,
		CallTimeout: cfg.CallTimeout,
		MaxWatchers: maxWatchers,
		MaxCalls:    maxCalls,
		Admission:   cfg.admission(),
		Operator:    serve.Operators(cfg.Operators),
		Warn:        s.members.Problem,
		Decided:     s.observer.Decided,
		Reported:    s.observer.Reported,
		Log:         cfg.Log.With("component", "rpc"),
	})
	s.serving = serve.Config{
		GRPCAddress: cfg.GRPCAddress, HTTPAddress: cfg.HTTPAddress, ExtProcAddress: cfg.ExtProcAddress, GatewayAddress: cfg.GatewayAddress, AdminAddress: cfg.AdminAddress,
		TLS: transport, ExtProcTLS: gateways, Refused: &s.refused,
		Service: s.rpc, People: s.admin(), Operators: cfg.openToPeople(), Observer: s.observer, Telemetry: s.telemetry,
		StopWait: func() time.Duration { return s.live.Load().StopWait },
		Log:      cfg.Log,
	}
	s.extproc = s.serving.Picker(s.fleet, cfg.gateway(), cfg.Log.With("component", "extproc"))
	s.serving.ExtProc = s.extproc
	if s.gateway, err = s.serving.OpenAI(s.fleet, s.takes, cfg.gateway(), engines, cfg.Log.With("component", "gateway")); err != nil {
		s.flush()
		return nil, err
	}
	s.serving.Gateway = s.gateway
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

// self is what operators are told of this scheduler.
func (s *Scheduler) self() *api.SchedulerState {
	_, why := s.readiness()
	return &api.SchedulerState{Name: s.cfg.instance(), Release: s.cfg.Version, Pool: s.cfg.Pool, Readiness: why, NatsConnected: s.linked()}
}

// ready tells whether the cache states are complete, or the wait for that is over.
func (s *Scheduler) ready() bool {
	in := s.ingest.Load()
	return in != nil && in.Ready()
}

// takes tells whether requests are to be sent here: not while it stops.
func (s *Scheduler) takes() bool { return s.ready() && !s.stopping.Load() }

// admit says why a member may not be one; nil: it may.
func (s *Scheduler) admit(i *fleet.Info) error {
	if err := s.members.Admit(i); err != nil || s.cluster == nil {
		return err
	}
	return s.cluster.Admit(i)
}

// withdrawn says whether a member is in service.
func (s *Scheduler) withdrawn(i *fleet.Info) fleet.Withdrawal {
	if s.cluster == nil {
		return fleet.InService
	}
	return s.cluster.Withdrawn(i)
}

// tokens tells whose token an agent shows; nil: nobody comes by one.
func (s *Scheduler) tokens() bus.Review {
	if s.cfg.NATSTokenAudience == "" {
		return nil
	}
	return func(ctx context.Context, token string) (bus.Pod, error) {
		t, err := cluster.Review(ctx, s.kube, s.cfg.NATSTokenAudience, token)
		if errors.Is(err, cluster.ErrToken) {
			err = fmt.Errorf("%w: %w", bus.ErrToken, err)
		}
		return bus.Pod{Namespace: t.Namespace, UID: t.UID, Expires: t.Expires}, err
	}
}

// review has all members judged anew, and cuts off the agents of pods that are gone.
func (s *Scheduler) review() {
	if b := s.bus.Load(); b != nil {
		b.CutPods(s.cluster.Gone)
	}
	if in := s.ingest.Load(); in != nil {
		in.Review()
	}
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

// Run serves until ctx is done, then stops in good order: calls under way are
// finished, as far as StopWait allows. Nothing of it is alive afterwards.
func (s *Scheduler) Run(ctx context.Context) error {
	if !s.running.CompareAndSwap(false, true) {
		return errors.New("scheduler: Run called twice")
	}
	defer s.limit.Start()()
	defer s.flush()
	defer s.intake.Close()
	defer s.kube.Close()

	server, err := serve.Listen(s.serving)
	if err != nil {
		return err
	}
	defer s.gateway.Close()
	defer server.Close()
	bus, err := bus.Open(s.cfg.bus(s.tokens()))
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
		Admit: s.admit, Withdrawn: s.withdrawn,
		Warn: s.members.Problem,
		Wait: s.cfg.ReadyWait,
		Deaf: bus.Deaf,
		Lag:  s.observer.Applied,
		Name: s.cfg.instance(), Release: s.cfg.Version,
		Log: s.cfg.Log.With("component", "ingest"),
	})
	if err != nil {
		return err
	}
	s.ingest.Store(in)
	others, err := replica.New(replica.Config{Conn: bus.Conn, Pool: s.cfg.Pool, Name: s.cfg.instance(),
		Fleet: s.fleet, Predicted: s.predicted, Outbox: s.outbox, Log: s.cfg.Log.With("component", "replica")})
	if err != nil {
		return err
	}
	s.replica.Store(others)

	s.addrs = Addrs{Addrs: server.Addrs(), NATS: bus.Address()}
	s.cfg.warnInsecure()
	s.members.Start(bus.Origins())
	close(s.started)
	s.cfg.Log.Info("scheduler started", "grpc", s.addrs.GRPC, "http", s.addrs.HTTP, "extproc", s.addrs.ExtProc, "gateway", s.addrs.Gateway, "admin", s.addrs.Admin, "pool", s.cfg.Pool,
		"nats", s.natsName(), "embedded", s.addrs.NATS != "")

	g, ctx := errgroup.WithContext(ctx)
	defer context.AfterFunc(ctx, func() { s.stopping.Store(true) })()
	g.Go(func() error { return in.Run(ctx) })
	g.Go(func() error { return others.Run(ctx) })
	g.Go(func() error { s.look(ctx, server); return nil })
	g.Go(func() error { return s.rpc.Run(ctx) })
	g.Go(func() error { s.profiles.Follow(ctx); return nil })
	g.Go(func() error { bus.Follow(ctx); return nil })
	g.Go(func() error { s.members.Run(ctx); return nil })
	if s.cluster != nil {
		g.Go(func() error { s.cluster.Run(ctx); return nil })
	}
	g.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case <-bus.Closed:
			return errors.New("the connection to NATS was closed for good")
		}
	})
	g.Go(func() error { return server.Run(ctx) })
	return g.Wait()
}

// look tells the server when it is ready and lets the picker learn.
func (s *Scheduler) look(ctx context.Context, server *serve.Server) {
	ready := false
	poll, tick := time.NewTicker(pollEvery), time.NewTicker(tickEvery)
	defer poll.Stop()
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.picker.Tick(now)
		case <-poll.C:
			if !ready && s.ready() {
				ready = true
				server.Ready()
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
