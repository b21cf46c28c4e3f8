package observe

import (
	"context"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/telemetry"
	"github.com/kvscout/kvscout/scheduler/internal/rpc"
)

// top is how many candidates a span names.
const top = 3

// spans records decisions. It is asked only where the call is traced.
type spans struct {
	tracer     trace.Tracer
	propagator propagation.TextMapPropagator
}

// record writes the spans of a request, whose parent is the call's.
func (s *spans) record(ctx context.Context, d *rpc.Decided) {
	trace.SpanFromContext(ctx).SetAttributes(asked(d.Request, d.Session)...)
	if _, ok := d.Request.GetPrompt().GetForm().(*api.Prompt_OpenaiBody); ok {
		s.part(ctx, telemetry.SpanTokenize, d.Start, d.Intake)
	}
	if d.Queued > 0 {
		s.part(ctx, telemetry.SpanWait, d.Start.Add(d.Intake), d.Queued)
	}
	if d.Decision != nil {
		s.decision(ctx, d)
	}
}

func (s *spans) part(ctx context.Context, name string, from time.Time, took time.Duration) {
	_, span := s.tracer.Start(ctx, name, trace.WithTimestamp(from))
	span.End(trace.WithTimestamp(from.Add(took)))
}

// asked is who asks, as far as the caller says so.
func asked(r *api.Request, session string) []attribute.KeyValue {
	var attributes []attribute.KeyValue
	for _, a := range [...]struct{ key, value string }{
		{telemetry.AttrRequest, r.GetRequestId()}, {telemetry.AttrSession, session}, {telemetry.AttrTenant, r.GetTenant()}, {telemetry.AttrModel, r.GetModel()},
	} {
		if a.value != "" {
			attributes = append(attributes, attribute.String(a.key, a.value))
		}
	}
	return attributes
}

// decision writes the span of a decision that was made.
func (s *spans) decision(ctx context.Context, d *rpc.Decided) {
	a := d.Decision
	first := &a.Candidates[0]
	state := &first.Member.CacheState
	names, costs, cached := make([]string, 0, top), make([]float64, 0, top), make([]int, 0, top)
	for i := range a.Candidates[:min(top, len(a.Candidates))] {
		c := &a.Candidates[i]
		names, costs, cached = append(names, c.Member.Info.Name), append(costs, c.Cost.Total), append(cached, c.Cached.Known())
	}
	attributes := []attribute.KeyValue{
		attribute.String(telemetry.AttrMethod, d.Method),
		attribute.String(telemetry.AttrDecision, a.ID),
		attribute.String(telemetry.AttrModel, a.Model),
		attribute.String(telemetry.AttrPolicy, a.Policy),
		attribute.String(telemetry.AttrReason, a.Why.String()),
		attribute.String(telemetry.AttrReceipt, a.Reason),
		attribute.String(telemetry.AttrFallbackReason, a.Fallback()),
		attribute.Int(telemetry.AttrPromptTokens, a.PromptTokens),
		attribute.Int(telemetry.AttrCachedTokens, first.Cached.Known()),
		attribute.Int(telemetry.AttrPredictedTokens, first.Cached.Predicted),
		attribute.Int(telemetry.AttrCandidates, a.Number),
		attribute.StringSlice(telemetry.AttrTop, names),
		attribute.Float64Slice(telemetry.AttrTopMS, costs),
		attribute.IntSlice(telemetry.AttrTopCached, cached),
		attribute.String(telemetry.AttrMember, first.Member.Info.Name),
		attribute.String(telemetry.AttrAddress, first.Member.Info.Address),
		attribute.String(telemetry.AttrTrust, strings.ToLower(state.Trust.String())),
		attribute.Int64(telemetry.AttrAge, int64(first.Age/time.Millisecond)),
		attribute.String(telemetry.AttrEpoch, telemetry.Epoch(state.Epoch)),
		attribute.Int64(telemetry.AttrSequence, int64(state.Sequence)),
	}
	if size := first.Member.Info.BlockSize; size > 0 {
		attributes = append(attributes, attribute.Int(telemetry.AttrDepth, first.Cached.Known()/size))
	}
	if a.Shadow.Policy != "" {
		attributes = append(attributes, attribute.String(telemetry.AttrShadow, a.Shadow.Policy), attribute.Bool(telemetry.AttrSame, a.Shadow.Same))
	}
	attributes = append(attributes, asked(d.Request, d.Session)...)
	options := []trace.SpanStartOption{trace.WithTimestamp(d.Start), trace.WithAttributes(attributes...)}
	if state.Trace != "" {
		change := trace.SpanContextFromContext(s.propagator.Extract(context.Background(), propagation.MapCarrier{"traceparent": state.Trace}))
		if change.IsValid() {
			options = append(options, trace.WithLinks(trace.Link{SpanContext: change, Attributes: []attribute.KeyValue{
				attribute.String(telemetry.AttrEpoch, telemetry.Epoch(state.Epoch)),
				attribute.Int64(telemetry.AttrSequence, int64(state.Sequence)),
			}}))
		}
	}
	_, span := s.tracer.Start(ctx, telemetry.SpanDecision, options...)
	span.End(trace.WithTimestamp(d.Start.Add(d.Took + d.Queued)))
}

// called says on the call's span whom it was about and why it failed.
func called(span trace.Span, req any, err error) {
	switch r := req.(type) {
	case *api.ReportRequest:
		for _, one := range r.GetReports() {
			if len(r.GetReports()) == 1 {
				span.SetAttributes(reported(one)...)
			} else {
				span.AddEvent("report", trace.WithAttributes(reported(one)...))
			}
		}
	case interface{ GetRequest() *api.Request }:
		if err != nil { // else the decision has said so
			span.SetAttributes(asked(r.GetRequest(), r.GetRequest().GetSessionId())...)
		}
	}
	if err != nil {
		span.RecordError(err)
	}
}

// reported is what became of a decision.
func reported(r *api.Report) []attribute.KeyValue {
	attributes := []attribute.KeyValue{
		attribute.String(telemetry.AttrDecision, r.GetDecisionId()), attribute.String(telemetry.AttrOutcome, outcomeName(r.GetOutcome())),
	}
	if r.GetMemberId() != "" {
		attributes = append(attributes, attribute.String(telemetry.AttrMember, r.GetMemberId()))
	}
	return attributes
}
