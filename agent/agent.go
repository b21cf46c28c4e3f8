// Package agent is the sidecar of one engine as a library: its configuration,
// its connections and what it shows to people. The watch finds out what the
// engine is and which data-parallel ranks it has; each rank follows the events
// of one, keeps the mirror of its cache and publishes it as a member of the
// fleet. Everything that the agent knows it has from the engine; a state file
// only bridges its own restarts, and counts when the engine has confirmed it.
package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"github.com/kvscout/kvscout/agent/internal/publish"
	"github.com/kvscout/kvscout/agent/internal/rank"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/agent/internal/watch"
	"github.com/kvscout/kvscout/protocol/admin"
	"github.com/kvscout/kvscout/protocol/bus"
	"github.com/kvscout/kvscout/protocol/logging"
	"github.com/kvscout/kvscout/protocol/pb"
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
	watch      *watch.Watch
	conn       atomic.Pointer[nats.Conn]
	refused    *bus.Refusals
	admin      atomic.Pointer[net.Addr]
	hungUp     atomic.Uint64           // connections for probes
	lags       metric.Float64Histogram // of events, by rank
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
	trust, err := cfg.EngineTLS.Config()
	if err != nil {
		return nil, &settings.Error{Name: "engine-tls-ca", Why: err.Error(), Example: "/etc/kvscout/engine-ca.crt"}
	}
	engine, err := vllm.NewEngine(vllm.EngineConfig{URL: cfg.Engine, Key: cfg.EngineAPIKey, TLS: trust, Within: cfg.ProbeTimeout})
	if err != nil {
		return nil, err
	}
	groups, err := rank.ParseGroups(cfg.Groups)
	if err != nil {
		return nil, err
	}
	return &Agent{
		cfg: cfg, limit: limit, engine: engine, refused: newRefusals(cfg.Log.With("component", "nats"), cfg.Heartbeat),
		watch: watch.New(watch.Config{
			Engine: engine, URL: settings.RedactURLs(cfg.Engine), Every: cfg.Probe, Failures: cfg.ProbeFailures, Audit: cfg.Audit,
			Events: cfg.Events, Replay: cfg.Replay, EventsBind: cfg.EventsBind, Model: cfg.Model, BlockSize: cfg.BlockSize,
			Hits: rank.HitSettings{Speculative: cfg.Speculative, AttentionChunk: cfg.AttentionChunk, HashSeed: cfg.HashSeed, Groups: groups},
			Member: &pb.MemberInfo{
				Namespace: cfg.Namespace, Pod: cfg.Pod, PodUid: cfg.PodUID, Labels: cfg.Labels, Address: cmp.Or(cfg.Address, engine.Address()), Tls: engine.TLS(),
			},
			Log: cfg.Log,
		}),
	}, nil
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
	g.Go(func() error { return a.watch.Run(ctx, a.open) })
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

// open makes a rank of what the watch has found of it.
func (a *Agent) open(found rank.Config) (*rank.Rank, error) {
	member, err := a.cfg.member(found.Number)
	if err != nil {
		return nil, err
	}
	found.Member, found.StateDir, found.Log = member, a.cfg.StateDir, a.cfg.Log.With("member", member)
	found.Tail.Topic, found.Lag = a.cfg.Topic, a.lag(found.Number)
	found.Publish = publish.Config{
		Conn: a.conn.Load(), Pool: a.cfg.Pool, HeartbeatEvery: a.cfg.Heartbeat, Release: a.cfg.Version, Sent: a.tracer(member),
	}
	return rank.New(found)
}

// AdminAddr is where /healthz, /readyz and /metrics are served; empty while
// they are not.
func (a *Agent) AdminAddr() string {
	if addr := a.admin.Load(); addr != nil {
		return (*addr).String()
	}
	return ""
}
