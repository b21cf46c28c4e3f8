package telemetry

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// See takes one value and its labels, as pairs of name and value.
type See func(value float64, labels ...string)

// Counts takes values that a label tells apart.
func (see See) Counts(label string, counts map[string]uint64) {
	for value, n := range counts {
		see(float64(n), label, value)
	}
}

// Flag takes 1 or 0.
func (see See) Flag(is bool, labels ...string) {
	value := 0.0
	if is {
		value = 1
	}
	see(value, labels...)
}

// Instrument is a counter or gauge that is read from S when somebody asks.
type Instrument[S any] struct {
	name, unit, help string
	grows            bool
	read             func(S, See)
}

// Counter only grows while the process lives.
func Counter[S any](name, unit, help string, read func(S, See)) Instrument[S] {
	return Instrument[S]{name, unit, help, true, read}
}

// Gauge may fall.
func Gauge[S any](name, unit, help string, read func(S, See)) Instrument[S] {
	return Instrument[S]{name, unit, help, false, read}
}

type number interface{ int | int64 | uint64 }

// CounterOf is a counter with one value.
func CounterOf[S any, N number](name, unit, help string, of func(S) N) Instrument[S] {
	return Counter(name, unit, help, func(s S, see See) { see(float64(of(s))) })
}

// GaugeOf is a gauge with one value.
func GaugeOf[S any, N number](name, unit, help string, of func(S) N) Instrument[S] {
	return Gauge(name, unit, help, func(s S, see See) { see(float64(of(s))) })
}

// CountersOf is a counter with one value for each value of a label.
func CountersOf[S any](name, unit, help, label string, of func(S) map[string]uint64) Instrument[S] {
	return Counter(name, unit, help, func(s S, see See) { see.Counts(label, of(s)) })
}

// Observe makes instruments and reads all of them at once. sources yields what
// they are read from, once each time that somebody asks, and the labels that all
// of its values get.
func Observe[S any](meter metric.Meter, list []Instrument[S], sources func(yield func(S, ...string))) error {
	made := make([]metric.Float64Observable, len(list))
	all := make([]metric.Observable, len(list))
	for i, x := range list {
		var err error
		if x.grows {
			made[i], err = meter.Float64ObservableCounter(x.name, metric.WithUnit(x.unit), metric.WithDescription(x.help))
		} else {
			made[i], err = meter.Float64ObservableGauge(x.name, metric.WithUnit(x.unit), metric.WithDescription(x.help))
		}
		if err != nil {
			return err
		}
		all[i] = made[i]
	}
	_, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		sources(func(from S, common ...string) {
			for i, x := range list {
				x.read(from, func(value float64, labels ...string) {
					o.ObserveFloat64(made[i], value, metric.WithAttributeSet(Labels(append(labels, common...)...)))
				})
			}
		})
		return nil
	}, all...)
	return err
}

// LagBuckets are seconds that events take from an engine on.
var LagBuckets = []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 60, 600}

// Lag is in seconds how far a clock is behind another, that of another machine it
// may be: never less than nothing, nor more than an hour.
func Lag(d time.Duration) float64 { return min(max(d, 0), time.Hour).Seconds() }

// Labels are attributes of metrics, given as pairs of name and value.
func Labels(pairs ...string) attribute.Set {
	attributes := make([]attribute.KeyValue, 0, len(pairs)/2)
	for i := 0; i+1 < len(pairs); i += 2 {
		attributes = append(attributes, attribute.String(pairs[i], pairs[i+1]))
	}
	return attribute.NewSet(attributes...)
}
