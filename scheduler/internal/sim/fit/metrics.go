package fit

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// maxPage bounds a metrics page.
const maxPage = 16 << 20

// Counters are what a vLLM metrics page says of the requests that ended.
type Counters struct {
	Requests float64 // prefills that ended
	Prefill  float64 // s, of all
	Prompt   float64 // tokens
	Computed float64 // tokens of them
	Gaps     float64 // between tokens
	GapTime  float64 // s, of all
	Output   float64 // tokens
	Running  float64 // requests at the moment
	KVTokens int     // of the cache; 0: not told
}

// ReadMetrics reads a vLLM /metrics page. Ranks are added up.
func ReadMetrics(r io.Reader) (Counters, error) {
	page, err := io.ReadAll(io.LimitReader(r, maxPage+1))
	if err != nil {
		return Counters{}, err
	}
	if len(page) > maxPage {
		return Counters{}, fmt.Errorf("metrics page of more than %d bytes", maxPage)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(string(page)))
	if err != nil {
		return Counters{}, fmt.Errorf("parse metrics: %w", err)
	}
	var c Counters
	var missing []string
	histogram := func(sum, count *float64, names ...string) {
		for _, name := range names {
			if f := families[name]; f != nil && f.GetType() == dto.MetricType_HISTOGRAM {
				for _, m := range f.GetMetric() {
					*sum += m.GetHistogram().GetSampleSum()
					*count += float64(m.GetHistogram().GetSampleCount())
				}
				return
			}
		}
		missing = append(missing, names[0])
	}
	var unused float64
	histogram(&c.Prefill, &c.Requests, "vllm:request_prefill_time_seconds")
	histogram(&c.Prompt, &unused, "vllm:request_prompt_tokens")
	histogram(&c.Output, &unused, "vllm:request_generation_tokens")
	histogram(&c.GapTime, &c.Gaps, "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
	if len(missing) > 0 {
		return Counters{}, fmt.Errorf("no vLLM metrics page: %s is missing", strings.Join(missing, ", "))
	}
	c.Computed = c.Prompt
	if families["vllm:request_prefill_kv_computed_tokens"] != nil {
		c.Computed = 0
		histogram(&c.Computed, &unused, "vllm:request_prefill_kv_computed_tokens")
	}
	for _, m := range families["vllm:num_requests_running"].GetMetric() {
		c.Running += m.GetGauge().GetValue()
	}
	for _, m := range families["vllm:cache_config_info"].GetMetric() {
		var blocks, size int
		for _, l := range m.GetLabel() {
			v, err := strconv.Atoi(l.GetValue())
			if err != nil {
				continue
			}
			switch l.GetName() {
			case "num_gpu_blocks":
				blocks = v
			case "block_size":
				size = v
			}
		}
		if blocks > 0 && size > 0 && blocks < 1<<40/size {
			c.KVTokens = blocks * size // of one rank: a rank is a pod here
		}
	}
	return c, nil
}

// Since gives what was counted after an earlier page of the same engine.
func (c Counters) Since(earlier Counters) (Counters, error) {
	d := c
	for _, f := range []struct {
		to   *float64
		less float64
	}{
		{&d.Requests, earlier.Requests}, {&d.Prefill, earlier.Prefill}, {&d.Prompt, earlier.Prompt}, {&d.Computed, earlier.Computed},
		{&d.Gaps, earlier.Gaps}, {&d.GapTime, earlier.GapTime}, {&d.Output, earlier.Output},
	} {
		if *f.to -= f.less; *f.to < 0 {
			return Counters{}, errors.New("a counter went back: the pages are in the wrong order, or the engine restarted between them")
		}
	}
	d.Running = (c.Running + earlier.Running) / 2
	return d, nil
}

// FromCounters fits an engine to means: one for prefill and one for decode. It
// keeps the base's proportions and moves each side as a whole, because a mean
// tells no more.
func FromCounters(c Counters, base sim.Profile) (Fit, error) {
	if c.Requests < 1 || c.Gaps < 1 || !(c.Prefill > 0) || !(c.GapTime > 0) || !(c.Computed > 0) {
		return Fit{}, fmt.Errorf("%.0f requests and %.0f gaps between tokens were counted: want some of both", c.Requests, c.Gaps)
	}
	f := Fit{Engine: base}
	e := &f.Engine
	mean := observed{Served: sim.Served{Prompt: int(c.Prompt / c.Requests), Cached: int(max(0, c.Prompt-c.Computed) / c.Requests)}}
	prefill := 1000 * c.Prefill / c.Requests
	if e.TokenMS*mean.fresh() > e.StepMS {
		scale := prefill / mean.computing(*e)
		e.TokenMS, e.PairMS = e.TokenMS*scale, e.PairMS*scale
	} else {
		f.Notes = append(f.Notes, fmt.Sprintf("prompts of %.0f computed tokens on average are done within one least step: prefill stays as in the base engine", mean.fresh()))
	}
	batch := max(1, c.Running)
	context := batch * (c.Prompt + c.Output/2) / c.Requests
	gap := 1000 * c.GapTime / c.Gaps
	scale := gap / (e.StepMS + e.SequenceMS*batch + e.ContextMS*context)
	e.StepMS, e.SequenceMS, e.ContextMS = e.StepMS*scale, e.SequenceMS*scale, e.ContextMS*scale
	if c.KVTokens > 0 {
		e.KVTokens = c.KVTokens
	}
	f.Notes = append(f.Notes,
		fmt.Sprintf("means of %.0f requests: the proportions within prefill and within decode are those of the base engine; a log of requests tells more", c.Requests),
		"under load both times include waiting for other requests' prefill: take the pages while few requests run")
	return f, e.Validate()
}
