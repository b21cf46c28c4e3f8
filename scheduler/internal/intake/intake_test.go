package intake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/protocol/blockkey"
)

const (
	chatMessages = `[{"role":"system","content":"You are terse."},{"role":"user","content":"def f(x): return x + 1  # what is f(2)? \u00fc"}]`
	generate     = `{"request_id":"r","token_ids":[7,8,9],"features":null,"model":"m","cache_salt":null}`
)

var (
	chatIDs = []uint32{1, 2612, 201, 59, 542, 564, 2055, 264, 16, 2, 201, 1, 2072, 201, 444, 284, 10, 90, 307, 323, 760,
		408, 383, 223, 309, 2525, 314, 284, 10, 20, 11, 33, 223, 130, 123, 2, 201, 1, 3375, 793, 821, 201}
	textIDs = []uint32{786, 654, 14, 628, 29, 762, 10, 495, 16, 5905, 2460, 1150}
)

// TestRealAnswersOfEachEra replays what vLLM 0.23 (renders) and 0.32 (render
// switched off) answered, and the form of 0.15 and 0.16.
func TestRealAnswersOfEachEra(t *testing.T) {
	old := func(t *testing.T) *standIn {
		return newStandIn(t, func(path string, _ []byte) (int, string) {
			switch path {
			case "/v1/chat/completions/render":
				return 200, `[[{"role":"user","content":"x [\"{"}], [{"prompt_token_ids": [5, 6, 7], "cache_salt": "s"}, {"prompt_token_ids": [1]}]]`
			case "/v1/completions/render":
				return 200, `[{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [1]}]`
			}
			return 404, `{"detail":"Not Found"}`
		})
	}
	replay := func(version string) func(*testing.T) *standIn {
		return func(t *testing.T) *standIn { return replayed(t, version) }
	}
	chat := "/v1/chat/completions/render"
	completion := "/v1/completions/render"
	ctx := context.Background()
	salted := `{"model":"tiny","messages":` + chatMessages + `,"max_tokens":8,"cache_salt":"tenant-a","kv_transfer_params":null}`
	for _, tc := range []struct {
		name   string
		engine func(*testing.T) *standIn
		call   func(*Intake) (Prompt, error)
		ids    []uint32
		salt   string
		asked  []string
	}{
		{"0.23 chat", replay("0.23.0"), func(i *Intake) (Prompt, error) {
			return i.Body(ctx, Request{Model: "tiny"}, []byte(`{"messages":`+chatMessages+`,"max_tokens":8}`))
		}, chatIDs, "", []string{chat}},
		{"0.23 chat body with salt", replay("0.23.0"), func(i *Intake) (Prompt, error) {
			return i.Body(ctx, Request{}, []byte(salted))
		}, chatIDs, "tenant-a", []string{chat}},
		{"0.32 chat body with salt", replay("0.32.0"), func(i *Intake) (Prompt, error) {
			return i.Body(ctx, Request{}, []byte(salted))
		}, chatIDs, "tenant-a", []string{chat, "/tokenize"}},
		{"0.23 two prompts", replay("0.23.0"), func(i *Intake) (Prompt, error) {
			return i.Body(ctx, Request{}, []byte(`{"model":"tiny","prompt":[[5,6,7,8],[1]]}`))
		}, []uint32{5, 6, 7, 8}, "", nil},
		{"0.23 text is not recorded for render", replay("0.23.0"), func(i *Intake) (Prompt, error) {
			return i.Body(ctx, Request{Model: "tiny"}, textBody("import os, sys; print(os.getcwd())"))
		}, textIDs, "", []string{completion, "/tokenize"}},
		{"0.32 text", replay("0.32.0"), func(i *Intake) (Prompt, error) {
			return i.Body(ctx, Request{Model: "tiny"}, textBody("import os, sys; print(os.getcwd())"))
		}, textIDs, "", []string{completion, "/tokenize"}},
		{"0.15 chat", old, func(i *Intake) (Prompt, error) {
			return i.Body(ctx, Request{}, chatBody(chatMessages))
		}, []uint32{5, 6, 7}, "s", []string{chat}},
		{"0.15 text", old, func(i *Intake) (Prompt, error) {
			return i.Body(ctx, Request{}, textBody("x"))
		}, []uint32{5, 6}, "", []string{completion}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := tc.engine(t)
			p, err := tc.call(newIntake(t, Config{}, e))
			if err != nil || p.Fallback != "" {
				t.Fatalf("error %v, fallback %q", err, p.Fallback)
			}
			if d := cmp.Diff(tc.ids, idsOf(p.Tokens)); d != "" {
				t.Error(d)
			}
			if p.Salt != tc.salt || p.Length != len(tc.ids) {
				t.Errorf("salt %q, length %d", p.Salt, p.Length)
			}
			if d := cmp.Diff(tc.asked, e.asked()); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestMultimodalRenderGivesItems(t *testing.T) {
	e := newStandIn(t, func(path string, _ []byte) (int, string) {
		if path == "/tokenize" {
			return 200, `{"tokens":[1,2,3]}`
		}
		return 200, `{"token_ids":[1,2,3,4,5,6,7,8],"cache_salt":"s","features":{
			"mm_hashes":{"image":["h2","h1"],"audio":["a"]},
			"mm_placeholders":{"image":[{"offset":5,"length":2},{"offset":1,"length":2}],"audio":[{"offset":3,"length":1}]},"kwargs_data":null}}`
	})
	body := `{"messages":[{"role":"user","content":[{"type":"text","text":"see"},{"type":"image_url","image_url":{"url":"data:x"}}]}]}`
	p, err := newIntake(t, Config{}, e).Body(context.Background(), Request{Model: "m"}, []byte(body))
	if err != nil || p.Fallback != "" {
		t.Fatal(err, p.Fallback)
	}
	want := []blockkey.Item{{ID: "h1", Offset: 1, Length: 2}, {ID: "a", Offset: 3, Length: 1}, {ID: "h2", Offset: 5, Length: 2}}
	if d := cmp.Diff(want, p.Items); d != "" {
		t.Error(d)
	}
	if m := e.lastBody()["model"]; m != "m" {
		t.Errorf("the engine was asked for model %v", m)
	}
}

func TestMultimodalIsNeverTokenized(t *testing.T) {
	e := newStandIn(t, func(path string, _ []byte) (int, string) {
		if path == "/tokenize" {
			return 200, `{"tokens":[1,2,3]}`
		}
		return 403, ""
	})
	i := newIntake(t, Config{}, e)
	for range 2 {
		p, err := i.Body(context.Background(), Request{}, chatBody(`[{"role":"user","content":[{"image_url":{"url":"data:x"}}]}]`))
		if err != nil || p.Tokens != nil || !strings.Contains(p.Fallback, "no engine could") {
			t.Fatalf("%v, %+v", err, p)
		}
	}
	if d := cmp.Diff([]string{"/v1/chat/completions/render"}, e.asked()); d != "" {
		t.Error(d)
	}
}

func TestTokenizeGetsWhatTheTemplateSees(t *testing.T) {
	e := newStandIn(t, func(path string, _ []byte) (int, string) {
		if path == "/tokenize" {
			return 200, `{"tokens":[1,2,3]}`
		}
		return 404, `{"detail":"Not Found"}`
	})
	i := newIntake(t, Config{}, e)
	body := `{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function"}],"temperature":0,
		"reasoning_effort":"low","documents":[{"a":1}],"chat_template_kwargs":{"enable_thinking":false,"reasoning_effort":"high"},
		"add_generation_prompt":false,"continue_final_message":null}`
	if p, err := i.Body(context.Background(), Request{}, []byte(body)); err != nil || p.Length != 3 {
		t.Fatal(err, p.Fallback)
	}
	want := map[string]any{
		"model": "m", "messages": []any{map[string]any{"role": "user", "content": "x"}},
		"tools": []any{map[string]any{"type": "function"}}, "add_generation_prompt": false,
		"chat_template_kwargs": map[string]any{"enable_thinking": false, "reasoning_effort": "low",
			"documents": []any{map[string]any{"a": 1.0}}},
	}
	if d := cmp.Diff(want, e.lastBody()); d != "" {
		t.Error(d)
	}
}

func TestAnotherEngineIsAskedOnFailure(t *testing.T) {
	bad := newStandIn(t, func(string, []byte) (int, string) { return 500, "the secret prompt" })
	wrong := newStandIn(t, func(string, []byte) (int, string) {
		return 404, `{"error":{"message":"The model does not exist.","type":"NotFoundError","param":"model","code":404}}`
	})
	good := newStandIn(t, func(string, []byte) (int, string) { return 200, generate })
	i := newIntake(t, Config{CacheBytes: -1}, bad, wrong, good)
	for n := range 6 {
		p, err := i.Body(context.Background(), Request{}, chatBody(chatMessages))
		if err != nil || p.Length != 3 {
			t.Fatalf("call %d: %v, %q", n, err, p.Fallback)
		}
	}
	// Both failed once and come last from then on.
	if len(bad.asked()) > 1 || len(wrong.asked()) > 1 || len(good.asked()) != 6 {
		t.Errorf("asked %d, %d and %d times", len(bad.asked()), len(wrong.asked()), len(good.asked()))
	}
}

func TestMissingEndpointIsRemembered(t *testing.T) {
	e := replayed(t, "0.32.0")
	i := newIntake(t, Config{CacheBytes: -1}, e)
	for range 3 {
		if p, err := i.Body(context.Background(), Request{Model: "tiny"}, chatBody(chatMessages)); err != nil || p.Fallback != "" {
			t.Fatal(err, p.Fallback)
		}
	}
	want := []string{"/v1/chat/completions/render", "/tokenize", "/tokenize", "/tokenize"}
	if d := cmp.Diff(want, e.asked()); d != "" {
		t.Error(d)
	}
}

func TestNoTokensIsAFallback(t *testing.T) {
	secret := "the secret prompt"
	answer := func(status int, text string) func(string, []byte) (int, string) {
		return func(string, []byte) (int, string) { return status, text }
	}
	for _, tc := range []struct {
		name   string
		answer func(string, []byte) (int, string)
		want   string
	}{
		{"nothing there", answer(404, `{"detail":"Not Found"}`), "answered 404"},
		{"refused", answer(400, secret), "/tokenize answered 400"},
		{"key wanted", answer(401, secret), "answered 401"},
		{"overloaded", answer(503, secret), "answered 503"},
		{"elsewhere", answer(302, secret), "answered 302"},
		{"no JSON", answer(200, secret), "not the form"},
		{"other JSON", answer(200, `{"text":"`+secret+`"}`), "not the form"},
		{"ids are not ids", answer(200, `{"token_ids":[-1],"tokens":["x"]}`), "not the form"},
		{"items do not fit", func(path string, _ []byte) (int, string) {
			if path == "/tokenize" {
				return 404, ""
			}
			return 200, `{"token_ids":[1,2],"features":{"mm_hashes":{"image":["h"]},"mm_placeholders":{"image":[{"offset":1,"length":2}]}}}`
		}, "404"},
		{"too large", answer(200, `{"token_ids":[`+strings.Repeat("1,", 2000)+`1]}`), "more than 1000 bytes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			i := newIntake(t, Config{MaxAnswer: 1000}, newStandIn(t, tc.answer))
			p, err := i.Body(context.Background(), Request{}, chatBody(chatMessages))
			if err != nil || p.Tokens != nil || p.Length != 0 {
				t.Fatalf("%v, %+v", err, p)
			}
			if !strings.Contains(p.Fallback, tc.want) || strings.Contains(p.Fallback, "secret") {
				t.Errorf("fallback %q", p.Fallback)
			}
		})
	}
	t.Run("nobody", func(t *testing.T) {
		p, err := New(Config{}).Body(context.Background(), Request{}, textBody("x"))
		if err != nil || p.Fallback != "no engine of the model is known" {
			t.Errorf("%v, %q", err, p.Fallback)
		}
	})
	t.Run("address", func(t *testing.T) {
		i := newIntake(t, Config{Engines: func(string) ([]string, error) { return []string{"", ":no\nhost"}, nil }})
		p, err := i.Body(context.Background(), Request{}, textBody("x"))
		if err != nil || !strings.Contains(p.Fallback, "not valid") {
			t.Errorf("%v, %q", err, p.Fallback)
		}
	})
}

func TestBadInput(t *testing.T) {
	ctx := context.Background()
	i := newIntake(t, Config{MaxTokens: 4})
	body := func(s string) func() (Prompt, error) {
		return func() (Prompt, error) { return i.Body(ctx, Request{}, []byte(s)) }
	}
	items := func(items ...blockkey.Item) func() (Prompt, error) {
		return func() (Prompt, error) { return i.Tokens(Request{Items: items}, []uint32{1, 2, 3, 4}) }
	}
	for _, tc := range []struct {
		name, want string
		call       func() (Prompt, error)
	}{
		{"no ids", "0 tokens", func() (Prompt, error) { return i.Tokens(Request{}, nil) }},
		{"many ids", "5 tokens, the limit is 4", func() (Prompt, error) { return i.Tokens(Request{}, make([]uint32, 5)) }},
		{"no keys", "0 tokens", func() (Prompt, error) { return i.Keys(Request{}, nil, 16, 0) }},
		{"no block size", "block size is 0", func() (Prompt, error) { return i.Keys(Request{}, []uint64{1}, 0, 3) }},
		{"zero key", "key 1 is 0", func() (Prompt, error) { return i.Keys(Request{}, []uint64{1, 0}, 2, 0) }},
		{"keys beyond the prompt", "more than the prompt's 3", func() (Prompt, error) { return i.Keys(Request{}, []uint64{1}, 4, 3) }},
		{"keys of a huge prompt", "limit is 4", func() (Prompt, error) { return i.Keys(Request{}, []uint64{1}, 2, 1<<63) }},
		{"items beside text", "items go with token ids", func() (Prompt, error) {
			return i.Body(ctx, Request{Items: []blockkey.Item{{ID: "x", Length: 1}}}, textBody("x"))
		}},
		{"item outside", "item 0", items(blockkey.Item{ID: "x", Offset: 3, Length: 2})},
		{"item far outside", "item 0", items(blockkey.Item{ID: "x", Offset: 1 << 62, Length: 1 << 62})},
		{"items out of order", "item 1", items(blockkey.Item{ID: "x", Offset: 2, Length: 1}, blockkey.Item{ID: "y", Offset: 1, Length: 1})},
		{"item without hash", "no hash", items(blockkey.Item{Length: 1})},
		{"empty item", "item 0", items(blockkey.Item{ID: "x"})},
		{"body is broken", "not valid JSON", body(`{"prompt":`)},
		{"body is a list", "not a JSON object", body(`[]`)},
		{"body is empty", "not valid JSON", body(``)},
		{"body with both", "both", body(`{"prompt":"x","messages":[]}`)},
		{"body with odd messages", "not a list", body(`{"messages":"x"}`)},
		{"body with odd prompt", "neither text nor a list", body(`{"prompt":{"a":1}}`)},
		{"body with odd model", "model is not a string", body(`{"model":1,"prompt":"x"}`)},
		{"body with no ids", "empty", body(`{"prompt":[]}`)},
		{"body with no ids inside", "empty", body(`{"prompt":[[ ]]}`)},
		{"body with empty text", "empty", body(`{"prompt":""}`)},
		{"body with negative ids", "not a list of token ids", body(`{"prompt":[1,-2]}`)},
		{"body with large ids", "not a list of token ids", body(`{"prompt":[4294967296]}`)},
		{"body with huge ids", "not a list of token ids", body(`{"prompt":[99999999999999999999999]}`)},
		{"body with fractions", "not a list of token ids", body(`{"prompt":[1.5]}`)},
		{"body with null ids", "not a list of token ids", body(`{"prompt":[1,null]}`)},
		{"body with mixed ids", "not a list of token ids", body(`{"prompt":[1,"x"]}`)},
		{"body with nested ids", "not a list of token ids", body(`{"prompt":[[[1]]]}`)},
		{"body with many ids", "limit is 4", body(`{"prompt":[1,2,3,4,5]}`)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := tc.call()
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
}

func TestForms(t *testing.T) {
	ctx := context.Background()
	i := newIntake(t, Config{})
	must := func(p Prompt, err error) Prompt {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	ids := []uint32{1, 1 << 20, 1<<32 - 1}
	p := must(i.Tokens(Request{Model: "m"}, ids))
	if d := cmp.Diff(ids, idsOf(p.Tokens)); d != "" || p.Length != 3 || p.Model != "m" {
		t.Error(d, p)
	}
	k := must(i.Keys(Request{}, []uint64{3, 4}, 16, 0))
	if k.Length != 32 || k.BlockSize != 16 || len(k.Keys) != 2 || k.Keys[1] != 4 {
		t.Errorf("%+v", k)
	}
	if k := must(i.Keys(Request{}, nil, 16, 5)); k.Length != 5 {
		t.Errorf("a prompt shorter than a block: %+v", k)
	}
	if p := i.None(Request{}); p.Fallback == "" {
		t.Error("no prompt, and no reason")
	}
	two := must(i.Body(ctx, Request{}, []byte(`{"model":"a","cache_salt":"s","prompt":[ [ 1 , 2 ] , [3]]}`)))
	if d := cmp.Diff([]uint32{1, 2}, idsOf(two.Tokens)); d != "" || two.Note != "ranked by the first of 2 prompts" ||
		two.Model != "a" || two.Salt != "s" {
		t.Errorf("%s %+v", d, two)
	}
	// What stands beside the body wins; names are exact; the last of equal ones counts.
	one := must(i.Body(ctx, Request{Model: "b", Salt: "x"}, []byte(`{"Prompt":"no","model":"a","prompt":[9],"cache_salt":"s","prompt":[7,8]}`)))
	if d := cmp.Diff([]uint32{7, 8}, idsOf(one.Tokens)); d != "" || one.Model != "b" || one.Salt != "x" {
		t.Errorf("%s %+v", d, one)
	}
	for _, body := range []string{`{}`, `{"input":"x"}`, `{"prompt_embeds":"AA=="}`, `{"prompt_embeds":"AA==","prompt":"x"}`,
		`{"prompt":[1,2],"truncate_prompt_tokens":1}`} {
		if p := must(i.Body(ctx, Request{}, []byte(body))); p.Fallback == "" || p.Tokens != nil {
			t.Errorf("%s: %+v", body, p)
		}
	}
}

func TestTwoMillionTokens(t *testing.T) {
	i := newIntake(t, Config{})
	p, err := i.Tokens(Request{}, make([]uint32, 2_000_000))
	if err != nil || p.Length != 2_000_000 {
		t.Fatal(err)
	}
	body := `{"prompt":[` + strings.Repeat("151643,", 1_999_999) + `1]}`
	p, err = i.Body(context.Background(), Request{}, []byte(body))
	if err != nil || p.Length != 2_000_000 {
		t.Fatal(err)
	}
}

func TestCacheIsBounded(t *testing.T) {
	e := newStandIn(t, func(string, []byte) (int, string) {
		return 200, `{"token_ids":[` + strings.Repeat("1,", 999) + `1]}`
	})
	i := newIntake(t, Config{CacheBytes: 20_000}, e)
	for n := range 20 {
		for range 2 {
			if _, err := i.Body(context.Background(), Request{}, textBody(fmt.Sprint(n))); err != nil {
				t.Fatal(err)
			}
		}
		if s := i.Stats(); s.CacheBytes > 20_000 {
			t.Fatalf("%d bytes", s.CacheBytes)
		}
	}
	s := i.Stats()
	if s.Hits != 20 || len(e.asked()) != 20 || s.Evicted == 0 || s.CacheBytes < 8000 {
		t.Errorf("%d calls, %+v", len(e.asked()), s)
	}
}

func TestCacheForgets(t *testing.T) {
	c := newCache(1<<20, time.Nanosecond)
	c.put(digest{1}, &rendered{tokens: make([]byte, 4)})
	time.Sleep(time.Microsecond)
	if c.get(digest{1}) != nil || c.bytes != 0 {
		t.Error("an entry outlived its time")
	}
}

// TestEqualPromptsAreAskedOnce holds the engine until all callers wait.
func TestEqualPromptsAreAskedOnce(t *testing.T) {
	const callers = 20
	hold := make(chan struct{})
	e := newStandIn(t, func(string, []byte) (int, string) { <-hold; return 200, generate })
	i := newIntake(t, Config{CacheBytes: -1}, e)
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			if p, err := i.Body(context.Background(), Request{}, textBody("x")); err != nil || p.Length != 3 {
				t.Error(err, p.Fallback)
			}
		})
	}
	await.True(t, "all but one share the call", func() bool { return i.Stats().Shared == callers-1 })
	close(hold)
	wg.Wait()
	if n := len(e.asked()); n != 1 {
		t.Errorf("asked %d times", n)
	}
}

func TestCancelledCallerLeavesTheOthers(t *testing.T) {
	hold, release := make(chan struct{}), sync.Once{}
	e := newStandIn(t, func(string, []byte) (int, string) { <-hold; return 200, generate })
	defer release.Do(func() { close(hold) })
	i := newIntake(t, Config{}, e)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := i.Body(ctx, Request{}, textBody("x")); !errors.Is(err, context.Canceled) {
			t.Errorf("the cancelled caller got %v", err)
		}
	})
	await.True(t, "the first is asked", func() bool { return len(e.asked()) == 1 })
	wg.Go(func() {
		if p, err := i.Body(context.Background(), Request{}, textBody("x")); err != nil || p.Length != 3 {
			t.Errorf("the other caller got %v, %q", err, p.Fallback)
		}
	})
	await.True(t, "the second shares the call", func() bool { return i.Stats().Shared == 1 })
	cancel()
	await.True(t, "the second asks itself", func() bool { return len(e.asked()) == 2 })
	release.Do(func() { close(hold) })
	wg.Wait()
}

// TestSilentEngineCostsNoDecision: an engine that hangs must leave the caller
// time for a choice by load.
func TestSilentEngineCostsNoDecision(t *testing.T) {
	hold := make(chan struct{})
	e := newStandIn(t, func(string, []byte) (int, string) { <-hold; return 200, generate })
	defer close(hold)
	i := newIntake(t, Config{}, e)
	ctx, cancel := context.WithTimeout(context.Background(), 400*time.Millisecond)
	defer cancel()
	p, err := i.Body(ctx, Request{}, textBody("x"))
	if err != nil || !strings.Contains(p.Fallback, "in time") || ctx.Err() != nil {
		t.Errorf("%v, %q, %v", err, p.Fallback, ctx.Err())
	}
}

func TestAPIKeyIsSent(t *testing.T) {
	var got string
	srv := newStandIn(t, func(string, []byte) (int, string) { return 200, generate })
	inner := srv.Config.Handler
	srv.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.Header.Get("Authorization")
		inner.ServeHTTP(w, r)
	})
	if _, err := newIntake(t, Config{APIKey: "k"}, srv).Body(context.Background(), Request{}, textBody("x")); err != nil || got != "Bearer k" {
		t.Error(err, got)
	}
}

func TestBeginningOfAPromptThatIsText(t *testing.T) {
	i := New(Config{})
	t.Cleanup(i.Close)
	quoted := func(s string) string { q, _ := json.Marshal(s); return string(q) }
	long := strings.Repeat("é\n\"x😀", 5000)
	for name, c := range map[string]struct{ body, want string }{
		"short":          {`{"model":"m","prompt":"h\u00e9llo"}`, "héllo"},
		"long":           {`{"prompt":` + quoted(long) + `}`, long[:2000]},
		"long, escaped":  {`{"prompt":"` + strings.Repeat(`\ud83d\ude00`, 2000) + `"}`, strings.Repeat("😀", 1000)},
		"first of two":   {`{"prompt":["one","two"]}`, "one"},
		"chat":           {`{"messages":[{"role":"user","content":"x"}]}`, `[{"role":"user","content":"x"}]`},
		"ids have none":  {`{"prompt":[1,2,3]}`, ""},
		"embeds of none": {`{"prompt_embeds":"x"}`, ""},
	} {
		p, err := i.Body(t.Context(), Request{Model: "m"}, []byte(c.body))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !strings.HasPrefix(p.Beginning, c.want) || (p.Beginning == "") != (c.want == "") || len(p.Beginning) > maxBeginning+12 {
			t.Errorf("%s: %.60q", name, p.Beginning)
		}
		if p.Beginning != "" && p.Tokens != nil {
			t.Errorf("%s: tokens without an engine", name)
		}
	}
	p, err := i.Body(t.Context(), Request{Model: "m"}, textBody(long))
	if err != nil || !strings.HasPrefix(p.Beginning, long[:2000]) || len(p.Beginning) > maxBeginning {
		t.Errorf("text: %v, %d bytes", err, len(p.Beginning))
	}
}

// textBody is the body of a completion of text.
func textBody(text string) []byte {
	quoted, _ := json.Marshal(text)
	return []byte(`{"prompt":` + string(quoted) + `}`)
}

// chatBody is the body of a chat completion.
func chatBody(messages string) []byte { return []byte(`{"messages":` + messages + `}`) }
