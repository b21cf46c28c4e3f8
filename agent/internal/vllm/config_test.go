package vllm

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
)

func TestConfigIsRead(t *testing.T) {
	for name, c := range map[string]struct {
		status int
		page   string
		want   Config
		text   string
		fails  bool
	}{
		"as text, no speculation": {status: 500, text: `{"vllm_config": "model='m', speculative_config=None, tokenizer='m'"}`, want: Config{Told: true}},
		"as text, EAGLE":          {status: 500, text: `{"vllm_config": "model='m', speculative_config=SpeculativeConfig(method='eagle3', model='d', num_spec_tokens=2), x"}`, want: Config{Told: true, Speculative: "eagle3"}},
		"as text, no method":      {status: 500, text: `{"vllm_config": "speculative_config=SpeculativeConfig(model='d')"}`, fails: true},
		"as text, nothing":        {status: 500, text: `{"vllm_config": ""}`, fails: true},

		"no development mode": {status: 404},
		"plain":               {page: `{"vllm_config": {"speculative_config": null, "model_config": {"hf_config": "LlamaConfig {\n  \"x\": 1\n}"}}}`, want: Config{Told: true}},
		"speculates":          {page: `{"vllm_config": {"speculative_config": {"method": "eagle3", "disable_eagle_block_drop": true}}}`, want: Config{Told: true, Speculative: "eagle3", KeepsLastBlock: true}},
		"chunks, as text":     {page: `{"vllm_config": {"model_config": {"hf_text_config": "Llama4TextConfig {\n  \"attention_chunk_size\": 8192,\n}"}}}`, want: Config{Told: true, Chunk: 8192}},
		"chunks, as object":   {page: `{"vllm_config": {"model_config": {"hf_config": {"text_config": {"attention_chunk_size": 128}}}}}`, want: Config{Told: true, Chunk: 128}},
		"chunks, as field":    {page: `{"vllm_config": {"model_config": {"attention_chunk_size": 64, "hf_config": "\"attention_chunk_size\": 65"}}}`, want: Config{Told: true, Chunk: 64}},
		"absurd chunks":       {page: `{"vllm_config": {"model_config": {"attention_chunk_size": -3}}}`, want: Config{Told: true}},
		"another shape":       {page: `{"vllm_config": "VllmConfig(...)"}`, fails: true},
		"not JSON":            {page: `vllm_config`, fails: true},
		"an error":            {status: 500, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Query().Get("config_format") == "text" {
					_, _ = w.Write([]byte(c.text))
					return
				}
				if r.URL.Path != "/server_info" || r.URL.Query().Get("config_format") != "json" {
					t.Errorf("asked for %s", r.URL)
				}
				if c.status != 0 {
					w.WriteHeader(c.status)
				}
				_, _ = w.Write([]byte(c.page))
			}))
			defer s.Close()
			e, err := NewEngine(EngineConfig{URL: s.URL})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			got, err := e.Config(context.Background())
			if got != c.want || (err != nil) != c.fails {
				t.Errorf("%+v, %v; want %+v", got, err, c.want)
			}
		})
	}
}
