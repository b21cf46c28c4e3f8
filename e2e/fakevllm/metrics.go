package fakevllm

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// metrics is the /metrics page under vLLM's names. It knows an engine as it
// stood at the end of each rank's last step: nothing moves on it in between, and
// all that a step moves, it moves at once. docs/ENGINE-METRICS.md says what moves
// when.
type metrics struct {
	engine   *Engine
	registry *prometheus.Registry

	mu sync.Mutex // held for a step's whole report, and for a page

	ttft, itl, tpot, e2e                 *prometheus.HistogramVec
	queue, prefill, decode, inference    *prometheus.HistogramVec
	prompt, generation, computed, tokens *prometheus.HistogramVec
	finish, http                         *prometheus.CounterVec

	byRank []rankMetrics // fixed after newMetrics
}

// rankMetrics are the metrics of one rank; its histograms are looked up once.
type rankMetrics struct {
	gauges   gauges
	counters reported
	sleeping int

	ttft, itl, tpot, e2e               prometheus.Observer
	queue, prefill, decode, inference  prometheus.Observer
	prompt, generation, computedTokens prometheus.Observer
	iteration                          prometheus.Observer
	finish                             map[string]prometheus.Counter
}

// gauges are how a rank stood when a step ended.
type gauges struct {
	running, waiting int
	usage            float64
	queries, hits    uint64   // prompt tokens looked up and found, since the start
	adapters         []string // of running requests that have a token
}

// reported are the counters of a rank that move with a request's tokens.
type reported struct {
	prompt, cached, generated, preempted uint64
}

var (
	secondsBuckets = []float64{.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	ttftBuckets    = []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	itlBuckets     = []float64{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	stepBuckets    = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
)

var finishReasons = []string{"stop", "length", "abort", "error", "repetition"}

// tokenBuckets is 1, 2, 5, 10 ... up to the model's length.
func tokenBuckets(most int) []float64 {
	var out []float64
	for scale := 1; ; scale *= 10 {
		for _, m := range []int{1, 2, 5} {
			if m*scale > most {
				return out
			}
			out = append(out, float64(m*scale))
		}
	}
}

func newMetrics(e *Engine) *metrics {
	m := &metrics{engine: e, registry: prometheus.NewRegistry()}
	labels := []string{"engine", "model_name"}
	histogram := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "vllm:" + name, Help: help, Buckets: buckets}, labels)
		m.registry.MustRegister(h)
		return h
	}
	sizes := tokenBuckets(e.cfg.MaxModelLen)
	m.ttft = histogram("time_to_first_token_seconds", "Histogram of time to first token in seconds.", ttftBuckets)
	m.itl = histogram("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", itlBuckets)
	m.tpot = histogram("request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", itlBuckets)
	m.e2e = histogram("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", secondsBuckets)
	m.queue = histogram("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", secondsBuckets)
	m.inference = histogram("request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", secondsBuckets)
	m.prefill = histogram("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", secondsBuckets)
	m.decode = histogram("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", secondsBuckets)
	m.prompt = histogram("request_prompt_tokens", "Number of prefill tokens processed.", sizes)
	m.generation = histogram("request_generation_tokens", "Number of generation tokens processed.", sizes)
	m.computed = histogram("request_prefill_kv_computed_tokens", "Histogram of new KV tokens computed during prefill (excluding cached tokens).", sizes)
	m.tokens = histogram("iteration_tokens_total", "Histogram of number of tokens per engine_step.", stepBuckets)
	m.finish = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "vllm:request_success_total", Help: "Count of successfully processed requests.",
	}, []string{"engine", "finished_reason", "model_name"})
	m.http = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "http_requests_total", Help: "Total number of requests by method, status and handler.",
	}, []string{"handler", "method", "status"})
	m.registry.MustRegister(m.finish)
	if !e.cfg.NoRequestCounts {
		m.registry.MustRegister(m.http)
	}
	for i := range e.cfg.Ranks {
		l := []string{strconv.Itoa(i), e.cfg.Model}
		rm := rankMetrics{
			ttft: m.ttft.WithLabelValues(l...), itl: m.itl.WithLabelValues(l...),
			tpot: m.tpot.WithLabelValues(l...), e2e: m.e2e.WithLabelValues(l...),
			queue: m.queue.WithLabelValues(l...), inference: m.inference.WithLabelValues(l...),
			prefill: m.prefill.WithLabelValues(l...), decode: m.decode.WithLabelValues(l...),
			prompt: m.prompt.WithLabelValues(l...), generation: m.generation.WithLabelValues(l...),
			computedTokens: m.computed.WithLabelValues(l...), iteration: m.tokens.WithLabelValues(l...),
			finish: make(map[string]prometheus.Counter),
		}
		for _, reason := range finishReasons {
			rm.finish[reason] = m.finish.WithLabelValues(l[0], reason, l[1])
		}
		m.byRank = append(m.byRank, rm)
	}
	m.registry.MustRegister(&page{m})
	return m
}

// step is what one step of a rank reports, all of it under the metrics' lock.
type step struct {
	*rankMetrics
	now      time.Time
	outputs  int // to requests
	computed int // tokens of the prompts that got their first token
	tokens   int // generated
}

// begin opens the report of a step that ended now; end closes it.
func (m *metrics) begin(rank int, now time.Time) *step {
	m.mu.Lock()
	return &step{rankMetrics: &m.byRank[rank], now: now}
}

// end closes the report. A step without an output leaves nothing but gauges.
func (m *metrics) end(s *step, g gauges) {
	if s.outputs > 0 {
		s.iteration.Observe(float64(s.computed + s.tokens))
	}
	s.gauges = g
	m.mu.Unlock()
}

// token reports the token that s just got. With its first one the whole prompt
// is reported, whatever steps computed it.
func (r *step) token(s *sequence) {
	r.tokens++
	r.counters.generated++
	r.counters.preempted += uint64(s.preempted)
	s.preempted = 0
	if s.first.IsZero() {
		r.computed += s.prompt - s.cached
		r.counters.prompt += uint64(s.prompt)
		r.counters.cached += uint64(s.cached)
	}
	r.output(s)
}

// output times what s was just sent.
func (r *step) output(s *sequence) {
	r.outputs++
	if s.first.IsZero() {
		s.first = r.now
		r.ttft.Observe(seconds(s.arrived, r.now))
	} else {
		r.itl.Observe(seconds(s.last, r.now))
	}
	s.last = r.now
}

// ended reports that the engine itself ended s, whose client is told so. Of one
// without a token vLLM knows neither when it began nor what was cached: it
// counts from its clock's origin, and the whole prompt.
func (r *step) ended(s *sequence, origin time.Time) {
	if s.first.IsZero() {
		s.queued, s.admitted, s.cached = origin, origin, 0
	}
	r.output(s)
	r.finished(s, "abort")
}

// finished reports the end of s.
func (r *step) finished(s *sequence, reason string) {
	r.finish[reason].Inc()
	r.e2e.Observe(seconds(s.arrived, r.now))
	r.queue.Observe(seconds(s.queued, s.admitted))
	r.prefill.Observe(seconds(s.admitted, s.first))
	r.inference.Observe(seconds(s.admitted, s.last))
	decode, perToken := seconds(s.first, s.last), 0.
	if n := s.generated(); n > 1 {
		perToken = decode / float64(n-1)
	}
	r.decode.Observe(decode)
	r.tpot.Observe(perToken)
	r.prompt.Observe(float64(s.prompt))
	r.generation.Observe(float64(s.generated()))
	r.computedTokens.Observe(float64(s.prompt - s.cached))
}

// seconds between two times. A rank that catches up may finish a step before
// its request came.
func seconds(from, to time.Time) float64 { return max(0, to.Sub(from).Seconds()) }

// sleep shows a sleep level at once.
func (m *metrics) sleep(rank, level int) {
	m.mu.Lock()
	m.byRank[rank].sleeping = level
	m.mu.Unlock()
}

// Gather takes the page between two reports.
func (m *metrics) Gather() ([]*dto.MetricFamily, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.registry.Gather()
}

// page is what is not kept in histograms.
type page struct{ *metrics }

// Describe sends nothing: what the page holds depends on the engine.
func (m *page) Describe(chan<- *prometheus.Desc) {}

// Collect runs under the metrics' lock.
func (m *page) Collect(out chan<- prometheus.Metric) {
	e := m.engine
	send := func(kind prometheus.ValueType, name, help string, v float64, labels ...string) {
		names := []string{"engine", "model_name"}
		values := labels[:2]
		for i := 2; i < len(labels); i += 2 {
			names = append(names, labels[i])
			values = append(values[:len(values):len(values)], labels[i+1])
		}
		out <- prometheus.MustNewConstMetric(prometheus.NewDesc("vllm:"+name, help, names, nil), kind, v, values...)
	}
	const gauge, counter = prometheus.GaugeValue, prometheus.CounterValue
	running := make(map[string]bool)
	for i := range m.byRank {
		g, c, sleeping := &m.byRank[i].gauges, &m.byRank[i].counters, m.byRank[i].sleeping
		for _, name := range g.adapters {
			running[name] = true
		}
		l := []string{strconv.Itoa(i), e.cfg.Model}
		send(gauge, "num_requests_running", "Number of requests in model execution batches.", float64(g.running), l...)
		send(gauge, "num_requests_waiting", "Number of requests waiting to be processed.", float64(g.waiting), l...)
		const byReason = "Number of waiting requests by reason."
		send(gauge, "num_requests_waiting_by_reason", byReason, float64(g.waiting), append(l, "reason", "capacity")...)
		send(gauge, "num_requests_waiting_by_reason", byReason, 0, append(l, "reason", "deferred")...)
		const sleep = "Engine sleep state; awake = 0 means engine is sleeping."
		send(gauge, "engine_sleep_state", sleep, flag(sleeping == 0), append(l, "sleep_state", "awake")...)
		send(gauge, "engine_sleep_state", sleep, flag(sleeping == 1), append(l, "sleep_state", "weights_offloaded")...)
		send(gauge, "engine_sleep_state", sleep, flag(sleeping == 2), append(l, "sleep_state", "discard_all")...)
		send(gauge, "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", g.usage, l...)
		send(counter, "prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.", float64(g.queries), l...)
		send(counter, "prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", float64(g.hits), l...)
		send(counter, "external_prefix_cache_queries_total", "External prefix cache queries.", 0, l...)
		send(counter, "external_prefix_cache_hits_total", "External prefix cache hits.", 0, l...)
		send(counter, "num_preemptions_total", "Cumulative number of preemption from the engine.", float64(c.preempted), l...)
		send(counter, "prompt_tokens_total", "Number of prefill tokens processed.", float64(c.prompt), l...)
		const bySource = "Number of prompt tokens by source."
		send(counter, "prompt_tokens_by_source_total", bySource, float64(c.prompt-c.cached), append(l, "source", "local_compute")...)
		send(counter, "prompt_tokens_by_source_total", bySource, float64(c.cached), append(l, "source", "local_cache_hit")...)
		send(counter, "prompt_tokens_by_source_total", bySource, 0, append(l, "source", "external_kv_transfer")...)
		send(counter, "prompt_tokens_cached_total", "Number of cached prompt tokens (local + external).", float64(c.cached), l...)
		send(counter, "generation_tokens_total", "Number of generation tokens processed.", float64(c.generated), l...)
		out <- cacheConfig(e.cfg, i)
	}
	const rejections = "Number of admission attempts rejected by a queue limit, by reason."
	for _, reason := range []string{"max_num_queued_reqs", "max_num_queued_tokens"} {
		out <- prometheus.MustNewConstMetric(prometheus.NewDesc("vllm:admission_rejections_total", rejections, []string{"model_name", "reason"}, nil),
			counter, 0, e.cfg.Model, reason)
	}
	out <- prometheus.MustNewConstMetric(prometheus.NewDesc("process_start_time_seconds", "Start time of the process since unix epoch in seconds.", nil, nil),
		gauge, float64(e.started.UnixMilli())/1000)
	e.mu.Lock()
	adapters := e.lastID > 0
	e.mu.Unlock()
	if adapters {
		out <- prometheus.MustNewConstMetric(
			prometheus.NewDesc("vllm:lora_requests_info", "Running stats on lora requests.", []string{"max_lora", "running_lora_adapters", "waiting_lora_adapters"}, nil),
			gauge, float64(time.Now().UnixMilli())/1000, strconv.Itoa(e.cfg.MaxAdapters), joined(running), joined(running))
	}
}

func cacheConfig(cfg Config, rank int) prometheus.Metric {
	size, retention := strconv.Itoa(cfg.BlockSize), "0"
	if cfg.Dense {
		retention = "None"
	}
	concurrency := float64(cfg.Blocks) / float64(cfg.blocksOfLongest())
	pairs := []string{
		"_block_size_resolved", "True",
		"block_size", size,
		"cache_dtype", "auto",
		"effective_attention_block_size", size,
		"enable_prefix_caching", "True",
		"engine", strconv.Itoa(rank),
		"gpu_memory_utilization", "0.92",
		"hash_block_size", "None",
		"is_attention_free", "False",
		"kv_cache_max_concurrency", strconv.FormatFloat(concurrency, 'g', 4, 64),
		"kv_cache_size_tokens", strconv.Itoa(int(concurrency * float64(cfg.MaxModelLen))),
		"num_cpu_blocks", "None",
		"num_gpu_blocks", strconv.Itoa(cfg.Blocks),
		"num_gpu_blocks_override", "None",
		"prefix_caching_hash_algo", "sha256",
		"prefix_cache_retention_interval", retention,
		"prefix_match_unit", "None",
		"sliding_window", "None",
		"user_specified_block_size", "True",
	}
	names, values := make([]string, 0, len(pairs)/2), make([]string, 0, len(pairs)/2)
	for i := 0; i < len(pairs); i += 2 {
		names, values = append(names, pairs[i]), append(values, pairs[i+1])
	}
	return prometheus.MustNewConstMetric(
		prometheus.NewDesc("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", names, nil),
		prometheus.GaugeValue, 1, values...)
}

func flag(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func joined(set map[string]bool) string {
	return strings.Join(slices.Sorted(maps.Keys(set)), ",")
}
