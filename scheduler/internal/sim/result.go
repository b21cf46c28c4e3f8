package sim

import (
	"math"
	"slices"
	"strings"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// Goodput counts requests with at most so much to the first token and between
// tokens on average.
const (
	goodTTFT = 2 * time.Second
	goodITL  = 25 * time.Millisecond
)

// Result of one run. Names and meanings are stable; docs/SIMULATOR.md says
// what each stands for.
type Result struct {
	Policy   string `json:"policy"`
	Seed     uint64 `json:"seed"`
	Requests int    `json:"requests"`

	TTFTMean float64 `json:"ttft_mean_s"`
	TTFTP50  float64 `json:"ttft_p50_s"`
	TTFTP90  float64 `json:"ttft_p90_s"`
	TTFTP99  float64 `json:"ttft_p99_s"`
	ITLMean  float64 `json:"itl_mean_ms"`

	// PerTokenP99 is of the time to the end of a request by its tokens of
	// output, Queued the mean time that requests waited for room.
	PerTokenP99 float64 `json:"per_token_p99_ms"`
	Queued      float64 `json:"queued_mean_s"`

	TokenHit        float64 `json:"token_hit"`
	HostHit         float64 `json:"host_hit"`
	TokenHitCeiling float64 `json:"token_hit_ceiling"`
	LoadCV          float64 `json:"load_cv"`
	Goodput         float64 `json:"goodput"`
	Throughput      float64 `json:"throughput_tok_s"`
	Rejects         int     `json:"rejects"`
	Resent          int     `json:"resent"`
	Preemptions     int     `json:"preemptions"`
	StickyBroken    float64 `json:"sticky_broken"`

	PredictedError       float64 `json:"predicted_error_ms"`
	PredictedBias        float64 `json:"predicted_bias_ms"`
	PredictedCachedError float64 `json:"predicted_cached_error_tokens"`

	// HeadroomShare is nil unless LeastTokens and Oracle ran beside.
	HeadroomShare *float64 `json:"headroom_share,omitempty"`

	// Stages of load that has them, in order.
	Stages []Stage `json:"stages,omitempty"`

	Span     float64  `json:"span_s"`
	Settings Settings `json:"settings"`
}

// Settings that a result stands on.
type Settings struct {
	Engine         string  `json:"engine"`
	KVTokens       int     `json:"kv_tokens"`
	HostTokens     int     `json:"host_tokens"`
	Hybrid         bool    `json:"hybrid,omitempty"`
	FullDepth      bool    `json:"full_depth,omitempty"`
	Capacity       float64 `json:"capacity"`
	BlockSize      int     `json:"block_size"`
	Pods           int     `json:"pods"`
	Admission      string  `json:"admission"`
	EnginePriority bool    `json:"engine_priority"`
	EventLag       float64 `json:"event_lag_s"`
	SampleInterval float64 `json:"sample_interval_s"`
	SampleAge      float64 `json:"sample_age_s"`
	DecisionLag    float64 `json:"decision_lag_s"`
	Lose           float64 `json:"lose"`
	Reports        bool    `json:"reports"`
	QueueLength    int     `json:"queue_length"`
	Restarts       int     `json:"restarts"`
	Adds           int     `json:"adds"`
}

// log collects what becomes of the requests.
type log struct {
	ttft, itl     []float64 // s, ms
	perToken      []float64 // ms
	queued        time.Duration
	good          int
	rejects       int
	resent        int
	tokens        int // of output
	predicted     []float64
	bias, cached  float64
	last          time.Duration
	sessions      map[string]*pod
	turns, broken int
	seen          map[blockkey.Key]struct{}
	hit, prompted int
	stages        []stageLog
}

// came takes a request for the ceiling: what one cache of everything that came
// before would hit.
func (l *log) came(q *arrival.Request, size int) {
	if l.seen == nil {
		l.seen = make(map[blockkey.Key]struct{})
	}
	n, most := 0, (q.Length-1)/size
	for ; n < min(most, len(q.Keys)); n++ {
		if _, ok := l.seen[q.Keys[n]]; !ok {
			break
		}
	}
	for _, k := range q.Keys[n:] {
		l.seen[k] = struct{}{}
	}
	l.hit += n * size
	l.prompted += q.Length
}

// placed notes where a request went.
func (l *log) placed(q *request, p *pod) {
	if q.resent > 0 {
		l.resent++
	}
	if q.Session == "" {
		return
	}
	if l.sessions == nil {
		l.sessions = make(map[string]*pod)
	}
	if last, ok := l.sessions[q.Session]; ok {
		l.turns++
		if last != p {
			l.broken++
		}
	}
	l.sessions[q.Session] = p
}

// finished takes a request that was served to its end.
func (l *log) finished(q *request, now time.Duration) {
	ttft := q.first - q.At
	l.ttft = append(l.ttft, ttft.Seconds())
	itl := time.Duration(0)
	if q.Output > 1 {
		itl = (now - q.first) / time.Duration(q.Output-1)
		l.itl = append(l.itl, float64(itl)/float64(time.Millisecond))
	}
	l.perToken = append(l.perToken, float64(now-q.At)/float64(time.Millisecond)/float64(max(q.Output, 1)))
	l.queued += q.queued
	if ttft <= goodTTFT && itl <= goodITL {
		l.good++
	}
	l.tokens += q.Output
	l.last = now
	if s := l.stage(q.At); s != nil {
		s.ttft = append(s.ttft, ttft.Seconds())
		s.tokens += q.Output
		s.last = now
	}
	if q.decision != "" {
		e := q.predictedMS - float64(ttft)/float64(time.Millisecond)
		l.predicted = append(l.predicted, math.Abs(e))
		l.bias += e
		l.cached += math.Abs(float64(q.predictedCached - q.cached))
	}
}

// ended is the number of requests that are over.
func (l *log) ended() int { return len(l.ttft) + l.rejects }

func (r *run) result() Result {
	l := &r.log
	res := Result{
		Policy: r.cfg.Policy, Seed: r.cfg.Seed, Requests: l.ended(),
		ITLMean: mean(l.itl), Rejects: l.rejects, Resent: l.resent,
		TokenHitCeiling:      share(float64(l.hit), float64(l.prompted)),
		Goodput:              share(float64(l.good), float64(l.ended())),
		StickyBroken:         share(float64(l.broken), float64(l.turns)),
		PredictedError:       mean(l.predicted),
		PredictedBias:        share(l.bias, float64(len(l.predicted))),
		PredictedCachedError: share(l.cached, float64(len(l.predicted))),
		Span:                 l.last.Seconds(),
		Throughput:           share(float64(l.tokens), l.last.Seconds()),
		Settings: Settings{
			Engine: engines(r.cfg.Engines), KVTokens: r.memory() * r.cfg.blockSize, HostTokens: r.cfg.HostTokens, Hybrid: r.cfg.Hybrid, FullDepth: r.cfg.FullDepth, Capacity: r.cfg.Capacity,
			BlockSize: r.cfg.blockSize, Pods: r.cfg.Pods, Admission: string(r.cfg.Admission),
			EnginePriority: r.cfg.EnginePriority, EventLag: r.cfg.EventLag.Seconds(),
			SampleInterval: r.cfg.SampleInterval.Seconds(), SampleAge: r.cfg.SampleAge.Seconds(),
			DecisionLag: r.cfg.DecisionLag.Seconds(), Lose: r.cfg.Lose, Reports: !r.cfg.NoReports, QueueLength: r.cfg.Queue.Length,
			Restarts: len(r.cfg.Restarts), Adds: len(r.cfg.Adds),
		},
	}
	for i := range l.stages {
		res.Stages = append(res.Stages, l.stages[i].result())
	}
	slices.Sort(l.ttft)
	slices.Sort(l.perToken)
	res.PerTokenP99, res.Queued = quantile(l.perToken, .99), share(l.queued.Seconds(), float64(len(l.ttft)))
	res.TTFTMean = mean(l.ttft)
	res.TTFTP50, res.TTFTP90, res.TTFTP99 = quantile(l.ttft, .5), quantile(l.ttft, .9), quantile(l.ttft, .99)
	var hit, queried, fromHost int
	var busy []float64
	for _, p := range r.pods {
		hit += p.counts.hit
		queried += p.counts.queried
		fromHost += p.counts.fromHost
		res.Preemptions += p.counts.preemptions
		busy = append(busy, p.counts.busy.Seconds())
	}
	res.TokenHit = share(float64(hit), float64(queried))
	res.HostHit = share(float64(fromHost), float64(queried))
	res.LoadCV = variation(busy)
	return res
}

// engines names them separated by commas.
func engines(list []Profile) string {
	names := make([]string, len(list))
	for i := range list {
		names[i] = list[i].Name
	}
	return strings.Join(names, ",")
}

func mean(v []float64) float64 {
	var sum float64
	for _, x := range v {
		sum += x
	}
	return share(sum, float64(len(v)))
}

// share is part of whole, 0 of nothing.
func share(part, whole float64) float64 {
	if whole == 0 {
		return 0
	}
	return part / whole
}

// quantile of sorted values: the least that so large a share does not exceed.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, max(0, int(math.Ceil(q*float64(len(sorted))))-1))]
}

// variation is the standard deviation over the mean.
func variation(v []float64) float64 {
	m := mean(v)
	var sum float64
	for _, x := range v {
		sum += (x - m) * (x - m)
	}
	return share(math.Sqrt(share(sum, float64(len(v)))), m)
}

// LeastTokens is the policy from which the headroom is counted.
const LeastTokens = "least-tokens"

// Headroom fills in, for results of one workload, which share of the way from
// least tokens to the oracle's mean time to first token each has gone.
func Headroom(results []Result) {
	type ends struct{ from, to *Result }
	bySeed := make(map[uint64]ends)
	for i := range results {
		r, e := &results[i], bySeed[results[i].Seed]
		switch r.Policy {
		case LeastTokens:
			e.from = r
		case Oracle:
			e.to = r
		}
		bySeed[r.Seed] = e
	}
	for i := range results {
		r := &results[i]
		if e := bySeed[r.Seed]; e.from != nil && e.to != nil && e.from.TTFTMean != e.to.TTFTMean {
			v := (e.from.TTFTMean - r.TTFTMean) / (e.from.TTFTMean - e.to.TTFTMean)
			r.HeadroomShare = &v
		}
	}
}
