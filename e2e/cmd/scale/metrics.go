package main

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// usage of a process.
type usage struct {
	CPU       time.Duration
	RSS, Peak int64
}

// metrics are the scheduler's, as it serves them.
type metrics map[string]*dto.MetricFamily

func fetch(ctx context.Context, admin string) (metrics, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+admin+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("metrics: %s", answer.Status)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(answer.Body)
	return families, err
}

// sum of a family's values whose labels are these, given as name and value.
func (m metrics) sum(name string, labels ...string) (total float64) {
	for _, one := range m[name].GetMetric() {
		if !has(one, labels) {
			continue
		}
		total += one.GetGauge().GetValue() + one.GetCounter().GetValue() + one.GetUntyped().GetValue()
	}
	return total
}

func has(one *dto.Metric, labels []string) bool {
	for i := 0; i < len(labels); i += 2 {
		found := false
		for _, l := range one.GetLabel() {
			found = found || l.GetName() == labels[i] && l.GetValue() == labels[i+1]
		}
		if !found {
			return false
		}
	}
	return true
}

// quantileSince estimates a quantile of what a histogram counted since before,
// on a line between the bounds of its bucket.
func (m metrics) quantileSince(before metrics, name string, q float64) float64 {
	counts := func(m metrics) (bounds []float64, n []float64) {
		for _, one := range m[name].GetMetric() {
			for i, b := range one.GetHistogram().GetBucket() {
				if i == len(bounds) {
					bounds, n = append(bounds, b.GetUpperBound()), append(n, 0)
				}
				n[i] += float64(b.GetCumulativeCount())
			}
		}
		return bounds, n
	}
	bounds, now := counts(m)
	_, then := counts(before)
	for i := range min(len(then), len(now)) {
		now[i] -= then[i]
	}
	if len(now) == 0 || now[len(now)-1] == 0 {
		return math.NaN()
	}
	want := q * now[len(now)-1]
	low, below := 0.0, 0.0
	for i, n := range now {
		if n >= want {
			if math.IsInf(bounds[i], 1) {
				return low
			}
			return low + (bounds[i]-low)*(want-below)/max(n-below, 1)
		}
		low, below = bounds[i], n
	}
	return low
}
