package vllm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func pages(t testing.TB) map[string][]byte {
	t.Helper()
	names, err := filepath.Glob("testdata/metrics-*.txt")
	if err != nil || len(names) == 0 {
		t.Fatalf("pages: %v, %v", names, err)
	}
	all := make(map[string][]byte)
	for _, name := range names {
		page, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		all[filepath.Base(name)] = page
	}
	return all
}

func TestParseMetricsGolden(t *testing.T) {
	parsed := make(map[string]Page)
	for name, page := range pages(t) {
		p, err := ParseMetrics(page)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		parsed[name] = p
	}
	got, err := json.MarshalIndent(parsed, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, '\n')
	const golden = "testdata/metrics.golden"
	if *update {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Error(diff)
	}
}

func f(v float64) *float64 { return &v }

func TestParseMetricsOldAndNewNames(t *testing.T) {
	page := func(lines ...string) []byte { return []byte(strings.Join(lines, "\n") + "\n") }
	for _, c := range []struct {
		name string
		page []byte
		want Load
	}{
		{"missing is unknown", page(`vllm:num_requests_running{engine="0"} 0`), Load{Running: f(0)}},
		{"NaN and negative are unknown", page(`vllm:num_requests_running 3`, `vllm:kv_cache_usage_perc NaN`, `vllm:num_requests_waiting -1`), Load{Running: f(3)}},
		{"old names", page(`vllm:gpu_cache_usage_perc 0.5`, `vllm:gpu_prefix_cache_hits_total 7`, `vllm:time_per_output_token_seconds_sum 2`, `vllm:time_per_output_token_seconds_count 4`),
			Load{KVUsage: f(.5), CachedTokens: f(7), HitTokens: f(7), InterTokenSeconds: f(2), InterTokenCount: f(4)}},
		{"new names win", page(`vllm:gpu_cache_usage_perc 0.5`, `vllm:kv_cache_usage_perc 0.25`, `vllm:prefix_cache_hits_total 5`, `vllm:prompt_tokens_cached_total 6`),
			Load{KVUsage: f(.25), CachedTokens: f(6), HitTokens: f(5)}},
		{"computed as the engine reports", page(`vllm:prompt_tokens_total 9`, `vllm:prompt_tokens_cached_total 6`, `vllm:prompt_tokens_by_source_total{source="local_cache_hit"} 5`, `vllm:prompt_tokens_by_source_total{source="local_compute"} 2`),
			Load{PromptTokens: f(9), CachedTokens: f(6), ComputedPromptTokens: f(2)}},
		{"computed as what nobody had", page(`vllm:prompt_tokens_total 9`, `vllm:prefix_cache_hits_total 4`, `vllm:external_prefix_cache_hits_total 2`),
			Load{PromptTokens: f(9), CachedTokens: f(4), HitTokens: f(4), ExternalTokens: f(2), ComputedPromptTokens: f(3)}},
		{"waiting by reason adds up", page(`vllm:num_requests_waiting_by_reason{reason="capacity"} 2`, `vllm:num_requests_waiting_by_reason{reason="deferred"} 3`), Load{Waiting: f(5)}},
		{"the total of waiting wins", page(`vllm:num_requests_waiting 4`, `vllm:num_requests_waiting_by_reason{reason="capacity"} 2`), Load{Waiting: f(4)}},
		{"newest series of adapters", page(`vllm:num_requests_running 1`, `vllm:lora_requests_info{running_lora_adapters="a, b"} 10`, `vllm:lora_requests_info{running_lora_adapters="c"} 9`),
			Load{Running: f(1), RunningAdapters: []string{"a", "b"}}},
		{"asleep", page(`vllm:engine_sleep_state{sleep_state="awake"} 0`, `vllm:engine_sleep_state{sleep_state="discard_all"} 1`), Load{Sleeping: ptr(true)}},
		{"awake", page(`vllm:engine_sleep_state{sleep_state="awake"} 1`), Load{Sleeping: ptr(false)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := ParseMetrics(c.page)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]RankMetrics{{Load: c.want}}, p.Ranks); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func ptr[T any](v T) *T { return &v }

func TestParseMetricsRanks(t *testing.T) {
	var page bytes.Buffer
	for i := range 2 * MaxRanks {
		fmt.Fprintf(&page, "vllm:num_requests_running{engine=\"%d\"} %d\n", i+3, i)
	}
	page.WriteString("vllm:num_requests_running{engine=\"-1\"} 1\nvllm:num_requests_running{engine=\"x\"} 1\nvllm:num_requests_running{engine=\"99999\"} 1\n")
	p, err := ParseMetrics(page.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Ranks) != MaxRanks || p.Ranks[0].Rank != 3 || p.Ignored != MaxRanks+3 {
		t.Errorf("%d ranks from %d, %d ignored", len(p.Ranks), p.Ranks[0].Rank, p.Ignored)
	}
}

func TestParseMetricsRefusesGarbage(t *testing.T) {
	for name, page := range map[string]string{
		"nothing":       "",
		"html":          "<html>not found</html>\n",
		"another's":     "process_start_time_seconds 5\nsglang:num_running_reqs 4\n",
		"no value":      "vllm:num_requests_running\nvllm:num_requests_running{} \n",
		"text as value": "vllm:num_requests_running{engine=\"0\"} many\n",
		"open labels":   "vllm:num_requests_running{engine=\"0\n",
		"cut":           "vllm:num_requests_running{engine=\"0\"} 1\nvllm:num_requests_waiting{engine=\"0\"} 1",
	} {
		t.Run(name, func(t *testing.T) {
			if p, err := ParseMetrics([]byte(page)); err == nil {
				t.Errorf("parsed to %+v", p)
			}
		})
	}
}

// TestMillionRanksAreNotBelieved: what a page may name is bounded, and so is
// what reading it takes.
func TestMillionRanksAreNotBelieved(t *testing.T) {
	write := func(ranks int) []byte {
		var page bytes.Buffer
		for n := range ranks {
			fmt.Fprintf(&page, "vllm:num_requests_running{engine=\"%d\"} 1\n", n)
		}
		return page.Bytes()
	}
	if p, err := ParseMetrics(write(20_000)); err != nil || len(p.Ranks) != MaxRanks || p.Ignored != 20_000-MaxRanks {
		t.Errorf("%d ranks, %d ignored, %v", len(p.Ranks), p.Ignored, err)
	}
	page := write(1_000_000)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if p, err := ParseMetrics(page); err == nil {
		t.Errorf("%d ranks", len(p.Ranks))
	}
	runtime.ReadMemStats(&after)
	if took := after.TotalAlloc - before.TotalAlloc; took > 8*maxWanted {
		t.Errorf("took %d bytes", took)
	}
}

func FuzzParseMetrics(f *testing.F) {
	for _, page := range pages(f) {
		var kept []byte
		for line := range bytes.Lines(page) {
			if name, _, ok := bytes.Cut(line, []byte("{")); ok && wanted[string(name)] {
				kept = append(kept, line...)
			}
		}
		f.Add(kept)
	}
	f.Add([]byte("vllm:num_requests_running{engine=\"0\"} 1 5\n"))
	f.Fuzz(func(t *testing.T, page []byte) {
		p, err := ParseMetrics(page)
		if err != nil {
			return
		}
		if len(p.Ranks) == 0 || len(p.Ranks) > MaxRanks {
			t.Fatalf("%d ranks", len(p.Ranks))
		}
		for _, r := range p.Ranks {
			if l := r.Load; l.Running != nil && !(*l.Running >= 0) || len(l.RunningAdapters) > maxAdapters || r.Cache.BlockSize < 0 {
				t.Fatalf("%+v", r)
			}
		}
	})
}

func BenchmarkParseMetrics(b *testing.B) {
	page := pages(b)["metrics-0.32.0.txt"]
	b.SetBytes(int64(len(page)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ParseMetrics(page); err != nil {
			b.Fatal(err)
		}
	}
}

func TestRequestsThatMayEmptyTheCacheAreCounted(t *testing.T) {
	const line = "http_requests_total{handler=%q,method=\"POST\",status=\"2xx\"} %d\n"
	page := "vllm:num_requests_running{engine=\"0\"} 0\n"
	for i, handler := range []string{"/reset_prefix_cache", "/sleep", "/pause", "/is_sleeping", "/is_paused", "/v1/completions"} {
		page += fmt.Sprintf(line, handler, 1<<i)
	}
	p, err := ParseMetrics([]byte(page))
	if err != nil || p.Resets != 1 || p.Sleeps != 2+4 {
		t.Errorf("%v resets, %v sleeps: %v", p.Resets, p.Sleeps, err)
	}
}

// The sizes are those that engines of these shapes said: one group, of one rank and
// of two, a group of sliding windows alone, and groups that share the blocks.
func TestGroupsThatShareTheBlocksAreSeen(t *testing.T) {
	for name, c := range map[string]struct {
		cache   Cache
		longest int
		shared  bool
	}{
		"full":              {Cache{BlockSize: 32, Blocks: 256, Capacity: 8192}, 4000, false},
		"full, a rest":      {Cache{BlockSize: 32, Blocks: 64, Capacity: 2031}, 2000, false},
		"two ranks":         {Cache{BlockSize: 32, Blocks: 512, Capacity: 8192}, 4000, false},
		"sliding":           {Cache{BlockSize: 32, Blocks: 256, Capacity: 14840}, 4000, false},
		"full and sliding":  {Cache{BlockSize: 32, Blocks: 256, Capacity: 5278}, 4000, true},
		"full and states":   {Cache{BlockSize: 96, Blocks: 256, Capacity: 17066}, 4000, true},
		"full and chunked":  {Cache{BlockSize: 32, Blocks: 320, Capacity: 2539}, 4000, true},
		"no capacity":       {Cache{BlockSize: 32, Blocks: 256}, 4000, false},
		"no longest prompt": {Cache{BlockSize: 32, Blocks: 256, Capacity: 5278}, 0, false},
		"no blocks":         {Cache{Capacity: 5278}, 4000, false},
	} {
		if shared := c.cache.Shared(c.longest); shared != c.shared {
			t.Errorf("%s: %v", name, shared)
		}
	}
}
