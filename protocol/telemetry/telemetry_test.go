package telemetry

import (
	"context"
	"io"
	"net"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.uber.org/goleak"

	"github.com/kvscout/kvscout/e2e/journal"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestPageShowsMetrics(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
	tel, err := New(t.Context(), Config{Service: "kvscout-test", Version: "1.2.3"})
	if err != nil {
		t.Fatal(err)
	}
	defer tel.Shutdown(context.Background())
	counter, err := tel.Meters.Meter(Scope).Int64Counter("kvscout.scheduler.decisions")
	if err != nil {
		t.Fatal(err)
	}
	counter.Add(t.Context(), 3, metric.WithAttributeSet(attribute.NewSet(attribute.String(LabelPolicy, "default"))))

	rec := httptest.NewRecorder()
	tel.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	page, _ := io.ReadAll(rec.Body)
	for _, want := range []string{
		`kvscout_scheduler_decisions_total{policy="default"} 3`,
		`service_name="kvscout-test"`, `service_version="1.2.3"`, "go_goroutines",
	} {
		if !strings.Contains(string(page), want) {
			t.Errorf("page lacks %q:\n%s", want, page)
		}
	}
	if _, span := tel.Tracers.Tracer(Scope).Start(t.Context(), "x"); span.IsRecording() {
		t.Error("spans are recorded although no endpoint is set")
	}
}

// TestExportFollowsEnvironment uses an endpoint where nobody answers: the
// providers must come up, record, and end in bounded time all the same.
func TestExportFollowsEnvironment(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+addr)
	t.Setenv("OTEL_METRICS_EXPORTER", "none")
	var log journal.Journal
	tel, err := New(t.Context(), Config{Service: "kvscout-test", Log: log.Logger()})
	if err != nil {
		t.Fatal(err)
	}
	_, span := tel.Tracers.Tracer(Scope).Start(t.Context(), "x")
	if !span.IsRecording() {
		t.Error("spans are not recorded although an endpoint is set")
	}
	span.End()
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if err := tel.Shutdown(ctx); err == nil && !strings.Contains(log.String(), "connection refused") {
		t.Errorf("nobody says that the last spans were lost: %s", log.String())
	}
}
