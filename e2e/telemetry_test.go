package e2e

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	prommodel "github.com/prometheus/common/model"
	metricspb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	tracespb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/journal"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler"
)

// receiver is what OTLP is sent to.
type receiver struct {
	tracespb.UnimplementedTraceServiceServer
	address string

	mu      sync.Mutex // guards what follows
	spans   []*tracepb.Span
	metrics map[string]bool
	// instances are the service.instance.id that spans came from, by service.
	instances map[string]string
}

func (r *receiver) Export(_ context.Context, req *tracespb.ExportTraceServiceRequest) (*tracespb.ExportTraceServiceResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, resource := range req.GetResourceSpans() {
		about := make(map[string]string)
		for _, kv := range resource.GetResource().GetAttributes() {
			about[kv.GetKey()] = kv.GetValue().GetStringValue()
		}
		r.instances[about["service.name"]] = about["service.instance.id"]
		for _, scope := range resource.GetScopeSpans() {
			r.spans = append(r.spans, scope.GetSpans()...)
		}
	}
	return &tracespb.ExportTraceServiceResponse{}, nil
}

func (r *receiver) named(name string) []*tracepb.Span {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []*tracepb.Span
	for _, s := range r.spans {
		if s.GetName() == name {
			list = append(list, s)
		}
	}
	return list
}

type metricsReceiver struct {
	metricspb.UnimplementedMetricsServiceServer
	*receiver
}

func (r metricsReceiver) Export(_ context.Context, req *metricspb.ExportMetricsServiceRequest) (*metricspb.ExportMetricsServiceResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, resource := range req.GetResourceMetrics() {
		for _, scope := range resource.GetScopeMetrics() {
			for _, m := range scope.GetMetrics() {
				r.metrics[m.GetName()] = true
			}
		}
	}
	return &metricspb.ExportMetricsServiceResponse{}, nil
}

// collector receives on a real socket, and has this process's telemetry sent
// there.
func collector(t *testing.T) *receiver {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &receiver{address: l.Addr().String(), metrics: make(map[string]bool), instances: make(map[string]string)}
	server := grpc.NewServer()
	tracespb.RegisterTraceServiceServer(server, r)
	metricspb.RegisterMetricsServiceServer(server, metricsReceiver{receiver: r})
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(l) }()
	t.Cleanup(func() { server.Stop(); <-done })
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+l.Addr().String())
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
	t.Setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
	return r
}

// said is what a span says by an attribute.
func said(s *tracepb.Span, key string) *commonpb.AnyValue {
	for _, kv := range s.GetAttributes() {
		if kv.GetKey() == key {
			return kv.GetValue()
		}
	}
	return &commonpb.AnyValue{}
}

func question(q prompt) *api.Request {
	r := q.request()
	r.Model = model
	return r
}

const (
	callerTrace = "0af7651916cd43dd8448eb211c80319c"
	callerSpan  = "b7ad6b7169203331"
)

// One trace leads from the caller through the call to the decision, and from
// there to the delta that the agent sent.
func TestDecisionIsASpanThatLeadsToTheEvents(t *testing.T) {
	r := collector(t)
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	q := random(1, 160)
	e.complete(q)
	e.truth(patience, q)

	ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+callerTrace+"-"+callerSpan+"-01")
	d, err := p.Client.Pick(ctx, &api.PickRequest{Request: question(q)})
	if err != nil {
		t.Fatal(err)
	}
	first := d.GetRanking().GetCandidates()[0]
	var span *tracepb.Span
	p.until("the decision's span arrives", func() bool {
		for _, s := range r.named("kvscout.decision") {
			if said(s, "kvscout.decision").GetStringValue() == d.GetDecisionId() {
				span = s
			}
		}
		return span != nil
	})
	if got := hex.EncodeToString(span.GetTraceId()); got != callerTrace {
		t.Errorf("trace %s, want the caller's", got)
	}
	calls := r.named("kvscout.scheduler.v1.Scheduler/Pick")
	if !slices.ContainsFunc(calls, func(s *tracepb.Span) bool {
		return hex.EncodeToString(s.GetSpanId()) == hex.EncodeToString(span.GetParentSpanId()) && hex.EncodeToString(s.GetParentSpanId()) == callerSpan
	}) {
		t.Errorf("the decision's parent %x is none of the calls %v", span.GetParentSpanId(), calls)
	}
	for key, want := range map[string]string{
		"kvscout.member": e.id(), "kvscout.policy": "default", "kvscout.trust": "exact", "kvscout.reason": "only",
		"gen_ai.request.model": model, "kvscout.receipt": d.GetRanking().GetExplanation(), "kvscout.method": "pick",
	} {
		if got := said(span, key).GetStringValue(); got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
	for key, want := range map[string]uint64{
		"kvscout.prompt_tokens": 160, "kvscout.cached_tokens": uint64(first.GetCachedTokens().GetGpu()), "kvscout.depth": uint64(first.GetCachedTokens().GetGpu() / 16),
		"kvscout.candidates": 1, "kvscout.sequence": first.GetCacheState().GetSequence(),
	} {
		if got := said(span, key).GetIntValue(); got != int64(want) {
			t.Errorf("%s is %d, want %d", key, got, want)
		}
	}
	if ms := said(span, "kvscout.top.ms").GetArrayValue().GetValues(); len(ms) != 1 || ms[0].GetDoubleValue() != first.GetCost().GetTotalMs() {
		t.Errorf("top costs %v", ms)
	}
	if took := span.GetEndTimeUnixNano() - span.GetStartTimeUnixNano(); took == 0 || time.Duration(took) > patience {
		t.Errorf("the decision took %d ns", took)
	}

	if len(span.GetLinks()) != 1 {
		t.Fatalf("links: %v", span.GetLinks())
	}
	link := span.GetLinks()[0]
	p.until("the delta's span arrives", func() bool {
		for _, s := range r.named("kvscout.publish") {
			if hex.EncodeToString(s.GetSpanId()) != hex.EncodeToString(link.GetSpanId()) || hex.EncodeToString(s.GetTraceId()) != hex.EncodeToString(link.GetTraceId()) {
				continue
			}
			if said(s, "kvscout.member").GetStringValue() != e.id() || said(s, "kvscout.sequence").GetIntValue() != int64(first.GetCacheState().GetSequence()) ||
				said(s, "kvscout.epoch").GetStringValue() != said(span, "kvscout.epoch").GetStringValue() {
				t.Errorf("%v is not the delta of %v", s, first.GetCacheState())
			}
			return true
		}
		return false
	})
	page := scraped(t, p.Admin, "application/openmetrics-text; version=1.0.0")
	if !regexp.MustCompile(`kvscout_scheduler_decision_duration_seconds_bucket\{[^\n]* # \{[^\n]*trace_id="` + callerTrace).MatchString(page) {
		t.Error("no bucket of the latency names the trace as its exemplar")
	}
	p.until("metrics arrive", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.metrics["kvscout.scheduler.decisions"] && r.metrics["kvscout.scheduler.hit.tokens"] && r.metrics["kvscout.agent.trust"]
	})
}

// TestSpansAndLogsTellWhoseRequestItWas: what the caller calls it, where it went,
// what became of it, and what took its time; and why a call failed.
func TestSpansAndLogsTellWhoseRequestItWas(t *testing.T) {
	r := collector(t)
	log := &journal.Journal{}
	p := open(t, stage.Options{
		Log: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Change: func(c *scheduler.Config) {
			c.QueueLength, c.QueueBudget, c.QueueWait = 8, time.Millisecond, 300*time.Millisecond
			c.SessionHeaders = "x-session"
		},
	})
	e := p.engine(fakevllm.Config{ScaleOut: true}).watched("pod")
	q := random(1, 160)
	e.complete(q)
	e.truth(patience, q)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+callerTrace+"-"+callerSpan+"-01")
	request := func(id string) *api.Request {
		return &api.Request{RequestId: id, Model: model, Tenant: "team-a", Headers: map[string]string{"X-Session": "talk-1"},
			Prompt: api.Body(fmt.Sprintf(`{"prompt":%q}`, strings.Repeat("word ", 2000)))}
	}
	d, err := p.Client.Pick(ctx, &api.PickRequest{Request: request("req-1")})
	if err != nil {
		t.Fatal(err)
	}
	_, full := p.Client.Pick(ctx, &api.PickRequest{Request: request("req-2")}) // no room: it waits
	if full == nil {
		t.Fatal("a second request found room at once")
	}
	if _, err := p.Client.Report(ctx, &api.ReportRequest{Reports: []*api.Report{{DecisionId: d.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FINISHED}}}); err != nil {
		t.Fatal(err)
	}
	// has waits for a span of the trace that says all this.
	has := func(name string, want map[string]string) *tracepb.Span {
		t.Helper()
		var found *tracepb.Span
		p.until("a span "+name+" says "+fmt.Sprint(want), func() bool {
			for _, s := range r.named(name) {
				fits := hex.EncodeToString(s.GetTraceId()) == callerTrace
				for key, value := range want {
					fits = fits && said(s, key).GetStringValue() == value
				}
				if fits {
					found = s
				}
			}
			return found != nil
		})
		return found
	}
	member := e.id()
	address := d.GetRanking().GetCandidates()[0].GetMember().GetAddress()
	whose := map[string]string{"kvscout.request": "req-1", "kvscout.session": "talk-1", "kvscout.tenant": "team-a"}
	call := has("kvscout.scheduler.v1.Scheduler/Pick", whose)
	decision := has("kvscout.decision", map[string]string{"kvscout.request": "req-1", "kvscout.session": "talk-1", "kvscout.tenant": "team-a", "kvscout.member": member, "kvscout.address": address})
	if !bytes.Equal(decision.GetParentSpanId(), call.GetSpanId()) {
		t.Error("the decision is not below its call")
	}
	failed := has("kvscout.scheduler.v1.Scheduler/Pick", map[string]string{"kvscout.request": "req-2"})
	below := func(name string, parent *tracepb.Span) *tracepb.Span {
		for _, s := range r.named(name) {
			if bytes.Equal(s.GetParentSpanId(), parent.GetSpanId()) && s.GetEndTimeUnixNano() > s.GetStartTimeUnixNano() {
				return s
			}
		}
		t.Errorf("no span %s below %v", name, parent.GetName())
		return &tracepb.Span{}
	}
	below("kvscout.tokenize", call)
	below("kvscout.tokenize", failed)
	if s := below("kvscout.wait", failed); time.Duration(s.GetEndTimeUnixNano()-s.GetStartTimeUnixNano()) < 250*time.Millisecond {
		t.Errorf("the span of the wait is %d ns", s.GetEndTimeUnixNano()-s.GetStartTimeUnixNano())
	}
	message := ""
	for _, event := range failed.GetEvents() {
		for _, kv := range event.GetAttributes() {
			if kv.GetKey() == "exception.message" {
				message = kv.GetValue().GetStringValue()
			}
		}
	}
	if want := status.Convert(full).Message(); !strings.Contains(message, want) {
		t.Errorf("the failed call says %q, want %q", message, want)
	}
	has("kvscout.scheduler.v1.Scheduler/Report", map[string]string{"kvscout.decision": d.GetDecisionId(), "kvscout.outcome": "finished"})
	r.mu.Lock()
	instances := maps.Clone(r.instances)
	r.mu.Unlock()
	if instances["kvscout-scheduler"] == "" || instances["kvscout-agent"] != "default/pod" {
		t.Errorf("instances %v", instances)
	}

	for _, want := range [][]string{
		{"level=DEBUG", "msg=decided", "decision=" + d.GetDecisionId(), "request=req-1", "session=talk-1", "tenant=team-a", "member=" + member, "address=" + address},
		{"level=DEBUG", "msg=reported", "decision=" + d.GetDecisionId(), "outcome=finished"},
		{"level=WARN", `msg="call failed"`, "request=req-2", "tenant=team-a", "code=DEADLINE_EXCEEDED", "no member had room"},
	} {
		if len(log.Since(0, want...)) != 1 {
			t.Errorf("the log does not say %q", want)
		}
	}
}

// scraped is the metrics page in a format.
func scraped(t *testing.T, admin, format string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+admin+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", format)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// An unsampled caller costs no span.
func TestUnsampledCallersRecordNothing(t *testing.T) {
	r := collector(t)
	p := open(t, stage.Options{})
	p.engine(fakevllm.Config{}).watched("pod")
	q := random(1, 160)
	for _, flags := range []string{"00", "01"} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+callerTrace+"-"+callerSpan+"-"+flags)
		if _, err := p.Client.Pick(ctx, &api.PickRequest{Request: question(q)}); err != nil {
			t.Fatal(err)
		}
	}
	of := func() (n int) {
		for _, s := range r.named("kvscout.decision") {
			if hex.EncodeToString(s.GetTraceId()) == callerTrace {
				n++
			}
		}
		return n
	}
	p.until("the sampled one arrives", func() bool { return of() > 0 })
	if n := of(); n != 1 {
		t.Errorf("%d spans of one sampled call", n)
	}
}

// The page is valid by Prometheus' own parser, hit tokens fall from stage to stage, and each
// token that is lost has its cause.
func TestMetricsPageTellsHitTokensByStage(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	q := random(1, 160)
	e.complete(q)
	e.truth(patience, q)
	const predicted, delivered = 144, 96
	d, err := p.Client.Pick(t.Context(), &api.PickRequest{Request: question(q)})
	if err != nil {
		t.Fatal(err)
	}
	n, cached := uint32(160), uint32(delivered)
	if _, err := p.Client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{
		DecisionId: d.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FINISHED, PromptTokens: &n, CachedTokens: &cached,
	}}}); err != nil {
		t.Fatal(err)
	}
	parser := expfmt.NewTextParser(prommodel.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(scraped(t, p.Admin, "text/plain")))
	if err != nil {
		t.Fatal(err)
	}
	value := func(family, label string) float64 {
		for _, m := range families[family].GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetValue() == label {
					return m.GetCounter().GetValue()
				}
			}
		}
		t.Errorf("the page lacks %s of %s", family, label)
		return -1
	}
	for _, c := range []struct {
		family, label string
		want          float64
	}{
		{"kvscout_scheduler_hit_tokens_total", "prompt", 160}, {"kvscout_scheduler_hit_tokens_total", "ideal", predicted},
		{"kvscout_scheduler_hit_tokens_total", "feasible", predicted}, {"kvscout_scheduler_hit_tokens_total", "routed", predicted},
		{"kvscout_scheduler_delivered_tokens_total", "predicted", predicted}, {"kvscout_scheduler_delivered_tokens_total", "delivered", delivered},
		{"kvscout_scheduler_hit_tokens_total", "least_load", predicted}, // it is the only one
		{"kvscout_scheduler_lost_tokens_total", "busy", 0}, {"kvscout_scheduler_lost_tokens_total", "mispredicted", predicted - delivered},
		{"kvscout_scheduler_lost_tokens_total", "uncacheable", 160 - predicted}, {"kvscout_scheduler_evicted_tokens_total", "2x", 0},
		{"kvscout_scheduler_sticky_broken_total", "gone", 0}, {"kvscout_scheduler_sticky_broken_total", "slow", 0},
	} {
		if got := value(c.family, c.label); got != c.want {
			t.Errorf("%s %s is %v, want %v", c.family, c.label, got, c.want)
		}
	}
	buckets := families["kvscout_scheduler_decision_duration_seconds"].GetMetric()[0].GetHistogram().GetBucket()
	if len(buckets) < 10 || buckets[0].GetUpperBound() != 1e-6 {
		t.Errorf("latency buckets %v", buckets)
	}
}
