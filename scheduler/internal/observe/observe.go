// Package observe leaves traces of calls and decisions for people and their
// tools: metrics, spans and log lines. It is told of each, decides nothing, and
// costs next to nothing where nobody looks. What can be read from other packages'
// Stats is not its business.
package observe

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/telemetry"
	"github.com/kvscout/kvscout/scheduler/internal/rpc"
)

// Observer is told of each call and answer.
type Observer struct {
	*calls
	decisions *decisions
	reports   metric.Int64Counter
	queued    metric.Float64Histogram
	lag       metric.Float64Histogram // of events
	requests  metric.Float64Histogram // of HTTP
	log       callLog
	spans     *spans
}

// durations in seconds, from a decision that is a lookup to an engine that
// renders.
var durations = []float64{
	.000001, .000002, .000005, .00001, .00002, .00005, .0001, .0002, .0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 50, 100,
}

// waits in seconds, for requests that wait for room.
var waits = []float64{.001, .01, .05, .1, .2, .5, 1, 2, 5, 10, 20, 50, 100, 300, 1000, 3600}

// New makes the instruments.
func New(t *telemetry.Telemetry, log *slog.Logger) (*Observer, error) {
	b := &builder{meter: t.Meters.Meter(telemetry.Scope)}
	lines := callLog{log.With("component", "calls")}
	o := &Observer{
		decisions: newDecisions(b),
		reports:   b.counter("kvscout.scheduler.reports", "{report}", "Reports by outcome."),
		queued:    b.seconds("kvscout.scheduler.queue.duration", "How long requests waited that got a place, 0 for those that did not have to.", waits),
		lag:       b.seconds("kvscout.scheduler.event.lag", "Time from an engine's stamp on its events to the index that has them, by the clocks of both machines.", telemetry.LagBuckets),
		requests:  b.seconds("http.server.request.duration", "Duration of HTTP requests that were answered, refused ones included.", durations),
		calls:     newCalls(b, lines),
		log:       lines,
		spans:     &spans{tracer: t.Tracers.Tracer(telemetry.Scope), propagator: t.Propagator},
	}
	return o, b.err
}

// Decided counts an answer, and records the spans of a request.
func (o *Observer) Decided(ctx context.Context, d rpc.Decided) {
	if trace.SpanFromContext(ctx).IsRecording() {
		o.spans.record(ctx, &d)
	}
	if d.Decision == nil {
		return
	}
	o.log.decided(ctx, &d)
	o.decisions.decided(ctx, &d)
	if d.Queues {
		o.queued.Record(ctx, d.Queued.Seconds())
	}
}

// Reported counts a report.
func (o *Observer) Reported(outcome api.Outcome) {
	o.reports.Add(context.Background(), 1, metric.WithAttributes(attribute.String(telemetry.LabelOutcome, outcomeName(outcome))))
}

// Served counts a request of HTTP, by OpenTelemetry's conventions for servers.
func (o *Observer) Served(ctx context.Context, method string, code int, took time.Duration) {
	o.requests.Record(ctx, took.Seconds(), metric.WithAttributes(
		attribute.String("http.request.method", method), attribute.Int("http.response.status_code", code)))
}

// outcomeName is the word for it in metrics, spans and logs.
func outcomeName(o api.Outcome) string {
	return strings.ToLower(strings.TrimPrefix(o.String(), "OUTCOME_"))
}

// Applied takes how long the events of a delta took from the engine to the index.
func (o *Observer) Applied(lag time.Duration) {
	o.lag.Record(context.Background(), telemetry.Lag(lag))
}

// builder makes instruments and keeps the first error.
type builder struct {
	meter metric.Meter
	err   error
}

func (b *builder) keep(err error) {
	if b.err == nil {
		b.err = err
	}
}

func (b *builder) counter(name, unit, help string) metric.Int64Counter {
	c, err := b.meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(help))
	b.keep(err)
	return c
}

func (b *builder) floatCounter(name, unit, help string) metric.Float64Counter {
	c, err := b.meter.Float64Counter(name, metric.WithUnit(unit), metric.WithDescription(help))
	b.keep(err)
	return c
}

func (b *builder) seconds(name, help string, bounds []float64) metric.Float64Histogram {
	h, err := b.meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(help),
		metric.WithExplicitBucketBoundaries(bounds...))
	b.keep(err)
	return h
}
