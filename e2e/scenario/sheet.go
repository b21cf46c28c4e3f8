package scenario

import (
	"bufio"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// sheet is a metrics page by sample: its name without vllm:, and the labels that
// tell more than the engine and the model.
type sheet map[string]float64

// waited is a queue time that only a held engine or a full one causes.
const waited = 50 * time.Millisecond

// compared are the names that a sheet holds. Of other times only the number is.
var compared = []string{
	"num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc", "engine_sleep_state",
	"prefix_cache_queries_total", "prefix_cache_hits_total",
	"external_prefix_cache_queries_total", "external_prefix_cache_hits_total", "num_preemptions_total",
	"prompt_tokens_total", "prompt_tokens_cached_total", "prompt_tokens_by_source_total", "generation_tokens_total",
	"request_success_total", "lora_requests_info", "http_requests_total",
	"iteration_tokens_total_count", "iteration_tokens_total_sum",
	"time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
	"request_time_per_output_token_seconds_count", "e2e_request_latency_seconds_count",
	"request_queue_time_seconds_count", "request_queue_time_seconds_sum", "request_prefill_time_seconds_count",
	"request_inference_time_seconds_count", "request_decode_time_seconds_count",
	"request_prefill_kv_computed_tokens_count", "request_prefill_kv_computed_tokens_sum",
	"request_prompt_tokens_count", "request_prompt_tokens_sum",
	"request_generation_tokens_count", "request_generation_tokens_sum",
}

const adapters = "lora_requests_info"

// parse reads a page.
func parse(page string) (sheet, error) {
	s := make(sheet)
	newest, names := 0.0, ""
	lines := bufio.NewScanner(strings.NewReader(page))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := strings.TrimPrefix(lines.Text(), "vllm:")
		end := strings.IndexAny(line, "{ ")
		if end < 0 || !slices.Contains(compared, line[:end]) {
			continue
		}
		key, text, labels := line[:end], line[end:], ""
		if open := strings.IndexByte(text, '}'); open >= 0 {
			labels, text = text[1:open], text[open+1:]
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		if err != nil {
			return nil, fmt.Errorf("metrics: %q: %w", lines.Text(), err)
		}
		if key == adapters { // the newest series counts
			if v > newest {
				newest, names = v, labels
			}
			continue
		}
		var kept []string
		for label := range strings.SplitSeq(labels, ",") {
			if name, _, _ := strings.Cut(label, "="); name != "engine" && name != "model_name" && name != "" {
				kept = append(kept, label)
			}
		}
		if slices.Contains(kept, `handler="/pause"`) || slices.Contains(kept, `handler="/resume"`) {
			continue // how often they are asked is chance
		}
		if len(kept) > 0 {
			key += "{" + strings.Join(kept, ",") + "}"
		}
		s[key] = v
	}
	if names != "" {
		s[adapters+"{"+names+"}"] = 1
	}
	return s, lines.Err()
}

// since is what counters gained, and gauges as they are.
func (s sheet) since(before sheet) sheet {
	d := make(sheet, len(s))
	for key, v := range s {
		if !gauge(key) {
			v -= before[key]
		}
		if v != 0 || key == "request_queue_time_seconds_sum" {
			d[key] = v
		}
	}
	return d
}

func gauge(key string) bool {
	for _, name := range []string{"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_sleep_state", adapters} {
		if strings.HasPrefix(key, name) {
			return true
		}
	}
	return false
}

// blocks in use.
func (s sheet) blocks() int { return int(math.Round(s["kv_cache_usage_perc"] * (Blocks - 1))) }

// lines writes a sheet. Where an engine was stopped somewhere, only what does not
// depend on the place is a number.
func (s sheet) lines(e events, cut bool) []string {
	var out []string
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf("   "+format, args...)) }
	for _, key := range slices.Sorted(mapKeys(s)) {
		switch {
		case key == "kv_cache_usage_perc":
		case key == "request_queue_time_seconds_sum" && s["request_queue_time_seconds_count"] == 0:
		case key == "request_queue_time_seconds_sum":
			say("%s more than %v: %v", key, waited, s[key] > waited.Seconds())
		case cut && key == "inter_token_latency_seconds_count": // below
		case cut && slices.Contains([]string{"generation_tokens_total", "iteration_tokens_total_count", "iteration_tokens_total_sum", "request_generation_tokens_sum"}, key):
			say("%s some", key)
		default:
			say("%s %v", key, s[key])
		}
	}
	generated, firsts := s["generation_tokens_total"], s["time_to_first_token_seconds_count"]
	if n := s["inter_token_latency_seconds_count"] - (generated - firsts); n != 0 {
		say("tokens but the first ones, and %v more, have a latency", n)
	}
	if n := s["iteration_tokens_total_sum"] - generated - s[`prompt_tokens_by_source_total{source="local_compute"}`]; n != 0 {
		say("steps have %v tokens beside those generated and computed", n)
	}
	used := s.blocks()
	switch {
	case cut && used > 0 && generated == 0:
		say("%d blocks are in use beside those stored", used-e.stored)
	case cut && used > 0:
		say("some blocks are in use")
	case used > 0:
		say("%d blocks are in use", used)
	}
	if e == (events{}) {
		return out
	}
	if !cut {
		say("events: %d batches, %d blocks stored, %d removed, cleared %d times", e.batches, e.stored, e.removed, e.cleared)
		return out
	}
	// Before anything is generated each step stores what it computes.
	if generated == 0 {
		say("events: %d blocks stored beside two in each batch", e.stored-2*e.batches)
	} else {
		say("events: some blocks stored")
	}
	return out
}

func mapKeys(s sheet) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range s {
			if !yield(k) {
				return
			}
		}
	}
}
