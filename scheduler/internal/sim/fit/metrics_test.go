package fit

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// page is a metrics page with counters, as vLLM writes them.
func page(c Counters) string {
	var b strings.Builder
	histogram := func(name string, sum, count float64) {
		fmt.Fprintf(&b, "# TYPE vllm:%s histogram\nvllm:%[1]s_bucket{engine=\"0\",le=\"+Inf\"} %.0[3]f\nvllm:%[1]s_sum{engine=\"0\"} %[2]g\nvllm:%[1]s_count{engine=\"0\"} %.0[3]f\n", name, sum, count)
	}
	histogram("request_prefill_time_seconds", c.Prefill, c.Requests)
	histogram("request_prompt_tokens", c.Prompt, c.Requests)
	histogram("request_prefill_kv_computed_tokens", c.Computed, c.Requests)
	histogram("request_generation_tokens", c.Output, c.Requests)
	histogram("inter_token_latency_seconds", c.GapTime, c.Gaps)
	fmt.Fprintf(&b, "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\"} %g\n", c.Running)
	fmt.Fprintf(&b, "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"%d\"} 1\n", c.KVTokens/16)
	return b.String()
}

// Two pages of an idle engine that is a fifth slower in prefill and a third
// faster in decode than the base give those shares back.
func TestTwoPagesGiveTheEnginesSpeeds(t *testing.T) {
	base, _ := sim.Engine("")
	want := base
	want.TokenMS, want.PairMS = 1.2*base.TokenMS, 1.2*base.PairMS
	want.StepMS, want.SequenceMS, want.ContextMS = base.StepMS/1.5, base.SequenceMS/1.5, base.ContextMS/1.5
	list, _, err := ReadLog(bytes.NewReader(simulateEngine(t, want, "shared:groups=3,prompts=0,head=2048,input=6000~1000:4000-9000,output=200,qps=.05,seconds=3000", 1)))
	if err != nil {
		t.Fatal(err)
	}
	before := Counters{Requests: 7, Prefill: 99, Prompt: 5000, Computed: 4000, Gaps: 70, GapTime: 9, Output: 77, KVTokens: 98_304}
	after := before
	for _, q := range list {
		after.Requests++
		after.Prefill += q.TTFT
		after.Prompt += float64(q.Prompt)
		after.Computed += float64(q.Prompt - q.Cached)
		after.Gaps += float64(q.Output - 1)
		after.GapTime += q.E2E - q.TTFT
		after.Output += float64(q.Output)
	}
	var pages [2]Counters
	for i, c := range []Counters{before, after} {
		if pages[i], err = ReadMetrics(strings.NewReader(page(c))); err != nil {
			t.Fatal(err)
		}
	}
	c, err := pages[1].Since(pages[0])
	if err != nil {
		t.Fatal(err)
	}
	f, err := FromCounters(c, base)
	if err != nil {
		t.Fatal(err)
	}
	if e := f.Engine; !near(e.TokenMS, want.TokenMS, .05) || !near(e.PairMS, want.PairMS, .05) || !near(e.StepMS, want.StepMS, .05) || e.KVTokens != 98_304 {
		t.Errorf("%+v\nwant\n%+v", e, want)
	}
	if _, err := pages[0].Since(pages[1]); err == nil {
		t.Error("pages in the wrong order are taken")
	}
}

func TestPagesOfRealEnginesAreRead(t *testing.T) {
	const folder = "../../../../agent/internal/vllm/testdata/"
	for _, name := range []string{"metrics-0.11.2.txt", "metrics-0.23.0.txt", "metrics-0.32.0.txt"} {
		f, err := os.Open(folder + name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		c, err := ReadMetrics(f)
		if err != nil || c.Requests < 1 || c.Prompt < 1 || c.Prefill <= 0 || c.KVTokens < 1 {
			t.Errorf("%s: %+v, %v", name, c, err)
		}
	}
}

func TestBadPagesAreNamed(t *testing.T) {
	for want, text := range map[string]string{
		"vllm:request_prefill_time_seconds": "# TYPE up gauge\nup 1\n",
		"parse metrics":                     "what is this?\n",
	} {
		if _, err := ReadMetrics(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	base, _ := sim.Engine("")
	if _, err := FromCounters(Counters{}, base); err == nil || !strings.Contains(err.Error(), "0 requests") {
		t.Errorf("%v", err)
	}
}

func FuzzReadMetrics(f *testing.F) {
	f.Add([]byte(page(Counters{Requests: 3, Prefill: 1, Prompt: 100, Computed: 50, Gaps: 9, GapTime: 1, Output: 12, KVTokens: 1600})))
	base, _ := sim.Engine("")
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := ReadMetrics(bytes.NewReader(text))
		if err != nil {
			return
		}
		if fit, err := FromCounters(c, base); err == nil && fit.Engine.Validate() != nil {
			t.Errorf("%+v gives %+v", c, fit.Engine)
		}
	})
}
