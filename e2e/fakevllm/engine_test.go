package fakevllm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vmihailenco/msgpack/v5"
)

// engine runs one, fast, until the test ends.
func engine(t *testing.T, cfg Config) *Engine {
	t.Helper()
	if cfg.Speedup == 0 {
		cfg.Speedup = 1000
	}
	e, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		http.DefaultClient.CloseIdleConnections()
	})
	return e
}

func ids(first, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(first + i)
	}
	return out
}

type reply struct {
	Choices []struct {
		Text    string
		Message struct{ Content string }
		Delta   struct{ Role, Content string }
		Finish  string `json:"finish_reason"`
	}
	Usage usage
	Error struct {
		Message string
		Type    string
		Param   *string
		Code    int
	}
}

func post(t *testing.T, e *Engine, path string, body any, header ...string) (int, []byte) {
	t.Helper()
	b, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequest("POST", e.URL()+path, bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, out
}

// complete sends a prompt of token ids and returns the reply.
func complete(t *testing.T, e *Engine, tokens []uint32, generate int, more map[string]any, header ...string) reply {
	t.Helper()
	body := map[string]any{"model": e.cfg.Model, "prompt": tokens, "max_tokens": generate}
	for k, v := range more {
		body[k] = v
	}
	status, b := post(t, e, "/v1/completions", body, header...)
	var r reply
	if err := json.Unmarshal(b, &r); err != nil || status != 200 {
		t.Fatalf("%d %v: %s", status, err, b)
	}
	return r
}

func cached(t *testing.T, e *Engine, tokens []uint32, generate int) int {
	t.Helper()
	return complete(t, e, tokens, generate, nil).Usage.Details.CachedTokens
}

// eventsOf decodes the map events of a message, in short.
func eventsOf(t *testing.T, m sent) []string {
	t.Helper()
	rest := m.wire[m.topicEnd:][10:] // behind the sequence frame
	if rest[0]&flagLong != 0 {
		rest = rest[9:]
	} else {
		rest = rest[2:]
	}
	var batch []any
	if err := msgpack.Unmarshal(rest, &batch); err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range batch[1].([]any) {
		e := e.(map[string]any)
		s := e["type"].(string)
		if h, ok := e["block_hashes"].([]any); ok {
			s += fmt.Sprintf(" %d", len(h))
		}
		if k, ok := e["token_ids"].([]any); ok {
			s += fmt.Sprintf(" tokens %d", len(k))
		}
		if p, ok := e["parent_block_hash"]; ok && p != nil {
			s += " chained"
		}
		out = append(out, s)
	}
	return out
}

func allEvents(t *testing.T, e *Engine, rank int) [][]string {
	t.Helper()
	var out [][]string
	for _, m := range e.Events(rank).since(0) {
		out = append(out, eventsOf(t, m))
	}
	return out
}

func TestCachedTokensAreExact(t *testing.T) {
	e := engine(t, Config{BlockSize: 16, Blocks: 200})
	prompt := ids(1000, 64)
	if n := cached(t, e, prompt, 1); n != 0 {
		t.Errorf("cold: %d", n)
	}
	if n := cached(t, e, prompt, 1); n != 48 { // the last block is always computed
		t.Errorf("all but the last token: %d", n)
	}
	if n := cached(t, e, append(slices.Clone(prompt), 1, 2), 1); n != 64 {
		t.Errorf("longer: %d", n)
	}
	if n := cached(t, e, append(slices.Clone(prompt[:40]), 9, 9, 9), 1); n != 32 {
		t.Errorf("forked: %d", n)
	}
	if n := e.Depth(0, prompt, "", ""); n != 4 {
		t.Errorf("depth %d", n)
	}
	if r := complete(t, e, prompt, 1, map[string]any{"cache_salt": "a"}); r.Usage.Details.CachedTokens != 0 {
		t.Error("a salted prompt met an unsalted one")
	}
	if r := complete(t, e, prompt, 1, map[string]any{"cache_salt": "a"}); r.Usage.Details.CachedTokens != 48 {
		t.Error("a salted prompt did not meet itself")
	}
	s := e.State(0)
	if s.Counters.Queries != 64+64+66+43+64+64 || s.Counters.Hits != 48+64+32+48 {
		t.Errorf("counters %+v", s.Counters)
	}
}

func TestGeneratedTokensFillBlocks(t *testing.T) {
	e := engine(t, Config{BlockSize: 4, Blocks: 100})
	prompt := ids(500, 6)
	r := complete(t, e, prompt, 11, nil)
	if len(r.Choices[0].Text) != 11 || r.Choices[0].Finish != "length" {
		t.Fatalf("%+v", r)
	}
	full := append(slices.Clone(prompt), appendText(nil, r.Choices[0].Text)...)
	// 17 tokens, of which the last was never computed: 4 whole blocks.
	if n := e.Depth(0, full, "", ""); n != 4 {
		t.Errorf("depth %d", n)
	}
	want := [][]string{
		{"BlockStored 1 tokens 4"},
		{"BlockStored 1 tokens 4 chained"},
		{"BlockStored 1 tokens 4 chained"},
		{"BlockStored 1 tokens 4 chained"},
	}
	if d := cmp.Diff(want, allEvents(t, e, 0)); d != "" {
		t.Error(d)
	}
	if again := complete(t, e, prompt, 11, nil); again.Choices[0].Text != r.Choices[0].Text {
		t.Error("the same prompt got another answer")
	}
}

func TestPrefillIsChunked(t *testing.T) {
	e := engine(t, Config{BlockSize: 16, Blocks: 100, MaxBatchedTokens: 40})
	cached(t, e, ids(0, 100), 1)
	want := [][]string{
		{"BlockStored 2 tokens 32"},
		{"BlockStored 3 tokens 48 chained"},
		{"BlockStored 1 tokens 16 chained"},
	}
	if d := cmp.Diff(want, allEvents(t, e, 0)); d != "" {
		t.Error(d)
	}
	if s := e.State(0); s.Counters.Steps != 3 {
		t.Errorf("%d steps", s.Counters.Steps)
	}
}

func TestEvictionIsAnnouncedBlockByBlockBeforeTheStore(t *testing.T) {
	e := engine(t, Config{BlockSize: 4, Blocks: 9})
	a, b := ids(100, 16), ids(200, 16)
	cached(t, e, a, 1)
	cached(t, e, b, 1)
	if e.Depth(0, a, "", "") != 4 || e.Depth(0, b, "", "") != 4 {
		t.Fatal("both must fit")
	}
	cached(t, e, ids(300, 8), 1)
	if n := e.Depth(0, a, "", ""); n != 2 {
		t.Errorf("the older one keeps its head of 2 blocks, not %d", n)
	}
	if n := e.Depth(0, b, "", ""); n != 4 {
		t.Errorf("the newer one keeps 4 blocks, not %d", n)
	}
	all := allEvents(t, e, 0)
	want := []string{"BlockRemoved 1", "BlockRemoved 1", "BlockStored 2 tokens 8"}
	if d := cmp.Diff(want, all[len(all)-1]); d != "" {
		t.Error(d)
	}
}

func TestIdleResetIsSilentUntilTheNextEvents(t *testing.T) {
	e := engine(t, Config{BlockSize: 4, Blocks: 50})
	cached(t, e, ids(1, 9), 1)
	if _, b := post(t, e, "/reset_prefix_cache", nil); strings.TrimSpace(string(b)) != `{"success":true}` {
		t.Fatalf("%s", b)
	}
	if n := len(allEvents(t, e, 0)); n != 1 {
		t.Fatalf("%d batches after an idle reset", n)
	}
	if e.State(0).Cached != 0 {
		t.Error("the cache is not empty")
	}
	cached(t, e, ids(1, 9), 1)
	all := allEvents(t, e, 0)
	if d := cmp.Diff([]string{"AllBlocksCleared", "BlockStored 2 tokens 8"}, all[len(all)-1]); d != "" {
		t.Error(d)
	}
}

func TestResetWhileBusyClearsNothing(t *testing.T) {
	e := engine(t, Config{Speedup: 10, MaxModelLen: 1000})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	first := make(chan struct{}, 1)
	done := make(chan error, 1)
	go func() { done <- stream(ctx, e, ids(5, 40), 900, func(reply) { signal(first) }) }()
	<-first
	if _, b := post(t, e, "/reset_prefix_cache", nil); strings.TrimSpace(string(b)) != `{"success":false}` {
		t.Errorf("%s", b)
	}
	if e.State(0).Cached == 0 {
		t.Error("the cache is empty")
	}
	if _, b := post(t, e, "/reset_prefix_cache?reset_running_requests=true", nil); strings.TrimSpace(string(b)) != `{"success":true}` {
		t.Errorf("%s", b)
	}
	until(t, "the request to start over", func() bool { return e.State(0).Running == 1 })
	cancel()
	<-done
	until(t, "an empty batch", func() bool { return e.State(0).Running == 0 })
	if u := e.State(0).Usage; u != 0 {
		t.Errorf("usage %v after the client left", u)
	}
	if n := e.State(0).Counters.Aborted; n != 1 {
		t.Errorf("%d aborted", n)
	}
}

// stream sends a streaming completion and hands over each chunk.
func stream(ctx context.Context, e *Engine, tokens []uint32, generate int, chunk func(reply)) error {
	b, _ := json.Marshal(map[string]any{"prompt": tokens, "max_tokens": generate, "stream": true, "stream_options": map[string]any{"include_usage": true}})
	req, err := http.NewRequestWithContext(ctx, "POST", e.URL()+"/v1/completions", bytes.NewReader(b))
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return nil
		}
		var r reply
		if err := json.Unmarshal([]byte(data), &r); err != nil {
			return fmt.Errorf("%w: %s", err, data)
		}
		chunk(r)
	}
	return io.ErrUnexpectedEOF
}

func TestStreamHasFirstTokenAtOnceAndUsageLast(t *testing.T) {
	e := engine(t, Config{StreamInterval: 8, Speedup: 0.25}) // steps so long that a reader keeps up
	var texts []int
	var last reply
	if err := stream(context.Background(), e, ids(5, 40), 20, func(r reply) {
		if len(r.Choices) > 0 {
			texts = append(texts, len(r.Choices[0].Text))
		}
		last = r
	}); err != nil {
		t.Fatal(err)
	}
	sum := 0
	for _, n := range texts {
		sum += n
	}
	if sum != 20 || texts[0] != 1 || len(texts) > 5 {
		t.Errorf("chunks of %v tokens", texts)
	}
	want := usage{PromptTokens: 40, CompletionTokens: 20, TotalTokens: 60, Details: &usageDetails{CreatedTokens: 32}}
	if d := cmp.Diff(want, last.Usage); d != "" {
		t.Error(d)
	}
}

func TestAdmissionWaitsForBlocks(t *testing.T) {
	// Room for two requests of 8 blocks each, which take long enough to be seen.
	e := engine(t, Config{BlockSize: 4, Blocks: 17, Speedup: 1, MaxModelLen: 64})
	done := make(chan error, 3)
	for i := range 3 {
		go func() { done <- stream(context.Background(), e, ids(i*100, 16), 17, func(reply) {}) }()
	}
	until(t, "two running and one waiting", func() bool {
		s := e.State(0)
		return s.Running == 2 && s.Waiting == 1
	})
	for range 3 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	s := e.State(0)
	if s.Counters.Finished != 3 || s.Counters.Preempted != 0 || s.Usage != 0 {
		t.Errorf("%+v", s)
	}
	if r := e.ranks[0]; r.reserved != 0 {
		t.Errorf("%d blocks still reserved", r.reserved)
	}
}

func TestPreemptionStartsOver(t *testing.T) {
	e := engine(t, Config{BlockSize: 4, Blocks: 17, Speedup: 50, MaxModelLen: 64, Preemption: true})
	done := make(chan error, 3)
	sums := make([]int, 3)
	for i := range 3 {
		go func() {
			done <- stream(context.Background(), e, ids(i*100, 16), 33, func(r reply) {
				if len(r.Choices) > 0 {
					sums[i] += len(r.Choices[0].Text)
				}
			})
		}()
	}
	for range 3 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if d := cmp.Diff([]int{33, 33, 33}, sums); d != "" {
		t.Error(d)
	}
	s := e.State(0)
	if s.Counters.Preempted == 0 || s.Usage != 0 {
		t.Errorf("%+v", s)
	}
}

func TestPriorityGoesFirst(t *testing.T) {
	e := engine(t, Config{Speedup: 20, MaxSequences: 1, PriorityScheduling: true})
	post(t, e, "/pause?mode=keep", nil)
	type end struct {
		priority int
		err      error
	}
	ends := make(chan end, 3)
	for i, priority := range []int{5, 0, 1} {
		go func() {
			b, _ := json.Marshal(map[string]any{"prompt": ids(i*100, 20), "max_tokens": 60, "priority": priority})
			resp, err := http.Post(e.URL()+"/v1/completions", "application/json", bytes.NewReader(b))
			if err == nil {
				resp.Body.Close()
			}
			ends <- end{priority, err}
		}()
		until(t, "the queue", func() bool { return e.State(0).Waiting == i+1 })
	}
	post(t, e, "/resume", nil)
	var order []int
	for range 3 {
		x := <-ends
		if x.err != nil {
			t.Fatal(x.err)
		}
		order = append(order, x.priority)
	}
	if d := cmp.Diff([]int{0, 1, 5}, order); d != "" {
		t.Error(d)
	}
}

func TestSleepForgetsTheCacheAndWakes(t *testing.T) {
	e := engine(t, Config{})
	cached(t, e, ids(1, 40), 1)
	post(t, e, "/sleep?level=1", nil)
	if s := e.State(0); s.Cached != 0 {
		t.Errorf("%d cached while asleep", s.Cached)
	}
	if b := get(t, e, "/is_sleeping"); strings.TrimSpace(b) != `{"is_sleeping":true}` {
		t.Error(b)
	}
	if b := get(t, e, "/metrics"); !strings.Contains(b, `vllm:engine_sleep_state{engine="0",model_name="fake",sleep_state="awake"} 0`) {
		t.Error("the sleep state is not in the metrics")
	}
	post(t, e, "/wake_up", nil)
	if n := cached(t, e, ids(1, 40), 1); n != 0 {
		t.Errorf("%d cached after sleep", n)
	}
}

func TestRanksHaveCachesAndStreamsOfTheirOwn(t *testing.T) {
	e := engine(t, Config{Ranks: 2})
	if port(e.events[1].events) != port(e.events[0].events)+1 || port(e.events[1].replay) != port(e.events[0].replay)+1 {
		t.Error("ports of rank 1 do not follow those of rank 0")
	}
	for _, want := range []int{0, 32} {
		if r := complete(t, e, ids(1, 40), 1, nil, "X-data-parallel-rank", "1"); r.Usage.Details.CachedTokens != want {
			t.Errorf("cached %d, want %d", r.Usage.Details.CachedTokens, want)
		}
	}
	if r := complete(t, e, ids(1, 40), 1, nil, "X-data-parallel-rank", "0"); r.Usage.Details.CachedTokens != 0 {
		t.Error("rank 0 has what rank 1 computed")
	}
	if len(allEvents(t, e, 0)) != 1 || len(allEvents(t, e, 1)) != 1 {
		t.Error("each rank sends its own events")
	}
	if status, b := post(t, e, "/v1/completions", map[string]any{"prompt": []int{1}}, "X-data-parallel-rank", "2"); status != 400 {
		t.Errorf("%d %s", status, b)
	}
}

func TestAdapterSwapMissesTheCache(t *testing.T) {
	e := engine(t, Config{Adapters: []Adapter{{"ad1", "/one"}}})
	tokens := ids(1, 40)
	ask := func(model string) int {
		return complete(t, e, tokens, 1, map[string]any{"model": model}).Usage.Details.CachedTokens
	}
	ask("fake")
	if n := ask("ad1"); n != 0 {
		t.Errorf("the adapter met the base: %d", n)
	}
	if n := ask("ad1"); n != 32 {
		t.Errorf("the adapter did not meet itself: %d", n)
	}
	if n := e.Depth(0, tokens, "ad1", ""); n != 2 {
		t.Errorf("depth %d", n)
	}
	post(t, e, "/v1/unload_lora_adapter", map[string]string{"lora_name": "ad1"})
	if status, _ := post(t, e, "/v1/completions", map[string]any{"model": "ad1", "prompt": "x"}); status != 404 {
		t.Errorf("an unloaded adapter answers %d", status)
	}
	post(t, e, "/v1/load_lora_adapter", map[string]string{"lora_name": "ad1", "lora_path": "/two"})
	if n := ask("ad1"); n != 0 {
		t.Errorf("other weights met the old ones: %d", n)
	}
}

// The time that a request runs is that of its steps, and what the machine was
// too slow for is counted.
func TestStepsKeepTheProfilesTime(t *testing.T) {
	e := engine(t, Config{Speedup: 5})
	begin := time.Now()
	complete(t, e, ids(1, 8192*2), 50, nil)
	took := time.Since(begin)
	p := Qwen32B()
	var want time.Duration
	for i := range 2 {
		var w work
		w.prefill(8192, i*8192)
		want += p.step(w)
	}
	for i := range 49 {
		var w work
		w.decode(8192*2 + i)
		want += p.step(w)
	}
	want /= 5
	ran := time.Duration(sums(t, e)["request_inference_time_seconds_sum"]*float64(time.Second)) - e.State(0).Counters.Lag
	if took < want || ran < want-time.Microsecond || ran > want+time.Millisecond {
		t.Errorf("took %v and ran for %v, the profile says %v", took, ran, want)
	}
}

func TestRestartComputesTheSameHashes(t *testing.T) {
	a, b := engine(t, Config{}), engine(t, Config{})
	cached(t, a, ids(1, 100), 1)
	cached(t, b, ids(1, 100), 1)
	x, y := a.Held(0), b.Held(0)
	slices.Sort(x)
	slices.Sort(y)
	if d := cmp.Diff(x, y); d != "" || len(x) != 6 {
		t.Errorf("%d hashes: %s", len(x), d)
	}
}

func TestConfigSaysAllThatIsWrong(t *testing.T) {
	_, err := New(Config{Blocks: 1, Ranks: -1, MaxSequences: -3})
	if err == nil || !strings.Contains(err.Error(), "blocks") || !strings.Contains(err.Error(), "ranks") || !strings.Contains(err.Error(), "sequences") {
		t.Error(err)
	}
}
