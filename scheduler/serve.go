package scheduler

import (
	"fmt"
	"runtime"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc/filters"
	"google.golang.org/grpc"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/reflection"

	"github.com/kvscout/kvscout/protocol/pb"
)

const (
	// maxReceive has room for 2 million token ids in any form.
	maxReceive = 16 << 20
	// maxStreams of one connection at a time.
	maxStreams = 4096
	// connectionAge lets callers spread over replicas again; connectionGrace
	// is for what is under way then.
	connectionAge   = 30 * time.Minute
	connectionGrace = 30 * time.Second
	// pingMin is the shortest interval in which a caller may ping.
	pingMin = 10 * time.Second
)

// bufferExponents are the sizes of pooled message buffers, as powers of two.
// gRPC's own pool goes from 32 KiB to 1 MiB in one step and clears the whole
// buffer for each message, which is where prompts of more than 8,000 tokens are.
var bufferExponents = []uint8{8, 12, 14, 15, 16, 17, 18, 19, 20, 22, 24}

// server builds the gRPC server with all its services.
func (s *Scheduler) server(state *health.Server) (*grpc.Server, error) {
	buffers, err := mem.NewBinaryTieredBufferPool(bufferExponents...)
	if err != nil {
		return nil, fmt.Errorf("message buffers: %w", err)
	}
	server := grpc.NewServer(
		experimental.BufferPool(buffers),
		// A goroutine that lives on has grown its stack before.
		grpc.NumStreamWorkers(uint32(4*runtime.GOMAXPROCS(0))),
		grpc.MaxRecvMsgSize(maxReceive),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingMin, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionAge:      connectionAge,
			MaxConnectionAgeGrace: connectionGrace,
		}),
		grpc.ChainUnaryInterceptor(s.rpc.Unary),
		grpc.ChainStreamInterceptor(s.rpc.Stream),
		grpc.StatsHandler(otelgrpc.NewServerHandler(
			otelgrpc.WithMeterProvider(s.telemetry.Meters),
			otelgrpc.WithTracerProvider(s.telemetry.Tracers),
			otelgrpc.WithPropagators(s.telemetry.Propagator),
			otelgrpc.WithFilter(filters.Not(filters.HealthCheck())),
		)),
	)
	pb.RegisterSchedulerServer(server, s.rpc)
	healthpb.RegisterHealthServer(server, state)
	reflection.Register(server)
	return server, nil
}
