// Package serve serves the API by gRPC and HTTP/JSON, and the pages of people:
// it binds the addresses, bounds connections and messages, tells operators from
// other callers, and stops in good order. What is answered is others' business.
package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvscout/kvscout/protocol/admin"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/telemetry"
	"github.com/kvscout/kvscout/scheduler/internal/extproc"
	"github.com/kvscout/kvscout/scheduler/internal/gateway"
	"github.com/kvscout/kvscout/scheduler/internal/observe"
	"github.com/kvscout/kvscout/scheduler/internal/rpc"
)

const (
	// LongestWait of a call, which its connection has to outlive.
	LongestWait = time.Hour
	// maxConnections of callers.
	maxConnections = 1024
)

// Config of a Server. Addresses are host:port.
type Config struct {
	GRPCAddress, AdminAddress string
	HTTPAddress               string        // of the API as HTTP/JSON; empty: it is not served so
	ExtProcAddress            string        // of gateways; empty: they are not served
	GatewayAddress            string        // of clients of engines; empty: they are not served
	TLS                       *tls.Config   // of the API; nil: plain
	ExtProcTLS                *tls.Config   // of gateways; nil: plain
	Age                       time.Duration // of connections; 0: connectionAge
	Refused                   *atomic.Uint64
	Service                   *rpc.Service
	ExtProc                   *extproc.Server
	Gateway                   *gateway.Gateway
	// People are answered at AdminAddress. Operators: whoever reaches it may also ask
	// what is for operators besides the members, which all may see.
	People    http.Handler
	Operators bool
	Observer  *observe.Observer
	Telemetry *telemetry.Telemetry
	// StopWait bounds the graceful stop.
	StopWait func() time.Duration
	Log      *slog.Logger
}

// Addrs are the addresses that are really bound; empty ones are not served.
type Addrs struct{ GRPC, HTTP, ExtProc, Gateway, Admin string }

// Server of callers and people.
type Server struct {
	cfg    Config
	health *health.Server
	calls  []served // of callers, and of gateways
	web    *web
	openai *httpServer
	pages  net.Listener
	admin  *http.Server
}

// served is a gRPC server with where it listens.
type served struct {
	*grpc.Server
	net.Listener
}

// Listen binds all addresses. Until Run nobody is answered.
func Listen(cfg Config) (_ *Server, err error) {
	s := &Server{cfg: cfg, health: newHealth()}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	people, err := s.people()
	if err != nil {
		return nil, err
	}
	s.admin = admin.Server(people, cfg.Refused)
	if err := s.listen("gRPC", cfg.GRPCAddress, s.newGRPC()); err != nil {
		return nil, err
	}
	if cfg.ExtProcAddress != "" {
		if err := s.listen("external processing", cfg.ExtProcAddress, s.newExtProc()); err != nil {
			return nil, err
		}
	}
	if s.pages, err = net.Listen("tcp", cfg.AdminAddress); err != nil {
		return nil, fmt.Errorf("admin address: %w", err)
	}
	if s.web, err = s.newWeb(); err != nil {
		return nil, err
	}
	if s.openai, err = s.newOpenAI(); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *Server) listen(what, address string, server *grpc.Server) error {
	l, err := s.bind(what, address, maxConnections)
	if err != nil {
		server.Stop()
		return err
	}
	s.calls = append(s.calls, served{server, l})
	return nil
}

// bind listens, for so many connections at a time.
func (s *Server) bind(what, address string, limit int64) (net.Listener, error) {
	tcp, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%s address: %w", what, err)
	}
	return &listener{Listener: tcp, limit: limit, refused: s.cfg.Refused}, nil
}

// Addrs that are bound.
func (s *Server) Addrs() Addrs {
	a := Addrs{GRPC: s.calls[0].Addr().String(), HTTP: s.web.address(), Gateway: s.openai.address(), Admin: s.pages.Addr().String()}
	if len(s.calls) > 1 {
		a.ExtProc = s.calls[1].Addr().String()
	}
	return a
}

// Ready says from now on that this scheduler can be asked.
func (s *Server) Ready() { setHealth(s.health, healthpb.HealthCheckResponse_SERVING) }

// newHealth is a health service that says NOT_SERVING from the first call on;
// gRPC's own begins with SERVING.
func newHealth() *health.Server {
	state := health.NewServer()
	setHealth(state, healthpb.HealthCheckResponse_NOT_SERVING)
	return state
}

func setHealth(state *health.Server, status healthpb.HealthCheckResponse_ServingStatus) {
	for _, service := range []string{"", api.Scheduler_ServiceDesc.ServiceName, extproc.ServiceName, readiness} {
		state.SetServingStatus(service, status)
	}
}

// Run serves until ctx is done. Then calls under way are finished, as far as
// StopWait allows.
func (s *Server) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, c := range s.calls {
		g.Go(func() error {
			// A stop that comes before the start is no failure.
			if err := c.Serve(c.Listener); !errors.Is(err, grpc.ErrServerStopped) {
				return err
			}
			return nil
		})
	}
	g.Go(s.web.serve)
	g.Go(s.openai.serve)
	g.Go(func() error {
		if err := s.admin.Serve(s.pages); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		s.cfg.Log.Info("scheduler stopping")
		s.health.Shutdown()
		s.stop()
		return nil
	})
	return g.Wait()
}

// stop ends the servers gracefully, or after StopWait at once.
func (s *Server) stop() {
	within := s.cfg.StopWait()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	hard := context.AfterFunc(ctx, func() {
		s.cfg.Log.Warn("calls cut off", "after", within)
		for _, c := range s.calls {
			c.Stop()
		}
	})
	if s.cfg.ExtProcAddress != "" || s.cfg.GatewayAddress != "" {
		time.Sleep(min(noticeWait, within/2)) // gateways see that they are to ask others
	}
	s.cfg.Service.Close()
	var graceful sync.WaitGroup
	graceful.Go(func() { s.web.stop(ctx) })
	graceful.Go(func() { s.openai.stop(ctx) })
	for _, c := range s.calls {
		graceful.Go(c.GracefulStop)
	}
	graceful.Wait()
	hard()
	if err := s.admin.Shutdown(ctx); err != nil {
		s.admin.Close()
	}
}

// Close at once whatever is bound.
func (s *Server) Close() {
	for _, c := range s.calls {
		c.Stop()
		c.Close()
	}
	if s.pages != nil {
		s.pages.Close()
	}
	if s.web != nil {
		s.web.close()
	}
	if s.openai != nil {
		s.openai.close()
	}
}
