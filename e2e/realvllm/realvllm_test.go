package realvllm_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/realvllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	// startTime bounds the start of an engine, patience any other wait.
	startTime = 20 * time.Minute
	patience  = 90 * time.Second
	// quiet is how long no event must have come before a request is judged:
	// an answer often overtakes the last event of its request.
	quiet = 250 * time.Millisecond
	pod   = "engine"
)

// run is one engine with an agent and a scheduler.
type run struct {
	t      *testing.T
	kind   string // of the engine, as in realvllm.Engines; empty: its phases are not kept
	rng    *rand.Rand
	engine *realvllm.Engine
	stage  *stage.Stage
	agent  *stage.Agent
	groups string     // that the agent is told
	pools  [][]uint32 // prefixes that prompts share

	judged, exact, over, under int
	predicted, cached          int       // tokens of all that were judged
	trust                      api.Trust // the least since the phase began; 0: none
	why                        string
	lacks                      string // what the newest answer does not stand on
}

// TestPromisedTokensAreTheEnginesOwn holds the promise of kvscout against a
// real vLLM: request by request, the predicted cached tokens are what the
// engine then reports.
func TestPromisedTokensAreTheEnginesOwn(t *testing.T) {
	t.Parallel()
	r := open(t, "full", realvllm.Config{Lora: true})
	r.wire()
	r.startAgent()

	r.phase("sequential, with evictions", func() { r.requests(60, realvllm.Request{}) })
	r.phase("turns", r.turns)
	r.phase("adapters", func() {
		for i := range short(30) {
			r.requests(1, realvllm.Request{Adapter: []string{"ad1", "ad2", ""}[i%3]})
		}
	})
	r.phase("salts", func() {
		for i := range short(30) {
			r.requests(1, realvllm.Request{Salt: []string{"tenant-a", "tenant-ü", ""}[i%3]})
		}
	})
	r.phase("between bursts", r.bursts)
	r.phase("given up", r.aborts)
	r.phase("after a reset", r.reset)
	r.phase("after a restart of the agent", func() {
		r.agent.Stop()
		for range 5 {
			r.complete(realvllm.Request{Tokens: r.prompt()}) // nobody listens
		}
		r.startAgent()
		r.requests(20, realvllm.Request{})
	})
	r.phase("after a restart of the scheduler", func() {
		if err := r.stage.RestartScheduler(); err != nil {
			t.Fatal(err)
		}
		r.until("be settled again", stage.Settled)
		r.requests(20, realvllm.Request{})
	})
	if !testing.Short() { // a start is the longest of all
		r.phase("after kill -9 and restart of the engine", r.crash)
	}
	t.Logf("all phases: judged=%d exact=%d over=%d under=%d", r.judged, r.exact, r.over, r.under)
}

// open starts an engine and a scheduler. Phases of a kind, one of
// realvllm.Engines, are kept.
func open(t *testing.T, kind string, cfg realvllm.Config) *run {
	t.Helper()
	cfg.Home = os.Getenv("KVSCOUT_VLLM")
	if cfg.Home == "" {
		t.Skip("SKIPPED: no real vLLM (make test-vllm installs one and runs this)")
	}
	release := filepath.Base(cfg.Home)
	if why := realvllm.Limit(release, kind, ""); why != "" {
		keep(release, realvllm.Phase{Engine: kind, Cannot: why})
		t.Skipf("SKIPPED: vLLM %s: %s", release, why)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("vLLM in %s, seed %d", cfg.Home, seed)
	log, err := os.CreateTemp(t.TempDir(), "vllm-*.log")
	if err != nil {
		t.Fatal(err)
	}
	cfg.Log = log
	engine, err := realvllm.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		engine.Kill()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("the engine's log ends:\n%s", text[max(0, len(text)-4000):])
		}
	})
	r := &run{t: t, kind: kind, rng: rand.New(rand.NewPCG(seed, 1)), engine: engine}
	for _, size := range []int{32, 96, 400, 900, 1500, 2100} {
		r.pools = append(r.pools, r.tokens(size))
	}
	r.start()
	if r.stage, err = stage.New(t.Context(), stage.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.stage.Close(); err != nil {
			t.Errorf("the stage: %v", err)
		}
	})
	return r
}

func (r *run) start() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), startTime)
	defer cancel()
	began := time.Now()
	if err := r.engine.Start(ctx); err != nil {
		r.t.Fatal(err)
	}
	r.t.Logf("the engine answers after %v", time.Since(began).Round(time.Second))
}

func (r *run) startAgent() {
	r.t.Helper()
	var err error
	opt := stage.AgentOptions{Engine: r.engine.URL(), Pod: pod, Ranks: r.engine.Ranks(), Groups: r.groups}
	if opt.Events, opt.Replay, err = r.engine.ExplicitEndpoints(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	if r.agent, err = r.stage.Agent(opt); err != nil {
		r.t.Fatal(err)
	}
	r.until("be settled", stage.Settled)
}

// until waits until the condition holds for every rank.
func (r *run) until(what string, holds func(*api.MemberState) bool) {
	r.t.Helper()
	for _, member := range r.agent.Members {
		if err := r.stage.Until(r.t.Context(), patience, member, what, holds); err != nil {
			r.t.Fatal(err)
		}
	}
}

// phase runs one part and reports its figures.
func (r *run) phase(name string, body func()) {
	r.t.Helper()
	if why := realvllm.Limit(r.engine.Release(), r.kind, name); why != "" {
		keep(r.engine.Release(), realvllm.Phase{Engine: r.kind, Name: name, Cannot: why})
		r.t.Logf("%-42s vLLM %s: %s", name, r.engine.Release(), why)
		return
	}
	judged, exact, over, under, predicted, cached := r.judged, r.exact, r.over, r.under, r.predicted, r.cached
	r.trust, r.why = 0, ""
	began, failed := time.Now(), r.t.Failed()
	defer func() {
		p := realvllm.Phase{
			Engine: r.kind, Name: name,
			Judged: r.judged - judged, Exact: r.exact - exact, Over: r.over - over, Under: r.under - under,
			Predicted: r.predicted - predicted, Cached: r.cached - cached,
			Trust: strings.TrimPrefix(r.trust.String(), "TRUST_"), Why: r.why, Failed: r.t.Failed() && !failed,
		}
		if p.Judged == 0 {
			p.Trust = ""
		}
		keep(r.engine.Release(), p)
		r.t.Logf("%-42s judged=%d exact=%d over=%d under=%d %s in %v", name,
			p.Judged, p.Exact, p.Over, p.Under, p.Trust, time.Since(began).Round(time.Millisecond))
	}()
	body()
}

func (r *run) tokens(n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = 3 + r.rng.Uint32N(3900)
	}
	return tokens
}

// prompt shares a prefix with others, often to a block's end.
func (r *run) prompt() []uint32 {
	p := slices.Clone(r.pools[r.rng.IntN(len(r.pools))])
	if r.rng.IntN(3) == 0 {
		p = p[:1+r.rng.IntN(len(p))]
	}
	if r.rng.IntN(3) > 0 {
		p = append(p, r.tokens(r.rng.IntN(300))...)
	}
	if size := r.engine.BlockSize(); r.rng.IntN(4) == 0 && len(p) > size {
		p = p[:len(p)/size*size]
	}
	return p
}

// settle waits until no event has come for a while.
func (r *run) settle() {
	r.t.Helper()
	batches, since := map[string]uint64{}, time.Now()
	r.until("fall quiet", func(m *api.MemberState) bool {
		if n, id := m.GetCacheState().GetEngineBatches(), m.GetMember().GetId(); n != batches[id] {
			batches[id], since = n, time.Now()
		}
		return stage.Settled(m) && time.Since(since) >= quiet
	})
}

// predict asks the scheduler for the tokens that the engine will find.
func (r *run) predict(q realvllm.Request) (int, *api.Candidate) {
	r.t.Helper()
	request := &api.Request{
		Model: realvllm.Model, Adapter: q.Adapter,
		Prompt: api.TokenIDs(q.Tokens),
	}
	request.Prompt.GetTokens().CacheSalt = q.Salt
	return r.score(request, q.Rank)
}

// score asks for the prediction of any request on a rank.
func (r *run) score(request *api.Request, rank int) (int, *api.Candidate) {
	r.t.Helper()
	answer, err := r.stage.Client.Score(r.t.Context(), &api.ScoreRequest{Request: request})
	if err != nil {
		r.t.Fatal(err)
	}
	r.lacks = answer.GetRanking().Lacks()
	for _, c := range answer.GetRanking().GetCandidates() {
		if c.GetMember().GetId() == r.agent.Members[rank] {
			cached := c.GetCachedTokens()
			return int(cached.GetGpu() + cached.GetHost() + cached.GetDisk()), c
		}
	}
	r.t.Fatalf("%s is no candidate: %v", r.agent.Members[rank], answer)
	return 0, nil
}

func (r *run) complete(q realvllm.Request) realvllm.Usage {
	r.t.Helper()
	usage, err := r.engine.Complete(r.t.Context(), q)
	if err != nil {
		r.t.Fatal(err)
	}
	return usage
}

// judge sends a request alone and compares.
func (r *run) judge(q realvllm.Request) realvllm.Usage {
	r.t.Helper()
	r.settle()
	predicted, candidate := r.predict(q)
	usage := r.complete(q)
	r.verdict(fmt.Sprintf("%d tokens, adapter %q, salt %q", len(q.Tokens), q.Adapter, q.Salt), predicted, usage.CachedTokens, candidate)
	return usage
}

// verdict compares what was predicted with what the engine counted.
func (r *run) verdict(what string, predicted, actual int, candidate *api.Candidate) {
	r.t.Helper()
	r.judged++
	r.predicted += predicted
	r.cached += actual
	if trust := candidate.GetCacheState().GetTrust(); r.trust == 0 || worse(trust, r.trust) {
		r.trust, r.why = trust, candidate.GetCacheState().GetExplanation()
	}
	if r.why == "" {
		r.why = r.lacks
	}
	switch {
	case predicted == actual:
		r.exact++
	case predicted > actual:
		r.over++
		r.t.Errorf("OVER: %s: predicted %d, engine %d; %v", what, predicted, actual, candidate.GetCacheState())
	default:
		r.under++
		// An answer that calls itself a lower bound may be one.
		if r.lacks == "" && stage.Trusted(candidate) {
			r.t.Errorf("UNDER: %s: predicted %d, engine %d; %v", what, predicted, actual, candidate.GetCacheState())
		}
	}
}

// worse says whether one trust is less than another.
func worse(a, b api.Trust) bool {
	order := []api.Trust{api.Trust_TRUST_EXACT, api.Trust_TRUST_APPROXIMATE, api.Trust_TRUST_SYNCING, api.Trust_TRUST_UNKNOWN}
	return slices.Index(order, a) > slices.Index(order, b)
}

// short divides the number of requests where an engine gets the short set.
func short(n int) int {
	if testing.Short() {
		return max(n/3, 1)
	}
	return n
}

// requests judges n requests like q, each with a prompt of its own.
func (r *run) requests(n int, q realvllm.Request) {
	r.t.Helper()
	for range short(n) {
		q.Tokens = r.prompt()
		q.MaxTokens = []int{1, 4, 40}[r.rng.IntN(3)]
		q.Rank = r.rng.IntN(r.engine.Ranks())
		r.judge(q)
	}
}

// turns are conversations: every prompt extends the one before and its answer.
func (r *run) turns() {
	for range short(4) {
		history := r.tokens(100 + r.rng.IntN(200))
		for range 5 {
			usage := r.judge(realvllm.Request{Tokens: history, MaxTokens: 40})
			history = append(slices.Clone(history), usage.Output...)
			history = append(history, r.tokens(20)...)
		}
	}
}

// reset empties the cache while the engine is idle: it tells with its next
// request, so that one is not judged.
func (r *run) reset() {
	r.settle()
	if err := r.engine.Reset(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	r.complete(realvllm.Request{Tokens: r.tokens(40)})
	r.requests(15, realvllm.Request{})
}

// crash kills the engine and starts it again at the same address.
func (r *run) crash() {
	r.settle()
	before := r.epoch()
	r.engine.Kill()
	killed := time.Now()
	r.until("be doubted", func(m *api.MemberState) bool { return !stage.Exact(m) })
	r.t.Logf("doubted %v after the kill", time.Since(killed).Round(time.Millisecond))
	r.start()
	up := time.Now()
	r.until("live anew", func(m *api.MemberState) bool {
		return stage.Exact(m) && m.GetCacheState().GetEpoch() != before && m.GetHeldGpuBlocks() == 0
	})
	r.t.Logf("exact and empty %v after the engine answered", time.Since(up).Round(time.Millisecond))
	r.requests(20, realvllm.Request{})
}

func (r *run) epoch() uint64 {
	r.t.Helper()
	m, err := r.stage.Member(r.t.Context(), r.agent.Members[0])
	if err != nil || m == nil {
		r.t.Fatalf("no member: %v", err)
	}
	return m.GetCacheState().GetEpoch()
}
