package e2e

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	patience = await.Patience
	// soon is the promise: the time after a fault in which a cache state must be true
	// again. A stopwatch judges it.
	soon  = time.Second
	size  = 16 // tokens in a block
	model = "fake"

	// Where an engine serves, on a host of its own.
	httpPort, eventsPort, replayPort = 28000, 25557, 25657
)

// play is a stage for one test, and what callers do on it.
type play struct {
	*stage.Stage
	t    *testing.T
	http *http.Client
}

func open(t *testing.T, opt stage.Options) *play {
	t.Helper()
	s, err := stage.New(context.Background(), opt)
	if err != nil {
		t.Fatal(err)
	}
	p := &play{Stage: s, t: t, http: &http.Client{Transport: &http.Transport{}, Timeout: patience}}
	t.Cleanup(func() {
		p.http.CloseIdleConnections()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// until waits for a condition that has no member.
func (p *play) until(what string, holds func() bool) {
	p.t.Helper()
	await.True(p.t, what, holds)
}

// ready waits until the scheduler knows all members: only then is a model that
// nobody serves unknown.
func (p *play) ready() {
	p.t.Helper()
	p.until("the scheduler is ready", func() bool {
		fleet, err := p.Operator.ListMembers(p.t.Context(), &api.ListMembersRequest{})
		return err == nil && fleet.GetReady()
	})
}

// untilMember waits until the scheduler's view of a member fulfils a condition.
func (p *play) untilMember(id, what string, holds func(*api.MemberState) bool) {
	p.t.Helper()
	if err := p.Until(context.Background(), patience, id, what, holds); err != nil {
		p.t.Fatal(err)
	}
}

func (p *play) member(id string) *api.MemberState {
	p.t.Helper()
	m, err := p.Member(p.t.Context(), id)
	if err != nil {
		p.t.Fatal(err)
	}
	return m
}

// everybody is a ranked list of all members.
const everybody = 1000

// score ranks for a request; an empty model is the usual one.
func (p *play) score(r *api.Request) *api.Ranking {
	p.t.Helper()
	if r.GetModel() == "" && !bytes.Contains(r.GetPrompt().GetOpenaiBody(), []byte(`"model"`)) {
		r.Model = model
	}
	r.MaxCandidates = everybody
	for end := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		answer, err := p.Client.Score(p.t.Context(), &api.ScoreRequest{Request: r}, grpc.WaitForReady(true))
		// Unavailable says to try again: members may be between two lives.
		if status.Code(err) == codes.Unavailable && time.Now().Before(end) {
			continue
		}
		if err != nil {
			p.t.Fatal(err)
		}
		return answer.GetRanking()
	}
}

func (p *play) pick(r *api.Request) *api.PickResponse {
	p.t.Helper()
	if r.GetModel() == "" {
		r.Model = model
	}
	r.MaxCandidates = everybody
	answer, err := p.Client.Pick(p.t.Context(), &api.PickRequest{Request: r})
	if err != nil {
		p.t.Fatal(err)
	}
	return answer
}

// counted reads a metric and adds up the series that have the text in their labels.
func (p *play) counted(admin, metric, label string) float64 {
	p.t.Helper()
	_, page := p.get(admin, "/metrics")
	sum := 0.0
	for line := range strings.Lines(page) {
		labels, value, ok := strings.Cut(line, "} ")
		if bare, found := strings.CutPrefix(line, metric+" "); found {
			labels, value, ok = metric+"{", bare, true
		}
		if ok && strings.HasPrefix(labels, metric+"{") && strings.Contains(labels, label) {
			v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				p.t.Fatalf("%s: %v", line, err)
			}
			sum += v
		}
	}
	return sum
}

// prompt is what an engine is asked and a scheduler predicts.
type prompt struct {
	tokens        []uint32
	adapter, salt string
	rank          int
}

// request asks the scheduler about the prompt; of nobody but the members, if any are named.
func (q prompt) request(members ...string) *api.Request {
	r := &api.Request{
		Model: model, Adapter: q.adapter,
		Prompt: api.TokenIDs(q.tokens),
	}
	r.Prompt.GetTokens().CacheSalt = q.salt
	for _, id := range members {
		r.Candidates = append(r.Candidates, &api.MemberRef{Ref: &api.MemberRef_MemberId{MemberId: id}})
	}
	return r
}

// random is a prompt that shares nothing with those of other seeds.
func random(seed uint64, tokens int) prompt {
	r := rand.New(rand.NewPCG(seed, 1))
	q := prompt{tokens: make([]uint32, tokens)}
	for i := range q.tokens {
		q.tokens[i] = 1000 + r.Uint32N(100_000)
	}
	return q
}

// branch keeps the first tokens of q and goes on differently.
func (q prompt) branch(keep int, seed uint64, tokens int) prompt {
	q.tokens = append(q.tokens[:keep:keep], random(seed, tokens).tokens...)
	return q
}

// engine is a fake engine, with an agent beside it once there is one.
type engine struct {
	*fakevllm.Engine
	*play
	cfg   fakevllm.Config
	agent *stage.Agent
	stop  func()
}

// engine starts one at addresses that stay its own.
func (p *play) engine(cfg fakevllm.Config) *engine {
	p.t.Helper()
	if cfg.Host == "" {
		cfg.Host = loopback.Host(p.t)
	}
	cfg.Port, cfg.EventsPort, cfg.ReplayPort = cmp.Or(cfg.Port, httpPort), cmp.Or(cfg.EventsPort, eventsPort), cmp.Or(cfg.ReplayPort, replayPort)
	if cfg.Speedup == 0 {
		cfg.Speedup = 10_000
	}
	e := &engine{play: p, cfg: cfg}
	e.start()
	p.t.Cleanup(func() { e.stop() })
	return e
}

func (e *engine) start() {
	e.t.Helper()
	var err error
	if e.Engine, err = fakevllm.New(e.cfg); err != nil {
		e.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	running := e.Engine
	go func() { done <- running.Run(ctx) }()
	stopped := false
	e.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		e.http.CloseIdleConnections()
		if err := <-done; err != nil {
			e.t.Error(err)
		}
	}
}

// restart ends the engine and starts another one at the same addresses.
func (e *engine) restart() {
	e.t.Helper()
	e.stop()
	e.start()
}

// watched puts an agent beside the engine and waits until its cache states stand.
func (e *engine) watched(pod string) *engine {
	e.t.Helper()
	return e.watchedBy(stage.AgentOptions{Pod: pod})
}

func (e *engine) watchedBy(opt stage.AgentOptions) *engine {
	e.t.Helper()
	if opt.Engine == "" {
		opt.Engine = e.URL()
	}
	opt.Ranks = max(e.cfg.Ranks, 1)
	if opt.Events != "" { // as with a release that cannot contradict it
		e.cfg.NoSources = true
		e.HideSources(true)
	}
	var err error
	if e.agent, err = e.Agent(opt); err != nil {
		e.t.Fatal(err)
	}
	for _, id := range e.agent.Members {
		e.untilMember(id, "settle", func(m *api.MemberState) bool { return len(m.GetModels()) > 0 && stage.Settled(m) })
	}
	return e
}

func (e *engine) id() string { return e.agent.Members[0] }

// usage is what an engine says of a request.
type usage struct {
	Usage struct {
		PromptTokens int `json:"prompt_tokens"`
		Details      struct {
			CachedTokens int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

func (p *play) post(address string, header http.Header, body any) (int, []byte) {
	p.t.Helper()
	code, text, err := p.try(address, header, body)
	if err != nil {
		p.t.Fatal(err)
	}
	return code, text
}

// try posts, and may fail.
func (p *play) try(address string, header http.Header, body any) (int, []byte, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return 0, nil, err
	}
	req, err := http.NewRequestWithContext(p.t.Context(), http.MethodPost, address, bytes.NewReader(data))
	if err != nil {
		return 0, nil, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	answer, err := p.http.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return answer.StatusCode, text, err
}

// serve lets the engine serve a request and gives its own count.
func (e *engine) serve(path string, rank int, body map[string]any) (prompt, cached int) {
	e.t.Helper()
	header := http.Header{"X-Data-Parallel-Rank": {strconv.Itoa(rank)}}
	status, text := e.post(e.URL()+path, header, body)
	var u usage
	if err := json.Unmarshal(text, &u); err != nil || status != http.StatusOK {
		e.t.Fatalf("%s: %d %v: %.300s", path, status, err, text)
	}
	return u.Usage.PromptTokens, u.Usage.Details.CachedTokens
}

// complete serves prompts one by one and gives the cached tokens of the last.
func (e *engine) complete(prompts ...prompt) (cached int) {
	e.t.Helper()
	for _, q := range prompts {
		name := e.cfg.Model
		if name == "" {
			name = model
		}
		if q.adapter != "" {
			name = q.adapter
		}
		body := map[string]any{"model": name, "prompt": q.tokens, "max_tokens": 1}
		if q.salt != "" {
			body["cache_salt"] = q.salt
		}
		_, cached = e.serve("/v1/completions", q.rank, body)
	}
	return cached
}

// act asks for something without a body.
func (e *engine) act(path string, query url.Values) {
	e.t.Helper()
	if status, text := e.post(e.URL()+path+"?"+query.Encode(), nil, struct{}{}); status != http.StatusOK {
		e.t.Fatalf("%s: %d %s", path, status, text)
	}
}

// held is what the engine would find in its cache for the prompt.
func (e *engine) held(q prompt) int { return e.Hit(q.rank, q.tokens, q.adapter, q.salt) }

// promised is what the scheduler says of the prompt on the engine.
func (e *engine) promised(q prompt) (tokens int, state *api.CacheState) {
	e.t.Helper()
	r := q.request(e.agent.Members[q.rank])
	if e.cfg.Model != "" {
		r.Model = e.cfg.Model
	}
	list := e.score(r).GetCandidates()
	if len(list) != 1 {
		e.t.Fatalf("%d candidates", len(list))
	}
	c := list[0].GetCachedTokens()
	return int(c.GetGpu() + c.GetHost() + c.GetDisk()), list[0].GetCacheState()
}

// truth waits until the scheduler promises of each prompt exactly what the
// engine holds, all proven, and says how long that took.
func (e *engine) truth(within time.Duration, prompts ...prompt) time.Duration {
	e.t.Helper()
	return e.wait(within, "be the truth", prompts, func(got, want int, p *api.CacheState) bool {
		return got == want && p.GetTrust() == api.Trust_TRUST_EXACT
	})
}

// lower waits until the scheduler promises nothing that the engine does not
// hold, and says that this is a lower bound.
func (e *engine) lower(within time.Duration, prompts ...prompt) time.Duration {
	e.t.Helper()
	return e.wait(within, "be a lower bound", prompts, func(got, want int, p *api.CacheState) bool {
		return got <= want && p.GetTrust() == api.Trust_TRUST_APPROXIMATE
	})
}

func (e *engine) wait(within time.Duration, what string, prompts []prompt, holds func(got, want int, p *api.CacheState) bool) time.Duration {
	e.t.Helper()
	start, watch := time.Now(), newStopwatch()
	for {
		wrong := ""
		for i, q := range prompts {
			got, state := e.promised(q)
			if want := e.held(q); !holds(got, want, state) {
				wrong = fmt.Sprintf("prompt %d: promised %d, held %d, %v", i, got, want, state)
				break
			}
		}
		took := time.Since(start)
		if wrong == "" {
			return took
		}
		if watch.over(within) {
			e.t.Fatalf("the cache state did not come to %s within %v, in %v: %s", what, within, took, wrong)
		}
		time.Sleep(2 * time.Millisecond)
	}
}
