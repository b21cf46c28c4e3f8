// Package agent is the sidecar of one engine as a library. It learns what the
// engine is, follows the events of each of its data-parallel ranks, keeps the
// mirror of each rank's cache, and publishes each as a member of the fleet.
// Everything it knows it has from the engine; a state file only bridges its own
// restarts, and counts when the engine has confirmed it. What vLLM
// says is read in room vllm, what its events add up to is kept in mirror, what
// schedulers are told is sent by publish: here the three are put together.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"github.com/kvscout/kvscout/agent/internal/publish"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/admin"
	"github.com/kvscout/kvscout/protocol/bus"
	"github.com/kvscout/kvscout/protocol/logging"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/protocol/telemetry"
)

// stopWait bounds what is left to do at the end.
const stopWait = 3 * time.Second

// Agent serves one engine process.
type Agent struct {
	tracers    trace.TracerProvider
	propagator propagation.TextMapPropagator
	cfg        Config
	limit      *logging.Limiter // in cfg.Log
	engine     *vllm.Engine
	watch      *watch
	conn       atomic.Pointer[nats.Conn]
	refused    *bus.Refusals
	admin      atomic.Pointer[net.Addr]
	audits     audits
	hungUp     atomic.Uint64 // connections for probes

	mu     sync.Mutex // guards ranks
	active map[*rank]*activity
}

// activity is what runs for one rank.
type activity struct {
	publisher *publish.Publisher
	saver     *saver // nil: nothing is kept
	stop      context.CancelFunc
}

// New checks the configuration.
func New(cfg Config) (*Agent, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	given := cfg
	cfg = cfg.withDefaults()
	limit := logging.Limit(cfg.Log.Handler())
	cfg.Log = slog.New(limit)
	cfg.logIdentity(given)
	engine, err := vllm.NewEngine(vllm.EngineConfig{URL: cfg.Engine, Key: cfg.EngineAPIKey, Within: cfg.ProbeTimeout})
	if err != nil {
		return nil, err
	}
	a := &Agent{cfg: cfg, limit: limit, engine: engine, active: make(map[*rank]*activity)}
	a.refused = newRefusals(cfg.Log.With("component", "nats"), cfg.Heartbeat)
	a.watch = &watch{cfg: &a.cfg, engine: engine, ranks: make(map[int]*rank), missing: make(map[int]int), over: make(map[int]vllm.Source)}
	return a, nil
}

// Run serves until ctx ends, then takes leave of the schedulers. Neither NATS
// nor the engine need be there; both may go and come back. It may be called
// once.
func (a *Agent) Run(ctx context.Context) (err error) {
	defer a.limit.Start()()
	defer a.engine.Close()
	tel, err := telemetry.New(ctx, telemetry.Config{Service: "kvscout-agent", Version: a.cfg.Version, Log: a.cfg.Log,
		Attributes: []attribute.KeyValue{attribute.String(telemetry.AttrInstance, a.cfg.Namespace+"/"+a.cfg.PodUID)}})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopWait)
		defer cancel()
		if e := tel.Shutdown(ctx); e != nil {
			a.cfg.Log.Warn("telemetry", "error", e)
		}
	}()
	a.tracers, a.propagator = tel.Tracers, tel.Propagator
	if err := a.meter(tel.Meters); err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	var listener net.Listener
	if a.cfg.AdminAddress != "" {
		if listener, err = net.Listen("tcp", a.cfg.AdminAddress); err != nil {
			return fmt.Errorf("listen for probes: %w", err)
		}
		defer listener.Close()
		addr := listener.Addr()
		a.admin.Store(&addr)
		a.cfg.Log.Info("serving probes", "address", addr.String())
	}
	conn, closed, err := openBus(&a.cfg, a.refused)
	if err != nil {
		return err
	}
	a.conn.Store(conn)
	defer func() {
		conn.Close()
		<-closed
	}()

	g, ctx := errgroup.WithContext(ctx)
	a.watch.start = func(n int, id identity, hits hitRule, source vllm.Source, now emptied) (*rank, error) {
		return a.start(ctx, g, n, id, hits, source, now)
	}
	a.watch.retire = a.retire
	g.Go(func() error { a.watch.run(ctx); return nil })
	g.Go(func() error { a.refused.Watch(ctx, conn); return nil })
	g.Go(func() error { a.watchAddress(ctx, conn); return nil })
	g.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case <-closed:
			return errors.New("the connection to NATS was closed for good")
		}
	})
	if a.cfg.Audit > 0 {
		g.Go(func() error { a.audit(ctx); return nil })
	}
	if listener != nil {
		server := admin.Server(a.handler(tel.Handler()), &a.hungUp)
		g.Go(func() error {
			if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("serve probes: %w", err)
			}
			return nil
		})
		g.Go(func() error {
			<-ctx.Done()
			return server.Close()
		})
	}
	return g.Wait()
}

// start follows one more rank.
func (a *Agent) start(ctx context.Context, g *errgroup.Group, n int, id identity, hits hitRule, source vllm.Source, now emptied) (*rank, error) {
	member, err := a.cfg.member(n)
	if err != nil {
		return nil, err
	}
	log := a.cfg.Log.With("member", member)
	r := newRank(n, member, id, log)
	r.follow(hits)
	r.engine = settings.RedactURLs(a.cfg.Engine)
	r.source = source
	r.describe(a.watch.info(n), "")
	r.emptied = now
	r.incarnation.reset = resetWatch{counted: now}
	if a.cfg.Audit > 0 {
		r.heads = new(heads)
	}
	var keep *saver
	var known *vllm.Mark
	if a.cfg.StateDir != "" {
		keep = newSaver(a.cfg.StateDir, r)
		known = keep.load(now)
	}
	r.tail, err = vllm.NewTail(vllm.TailConfig{
		Endpoint: source.Endpoint, Replay: source.Replay, Bind: a.cfg.EventsBind, Topic: a.cfg.Topic,
		Known: known, Sink: r, Log: log,
	})
	if err != nil {
		return nil, err
	}
	p, err := publish.New(publish.Config{
		Conn: a.conn.Load(), Pool: a.cfg.Pool, Member: member, CacheState: r, HeartbeatEvery: a.cfg.Heartbeat, Release: a.cfg.Version, Log: log,
		Sent: a.tracer(member),
	})
	if err != nil {
		return nil, err
	}
	r.wake = p.Wake
	ctx, stop := context.WithCancel(ctx)
	a.mu.Lock()
	a.active[r] = &activity{publisher: p, saver: keep, stop: stop}
	a.mu.Unlock()
	log.Info("following the engine", "events", source.Endpoint, "unusable", source.Unusable, "replay", source.Replay, "model", id.model)
	rest := make(chan struct{})
	g.Go(func() error {
		defer close(rest)
		r.tail.Run(ctx)
		return nil
	})
	if keep != nil {
		g.Go(func() error { keep.run(rest); return nil })
	}
	g.Go(func() error {
		if err := p.Run(ctx); err != nil {
			return fmt.Errorf("rank %d: %w", n, err)
		}
		return nil
	})
	return r, nil
}

// retire stops following a rank; its publisher takes leave.
func (a *Agent) retire(r *rank) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if act := a.active[r]; act != nil {
		act.stop()
		delete(a.active, r)
	}
}

// publisherStats are those of a rank's publisher.
func (a *Agent) publisherStats(r *rank) publish.Stats {
	a.mu.Lock()
	act := a.active[r]
	a.mu.Unlock()
	if act == nil {
		return publish.Stats{}
	}
	return act.publisher.Stats()
}

// opinions are what schedulers make of a rank.
func (a *Agent) opinions(r *rank) []publish.Opinion {
	a.mu.Lock()
	act := a.active[r]
	a.mu.Unlock()
	if act == nil {
		return nil
	}
	return act.publisher.Opinions()
}

// keeperOf keeps a rank's state file; nil when nobody does.
func (a *Agent) saverOf(r *rank) *saver {
	a.mu.Lock()
	defer a.mu.Unlock()
	if act := a.active[r]; act != nil {
		return act.saver
	}
	return nil
}

// AdminAddr is where /healthz, /readyz and /metrics are served; empty while
// they are not.
func (a *Agent) AdminAddr() string {
	if addr := a.admin.Load(); addr != nil {
		return (*addr).String()
	}
	return ""
}
