package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvscout/kvscout/e2e/fakevllm"
)

// outcome is what is said about a fleet at the end. Times are the engines' own.
type outcome struct {
	Name         string `json:"name"`
	Requests     int    `json:"requests"`
	PromptTokens int    `json:"prompt_tokens"`
	CachedTokens int    `json:"cached_tokens"`
	// Prediction is missing where nobody says what was predicted.
	*Prediction
	TTFTMean float64 `json:"ttft_mean_ms"`
	// EngineTTFTMean is the part of TTFTMean within the engines: what is
	// missing is the way to them and back.
	EngineTTFTMean float64 `json:"engine_ttft_mean_ms"`
	TTFTp50        float64 `json:"ttft_p50_ms"`
	TTFTp90        float64 `json:"ttft_p90_ms"`
	TTFTp99        float64 `json:"ttft_p99_ms"`
	// GPUSeconds that computing the cached tokens would have taken.
	GPUSeconds float64 `json:"gpu_seconds_saved"`
	Failed     int     `json:"failed"`
	Unfinished int     `json:"unfinished"`
}

// Prediction is how many cached tokens were predicted for the requests that are done,
// and how far that was off in all.
type Prediction struct {
	PredictedTokens int `json:"predicted_cached_tokens"`
	AbsErrorTokens  int `json:"abs_error_tokens"`
}

// gpuSeconds is what computing the cached tokens takes on the two GPUs of an engine.
func (s sum) gpuSeconds() float64 {
	return 2 * fakevllm.Qwen32B().PerToken / 1000 * float64(s.cached)
}

func outcomeOf(name string, s sum, q quantiles, engine time.Duration) outcome {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	return outcome{
		Name: name, Requests: s.done, PromptTokens: s.prompt, CachedTokens: s.cached,
		TTFTMean: ms(q.mean), EngineTTFTMean: ms(engine), TTFTp50: ms(q.p50), TTFTp90: ms(q.p90), TTFTp99: ms(q.p99),
		GPUSeconds: s.gpuSeconds(), Prediction: &Prediction{PredictedTokens: s.predicted, AbsErrorTokens: s.error}, Failed: s.failed, Unfinished: s.unfinished,
	}
}

// table writes the outcomes beside each other.
func table(out io.Writer, list []outcome) error {
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', tabwriter.AlignRight)
	row := func(name string, cell func(o outcome) string) {
		fmt.Fprintf(w, "%s\t", name)
		for _, o := range list {
			fmt.Fprintf(w, "%s\t", cell(o))
		}
		fmt.Fprintln(w)
	}
	count := func(f func(o outcome) int) func(outcome) string {
		return func(o outcome) string { return grouped(f(o)) }
	}
	ms := func(f func(o outcome) float64) func(outcome) string {
		return func(o outcome) string { return grouped(int(f(o)+0.5)) + " ms" }
	}
	told := func(cell func(outcome) string) func(outcome) string {
		return func(o outcome) string {
			if o.Prediction == nil {
				return "-"
			}
			return cell(o)
		}
	}
	row("", func(o outcome) string { return o.Name })
	row("requests", count(func(o outcome) int { return o.Requests }))
	row("failed", count(func(o outcome) int { return o.Failed }))
	row("unfinished", count(func(o outcome) int { return o.Unfinished }))
	row("prompt tokens", count(func(o outcome) int { return o.PromptTokens }))
	row("cached tokens", count(func(o outcome) int { return o.CachedTokens }))
	row("hit rate", func(o outcome) string { return fmt.Sprintf("%.1f %%", 100*share(o.CachedTokens, o.PromptTokens)) })
	row("TTFT mean", ms(func(o outcome) float64 { return o.TTFTMean }))
	row("of that in the engine", ms(func(o outcome) float64 { return o.EngineTTFTMean }))
	row("TTFT p50", ms(func(o outcome) float64 { return o.TTFTp50 }))
	row("TTFT p90", ms(func(o outcome) float64 { return o.TTFTp90 }))
	row("TTFT p99", ms(func(o outcome) float64 { return o.TTFTp99 }))
	row("GPU seconds saved", func(o outcome) string { return fmt.Sprintf("%.0f", o.GPUSeconds) })
	row("predicted tokens", told(count(func(o outcome) int { return o.PredictedTokens })))
	row("|predicted - cached|", told(count(func(o outcome) int { return o.AbsErrorTokens })))
	row("of prompt tokens", told(func(o outcome) string { return fmt.Sprintf("%.2f %%", 100*share(o.AbsErrorTokens, o.PromptTokens)) }))
	return w.Flush()
}

// conclusion says in a sentence what the last one has over each of the others.
func conclusion(list []outcome) string {
	last := list[len(list)-1]
	factor := func(a, b float64) string {
		if a == 0 || b == 0 {
			return "-"
		}
		return fmt.Sprintf("%.1f x", a/b)
	}
	var parts []string
	for _, o := range slices.Backward(list[:len(list)-1]) {
		parts = append(parts, fmt.Sprintf("than %s: median time to first token %s lower,\nmean %s, 99th percentile %s; cached tokens %s as many", o.Name,
			factor(o.TTFTp50, last.TTFTp50), factor(o.TTFTMean, last.TTFTMean), factor(o.TTFTp99, last.TTFTp99), factor(float64(last.CachedTokens), float64(o.CachedTokens))))
	}
	return last.Name + " " + strings.Join(parts, ";\n") + "."
}

// object writes the outcomes as one line of JSON.
func object(out io.Writer, list []outcome) error {
	return json.NewEncoder(out).Encode(map[string]any{"fleets": list})
}

// grouped writes an integer with a comma between thousands.
func grouped(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
