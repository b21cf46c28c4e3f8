package serve

import (
	"cmp"
	"crypto/tls"
	"runtime"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc/filters"
	metricsoff "go.opentelemetry.io/otel/metric/noop"
	tracesoff "go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/stats"

	"github.com/kvscout/kvscout/protocol/buffers"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	// maxReceive has room for 2 million token ids in any form.
	maxReceive = 16 << 20
	// window is what a connection may have under way, and a call of it: fixed,
	// as gRPC's own estimate of it costs pings.
	window = 1 << 20
	// maxStreams of one connection at a time.
	maxStreams = 4096
	// connectionAge lets callers spread over replicas again; connectionGrace
	// is for what is under way then, the longest wait for room included.
	connectionAge   = 30 * time.Minute
	connectionGrace = LongestWait + 30*time.Second
	// pingMin is the shortest interval in which a caller may ping.
	pingMin = 10 * time.Second
)

// newGRPC builds the gRPC server with all its services.
func (s *Server) newGRPC() *grpc.Server {
	server := grpc.NewServer(s.cfg.Options()...)
	s.register(server)
	reflection.Register(server)
	return server
}

// register the services with what serves them.
func (s *Server) register(r grpc.ServiceRegistrar) {
	api.RegisterSchedulerServer(r, s.cfg.Service)
	api.RegisterAdminServer(r, s.cfg.Service)
	healthpb.RegisterHealthServer(r, s.health)
}

// unary and streams are the interceptors of calls, the outermost first.
func (c *Config) unary() []grpc.UnaryServerInterceptor {
	return []grpc.UnaryServerInterceptor{c.Observer.Unary, c.Service.Unary}
}

func (c *Config) streams() []grpc.StreamServerInterceptor {
	return []grpc.StreamServerInterceptor{c.Observer.Stream, c.Service.Stream}
}

// stats makes spans of calls; nil: nobody looks at them.
func (c *Config) stats() stats.Handler {
	if _, off := c.Telemetry.Tracers.(tracesoff.TracerProvider); off {
		return nil
	}
	return otelgrpc.NewServerHandler(
		otelgrpc.WithTracerProvider(c.Telemetry.Tracers),
		otelgrpc.WithMeterProvider(metricsoff.NewMeterProvider()), // calls counts
		otelgrpc.WithPropagators(c.Telemetry.Propagator),
		otelgrpc.WithFilter(filters.Not(filters.HealthCheck())),
	)
}

// Options of the gRPC server.
func (c *Config) Options() []grpc.ServerOption {
	options := append(buffers.Server(),
		creds(c.TLS),
		// A goroutine that lives on has grown its stack before.
		grpc.NumStreamWorkers(uint32(4*runtime.GOMAXPROCS(0))),
		grpc.InitialWindowSize(window),
		grpc.InitialConnWindowSize(window),
		grpc.MaxRecvMsgSize(maxReceive),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingMin, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionAge:      cmp.Or(c.Age, connectionAge),
			MaxConnectionAgeGrace: connectionGrace,
		}),
		grpc.ChainUnaryInterceptor(c.unary()...),
		grpc.ChainStreamInterceptor(c.streams()...),
	)
	if handler := c.stats(); handler != nil {
		options = append(options, grpc.StatsHandler(handler))
	}
	return options
}

func creds(served *tls.Config) grpc.ServerOption {
	if served == nil {
		return grpc.Creds(insecure.NewCredentials())
	}
	return grpc.Creds(credentials.NewTLS(served))
}
