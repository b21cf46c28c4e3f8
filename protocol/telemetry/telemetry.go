// Package telemetry sets OpenTelemetry up and holds every name that the two
// processes show to the world: metrics, spans and attributes (names.go).
//
// Metrics are always collected, for the process's own /metrics page. When the
// environment names an OTLP endpoint (OTEL_EXPORTER_OTLP_ENDPOINT, or the
// variants for one signal), metrics and traces are sent there as well; the
// exporters read the rest of their settings from the standard variables.
// Nothing global is set: the providers are handed to whoever needs them.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/contrib/instrumentation/runtime"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
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
		return nil, fmt.Errorf("describe the process for telemetry: %w", err)
	}

	page, err := otelprom.New(otelprom.WithRegisterer(t.registry), otelprom.WithoutScopeInfo())
	if err != nil {
		return nil, fmt.Errorf("metrics page: %w", err)
	}
	options := []sdkmetric.Option{sdkmetric.WithResource(res), sdkmetric.WithReader(page)}
	if wanted("METRICS") {
		exporter, err := otlpmetricgrpc.New(ctx)
		if err != nil {
			return nil, fmt.Errorf("OTLP metrics exporter: %w", err)
		}
		options = append(options, sdkmetric.WithReader(sdkmetric.NewPeriodicReader(exporter)))
	}
	meters := sdkmetric.NewMeterProvider(options...)
	t.Meters, t.shutdown = meters, append(t.shutdown, meters.Shutdown)

	if wanted("TRACES") {
		exporter, err := otlptracegrpc.New(ctx)
		if err != nil {
			return nil, fmt.Errorf("OTLP trace exporter: %w", err)
		}
		tracers := sdktrace.NewTracerProvider(sdktrace.WithResource(res), sdktrace.WithBatcher(exporter))
		// A provider that runs out of time leaves its exporter trying.
		t.Tracers, t.shutdown = tracers, append(t.shutdown, tracers.Shutdown, exporter.Shutdown)
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
	var errs []error
	for _, f := range t.shutdown {
		errs = append(errs, f(ctx))
	}
	t.shutdown = nil
	return errors.Join(errs...)
}

// wanted says whether the environment asks for OTLP export of a signal.
func wanted(signal string) bool {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") ||
		strings.EqualFold(os.Getenv("OTEL_"+signal+"_EXPORTER"), "none") {
		return false
	}
	return os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_"+signal+"_ENDPOINT") != ""
}
