package telemetry

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel"

	"github.com/kvscout/kvscout/e2e/journal"
)

// quiet takes everything that the environment of the tests says out.
func quiet(t *testing.T) {
	for _, name := range []string{
		"OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER",
		"OTEL_RESOURCE_ATTRIBUTES", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
	} {
		t.Setenv(name, "")
	}
}

func TestExportOverHTTP(t *testing.T) {
	quiet(t)
	var mu sync.Mutex // guards seen
	seen := make(map[string]string)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		seen[r.URL.Path] = r.Header.Get("Content-Type") + " " + r.Header.Get("X-Key")
		w.Header().Set("Content-Type", "application/x-protobuf")
	}))
	defer collector.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "X-Key=secret")
	tel, err := New(t.Context(), Config{Service: "kvscout-test"})
	if err != nil {
		t.Fatal(err)
	}
	_, span := tel.Tracers.Tracer(Scope).Start(t.Context(), "x")
	span.End()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := tel.Shutdown(ctx); err != nil {
		t.Errorf("shutdown: %v", err)
	}
	mu.Lock()
	defer mu.Unlock()
	for _, path := range []string{"/v1/traces", "/v1/metrics"} {
		if seen[path] != "application/x-protobuf secret" {
			t.Errorf("%s: %q; all: %v", path, seen[path], seen)
		}
	}
}

// TestTelemetryEndsNoProcess sets the variables wrongly, one by one.
func TestTelemetryEndsNoProcess(t *testing.T) {
	for variable, value := range map[string]string{
		"OTEL_RESOURCE_ATTRIBUTES":    "a=b,no pair,=",
		"OTEL_EXPORTER_OTLP_PROTOCOL": "carrier pigeon",
		"OTEL_TRACES_EXPORTER":        "paper",
		"OTEL_METRICS_EXPORTER":       "paper",
		"OTEL_EXPORTER_OTLP_HEADERS":  "no pair",
	} {
		t.Run(variable, func(t *testing.T) {
			quiet(t)
			if variable == "OTEL_EXPORTER_OTLP_PROTOCOL" || variable == "OTEL_EXPORTER_OTLP_HEADERS" {
				t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
			}
			t.Setenv(variable, value)
			var log journal.Journal
			tel, err := New(t.Context(), Config{Service: "kvscout-test", Log: log.Logger()})
			if err != nil {
				t.Fatal(err)
			}
			rec := httptest.NewRecorder()
			tel.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
			if !strings.Contains(rec.Body.String(), `service_name="kvscout-test"`) {
				t.Error("the page has lost the service's name")
			}
			if !strings.Contains(log.String(), "level=WARN") && !strings.Contains(log.String(), "level=ERROR") {
				t.Errorf("nothing is said: %s", log.String())
			}
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
			defer cancel()
			_ = tel.Shutdown(ctx)
		})
	}
}

func TestErrorsOfOpenTelemetryAreLogged(t *testing.T) {
	quiet(t)
	var log journal.Journal
	tel, err := New(t.Context(), Config{Service: "kvscout-test", Log: log.Logger()})
	if err != nil {
		t.Fatal(err)
	}
	defer tel.Shutdown(context.Background())
	otel.Handle(errors.New("the collector says no"))
	if !strings.Contains(log.String(), "the collector says no") {
		t.Error(log.String())
	}
}
