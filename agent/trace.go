package agent

import (
	"context"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/kvscout/kvscout/protocol/telemetry"
)

// tracer records a span for each delta of a member and puts its context into
// the delta's header, so that a scheduler's decision can name what it stands
// on. nil: nobody records spans.
func (a *Agent) tracer(member string) func(epoch, sequence uint64, keys int, header nats.Header) {
	if _, off := a.tracers.(noop.TracerProvider); off || a.tracers == nil {
		return nil
	}
	tracer := a.tracers.Tracer(telemetry.Scope)
	return func(epoch, sequence uint64, keys int, header nats.Header) {
		ctx, span := tracer.Start(context.Background(), telemetry.SpanPublish, trace.WithSpanKind(trace.SpanKindProducer))
		defer span.End()
		if !span.IsRecording() {
			return // nobody could follow a link to it
		}
		span.SetAttributes(
			attribute.String(telemetry.AttrMember, member),
			attribute.String(telemetry.AttrEpoch, telemetry.Epoch(epoch)),
			attribute.Int64(telemetry.AttrSequence, int64(sequence)),
			attribute.Int(telemetry.AttrKeys, keys),
		)
		a.propagator.Inject(ctx, propagation.HeaderCarrier(header))
	}
}
