package realvllm_test

import (
	"encoding/json"
	"maps"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/e2e/realvllm"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// special is a kind of request that asks for more than the next tokens of one
// prompt.
type special struct {
	name string
	// vary gives the request of a round, from a prompt of its own.
	vary func(r *run) map[string]any
}

var specials = []special{
	{name: "completion of token ids", vary: func(r *run) map[string]any { return r.ids() }},
	{name: "completion of text", vary: func(r *run) map[string]any { return r.text() }},
	{name: "add_special_tokens: false", vary: func(r *run) map[string]any { return r.text("add_special_tokens", false) }},
	{name: "truncate_prompt_tokens", vary: func(r *run) map[string]any { return r.text("truncate_prompt_tokens", 100+r.rng.IntN(50)) }},
	{name: "prompt_logprobs", vary: func(r *run) map[string]any { return r.ids("prompt_logprobs", 1) }},
	{name: "prompt_logprobs: 0", vary: func(r *run) map[string]any { return r.ids("prompt_logprobs", 0) }},
	{name: "echo", vary: func(r *run) map[string]any { return r.text("echo", true) }},
	{name: "echo with logprobs", vary: func(r *run) map[string]any { return r.text("echo", true, "logprobs", 1) }},
	{name: "logprobs of the answer", vary: func(r *run) map[string]any { return r.ids("logprobs", 1) }},
	{name: "n: 3", vary: func(r *run) map[string]any { return r.ids("n", 3, "temperature", 1) }},
	// kvscout ranks by the first prompt, and the usage that vLLM gives counts the
	// cached tokens of the last: here both are as long, and cached alike.
	{name: "two prompts of token ids", vary: func(r *run) map[string]any {
		return r.ids("prompt", [][]uint32{r.tokens(200), r.tokens(200)})
	}},
	{name: "cache_salt", vary: func(r *run) map[string]any { return r.ids("cache_salt", "tenant-a") }},
	{name: "chat", vary: func(r *run) map[string]any { return r.chat() }},
	{name: "chat: prompt_logprobs", vary: func(r *run) map[string]any { return r.chat("prompt_logprobs", 1) }},
	{name: "chat: echo", vary: func(r *run) map[string]any { return r.chat("echo", true) }},
	{name: "chat: echo with top_logprobs", vary: func(r *run) map[string]any { return r.chat("echo", true, "logprobs", true, "top_logprobs", 2) }},
	{name: "chat: logprobs of the answer", vary: func(r *run) map[string]any { return r.chat("logprobs", true, "top_logprobs", 2) }},
	{name: "chat: tools in the template", vary: func(r *run) map[string]any {
		return r.chat("tool_choice", "none", "tools", []any{map[string]any{"type": "function", "function": map[string]any{
			"name": "look_up", "description": r.words(80), "parameters": map[string]any{"type": "object", "properties": map[string]any{"key": map[string]any{"type": "string"}}},
		}}})
	}},
	{name: "chat: add_special_tokens", vary: func(r *run) map[string]any { return r.chat("add_special_tokens", true) }},
	{name: "chat: add_generation_prompt: false", vary: func(r *run) map[string]any { return r.chat("add_generation_prompt", false) }},
	{name: "chat: continue_final_message", vary: func(r *run) map[string]any {
		return r.chat("add_generation_prompt", false, "continue_final_message", true)
	}},
	{name: "chat: truncate_prompt_tokens", vary: func(r *run) map[string]any { return r.chat("truncate_prompt_tokens", 100+r.rng.IntN(50)) }},
	{name: "chat: cache_salt", vary: func(r *run) map[string]any { return r.chat("cache_salt", "tenant-b") }},
}

// TestSpecialRequests gives the same body to the scheduler and to the engine,
// which has served it once.
func TestSpecialRequests(t *testing.T) {
	t.Parallel()
	r := open(t, "special", realvllm.Config{ScaleOut: true, Blocks: 2000})
	r.startAgent()
	r.renders()
	for _, s := range specials {
		r.phase(s.name, func() {
			for range short(6) {
				r.twice(s)
			}
		})
	}
}

// renders notes what the render endpoint says where it is asked for.
func (r *run) renders() {
	r.t.Helper()
	status, _, err := r.engine.Do(r.t.Context(), http.MethodPost, "/v1/completions/render", map[string]any{"model": realvllm.Model, "prompt": "hello"})
	if err != nil {
		r.t.Fatal(err)
	}
	foundMu.Lock()
	defer foundMu.Unlock()
	found.Wire.RenderAsked = status
}

// twice sends a request, and judges it when it comes again.
func (r *run) twice(s special) {
	r.t.Helper()
	body := s.vary(r)
	if _, refused := r.ask(body); refused != "" {
		r.t.Logf("%s: this release refuses it: %s", s.name, refused)
		return
	}
	r.settle()
	raw, err := json.Marshal(body)
	if err != nil {
		r.t.Fatal(err)
	}
	predicted, candidate := r.score(&api.Request{Prompt: api.Body(string(raw))}, 0)
	actual, refused := r.ask(body)
	if refused != "" {
		r.t.Fatalf("%s: refused the second time: %s", s.name, refused)
	}
	r.verdict(s.name, predicted, actual, candidate)
}

// ask sends a body to the engine and gives its count of cached tokens, or why
// it refused.
func (r *run) ask(body map[string]any) (cached int, refused string) {
	r.t.Helper()
	path := "/v1/completions"
	if body["messages"] != nil {
		path = "/v1/chat/completions"
	}
	status, text, err := r.engine.Do(r.t.Context(), http.MethodPost, path, body)
	if err != nil {
		r.t.Fatal(err)
	}
	if status >= 400 && status < 500 {
		return 0, string(text[:min(len(text), 300)])
	}
	if status != http.StatusOK {
		r.t.Fatalf("%s: %d: %.300s", path, status, text)
	}
	usage, err := realvllm.ReadUsage(text)
	if err != nil {
		r.t.Fatal(err)
	}
	return usage.CachedTokens, ""
}

// with builds a body from pairs of a name and a value.
func with(body map[string]any, pairs []any) map[string]any {
	maps.Copy(body, map[string]any{"model": realvllm.Model, "max_tokens": 3, "temperature": 0, "ignore_eos": true})
	for i := 0; i+1 < len(pairs); i += 2 {
		body[pairs[i].(string)] = pairs[i+1]
	}
	return body
}

func (r *run) ids(pairs ...any) map[string]any {
	return with(map[string]any{"prompt": r.tokens(100 + r.rng.IntN(200))}, pairs)
}

func (r *run) text(pairs ...any) map[string]any {
	return with(map[string]any{"prompt": r.words(120)}, pairs)
}

func (r *run) chat(pairs ...any) map[string]any {
	return with(map[string]any{"messages": []any{
		map[string]any{"role": "system", "content": r.words(80)},
		map[string]any{"role": "user", "content": r.words(40)},
	}}, pairs)
}

// words are n of them, and a few more.
func (r *run) words(n int) string {
	list := strings.Fields("the import of a class returns self and not None while an error raises in one module for each name")
	var b strings.Builder
	for range n + rand.N(n/4+1) {
		b.WriteString(list[r.rng.IntN(len(list))])
		b.WriteByte(' ')
	}
	return strings.TrimSpace(b.String())
}
