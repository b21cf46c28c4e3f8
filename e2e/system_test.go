package e2e

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
)

func TestExternalNATSComesLateAndGoesAway(t *testing.T) {
	t.Parallel()
	nats := broker.Absent(t, nil)
	p := open(t, stage.Options{NATS: nats.URL()})
	e := p.engine(fakevllm.Config{})
	var err error
	if e.agent, err = p.Agent(stage.AgentOptions{Engine: e.URL(), Pod: "pod"}); err != nil {
		t.Fatal(err)
	}
	list := several(1, 5)
	e.complete(list...)
	nats.Start()
	start := time.Now()
	e.untilMember(e.id(), "be exact", stage.Exact)
	e.truth(soon, list...)
	t.Log("true after", time.Since(start))

	nats.Stop()
	list = append(list, several(2, 5)...)
	e.complete(list...)
	nats.Start()
	start = time.Now()
	e.truth(patience, list...)
	t.Log("true again after", time.Since(start))
}

func TestSchedulerRestartsWithItsNATS(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	list := several(1, 5)
	var engines []*engine
	for i := range 3 {
		e := p.engine(fakevllm.Config{}).watched(fmt.Sprint("pod-", i))
		e.complete(list[i:]...)
		e.truth(soon, list...)
		engines = append(engines, e)
	}
	if err := p.RestartScheduler(); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	for _, e := range engines {
		e.untilMember(e.id(), "be exact", stage.Exact)
		e.truth(soon, list...)
	}
	t.Log("all exact after", time.Since(start))
}

func TestTwoModelsNeverMeet(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	one := p.engine(fakevllm.Config{Model: "one"}).watched("one")
	two := p.engine(fakevllm.Config{Model: "two"}).watched("two")
	q := random(1, 100)
	one.complete(q)
	one.truth(soon, q)
	two.truth(soon, q)
	r := q.request()
	r.Model = "two"
	list := p.score(r).GetCandidates()
	if len(list) != 1 || list[0].GetMember().GetId() != two.id() || list[0].GetCachedTokens().GetGpu() != 0 {
		t.Errorf("%v", list)
	}
}

func TestAnotherModelAtTheSameAddress(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{Model: "old"}).watched("pod")
	q := random(1, 100)
	e.complete(q)
	e.truth(soon, q)
	e.cfg.Model, e.cfg.BlockSize = "new", 32
	e.restart()
	e.untilMember(e.id(), "serve the new model", func(m *api.MemberState) bool {
		return len(m.GetModels()) == 1 && m.GetModels()[0] == "new" && m.GetBlockSizeTokens() == 32 && stage.Exact(m)
	})
	e.truth(soon, q)
	e.complete(q)
	e.truth(soon, q)
	e.expect("blocks of 32", q, 96)
	old := q.request()
	old.Model = "old"
	p.ready()
	if _, err := p.Client.Score(t.Context(), &api.ScoreRequest{Request: old}); status.Code(err) != codes.NotFound {
		t.Errorf("the old model: %v", err)
	}
}

func TestLongPrompts(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	q := random(1, 120_000)
	e.complete(q)
	e.truth(patience, q, q.branch(60_000, 2, 10), q.branch(16, 3, 50_000))
	e.expect("all but the last block", q, 119_984)
}

func TestEngineThatComputesInSilenceIsNotTrusted(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{})
	mute, err := fakevllm.NewPublisher(fakevllm.PublisherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	p.Go(mute.Run)
	e.watchedBy(stage.AgentOptions{Pod: "pod", Events: mute.Endpoint(), Replay: "none"})
	began := time.Now()
	for seed := uint64(0); ; seed++ {
		e.complete(random(seed, 1600))
		state := p.member(e.id()).GetCacheState()
		if state.GetTrust() == api.Trust_TRUST_UNKNOWN && strings.Contains(state.GetExplanation(), "no events") {
			return
		}
		if time.Since(began) > patience {
			t.Fatalf("computed %d prompts and is still believed: %v", seed, state)
		}
	}
}

func TestAdaptersAndSaltsNeverMeet(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{Adapters: []fakevllm.Adapter{{Name: "red", Path: "/red"}, {Name: "blue", Path: "/blue"}}}).watched("pod")
	q := random(1, 100)
	var all []prompt
	for _, adapter := range []string{"", "red", "blue"} {
		for _, salt := range []string{"", "s1", "s2"} {
			x := q
			x.adapter, x.salt = adapter, salt
			all = append(all, x)
		}
	}
	for i, x := range all {
		e.complete(x)
		e.truth(soon, all...)
		for j, y := range all {
			want := 0
			if j <= i {
				want = 96
			}
			e.expect(fmt.Sprintf("%q %q after %d", y.adapter, y.salt, i), y, want)
		}
	}
	// An adapter of the same name from elsewhere is another one.
	for _, path := range []string{"/v1/unload_lora_adapter", "/v1/load_lora_adapter"} {
		if status, text := p.post(e.URL()+path, nil, map[string]string{"lora_name": "red", "lora_path": "/other"}); status != 200 {
			t.Fatalf("%s: %d %s", path, status, text)
		}
	}
	e.truth(soon, all...)
	e.expect("the other red", all[3], 0)
	e.expect("blue", all[6], 96)
	e.complete(all[3])
	e.truth(soon, all...)
}

func TestRanksStayApart(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{Ranks: 3}).watched("pod")
	var all []prompt
	for rank := range 3 {
		for i := range rank + 1 {
			q := random(uint64(10*rank+i), 100)
			for r := range 3 {
				q.rank = r
				all = append(all, q)
			}
			q.rank = rank
			e.complete(q)
		}
	}
	e.truth(soon, all...)
	q := random(20, 100)
	want := map[string]int{e.agent.Members[0]: 0, e.agent.Members[1]: 0, e.agent.Members[2]: 96}
	if d := cmp.Diff(want, p.gpu(q)); d != "" {
		t.Error(d)
	}
	for _, c := range p.score(q.request()).GetCandidates() {
		if c.GetMember().GetAddress() != e.Addr() || c.GetMember().GetPod() != "pod" {
			t.Errorf("%v", c.GetMember())
		}
	}
}

func TestTextHasTheEnginesTokens(t *testing.T) {
	for name, cfg := range map[string]fakevllm.Config{"render": {ScaleOut: true}, "tokenize only": {}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t, stage.Options{})
			e := p.engine(cfg).watched("pod")
			text := strings.Repeat("All that glitters is not gold. ", 7)
			tokens, _ := e.serve("/v1/completions", 0, map[string]any{"model": model, "prompt": text, "max_tokens": 1})
			e.untilMember(e.id(), "know the blocks", func(m *api.MemberState) bool { return int(m.GetHeldGpuBlocks()) == tokens/size })
			body := fmt.Sprintf(`{"model":%q,"prompt":%q,"max_tokens":1}`, model, text)
			for form, r := range map[string]*api.Request{
				"text": {Prompt: api.Body(fmt.Sprintf(`{"prompt":%q}`, text))},
				"body": {Prompt: api.Body(body)},
			} {
				ranking := p.score(r)
				want := (tokens - 1) / size * size
				if got := int(ranking.GetCandidates()[0].GetCachedTokens().GetGpu()); got != want || int(ranking.GetPromptTokens()) != tokens || ranking.Lacks() != "" {
					t.Errorf("%s: promised %d of %d tokens (%q), want %d of %d", form, got, ranking.GetPromptTokens(), ranking.Lacks(), want, tokens)
				}
			}
			_, cached := e.serve("/v1/completions", 0, map[string]any{"model": model, "prompt": text, "max_tokens": 1})
			if cached != (tokens-1)/size*size {
				t.Errorf("the engine counts %d", cached)
			}
		})
	}
}

func TestWithoutTokensLoadDecidesAndSaysSo(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	conn := p.bus()
	nobody := net.JoinHostPort(loopback.Host(t), "8000")
	var list []*speaker
	for i := range 2 {
		s := p.speaker(conn, fmt.Sprint("m", i))
		s.mu.Lock()
		s.info = proto.Clone(s.info).(*pb.MemberInfo)
		s.info.Address = nobody
		s.mu.Unlock()
		list = append(list, s)
	}
	list[0].loaded(&pb.Load{Running: proto.Uint32(90), Waiting: proto.Uint32(30)})
	p.untilMember(list[0].id, "be busy", func(m *api.MemberState) bool { return m.GetRunningRequests() == 90 })
	for _, s := range list {
		p.untilMember(s.id, "have an address", func(m *api.MemberState) bool { return m.GetMember().GetAddress() == nobody })
	}
	for name, c := range map[string]struct {
		request *api.Request
		instead string
	}{
		"text": {&api.Request{Prompt: api.Body(`{"prompt":"a secret"}`)}, "by the beginning of the prompt"},
		"chat": {p.chatRequest(chat("a secret", "a secret")), "by the beginning of the prompt"},
		"none": {&api.Request{}, "load only"},
	} {
		ranking := p.pick(c.request).GetRanking()
		if f := ranking.Lacks(); !strings.Contains(f, c.instead) || strings.Contains(f, "secret") {
			t.Errorf("%s: fallback %q", name, f)
		}
		if first := ranking.GetCandidates()[0].GetMember().GetId(); first != list[1].id {
			t.Errorf("%s: the busy one is first", name)
		}
	}
	// Tokens need no engine.
	if f := p.score(random(1, 100).request()).Lacks(); f != "" {
		t.Errorf("tokens: fallback %q", f)
	}
}

func TestEveryAnswerSaysWhatItStandsOn(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	exact := p.engine(fakevllm.Config{}).watched("exact")
	partial := p.engine(fakevllm.Config{BufferSteps: 4})
	partial.complete(several(9, 20)...)
	partial.watched("partial")
	blind := p.engine(fakevllm.Config{NoEvents: true}).watched("blind")
	q := random(1, 1000)
	exact.complete(q)
	exact.truth(soon, q)
	want := map[string]api.Trust{
		exact.id(): api.Trust_TRUST_EXACT, partial.id(): api.Trust_TRUST_APPROXIMATE, blind.id(): api.Trust_TRUST_UNKNOWN,
	}
	for id, trust := range want {
		p.untilMember(id, "be "+trust.String(), func(m *api.MemberState) bool { return m.GetCacheState().GetTrust() == trust })
	}
	ranking := p.pick(q.request()).GetRanking()
	if ranking.GetExplanation() == "" || ranking.GetPolicy() != "default" || ranking.GetPromptTokens() != 1000 || len(ranking.GetCandidates()) != 3 {
		t.Errorf("%v", ranking)
	}
	for _, c := range ranking.GetCandidates() {
		id, state := c.GetMember().GetId(), c.GetCacheState()
		if state.GetTrust() != want[id] || (state.GetExplanation() == "") != (want[id] == api.Trust_TRUST_EXACT) {
			t.Errorf("%s: %v", id, state)
		}
		if state.GetEpoch() == 0 || state.GetAgeMs() > 5000 {
			t.Errorf("%s: %v", id, state)
		}
		cached := c.GetCachedTokens()
		if cached.GetGpu()+cached.GetHost()+cached.GetDisk()+cached.GetPredicted()+c.GetUncachedTokens() != 1000 {
			t.Errorf("%s: %v and %d uncached are not 1000", id, cached, c.GetUncachedTokens())
		}
		cost := c.GetCost()
		sum := cost.GetWaitMs() + cost.GetLoadMs() + cost.GetPrefillMs() + cost.GetMissMs() + cost.GetEvictMs() + cost.GetDecodeMs()
		if d := sum - cost.GetTotalMs(); d > 1e-6 || d < -1e-6 || cost.GetTotalMs() <= 0 {
			t.Errorf("%s: the parts of %v add up to %v", id, cost, sum)
		}
	}
	first := ranking.GetCandidates()[0]
	if first.GetMember().GetId() != exact.id() || first.GetCacheState().GetEngineBatches() != exact.Events(0).Stats().Next || first.GetCacheState().GetSequence() == 0 {
		t.Errorf("%v; the engine sent %d batches", first, exact.Events(0).Stats().Next)
	}
}

func TestWatchTellsWhoComesAndGoes(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	stream, err := p.Operator.WatchMembers(ctx, &api.WatchMembersRequest{IntervalMs: 20})
	if err != nil {
		t.Fatal(err)
	}
	until := func(what string, holds func([]*api.MemberState) bool) {
		t.Helper()
		for {
			answer, err := stream.Recv()
			if err != nil {
				t.Fatalf("waiting until %s: %v", what, err)
			}
			if holds(answer.GetFleet().GetMembers()) {
				return
			}
		}
	}
	until("nobody is there", func(m []*api.MemberState) bool { return len(m) == 0 })
	e := p.engine(fakevllm.Config{}).watched("pod")
	until("a member is exact", func(m []*api.MemberState) bool { return len(m) == 1 && stage.Exact(m[0]) })
	e.complete(random(1, 100))
	until("it holds 6 blocks", func(m []*api.MemberState) bool { return len(m) == 1 && m[0].GetHeldGpuBlocks() == 6 })
	e.agent.Stop()
	until("nobody is there", func(m []*api.MemberState) bool { return len(m) == 0 })
	cancel()
	if _, err := stream.Recv(); status.Code(err) != codes.Canceled {
		t.Error(err)
	}
}

func TestReportsStandBesideThePredictions(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	q := random(1, 1000)
	var prompts, cached uint64
	for i := range 3 {
		picked := p.pick(q.request())
		got := uint32(e.complete(q))
		prompts, cached = prompts+1000, cached+uint64(got)
		if promised := picked.GetRanking().GetCandidates()[0].GetCachedTokens().GetGpu(); promised != got {
			t.Errorf("request %d: promised %d, the engine counts %d", i, promised, got)
		}
		for _, outcome := range []api.Outcome{api.Outcome_OUTCOME_FIRST_TOKEN, api.Outcome_OUTCOME_FINISHED} {
			answer, err := p.Client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{
				DecisionId: picked.GetDecisionId(), Outcome: outcome, PromptTokens: proto.Uint32(1000), CachedTokens: proto.Uint32(got),
				OutputTokens: proto.Uint32(1), TtftMs: proto.Float64(5),
			}}})
			if err != nil || answer.GetResults()[0].GetStatus() != api.ReportStatus_REPORT_STATUS_RECORDED {
				t.Errorf("request %d: %v, %v", i, answer, err)
			}
		}
		e.truth(soon, q)
	}
	m := p.member(e.id())
	if m.GetReportedRequests() != 3 || m.GetReportedPromptTokens() != prompts || m.GetReportedCachedTokens() != cached ||
		m.GetPredictedCachedTokens() != cached || m.GetReservedRequests() != 0 || m.GetReservedTokens() != 0 {
		t.Errorf("%v; want %d prompt and %d cached tokens", m, prompts, cached)
	}
	// A caller that gives up leaves no load behind.
	picked := p.pick(q.request())
	if _, err := p.Client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{DecisionId: picked.GetDecisionId(), Outcome: api.Outcome_OUTCOME_CANCELLED}}}); err != nil {
		t.Fatal(err)
	}
	if m := p.member(e.id()); m.GetReservedRequests() != 0 || m.GetReservedTokens() != 0 {
		t.Errorf("%v", m)
	}
}

// Two small engines under concurrent callers who go where they are told, with
// evictions, preemptions and a reset: in the end every promise is the truth.
func TestTheWholeUnderLoad(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	engines := map[string]*engine{}
	for i, cfg := range []fakevllm.Config{
		{Blocks: 48, Preemption: true, MaxBatchedTokens: 128, Speedup: 200},
		{Blocks: 96, MaxBatchedTokens: 128, Speedup: 200, Era: fakevllm.Arrays},
	} {
		e := p.engine(cfg).watched(fmt.Sprint("pod-", i))
		engines[e.id()] = e
	}
	heads := several(1, 6)
	ask := func(q prompt) {
		answer, err := p.Client.Pick(t.Context(), &api.PickRequest{Request: q.request()}, grpc.WaitForReady(true))
		if err != nil {
			t.Error(err)
			return
		}
		e := engines[answer.GetRanking().GetCandidates()[0].GetMember().GetId()]
		_, cached := e.serve("/v1/completions", 0, map[string]any{"model": model, "prompt": q.tokens, "max_tokens": 20})
		if _, err := p.Client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{
			DecisionId: answer.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FINISHED,
			PromptTokens: proto.Uint32(uint32(len(q.tokens))), CachedTokens: proto.Uint32(uint32(cached)),
		}}}); err != nil {
			t.Error(err)
		}
	}
	var mu sync.Mutex
	var asked []prompt
	var group sync.WaitGroup
	for caller := range 10 {
		group.Go(func() {
			for i := range 10 {
				q := heads[(caller+i)%len(heads)].branch(3*size, uint64(1000*caller+i), 200)
				ask(q)
				mu.Lock()
				asked = append(asked, q)
				mu.Unlock()
			}
		})
	}
	group.Go(func() {
		for _, e := range engines {
			e.act("/reset_prefix_cache", url.Values{})
		}
	})
	group.Wait()
	for _, e := range engines {
		state := e.State(0)
		t.Logf("evicted %d, preempted %d, true after %v", state.Counters.Evicted, state.Counters.Preempted, e.truth(soon, asked[len(asked)-40:]...))
		if state.Counters.Evicted == 0 {
			t.Error("nothing was evicted")
		}
	}
}
