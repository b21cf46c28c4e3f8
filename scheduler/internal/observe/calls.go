package observe

import (
	"context"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// calls measures what gRPC serves of ours, by OpenTelemetry's conventions for
// servers. otelgrpc could do that too, at a price that a decision notices.
type calls struct {
	log      callLog
	duration metric.Float64Histogram

	mu   sync.RWMutex // guards made
	made map[call][]metric.RecordOption
}

// call is what calls are told apart by: our methods and gRPC's codes.
type call struct {
	method string
	code   codes.Code
}

func newCalls(b *builder, log callLog) *calls {
	return &calls{
		log:      log,
		duration: b.seconds("rpc.server.call.duration", "Duration of calls that were served.", durations),
		made:     make(map[call][]metric.RecordOption),
	}
}

// Unary is the interceptor of calls.
func (c *calls) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	start := time.Now()
	resp, err := handle(ctx, req)
	c.record(ctx, info.FullMethod, start, err)
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		called(span, req, err)
	}
	c.log.called(ctx, info.FullMethod, req, err)
	return resp, err
}

// Stream is the interceptor of streams.
func (c *calls) Stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	start := time.Now()
	err := handle(srv, stream)
	c.record(stream.Context(), info.FullMethod, start, err)
	if span := trace.SpanFromContext(stream.Context()); err != nil && span.IsRecording() {
		span.RecordError(err)
	}
	return err
}

func (c *calls) record(ctx context.Context, method string, start time.Time, err error) {
	if !ours(method) {
		return // health checks and reflection
	}
	c.duration.Record(ctx, time.Since(start).Seconds(), c.options(call{method, status.Code(err)})...)
}

// ours tells whether a method is of our services.
func ours(method string) bool {
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	return service == api.Scheduler_ServiceDesc.ServiceName || service == api.Admin_ServiceDesc.ServiceName
}

func (c *calls) options(of call) []metric.RecordOption {
	c.mu.RLock()
	o, ok := c.made[of]
	c.mu.RUnlock()
	if ok {
		return o
	}
	o = []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(
		attribute.String("rpc.system.name", "grpc"),
		attribute.String("rpc.method", strings.TrimPrefix(of.method, "/")),
		attribute.String("rpc.response.status_code", codeName(of.code)),
	))}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.made[of] = o
	return o
}

// codeName is the code as gRPC's specification writes it.
func codeName(c codes.Code) string {
	names := [...]string{"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
		"ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
		"OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"}
	if int(c) < len(names) {
		return names[c]
	}
	return "UNKNOWN"
}
