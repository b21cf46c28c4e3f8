package fakevllm

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

func get(t *testing.T, e *Engine, path string) string {
	t.Helper()
	resp, err := http.Get(e.URL() + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// shape is the keys of an answer with the kinds of their values.
func shape(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := make(map[string]any)
		for k, x := range v {
			out[k] = shape(x)
		}
		return out
	case []any:
		if len(v) == 0 {
			return "list"
		}
		return []any{shape(v[0])}
	case string:
		return "string"
	case float64:
		return "number"
	case bool:
		return "bool"
	}
	return nil
}

func TestAnswersHaveVLLMsShapes(t *testing.T) {
	e := engine(t, Config{Model: "tiny", MaxModelLen: 4000, BlockSize: 32, Blocks: 256, Topic: "kv", ScaleOut: true})
	chat := `{"model":"tiny","messages":[{"role":"system","content":"You are terse."},{"role":"user","content":[{"type":"text","text":"hi"}]}],"max_tokens":8}`
	// The answers of vLLM 0.32, and of 0.23 for render.
	for _, c := range []struct{ method, path, body, want string }{
		{"GET", "/health", "", ``},
		{"GET", "/ping", "", ``},
		{"GET", "/version", "", `{"version":"0.32.0"}`},
		{"GET", "/load", "", `{"server_load":0}`},
		{"GET", "/is_sleeping", "", `{"is_sleeping":false}`},
		{"GET", "/tokenizer_info", "", `{"detail":"Not Found"}`},
		{"GET", "/v1/models", "", `{"object":"list","data":[{"id":"tiny","object":"model","created":1795224332,"owned_by":"vllm","root":"tiny","parent":null,"max_model_len":4000,
			"permission":[{"id":"modelperm-b5eac0dd5f30d340","object":"model_permission","created":1795224332,"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,
			"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]}]}`},
		{"GET", "/kv_event_sources", "", `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5732","replay_endpoint":"tcp://*:5832","buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv"}}`},
		{"POST", "/tokenize", `{"model":"tiny","prompt":"import os"}`, `{"count":2,"max_model_len":4000,"tokens":[786,654],"token_strs":null}`},
		{"POST", "/tokenize", `{"model":"tiny","prompt":"import os","return_token_strs":true}`, `{"count":2,"max_model_len":4000,"tokens":[786,654],"token_strs":["import","os"]}`},
		{"POST", "/detokenize", `{"model":"tiny","tokens":[100,200,300]}`, `{"prompt":"x"}`},
		{"POST", "/v1/completions", `{"model":"nope","prompt":"x"}`, `{"error":{"message":"The model does not exist.","type":"NotFoundError","param":"model","code":404}}`},
		{"POST", "/reset_prefix_cache", "", `{"success":true}`},
		{"POST", "/v1/completions/render", `{"model":"tiny","prompt":["a","b"],"max_tokens":4}`, `[{"request_id":"c","token_ids":[1],"features":null,"sampling_params":{"max_tokens":4},"model":"tiny",
			"stream":false,"stream_options":null,"cache_salt":null,"priority":0,"kv_transfer_params":null}]`},
		{"POST", "/v1/chat/completions/render", strings.Replace(chat, `{`, `{"cache_salt":"x",`, 1), `{"request_id":"c","token_ids":[1],"features":null,"sampling_params":{"max_tokens":4},"model":"tiny",
			"stream":false,"stream_options":null,"cache_salt":"x","priority":0,"kv_transfer_params":null}`},
		{"POST", "/v1/chat/completions", chat, `{"id":"c","object":"chat.completion","created":1,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":"x","refusal":null},
			"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],"service_tier":null,"system_fingerprint":null,
			"usage":{"prompt_tokens":42,"total_tokens":50,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":32}},"kv_transfer_params":null}`},
	} {
		req, err := http.NewRequest(c.method, e.URL()+c.path, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		if c.want == "" {
			if len(b) > 0 || resp.StatusCode != 200 {
				t.Errorf("%s: %d %q", c.path, resp.StatusCode, b)
			}
			continue
		}
		var got, want any
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatalf("%s: %v: %s", c.path, err, b)
		}
		if err := json.Unmarshal([]byte(c.want), &want); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(shape(want), shape(got)); d != "" {
			t.Errorf("%s: %s", c.path, d)
		}
	}
}

func TestRenderIsOffByDefault(t *testing.T) {
	e := engine(t, Config{})
	if status, b := post(t, e, "/v1/completions/render", map[string]any{"prompt": "x"}); status != 403 {
		t.Errorf("%d %s", status, b)
	}
}

func TestTokenizerAgreesWithRenderAndUsage(t *testing.T) {
	e := engine(t, Config{ScaleOut: true})
	messages := []map[string]string{{"role": "user", "content": "grüß dich\x00"}}
	var tok, ren struct {
		Tokens []uint32
		IDs    []uint32 `json:"token_ids"`
	}
	_, b := post(t, e, "/tokenize", map[string]any{"messages": messages})
	if err := json.Unmarshal(b, &tok); err != nil {
		t.Fatal(err)
	}
	_, b = post(t, e, "/v1/chat/completions/render", map[string]any{"messages": messages})
	if err := json.Unmarshal(b, &ren); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(tok.Tokens, ren.IDs); d != "" {
		t.Error(d)
	}
	if got, want := text(tok.Tokens), "<|im_start|>user\ngrüß dich\x00<|im_end|>\n<|im_start|>assistant\n"; got != want {
		t.Errorf("%q", got)
	}
	var r reply
	_, b = post(t, e, "/v1/chat/completions", map[string]any{"messages": messages})
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	if r.Usage.PromptTokens != len(tok.Tokens) || r.Choices[0].Finish != "stop" || len(r.Choices[0].Message.Content) != r.Usage.CompletionTokens {
		t.Errorf("%+v", r)
	}
}

func TestPromptForms(t *testing.T) {
	for _, c := range []struct {
		in   string
		want prompts
	}{
		{`"ab"`, prompts{{100, 101}}},
		{`[1, 2 ,3]`, prompts{{1, 2, 3}}},
		{`["a","b"]`, prompts{{100}, {101}}},
		{`[[1],[2,3]]`, prompts{{1}, {2, 3}}},
		{`[]`, prompts{{}}},
	} {
		var got prompts
		if err := json.Unmarshal([]byte(c.in), &got); err != nil {
			t.Errorf("%s: %v", c.in, err)
		}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("%s: %s", c.in, d)
		}
	}
	for _, bad := range []string{`5`, `{"a":1}`, `[-1]`, `[1.5]`, `[1,"a"]`, `[4294967296]`, `["a",1]`, `[[1],"a"]`, `[true]`} {
		var got prompts
		if err := json.Unmarshal([]byte(bad), &got); err == nil {
			t.Errorf("%s became %v", bad, got)
		}
	}
}

func TestBadRequestsAreSaidSo(t *testing.T) {
	e := engine(t, Config{MaxModelLen: 100})
	for _, body := range []string{
		`{`, `{"prompt":[]}`, `{}`, `{"prompt":"x","max_tokens":0}`, `{"prompt":"x","max_tokens":100}`, `{"prompt":"x","n":0}`, `{"prompt":"x","n":9999}`,
		`{"prompt":[999999]}`, `{"prompt":"` + strings.Repeat("x", 100) + `"}`,
	} {
		resp, err := http.Post(e.URL()+"/v1/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		var r reply
		if err := json.NewDecoder(resp.Body).Decode(&r); err != nil || resp.StatusCode != 400 || r.Error.Message == "" {
			t.Errorf("%.40s: %d %v %+v", body, resp.StatusCode, err, r.Error)
		}
		resp.Body.Close()
	}
}

func TestMetricsPage(t *testing.T) {
	e := engine(t, Config{Ranks: 2, Adapters: []Adapter{{"ad1", "/one"}}})
	for range 2 {
		complete(t, e, ids(1, 40), 3, nil, "X-data-parallel-rank", "1")
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(get(t, e, "/metrics")))
	if err != nil {
		t.Fatal(err)
	}
	value := func(name, engine string) float64 {
		for _, m := range families[name].GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "engine" && l.GetValue() == engine {
					switch {
					case m.Histogram != nil:
						return float64(m.Histogram.GetSampleCount())
					case m.Counter != nil:
						return m.Counter.GetValue()
					}
					return m.GetGauge().GetValue()
				}
			}
		}
		t.Errorf("no %s of engine %s", name, engine)
		return -1
	}
	for name, want := range map[string]float64{
		"vllm:prefix_cache_queries_total":            80,
		"vllm:prefix_cache_hits_total":               32,
		"vllm:prompt_tokens_total":                   80,
		"vllm:generation_tokens_total":               6,
		"vllm:num_requests_running":                  0,
		"vllm:num_requests_waiting":                  0,
		"vllm:kv_cache_usage_perc":                   0,
		"vllm:cache_config_info":                     1,
		"vllm:time_to_first_token_seconds":           2,
		"vllm:inter_token_latency_seconds":           4,
		"vllm:e2e_request_latency_seconds":           2,
		"vllm:request_queue_time_seconds":            2,
		"vllm:request_prefill_time_seconds":          2,
		"vllm:request_decode_time_seconds":           2,
		"vllm:request_inference_time_seconds":        2,
		"vllm:request_prefill_kv_computed_tokens":    2,
		"vllm:request_prompt_tokens":                 2,
		"vllm:request_generation_tokens":             2,
		"vllm:iteration_tokens_total":                6,
		"vllm:request_time_per_output_token_seconds": 2,
		"vllm:num_preemptions_total":                 0,
	} {
		if got := value(name, "1"); got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	if got := value("vllm:prefix_cache_queries_total", "0"); got != 0 {
		t.Errorf("rank 0 counted %v", got)
	}
	labels := make(map[string]string)
	for _, l := range families["vllm:cache_config_info"].GetMetric()[0].GetLabel() {
		labels[l.GetName()] = l.GetValue()
	}
	if labels["block_size"] != "16" || labels["num_gpu_blocks"] != "19208" || labels["enable_prefix_caching"] != "True" || labels["prefix_caching_hash_algo"] != "sha256" {
		t.Errorf("cache config %v", labels)
	}
	for _, name := range []string{"vllm:num_requests_waiting_by_reason", "vllm:engine_sleep_state", "vllm:lora_requests_info", "process_start_time_seconds", "vllm:request_success_total"} {
		if families[name] == nil {
			t.Errorf("no %s", name)
		}
	}
}

// sums reads the samples of an engine of one rank by name.
func sums(t *testing.T, e *Engine) map[string]float64 {
	t.Helper()
	out := make(map[string]float64)
	for line := range strings.Lines(get(t, e, "/metrics")) {
		name, rest, _ := strings.Cut(strings.TrimPrefix(line, "vllm:"), "{")
		if _, value, ok := strings.Cut(rest, "} "); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				t.Fatal(err)
			}
			out[name] = n
		}
	}
	return out
}

// A request is in the metrics with its first token, and in the histograms of
// requests when it has its last; nothing moves between two steps.
func TestMetricsMoveAtTheStepsEnd(t *testing.T) {
	e := engine(t, Config{Speedup: 1, MaxModelLen: 100000, MaxBatchedTokens: 8192})
	const prompt = 3 * 8192 // three steps of .4 s and more
	first := make(chan struct{}, 1)
	ctx, leave := context.WithCancel(context.Background())
	left := make(chan error, 1)
	go func() { left <- stream(ctx, e, ids(0, prompt), 1000, func(reply) { signal(first) }) }()
	expect := func(when string, want map[string]float64) {
		t.Helper()
		got := sums(t, e)
		for name, v := range want {
			if got[name] != v {
				t.Errorf("%s, %s is %v, want %v", when, name, got[name], v)
			}
		}
	}
	until(t, "the first step", func() bool { return e.State(0).Running == 1 })
	expect("in the first step", map[string]float64{"num_requests_running": 0, "prefix_cache_queries_total": 0, "kv_cache_usage_perc": 0})
	until(t, "the second step", func() bool { return e.State(0).Counters.Steps == 2 })
	expect("in the second step", map[string]float64{
		"num_requests_running": 1, "prefix_cache_queries_total": prompt, "prompt_tokens_total": 0, "iteration_tokens_total_count": 0,
	})
	<-first
	expect("with the first token", map[string]float64{
		"num_requests_running": 1, "prompt_tokens_total": prompt, "time_to_first_token_seconds_count": 1,
		"request_queue_time_seconds_count": 0, "request_prefill_time_seconds_count": 0,
		"request_prefill_kv_computed_tokens_count": 0, "request_prompt_tokens_count": 0,
	})
	if r := complete(t, e, ids(0, 20), 1, nil); r.Usage.CompletionTokens != 1 {
		t.Fatalf("%+v", r)
	}
	expect("with the end of another", map[string]float64{
		"prompt_tokens_total": prompt + 20, "request_queue_time_seconds_count": 1, "request_prefill_time_seconds_count": 1,
		"request_prefill_kv_computed_tokens_count": 1, "request_prefill_kv_computed_tokens_sum": 20 - 16, "request_prompt_tokens_sum": 20,
		"request_time_per_output_token_seconds_count": 1,
	})
	leave()
	<-left
	until(t, "an empty batch", func() bool { return sums(t, e)["num_requests_running"] == 0 })
	expect("after an abort", map[string]float64{
		"request_queue_time_seconds_count": 1, "request_prompt_tokens_sum": 20, "e2e_request_latency_seconds_count": 1,
	})
	if page := get(t, e, "/metrics"); !strings.Contains(page, `vllm:request_success_total{engine="0",finished_reason="abort",model_name="fake"} 0`) {
		t.Error("an abort by the client is counted as an end")
	}
}
