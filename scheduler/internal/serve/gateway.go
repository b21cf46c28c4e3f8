package serve

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/telemetry"
	"github.com/kvscout/kvscout/scheduler/internal/extproc"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/gateway"
)

const (
	// liveness and readiness are what gateways ask the health of, besides the
	// service itself.
	liveness, readiness = "liveness", "readiness"
	// noticeWait is how long gateways may take to see that no new requests are
	// wanted, until when they are served.
	noticeWait = 3 * time.Second
	// gatewayPingMin is the shortest interval in which a gateway may ping: by that it
	// finds a scheduler that hangs.
	gatewayPingMin = time.Second
)

// Picker is what gateways ask, on the same steps as the API.
func (c *Config) Picker(fleet *fleet.Fleet, options extproc.Options, log *slog.Logger) *extproc.Server {
	return extproc.New(extproc.Config{
		Pick:    within(c, api.Scheduler_Pick_FullMethodName, c.Service.Place),
		Score:   within(c, api.Scheduler_Score_FullMethodName, c.Service.Score),
		Report:  within(c, api.Scheduler_Report_FullMethodName, c.Service.Report),
		Fleet:   fleet,
		Trace:   c.trace,
		Options: options,
		Log:     log,
	})
}

// OpenAI is the gateway for those who have none, on the same steps as the API.
func (c *Config) OpenAI(fleet *fleet.Fleet, ready func() bool, options extproc.Options, engines *tls.Config, log *slog.Logger) (*gateway.Gateway, error) {
	return gateway.New(gateway.Config{
		Scheduler: &here{
			pick:   within(c, api.Scheduler_Pick_FullMethodName, c.Service.Place),
			report: within(c, api.Scheduler_Report_FullMethodName, c.Service.Report),
		},
		Fleet: fleet, Ready: ready, Objectives: options.Objectives, Priority: options.Priority, TLS: engines, Log: log,
	})
}

// here is the API in this process, as far as the client library calls it.
type here struct {
	api.SchedulerClient
	pick   func(context.Context, *api.PickRequest) (*api.PickResponse, error)
	report func(context.Context, *api.ReportRequest) (*api.ReportResponse, error)
}

func (h *here) Pick(ctx context.Context, r *api.PickRequest, _ ...grpc.CallOption) (*api.PickResponse, error) {
	return h.pick(ctx, r)
}

func (h *here) Report(ctx context.Context, r *api.ReportRequest, _ ...grpc.CallOption) (*api.ReportResponse, error) {
	return h.report(ctx, r)
}

// trace continues a client's trace, as its request's headers tell it, by a span of
// its own where the gateway has said nothing of one. A gateway that keeps its spans
// to itself says that a trace is not sampled; the client knows.
func (c *Config) trace(ctx context.Context, headers map[string]string) (context.Context, func()) {
	client := trace.SpanContextFromContext(c.Telemetry.Propagator.Extract(context.Background(), propagation.MapCarrier(headers)))
	md, _ := metadata.FromIncomingContext(ctx)
	told := trace.SpanContextFromContext(c.Telemetry.Propagator.Extract(context.Background(), propagation.HeaderCarrier(http.Header{"Traceparent": md.Get("traceparent")})))
	if !client.IsValid() || told.IsValid() && (client.TraceID() != told.TraceID() || told.IsSampled()) {
		return ctx, func() {}
	}
	ctx, span := c.Telemetry.Tracers.Tracer(telemetry.Scope).Start(trace.ContextWithRemoteSpanContext(ctx, client), extproc.ServiceName+"/Process", trace.WithSpanKind(trace.SpanKindServer))
	return ctx, func() { span.End() }
}

// within makes a call of the API one of this process: limits, deadlines, errors,
// metrics and logs are the same, and nothing is copied.
func within[Q, A any](c *Config, method string, handle func(context.Context, *Q) (*A, error)) func(context.Context, *Q) (*A, error) {
	info := &grpc.UnaryServerInfo{FullMethod: method}
	call := func(ctx context.Context, req any) (any, error) { return handle(ctx, req.(*Q)) }
	for _, intercept := range slices.Backward(c.unary()) {
		inner := call
		call = func(ctx context.Context, req any) (any, error) { return intercept(ctx, req, info, inner) }
	}
	return func(ctx context.Context, req *Q) (*A, error) {
		resp, err := call(ctx, req)
		if err != nil {
			return nil, err
		}
		return resp.(*A), nil
	}
}

// newExtProc serves gateways.
func (s *Server) newExtProc() *grpc.Server {
	server := grpc.NewServer(append(s.cfg.Options(), creds(s.cfg.ExtProcTLS), grpc.MaxRecvMsgSize(extproc.MaxMessage),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: gatewayPingMin, PermitWithoutStream: true}))...)
	s.cfg.ExtProc.Register(server)
	healthpb.RegisterHealthServer(server, alive{s.health})
	return server
}

// alive is a health service that says besides that the process answers, whatever
// else it says.
type alive struct{ *health.Server }

func (a alive) Check(ctx context.Context, req *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	if req.GetService() == liveness {
		return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING}, nil
	}
	return a.Server.Check(ctx, req)
}
