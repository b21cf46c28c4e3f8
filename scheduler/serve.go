package scheduler

import (
	"runtime"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc/filters"
	metricsoff "go.opentelemetry.io/otel/metric/noop"
	tracesoff "go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

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
	connectionGrace = longestWait + 30*time.Second
	// pingMin is the shortest interval in which a caller may ping.
	pingMin = 10 * time.Second
)

// server builds the gRPC server with all its services.
func (s *Scheduler) server(state *health.Server) *grpc.Server {
	server := grpc.NewServer(s.options()...)
	api.RegisterSchedulerServer(server, s.rpc)
	api.RegisterAdminServer(server, s.rpc)
	healthpb.RegisterHealthServer(server, state)
	reflection.Register(server)
	return server
}

func (s *Scheduler) options() []grpc.ServerOption {
	pool := &buffers{}
	options := []grpc.ServerOption{
		grpc.Creds(s.transport),
		experimental.BufferPool(pool),
		grpc.ForceServerCodecV2(codec{pool}),
		// A goroutine that lives on has grown its stack before.
		grpc.NumStreamWorkers(uint32(4 * runtime.GOMAXPROCS(0))),
		grpc.InitialWindowSize(window),
		grpc.InitialConnWindowSize(window),
		grpc.MaxRecvMsgSize(maxReceive),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingMin, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionAge:      s.age,
			MaxConnectionAgeGrace: connectionGrace,
		}),
		grpc.ChainUnaryInterceptor(s.meters.calls.unary, s.rpc.Unary),
		grpc.ChainStreamInterceptor(s.meters.calls.stream, s.rpc.Stream),
	}
	if _, off := s.telemetry.Tracers.(tracesoff.TracerProvider); !off {
		options = append(options, grpc.StatsHandler(otelgrpc.NewServerHandler(
			otelgrpc.WithTracerProvider(s.telemetry.Tracers),
			otelgrpc.WithMeterProvider(metricsoff.NewMeterProvider()), // calls counts
			otelgrpc.WithPropagators(s.telemetry.Propagator),
			otelgrpc.WithFilter(filters.Not(filters.HealthCheck())),
		)))
	}
	return options
}
