package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func sampleTally() *tally {
	t := &tally{}
	for i := range 103 {
		t.begin()
		if i < 100 {
			t.first(time.Duration(i+1) * time.Millisecond)
			t.finish(result{prompt: 1000, cached: 400, output: 5}, 400+(i%3-1)*16)
		}
	}
	t.fail(errors.New("broken"))
	t.cut(time.Second, true)
	t.cut(time.Second, false)
	return t
}

func TestTallyAddsUp(t *testing.T) {
	s, q := sampleTally().read()
	want := sum{sent: 103, done: 100, failed: 1, unfinished: 2, prompt: 100000, cached: 40000, predicted: 40000 - 16, error: 67 * 16, lastError: "broken"}
	if d := cmp.Diff(want, s, cmp.AllowUnexported(sum{})); d != "" {
		t.Error(d)
	}
	if want := (quantiles{59900990 * time.Nanosecond, 51 * time.Millisecond, 91 * time.Millisecond, 100 * time.Millisecond}); q != want {
		t.Errorf("%v", q)
	}
	if q := q.scaled(4); q.p50 != 204*time.Millisecond {
		t.Errorf("%v", q)
	}
}

func TestTableAndObjectSayTheSame(t *testing.T) {
	s, q := sampleTally().read()
	list := []outcome{outcomeOf("round-robin", s, q, 48*time.Millisecond), outcomeOf("kvscout", s, q, 48*time.Millisecond)}
	var b bytes.Buffer
	if err := table(&b, list); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"hit rate", "40.0 %", "100,000", "1,072", "1.07 %", "51 ms"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	b.Reset()
	silent := list[1]
	silent.Prediction = nil
	if err := errors.Join(table(&b, []outcome{silent}), object(&b, []outcome{silent})); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(b.String(), "1,072") || strings.Contains(b.String(), "abs_error_tokens") || !strings.Contains(b.String(), "|predicted - cached|         -") {
		t.Errorf("of a proxy that does not say what was predicted:\n%s", b.String())
	}
	b.Reset()
	if err := object(&b, list); err != nil {
		t.Fatal(err)
	}
	if strings.Count(b.String(), "\n") != 1 {
		t.Errorf("not one line: %s", b.String())
	}
	var got struct {
		Fleets []map[string]any `json:"fleets"`
	}
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"name": "kvscout", "requests": 100., "prompt_tokens": 100000., "cached_tokens": 40000., "ttft_mean_ms": 59.9, "engine_ttft_mean_ms": 48., "ttft_p50_ms": 51., "ttft_p90_ms": 91., "ttft_p99_ms": 100.,
		"predicted_cached_tokens": 39984., "gpu_seconds_saved": s.gpuSeconds(), "abs_error_tokens": 1072., "failed": 1., "unfinished": 2.,
	}
	if d := cmp.Diff(want, got.Fleets[1]); d != "" {
		t.Error(d)
	}
}

func TestTheConclusionNamesTheOthers(t *testing.T) {
	got := conclusion([]outcome{
		{Name: "a", TTFTp50: 300, TTFTMean: 400, TTFTp99: 1000, CachedTokens: 10},
		{Name: "b", TTFTp50: 200, TTFTMean: 200, TTFTp99: 500},
		{Name: "c", TTFTp50: 100, TTFTMean: 100, TTFTp99: 500, CachedTokens: 30},
	})
	want := `c than b: median time to first token 2.0 x lower,
mean 2.0 x, 99th percentile 1.0 x; cached tokens - as many;
than a: median time to first token 3.0 x lower,
mean 4.0 x, 99th percentile 2.0 x; cached tokens 3.0 x as many.`
	if got != want {
		t.Error(got)
	}
	if s := (sum{cached: 1000}); math.Abs(s.gpuSeconds()-.085) > 1e-9 {
		t.Errorf("%v GPU seconds", s.gpuSeconds())
	}
}

func TestGrouped(t *testing.T) {
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", -1234567: "-1,234,567"} {
		if got := grouped(n); got != want {
			t.Errorf("%d is %q", n, got)
		}
	}
}
