package realvllm_test

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvscout/kvscout/e2e/realvllm"
	"github.com/kvscout/kvscout/e2e/wire"
)

// found is what this run found; TestMain writes it to the file that
// KVSCOUT_RESULT names, beside what earlier runs found there.
var (
	foundMu sync.Mutex // guards found
	found   realvllm.Result
)

func TestMain(m *testing.M) {
	code := m.Run()
	if path := os.Getenv("KVSCOUT_RESULT"); path != "" && len(found.Phases) > 0 {
		result, err := realvllm.Read(path)
		if err == nil {
			result.Merge(found)
			err = result.Write(path)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "the result is not kept:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// keep notes a phase of an engine whose phases are kept.
func keep(release string, p realvllm.Phase) {
	if p.Engine == "" {
		return
	}
	foundMu.Lock()
	defer foundMu.Unlock()
	found.Release = release
	found.Phases = append(found.Phases, p)
}

func TestHybridModelsAreTheEnginesOwnToo(t *testing.T) {
	t.Parallel()
	r := open(t, "hybrid", realvllm.Config{Model: "hybrid"})
	r.wire()
	r.startAgent()
	r.phase("sequential, with evictions", func() { r.requests(40, realvllm.Request{}) })
	r.phase("turns", r.turns)
	r.phase("after a reset", r.reset)
	r.phase("kinds said by -groups", func() {
		r.agent.Stop()
		r.groups = "sliding:128,full"
		r.startAgent()
		r.requests(30, realvllm.Request{})
	})
}

// TestTiersOfHybridModels offloads blocks of several groups: what is credited of
// them is what GPU memory holds.
func TestTiersOfHybridModels(t *testing.T) {
	t.Parallel()
	r := open(t, "hybrid, offload", realvllm.Config{Model: "hybrid", Offload: true, Blocks: 260})
	r.startAgent()
	r.phase("sequential, with evictions", func() { r.requests(60, realvllm.Request{}) })
	r.phase("turns", r.turns)
	r.phase("after a reset", r.reset)
}

// TestDecodeEnginesAreNeverPromisedTooMuch runs a prefill engine and then, on what
// its connector left behind, a decode engine. No event tells of what a connector
// brings: the decode engine finds at least what was promised.
func TestDecodeEnginesAreNeverPromisedTooMuch(t *testing.T) {
	t.Parallel()
	connect := func(role string, folder string) realvllm.Config {
		return realvllm.Config{Args: []string{"--kv-transfer-config", fmt.Sprintf(
			`{"kv_connector":"ExampleConnector","kv_role":%q,"kv_connector_extra_config":{"shared_storage_path":%q}}`, role, folder)}}
	}
	folder := t.TempDir()
	prefill := open(t, "prefill", connect("kv_producer", folder))
	prefill.startAgent()
	prefill.phase("prefill", func() { prefill.requests(30, realvllm.Request{}) })
	list := make([]realvllm.Request, 15)
	for i := range list {
		list[i] = realvllm.Request{Tokens: prefill.tokens(100 + prefill.rng.IntN(900)), MaxTokens: 1}
		prefill.complete(list[i])
	}
	prefill.agent.Stop()
	prefill.engine.Kill()
	decode := open(t, "decode", connect("kv_consumer", folder))
	decode.startAgent()
	decode.complete(list[0]) // from here on its counters tell of the connector
	time.Sleep(looked)
	decode.phase("decode", func() {
		for _, q := range list[1:] {
			q.MaxTokens = 20
			decode.judge(q)
		}
	})
	decode.phase("turns", decode.turns)
	if decode.cached == 0 {
		t.Error("the connector brought nothing")
	}
}

func TestEachRankIsItsOwn(t *testing.T) {
	t.Parallel()
	r := open(t, "ranks", realvllm.Config{Ranks: 2})
	r.startAgent()
	r.phase("two ranks, by header", func() { r.requests(30, realvllm.Request{}) })
}

func TestOffloadedBlocksCount(t *testing.T) {
	t.Parallel()
	// A pool so small that what the host holds counts.
	r := open(t, "offload", realvllm.Config{Offload: true, Blocks: 130})
	r.startAgent()
	r.phase("sequential, with evictions", func() { r.requests(40, realvllm.Request{}) })
	r.phase("whole prompts again", func() {
		for range 5 {
			p := r.tokens(r.engine.BlockSize() * (2 + r.rng.IntN(20)))
			for range 2 {
				r.judge(realvllm.Request{Tokens: p})
			}
		}
	})
}

// salt of the request that is looked for in the events.
const salt = "a salt to be seen"

// wire looks at what the engine says of a salted request, and of itself.
func (r *run) wire() {
	r.t.Helper()
	payloads := make(chan []byte, 1000)
	s, err := wire.Subscribe(r.engine.Events(), func(p []byte) {
		select {
		case payloads <- slices.Clone(p):
		default: // the first ones say it
		}
	})
	if err != nil {
		r.t.Fatal(err)
	}
	defer s.Close()
	var w realvllm.Wire
	groups := map[string]bool{}
	for began := time.Now(); w.Events == "" || time.Since(began) < time.Second; {
		if time.Since(began) > patience {
			r.t.Fatal("no event came")
		}
		r.complete(realvllm.Request{Tokens: r.tokens(100), Salt: salt})
		select {
		case p := <-payloads:
			if err := learn(&w, groups, p); err != nil {
				r.t.Fatal(err)
			}
		case <-time.After(200 * time.Millisecond):
		}
	}
	for g := range groups {
		w.Groups = append(w.Groups, g)
	}
	slices.Sort(w.Groups)
	events, _, err := r.engine.ExplicitEndpoints(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	w.Told = events == ""
	if w.Render, _, err = r.engine.Do(r.t.Context(), http.MethodPost, "/v1/completions/render", map[string]any{"model": realvllm.Model, "prompt": "hello"}); err != nil {
		r.t.Fatal(err)
	}
	r.t.Logf("vLLM %s: %+v", r.engine.Release(), w)
	foundMu.Lock()
	defer foundMu.Unlock()
	if r.kind == "hybrid" {
		found.Wire.Groups = w.Groups
	} else {
		w.Groups, w.RenderAsked = found.Wire.Groups, found.Wire.RenderAsked
		found.Wire = w
	}
}

// learn learns from one batch what shape its events have and what they name.
func learn(w *realvllm.Wire, groups map[string]bool, payload []byte) error {
	var batch []msgpack.RawMessage
	if err := msgpack.Unmarshal(payload, &batch); err != nil || len(batch) < 2 {
		return fmt.Errorf("a batch of %d bytes: %w", len(payload), err)
	}
	var events []any
	if err := msgpack.Unmarshal(batch[1], &events); err != nil {
		return err
	}
	for _, e := range events {
		switch e := e.(type) {
		case map[string]any:
			if e["type"] != "BlockStored" {
				continue
			}
			w.Events = "maps"
			w.Salted = w.Salted || mentions(e["extra_keys"])
			if kind, _ := e["kv_cache_spec_kind"].(string); kind != "" {
				groups[name(e["group_idx"], kind, e["kv_cache_spec_sliding_window"])] = true
			}
		case []any:
			if len(e) == 0 || e[0] != "BlockStored" {
				continue
			}
			w.Events = fmt.Sprintf("arrays of %d", len(e))
			at := func(i int) any {
				if i < len(e) {
					return e[i]
				}
				return nil
			}
			w.Salted = w.Salted || mentions(at(8))
			if kind, _ := at(10).(string); kind != "" {
				groups[name(at(9), kind, at(11))] = true
			} else if g := at(9); g != nil {
				groups[fmt.Sprintf("%v: kind not named", g)] = true
			}
		}
	}
	return nil
}

func name(group any, kind string, window any) string {
	if window != nil {
		return fmt.Sprintf("%v: %s %v", group, kind, window)
	}
	return fmt.Sprintf("%v: %s", group, kind)
}

// mentions says whether the salt of the request stands among the extra keys.
func mentions(extra any) bool { return strings.Contains(fmt.Sprint(extra), salt) }
