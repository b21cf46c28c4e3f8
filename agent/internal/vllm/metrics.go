package vllm

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

const (
	// MaxRanks bounds the ranks of one engine process.
	MaxRanks = 64
	// maxRank bounds their numbers: a process may have only a high one.
	maxRank = 4095
	// maxAdapters bounds the adapters in execution.
	maxAdapters = 256
	// maxWanted bounds the lines that are parsed, in bytes: many times what
	// MaxRanks ranks say.
	maxWanted = 1 << 20
)

// Load is one sample of a rank. A nil field is not known, which is never zero.
type Load struct {
	Running *float64
	Waiting *float64
	KVUsage *float64 // share of blocks in use by running requests, 0..1
	// Totals since the engine started.
	PromptTokens          *float64
	CachedTokens          *float64
	GenerationTokens      *float64
	PrefillSeconds        *float64
	PrefillComputedTokens *float64
	PrefillRequests       *float64
	InterTokenSeconds     *float64
	InterTokenCount       *float64
	QueueSeconds          *float64
	QueueRequests         *float64
	// Of the requests that ended, as the prefill and queue totals are.
	RequestPromptTokens     *float64
	RequestGenerationTokens *float64
	// What the event stream is held against, totals since the engine started.
	ComputedPromptTokens *float64 // of prompts that got their first token, without what was cached or transferred
	QueriedTokens        *float64 // of prompts that were looked up in the prefix cache when they were admitted
	HitTokens            *float64 // of these, found
	ExternalTokens       *float64 // of these, found by a connector
	FirstTokens          *float64 // requests that got their first token
	Preemptions          *float64

	RunningAdapters []string
	Sleeping        *bool
}

// Cache is how a rank's cache is configured.
type Cache struct {
	BlockSize     int    // tokens; 0: not known
	Blocks        int    // of the GPU pool; 0: not known
	Algorithm     string // of the engine's hashes
	HashUnit      int    // tokens, of the engine's hashes; 0: it follows from the groups
	Capacity      int    // tokens that all blocks hold of prompts of the model's full length; 0: not known
	PrefixCaching *bool
}

// Shared says whether several KV-cache groups must share the blocks: a prompt of
// the model's full length takes more of them than one group would. Where that is
// not known, or by a whole factor as the ranks of one engine are counted together,
// the answer is no.
func (c Cache) Shared(longest int) bool {
	if c.Capacity < 1 || c.BlockSize < 1 || longest < 1 {
		return false
	}
	alone := int(float64(c.Blocks) / float64((longest+c.BlockSize-1)/c.BlockSize) * float64(longest))
	ranks := (alone + c.Capacity/2) / c.Capacity
	return alone-c.Capacity > 1 && max(alone-ranks*c.Capacity, ranks*c.Capacity-alone) > ranks
}

// RankMetrics is what a metrics page says about one rank.
type RankMetrics struct {
	Rank  int
	Load  Load
	Cache Cache
}

// Page is what one poll of /metrics gives.
type Page struct {
	Ranks []RankMetrics // by rank
	// Resets counts the requests to empty the prefix cache, successful or not.
	// The series appears with the first request: absent is none.
	Resets float64
	// Sleeps counts the requests to put the engine to sleep or to pause it, in the
	// same way.
	Sleeps float64
	// ProcessStart is when the engine's process began, in Unix seconds; 0: not
	// said, as where several processes answer.
	ProcessStart float64
	// Speculates: the engine counts drafts of speculative decoding, by whatever
	// method.
	Speculates bool
	// Ignored are samples of ranks beyond the bounds.
	Ignored int
}

// Metrics reads /metrics.
func (e *Engine) Metrics(ctx context.Context) (Page, error) {
	body, err := e.get(ctx, "/metrics")
	if err != nil {
		return Page{}, err
	}
	return ParseMetrics(body)
}

// loadMetrics lists for each field of Load the samples that tell it, the names
// of the newest releases first.
var loadMetrics = []struct {
	names []string
	field func(*Load) **float64
}{
	{[]string{"vllm:num_requests_running"}, func(l *Load) **float64 { return &l.Running }},
	{[]string{"vllm:num_requests_waiting"}, func(l *Load) **float64 { return &l.Waiting }},
	{[]string{"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"}, func(l *Load) **float64 { return &l.KVUsage }},
	{[]string{"vllm:prompt_tokens_total"}, func(l *Load) **float64 { return &l.PromptTokens }},
	{[]string{"vllm:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"}, func(l *Load) **float64 { return &l.CachedTokens }},
	{[]string{"vllm:generation_tokens_total"}, func(l *Load) **float64 { return &l.GenerationTokens }},
	{[]string{"vllm:request_prefill_time_seconds_sum"}, func(l *Load) **float64 { return &l.PrefillSeconds }},
	{[]string{"vllm:request_prefill_time_seconds_count"}, func(l *Load) **float64 { return &l.PrefillRequests }},
	{[]string{"vllm:request_prefill_kv_computed_tokens_sum"}, func(l *Load) **float64 { return &l.PrefillComputedTokens }},
	{[]string{"vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum"}, func(l *Load) **float64 { return &l.InterTokenSeconds }},
	{[]string{"vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count"}, func(l *Load) **float64 { return &l.InterTokenCount }},
	{[]string{"vllm:request_queue_time_seconds_sum"}, func(l *Load) **float64 { return &l.QueueSeconds }},
	{[]string{"vllm:request_queue_time_seconds_count"}, func(l *Load) **float64 { return &l.QueueRequests }},
	{[]string{"vllm:request_prompt_tokens_sum"}, func(l *Load) **float64 { return &l.RequestPromptTokens }},
	{[]string{"vllm:request_generation_tokens_sum"}, func(l *Load) **float64 { return &l.RequestGenerationTokens }},
	{[]string{"vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"}, func(l *Load) **float64 { return &l.QueriedTokens }},
	{[]string{"vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"}, func(l *Load) **float64 { return &l.HitTokens }},
	{[]string{"vllm:external_prefix_cache_hits_total"}, func(l *Load) **float64 { return &l.ExternalTokens }},
	{[]string{"vllm:time_to_first_token_seconds_count"}, func(l *Load) **float64 { return &l.FirstTokens }},
	{[]string{"vllm:num_preemptions_total"}, func(l *Load) **float64 { return &l.Preemptions }},
}

// Samples that are read by hand.
const (
	waitingByReason = "vllm:num_requests_waiting_by_reason"
	promptBySource  = "vllm:prompt_tokens_by_source_total"
	sleepState      = "vllm:engine_sleep_state"
	cacheConfig     = "vllm:cache_config_info"
	loraInfo        = "vllm:lora_requests_info"
	httpRequests    = "http_requests_total"
	drafts          = "vllm:spec_decode_num_drafts_total"
	processStart    = "process_start_time_seconds"
	resetHandler    = "/reset_prefix_cache"
	sleepHandler    = "/sleep"
	pauseHandler    = "/pause"
)

// wanted holds the names of all samples that are read.
var wanted = func() map[string]bool {
	m := map[string]bool{waitingByReason: true, promptBySource: true, sleepState: true, cacheConfig: true, loraInfo: true, httpRequests: true, drafts: true, processStart: true}
	for _, lm := range loadMetrics {
		for _, name := range lm.names {
			m[name] = true
		}
	}
	return m
}()

var errNoMetrics = errors.New("page has no metrics of vLLM")

// ParseMetrics reads a metrics page. Only the wanted lines reach the parser,
// about a tenth of a real page; without comments every sample is a family of
// its own name.
func ParseMetrics(page []byte) (Page, error) {
	samples, err := parseWanted(page)
	if err != nil {
		return Page{}, err
	}
	r := metricsReader{samples: samples, ranks: make(map[int]*RankMetrics)}
	r.loads()
	r.waiting()
	r.computed()
	r.sleep()
	r.caches()
	if len(r.ranks) == 0 {
		return Page{}, errNoMetrics
	}
	r.adapters()
	r.page.Speculates = len(samples[drafts]) > 0
	for _, s := range samples[processStart] {
		if s.value != nil {
			r.page.ProcessStart = *s.value
		}
	}
	for _, s := range samples[httpRequests] {
		switch {
		case s.value == nil:
		case s.labels["handler"] == resetHandler:
			r.page.Resets += *s.value
		default:
			r.page.Sleeps += *s.value
		}
	}
	for _, m := range r.ranks {
		r.page.Ranks = append(r.page.Ranks, *m)
	}
	slices.SortFunc(r.page.Ranks, func(a, b RankMetrics) int { return a.Rank - b.Rank })
	return r.page, nil
}

// sampled is one line of the page.
type sampled struct {
	labels map[string]string
	value  *float64 // nil when it says nothing
}

func parseWanted(page []byte) (map[string][]sampled, error) {
	var kept bytes.Buffer
	for line := range bytes.Lines(page) {
		end := bytes.IndexAny(line, "{ \t")
		if end < 0 || !wanted[string(line[:end])] {
			continue
		}
		if string(line[:end]) == httpRequests && !empties(line) {
			continue
		}
		if kept.Len()+len(line) > maxWanted {
			return nil, fmt.Errorf("metrics page has more than %d bytes of what is read", maxWanted)
		}
		kept.Write(line)
	}
	if kept.Len() > 0 && kept.Bytes()[kept.Len()-1] != '\n' {
		return nil, errors.New("metrics page ends within a line")
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(&kept)
	if err != nil {
		return nil, fmt.Errorf("parse metrics: %w", err)
	}
	samples := make(map[string][]sampled, len(families))
	for name, family := range families {
		for _, m := range family.GetMetric() {
			s := sampled{labels: make(map[string]string)}
			for _, l := range m.GetLabel() {
				s.labels[l.GetName()] = l.GetValue()
			}
			if v := m.GetUntyped().GetValue(); v >= 0 && !math.IsInf(v, 0) {
				s.value = &v
			}
			samples[name] = append(samples[name], s)
		}
	}
	return samples, nil
}

// empties says whether a line counts requests that may empty the prefix cache.
func empties(line []byte) bool {
	for _, handler := range []string{resetHandler, sleepHandler, pauseHandler} {
		if bytes.Contains(line, []byte(`"`+handler+`"`)) {
			return true
		}
	}
	return false
}

type metricsReader struct {
	samples map[string][]sampled
	ranks   map[int]*RankMetrics
	page    Page
}

func add(total **float64, v float64) {
	if *total == nil {
		*total = new(float64)
	}
	**total += v
}

// rank finds whom a sample is about; nil when it is beyond the bounds. Without
// the label it is rank 0.
func (r *metricsReader) rank(s sampled) *RankMetrics {
	n := 0
	if text := s.labels["engine"]; text != "" {
		var err error
		if n, err = strconv.Atoi(text); err != nil || n < 0 || n > maxRank {
			r.page.Ignored++
			return nil
		}
	}
	if known := r.ranks[n]; known != nil {
		return known
	}
	if len(r.ranks) == MaxRanks {
		r.page.Ignored++
		return nil
	}
	r.ranks[n] = &RankMetrics{Rank: n}
	return r.ranks[n]
}

func (r *metricsReader) loads() {
	for _, lm := range loadMetrics {
		for _, name := range lm.names {
			for _, s := range r.samples[name] {
				rank := r.rank(s)
				if rank == nil {
					continue
				}
				if f := lm.field(&rank.Load); *f == nil {
					*f = s.value
				}
			}
		}
	}
}

// waiting adds the reasons up where the total is missing.
func (r *metricsReader) waiting() {
	totals := make(map[*RankMetrics]*float64)
	for _, s := range r.samples[waitingByReason] {
		rank, v := r.rank(s), s.value
		if rank == nil || v == nil || rank.Load.Waiting != nil {
			continue
		}
		t := totals[rank]
		add(&t, *v)
		totals[rank] = t
	}
	for rank, t := range totals {
		rank.Load.Waiting = t
	}
}

// computed finds the prompt tokens that the engine computed itself. Releases
// before 0.16 don't say where prompts came from: there it is what neither the
// cache nor a connector had.
func (r *metricsReader) computed() {
	for _, s := range r.samples[promptBySource] {
		if rank := r.rank(s); rank != nil && s.labels["source"] == "local_compute" {
			rank.Load.ComputedPromptTokens = s.value
		}
	}
	for _, rank := range r.ranks {
		l := &rank.Load
		if l.ComputedPromptTokens != nil || l.PromptTokens == nil || l.CachedTokens == nil {
			continue
		}
		computed := *l.PromptTokens - *l.CachedTokens
		if l.ExternalTokens != nil {
			computed -= *l.ExternalTokens
		}
		l.ComputedPromptTokens = &computed
	}
}

func (r *metricsReader) sleep() {
	for _, s := range r.samples[sleepState] {
		rank, v := r.rank(s), s.value
		if rank == nil || v == nil || s.labels["sleep_state"] != "awake" {
			continue
		}
		sleeping := *v == 0
		rank.Load.Sleeping = &sleeping
	}
}

// caches reads labels, which are Python's texts of the values.
func (r *metricsReader) caches() {
	number := func(text string) int {
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 {
			return 0
		}
		return n
	}
	for _, s := range r.samples[cacheConfig] {
		rank := r.rank(s)
		if rank == nil {
			continue
		}
		c := &rank.Cache
		c.BlockSize, c.Blocks = number(s.labels["block_size"]), number(s.labels["num_gpu_blocks"])
		c.Capacity = number(s.labels["kv_cache_size_tokens"])
		c.Algorithm = s.labels["prefix_caching_hash_algo"]
		c.HashUnit = cmp.Or(number(s.labels["prefix_match_unit"]), number(s.labels["hash_block_size"]))
		switch on := s.labels["enable_prefix_caching"]; on {
		case "True", "False":
			enabled := on == "True"
			c.PrefixCaching = &enabled
		}
	}
}

// adapters reads the newest series. It names no rank, so it counts for one.
func (r *metricsReader) adapters() {
	if len(r.ranks) != 1 {
		return
	}
	newest := -1.0
	var names string
	for _, s := range r.samples[loraInfo] {
		if v := s.value; v != nil && *v > newest {
			newest, names = *v, s.labels["running_lora_adapters"]
		}
	}
	for _, rank := range r.ranks {
		for name := range strings.SplitSeq(names, ",") {
			if name = strings.TrimSpace(name); name != "" && len(rank.Load.RunningAdapters) < maxAdapters {
				rank.Load.RunningAdapters = append(rank.Load.RunningAdapters, name)
			}
		}
	}
}

// Idle says that nobody runs or waits, as far as the engine tells.
func (l *Load) Idle() bool {
	return l.Running != nil && *l.Running == 0 && (l.Waiting == nil || *l.Waiting == 0)
}
