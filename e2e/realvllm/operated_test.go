package realvllm_test

import (
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/realvllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// TestOperatedEnginesAreFollowed does to an engine what operators and trainers
// do over HTTP, while nobody sends requests: no event tells of it before the
// next one. What was cached before is then predicted, all of it before any is
// asked for again.
func TestOperatedEnginesAreFollowed(t *testing.T) {
	t.Parallel()
	r := open(t, "operated", realvllm.Config{Lora: true})
	r.startAgent()
	r.operations()
	r.phase("another adapter under its name", func() {
		list := r.adapted("ad1")
		r.remains(list, func() { r.load("ad1", "ad2") })
		r.remains(r.adapted("ad1"), func() { r.load("ad1", "ad1") })
		r.remains(list[:1], func() { r.load("ad1", "ad1") })
	})
	r.phase("weights replaced, cache kept", func() {
		r.survives(func() {
			r.do("/collective_rpc", map[string]any{"method": "reset_weights"})
			r.do("/update_weight_version", map[string]any{"new_version": "2"})
		})
	})
}

// TestOperatedTiersAreFollowed does the same to an engine that keeps blocks in
// host memory, too, where some of it reaches.
func TestOperatedTiersAreFollowed(t *testing.T) {
	t.Parallel()
	r := open(t, "operated, offload", realvllm.Config{Offload: true, Blocks: 130})
	r.startAgent()
	r.operations()
	r.phase("reset, with the connector", func() {
		r.survives(func() { r.do("/reset_prefix_cache?reset_external=true", nil) })
	})
}

// operations are those that every engine bears.
func (r *run) operations() {
	r.t.Helper()
	for _, o := range []struct {
		name  string
		paths []string
	}{
		{"reset", []string{"/reset_prefix_cache"}},
		{"asleep at level 0, awake", []string{"/sleep?level=0", "/wake_up?tags=scheduling"}},
		{"asleep at level 1, awake", []string{"/sleep?level=1", "/wake_up"}},
		{"asleep at level 2, awake", []string{"/sleep?level=2", "/wake_up"}},
		{"paused, resumed", []string{"/pause", "/resume"}},
		{"paused, requests kept, resumed", []string{"/pause?mode=keep", "/resume"}},
		{"paused, cache kept, resumed", []string{"/pause?clear_cache=false", "/resume"}},
	} {
		r.phase(o.name, func() {
			r.survives(func() {
				for _, path := range o.paths {
					r.do(path, nil)
				}
			})
		})
	}
}

// looked is how long the agent may take to look at its engine and tell.
const looked = 2 * time.Second

// survives judges what is left after an operation of prompts that were cached
// before it.
func (r *run) survives(operate func()) {
	r.t.Helper()
	var list []realvllm.Request
	for range 5 {
		list = append(list, realvllm.Request{Tokens: r.tokens(9*r.engine.BlockSize() + 1)})
	}
	r.remains(list, operate)
	r.requests(9, realvllm.Request{})
}

// remains caches prompts, operates, predicts all of them, and only then asks
// for one after the other.
func (r *run) remains(list []realvllm.Request, operate func()) {
	r.t.Helper()
	for _, q := range list {
		r.complete(q)
	}
	r.settle()
	operate()
	time.Sleep(looked)
	r.until("be settled", stage.Settled)
	predicted, candidates := make([]int, len(list)), make([]*api.Candidate, len(list))
	for i, q := range list {
		predicted[i], candidates[i] = r.predict(q)
	}
	for i, q := range list {
		r.verdict("cached before", predicted[i], r.complete(q).CachedTokens, candidates[i])
	}
}

// adapted are requests for an adapter, and one for the model itself.
func (r *run) adapted(adapter string) (list []realvllm.Request) {
	for _, name := range []string{adapter, adapter, ""} {
		list = append(list, realvllm.Request{Tokens: r.tokens(9*r.engine.BlockSize() + 1), Adapter: name})
	}
	return list
}

// load loads an adapter anew, from the folder of any.
func (r *run) load(name, folder string) {
	r.t.Helper()
	r.do("/v1/unload_lora_adapter", map[string]any{"lora_name": name})
	r.do("/v1/load_lora_adapter", map[string]any{"lora_name": name, "lora_path": filepath.Join(r.engine.Model(), folder)})
}

// do asks the engine to do something.
func (r *run) do(path string, body any) {
	r.t.Helper()
	status, text, err := r.engine.Do(r.t.Context(), http.MethodPost, path, body)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Logf("%s: %d %.200s", path, status, text)
	if status != http.StatusOK {
		r.t.Errorf("%s: %d: %.300s", path, status, text)
	}
}
