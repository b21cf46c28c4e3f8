// Package telemetry sets OpenTelemetry up, and holds the names that the two
// processes share: labels, spans and attributes (names.go). Metrics are named where
// they are made.
//
// Metrics are always collected, for the process's own /metrics page. When the
// environment names an OTLP endpoint (OTEL_EXPORTER_OTLP_ENDPOINT, or the
// variants for one signal) or an exporter (OTEL_TRACES_EXPORTER,
// OTEL_METRICS_EXPORTER), metrics and traces go there as well, in the protocol
// and with all else that the standard variables say. What they say wrongly is
// logged and left out: telemetry ends no process. The providers are handed to
// whoever needs them; global is only where OpenTelemetry's own errors go.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/contrib/instrumentation/runtime"
	"go.opentelemetry.io/otel/attribute"
	otelprom "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// Config says who reports.
type Config struct {
	// Service is the service name; OTEL_SERVICE_NAME overrides it.
	Service string
	// Version of the program; empty: not reported.
	Version string
	// Attributes of the resource besides; may be nil.
	Attributes []attribute.KeyValue
	// Log of what goes wrong with telemetry; nil: nowhere.
	Log *slog.Logger
}

// Telemetry holds the providers of one process. Shutdown flushes and ends them.
type Telemetry struct {
	Meters     metric.MeterProvider
	Tracers    trace.TracerProvider
	Propagator propagation.TextMapPropagator

	registry *prometheus.Registry
	shutdown []func(context.Context) error
}

// New builds the providers. The OTLP exporters, if any, run until Shutdown.
func New(ctx context.Context, cfg Config) (_ *Telemetry, err error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	report(cfg.Log)
	t := &Telemetry{
		Tracers:    noop.NewTracerProvider(),
		Propagator: propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}),
		registry:   prometheus.NewRegistry(),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.Shutdown(ctx))
		}
	}()

	attributes := append([]attribute.KeyValue{attribute.String(AttrServiceName, cfg.Service)}, cfg.Attributes...)
	if cfg.Version != "" {
		attributes = append(attributes, attribute.String(AttrServiceVersion, cfg.Version))
	}
	res, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithAttributes(attributes...), resource.WithFromEnv())
	if err != nil {
		cfg.Log.Warn("telemetry does not know all attributes of this process: OTEL_RESOURCE_ATTRIBUTES looks like key=value,key=value", "error", err)
	}
	if res == nil {
		res = resource.NewSchemaless(attributes...)
	}

	page, err := otelprom.New(otelprom.WithRegisterer(t.registry), otelprom.WithoutScopeInfo())
	if err != nil {
		return nil, fmt.Errorf("metrics page: %w", err)
	}
	options := []sdkmetric.Option{sdkmetric.WithResource(res), sdkmetric.WithReader(page),
		// Prometheus keeps _count for histograms.
		sdkmetric.WithView(sdkmetric.NewView(sdkmetric.Instrument{Name: "go.goroutine.count"}, sdkmetric.Stream{Name: "go.goroutines"}))}
	if wanted("METRICS") {
		if reader, err := autoexport.NewMetricReader(ctx); err != nil {
			cfg.Log.Error("metrics are not exported: see the OTEL_ variables", "error", err)
		} else {
			options = append(options, sdkmetric.WithReader(reader))
		}
	}
	meters := sdkmetric.NewMeterProvider(options...)
	t.Meters, t.shutdown = meters, append(t.shutdown, meters.Shutdown)

	if wanted("TRACES") {
		if exporter, err := autoexport.NewSpanExporter(ctx); err != nil {
			cfg.Log.Error("traces are not exported: see the OTEL_ variables", "error", err)
		} else {
			tracers := sdktrace.NewTracerProvider(sdktrace.WithResource(res), sdktrace.WithBatcher(exporter))
			// A provider that runs out of time leaves its exporter trying.
			t.Tracers, t.shutdown = tracers, append(t.shutdown, func(ctx context.Context) error {
				return errors.Join(tracers.Shutdown(ctx), exporter.Shutdown(ctx))
			})
		}
	}

	if err := runtime.Start(runtime.WithMeterProvider(meters)); err != nil {
		return nil, fmt.Errorf("runtime metrics: %w", err)
	}
	return t, nil
}

// Handler serves the metrics in Prometheus' text format, or in OpenMetrics',
// which has exemplars, to those who ask for it.
func (t *Telemetry) Handler() http.Handler {
	return promhttp.HandlerFor(t.registry, promhttp.HandlerOpts{EnableOpenMetrics: true})
}

// Shutdown sends what is left and ends the exporters.
func (t *Telemetry) Shutdown(ctx context.Context) error {
	errs := make([]error, len(t.shutdown))
	var all sync.WaitGroup
	for i, f := range t.shutdown {
		all.Go(func() { errs[i] = f(ctx) })
	}
	all.Wait()
	t.shutdown = nil
	return errors.Join(errs...)
}

// wanted says whether the environment asks for export of a signal. A page for
// Prometheus is there anyway.
func wanted(signal string) bool {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return false
	}
	switch os.Getenv("OTEL_" + signal + "_EXPORTER") {
	case "none", "prometheus":
		return false
	case "":
	default:
		return true
	}
	return os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_"+signal+"_ENDPOINT") != ""
}
