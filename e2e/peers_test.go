package e2e

import (
	"encoding/json"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
)

// Mistakes that other routers made, by their number in docs/PEER-BUGS.md, as
// far as they can be seen from outside.

// gpu is the GPU prefix promised of the prompt on each member.
func (p *play) gpu(q prompt) map[string]int {
	p.t.Helper()
	cached := make(map[string]int)
	for _, c := range p.score(q.request()).GetCandidates() {
		cached[c.GetMember().GetId()] = int(c.GetCachedTokens().GetGpu())
	}
	return cached
}

// publish sends events in the engine's name and waits until they are applied.
func (e *engine) publish(events ...any) {
	e.t.Helper()
	sequence := e.Events(0).Publish(batch(e.t, events...))
	e.untilMember(e.id(), fmt.Sprintf("stand on batch %d", sequence), func(m *api.MemberState) bool {
		return m.GetCacheState().GetEngineBatches() == sequence+1 && stage.Settled(m)
	})
}

// expect is what the scheduler must promise of a prompt. It may be in doubt for a
// moment, where a heartbeat is late.
func (e *engine) expect(what string, q prompt, want int) {
	e.t.Helper()
	e.until(fmt.Sprintf("%s: %d tokens are promised", what, want), func() bool {
		got, state := e.promised(q)
		if got > want && state.GetTrust() == api.Trust_TRUST_EXACT {
			e.t.Fatalf("%s: promised %d, want %d; %v", what, got, want, state)
		}
		return got == want
	})
}

func TestPeers01EveryBlockHangsBelowTheOneBefore(t *testing.T) {
	t.Parallel()
	e := open(t, stage.Options{}).engine(fakevllm.Config{}).watched("pod")
	q := random(1, 8*size+1)
	e.publish(stored{hashes: hashes(1, 8), tokens: q.tokens[:8*size]}.event())
	e.expect("one event of 8 blocks", q, 8*size)
	e.expect("its first half", prompt{tokens: q.tokens[:4*size+1]}, 4*size)
}

func TestPeers02BlockSizeIsLearnedAndAnotherRefused(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	small := p.engine(fakevllm.Config{BlockSize: 8}).watched("small")
	large := p.engine(fakevllm.Config{BlockSize: 48}).watched("large")
	q := random(1, 200)
	small.complete(q)
	large.complete(q)
	small.truth(soon, q)
	large.truth(soon, q)
	small.expect("blocks of 8", q, 192)
	large.expect("blocks of 48", q, 192)
	for _, e := range []*engine{small, large} {
		if m := p.member(e.id()); int(m.GetBlockSizeTokens()) != e.cfg.BlockSize {
			t.Errorf("%s has blocks of %d", e.id(), m.GetBlockSizeTokens())
		}
	}
	other := random(2, 64)
	large.publish(stored{hashes: hashes(1, 4), tokens: other.tokens}.event())
	large.expect("blocks of another size", other, 0)
	large.expect("what was known before", q, 192)
	if n := p.counted(large.agent.Admin(), "kvscout_agent_mirror_stores_refused_total", ""); n == 0 {
		t.Error("the refusal was not counted")
	}
	if m := p.member(large.id()); stage.Exact(m) {
		t.Error("a cache state that lacks blocks is called exact")
	}
}

func TestPeers03EvictionIsOneMembersOwn(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	one := p.engine(fakevllm.Config{Blocks: 64}).watched("one")
	two := p.engine(fakevllm.Config{Blocks: 64}).watched("two")
	q := random(1, 10*size)
	one.complete(q)
	two.complete(q)
	one.truth(soon, q)
	two.truth(soon, q)
	one.complete(several(2, 25)...) // more than the pool holds
	if one.held(q) == len(q.tokens)-size {
		t.Fatal("nothing was evicted")
	}
	one.truth(soon, q)
	two.truth(soon, q)
	two.expect("the one that evicted nothing", q, 9*size)
}

func TestPeers04HolesEndThePrefix(t *testing.T) {
	t.Parallel()
	e := open(t, stage.Options{}).engine(fakevllm.Config{}).watched("pod")
	q := random(1, 5*size+1)
	e.publish(stored{hashes: hashes(1, 5), tokens: q.tokens[:5*size]}.event())
	e.expect("whole", q, 5*size)
	e.publish(removed(3))
	e.expect("without block 2", q, 2*size)
	e.publish(stored{hashes: hashes(3, 1), parent: 2, tokens: q.tokens[2*size : 3*size]}.event())
	e.expect("whole again", q, 5*size)
}

func TestPeers05LostBatchesAreReplayed(t *testing.T) {
	for name, cfg := range map[string]fakevllm.Config{
		"with topics":         {},
		"as before 0.26":      {ThreeFrameReplay: true, Era: fakevllm.Arrays},
		"a replay that drops": {ReplayHWM: 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t, stage.Options{})
			cfg.Blocks = 64
			e := p.engine(cfg)
			events, _ := e.behind(t, "pod")
			known := several(1, 10)
			e.complete(known...)
			e.truth(soon, known...)
			events.drop(8)
			lost := several(2, 12) // with evictions
			e.complete(lost...)
			p.until("messages were lost", func() bool { return events.lost.Load() == 8 })
			e.truth(patience, append(known, lost...)...)
			if n := p.counted(e.agent.Admin(), "kvscout_agent_event_batches_replayed_total", ""); n < 8 {
				t.Errorf("%v batches replayed", n)
			}
		})
	}
}

func TestPeers05WithoutReplayTheRestIsNotExact(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{Blocks: 64, NoReplay: true})
	events, _ := e.behind(t, "pod")
	known := several(1, 10)
	e.complete(known...)
	e.wait(soon, "follow", known, func(got, want int, _ *api.CacheState) bool { return got == want })
	events.drop(3)
	lost := several(2, 12)
	e.complete(lost...)
	e.lower(soon, append(known, lost...)...)
	e.until("what came after the gap is known", func() bool {
		got, _ := e.promised(lost[11])
		return got == e.held(lost[11])
	})
	p.until("3 batches are counted as lost", func() bool {
		return p.counted(e.agent.Admin(), "kvscout_agent_event_batches_lost_total", "") == 3
	})
}

func TestPeers06UnknownParentIsWaitedFor(t *testing.T) {
	t.Parallel()
	e := open(t, stage.Options{}).engine(fakevllm.Config{}).watched("pod")
	q := random(1, 4*size+1)
	tail := prompt{tokens: q.tokens[2*size:]}
	e.publish(stored{hashes: hashes(3, 2), parent: 2, tokens: q.tokens[2*size : 4*size]}.event())
	e.expect("a tail without its head", q, 0)
	e.expect("the tail as if it were a head", tail, 0)
	e.publish(stored{hashes: hashes(1, 2), tokens: q.tokens[:2*size]}.event())
	e.expect("the head has come", q, 4*size)
	e.expect("the tail as if it were a head", tail, 0)
}

func TestPeers07LiveEventsFlowAfterASilentReplay(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{})
	events, replay := e.behind(t, "pod")
	known := several(1, 5)
	e.complete(known...)
	e.truth(soon, known...)
	replay.drop(math.MaxInt) // requests arrive, answers do not
	events.drop(1)
	e.complete(several(2, 1)...)
	p.until("a message was lost", func() bool { return events.lost.Load() == 1 })
	live := several(3, 5)
	e.complete(live...)
	start := time.Now()
	e.until("the live prompts are known", func() bool {
		for _, q := range live {
			if got, _ := e.promised(q); got != e.held(q) {
				return false
			}
		}
		return true
	})
	t.Log("known after", time.Since(start))
	e.lower(soon, append(known, live...)...)
}

func TestPeers08UnknownTierCountsNothing(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	q := random(1, 4*size+1)
	e.publish(stored{hashes: hashes(1, 4), tokens: q.tokens[:4*size], medium: "QUANTUM"}.event())
	e.expect("an unknown medium", q, 0)
	if n := p.counted(e.agent.Admin(), "kvscout_agent_events_skipped_total", `"unknown_medium"`); n != 1 {
		t.Errorf("counted %v times", n)
	}
}

func TestPeers09TheLongestOfManyHoldersWins(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	conn := p.bus()
	q := random(1, 32*size+1)
	var list []*speaker
	for i := range 14 { // more than ten
		list = append(list, p.speaker(conn, fmt.Sprintf("m%02d", i), prompt{tokens: q.tokens[:(i+1)*2*size]}))
	}
	ranking := p.score(q.request())
	if first := ranking.GetCandidates()[0].GetMember().GetId(); first != list[13].id {
		t.Errorf("first is %s: %s", first, ranking.GetExplanation())
	}
	want := make(map[string]int)
	for i, s := range list {
		want[s.id] = (i + 1) * 2 * size
	}
	if d := cmp.Diff(want, p.gpu(q)); d != "" {
		t.Error(d)
	}
	// Among equals load decides.
	short := prompt{tokens: q.tokens[:2*size+1]}
	for _, s := range list {
		if s != list[5] {
			s.loaded(&pb.Load{Running: proto.Uint32(40), Waiting: proto.Uint32(10)})
		}
	}
	p.until("the idle one is first", func() bool {
		return p.score(short.request()).GetCandidates()[0].GetMember().GetId() == list[5].id
	})
}

func TestPeers10MemoryIsBounded(t *testing.T) {
	p := open(t, stage.Options{})
	conn := p.bus()
	for i := range 4 {
		p.speaker(conn, fmt.Sprintf("m%d", i))
	}
	const prompts = 1_500
	keys := make([]uint64, 512)
	pick := func(i int) {
		for j := range keys {
			keys[j] = uint64(i*len(keys)+j+1) * 0x9e3779b97f4a7c15
		}
		p.pick(&api.Request{
			SessionId: fmt.Sprint("session ", i),
			Prompt:    api.Keys(keys, size),
		})
	}
	for i := range prompts {
		pick(i)
	}
	before := heap()
	for i := range prompts {
		pick(prompts + i)
	}
	grown := heap() - before
	// Each prompt's keys alone are 4 KiB.
	if per := grown / int64(prompts); per > 2<<10 {
		t.Errorf("each of %d further prompts left %d bytes", prompts, per)
	} else {
		t.Logf("each of %d further prompts left %d bytes", prompts, per)
	}
}

func TestPeers11MissesSpread(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	conn := p.bus()
	for i := range 4 {
		p.speaker(conn, fmt.Sprintf("m%d", i), several(uint64(10+i), 20)...)
	}
	p.speaker(conn, "new")
	counts := make(map[string]int)
	for i := range 100 {
		q := random(uint64(1000+i), 4000)
		counts[p.pick(q.request()).GetRanking().GetCandidates()[0].GetMember().GetId()]++
	}
	low, high := 100, 0
	for _, n := range counts {
		low, high = min(low, n), max(high, n)
	}
	if len(counts) != 5 || float64(high) > 1.3*float64(low) {
		t.Errorf("100 cold prompts went to %v", counts)
	}
}

func TestPeers12EqualPromptsAtOnceHaveFewOwners(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	conn := p.bus()
	for i := range 8 {
		// No sample comes between that would replace reservations.
		p.speaker(conn, fmt.Sprintf("m%d", i)).loaded(nil)
	}
	q := random(1, 8000)
	var mu sync.Mutex
	owners := make(map[string]int)
	var group sync.WaitGroup
	for range 64 {
		group.Go(func() {
			answer, err := p.Client.Pick(t.Context(), &api.PickRequest{Request: q.request()})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			owners[answer.GetRanking().GetCandidates()[0].GetMember().GetId()]++
		})
	}
	group.Wait()
	if len(owners) > 6 {
		t.Errorf("64 equal prompts have %d owners: %v", len(owners), owners)
	}
	fleet, err := p.Operator.ListMembers(t.Context(), &api.ListMembersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	reserved := uint32(0)
	for _, m := range fleet.GetMembers() {
		reserved += m.GetReservedRequests()
		if int(m.GetReservedRequests()) != owners[m.GetMember().GetId()] {
			t.Errorf("%s was picked %d times and has %d reservations", m.GetMember().GetId(), owners[m.GetMember().GetId()], m.GetReservedRequests())
		}
	}
	if reserved != 64 {
		t.Errorf("%d reservations for 64 picks", reserved)
	}
	t.Log(owners)
}

// chat is a conversation that is long enough to fill blocks.
func chat(system, user string) []map[string]string {
	return []map[string]string{{"role": "system", "content": system}, {"role": "user", "content": user}}
}

const (
	pirate = "You are a pirate of the seven seas, and whatever you say is salted with the words of your trade."
	judge  = "You are a judge of the highest court, and whatever you say is weighed, sober and to the point."
)

func (p *play) chatRequest(messages []map[string]string) *api.Request {
	p.t.Helper()
	text, err := json.Marshal(messages)
	if err != nil {
		p.t.Fatal(err)
	}
	return &api.Request{Model: model, Prompt: api.Body(fmt.Sprintf(`{"messages":%s}`, text))}
}

// chat serves a conversation and compares what the scheduler promised before
// with the engine's own counts.
func (e *engine) chat(messages []map[string]string) (cached int) {
	e.t.Helper()
	ranking := e.score(e.chatRequest(messages))
	body := map[string]any{"model": model, "messages": messages}
	text, err := json.Marshal(body)
	if err != nil {
		e.t.Fatal(err)
	}
	whole := e.score(&api.Request{Prompt: api.Body(string(text))})
	body["max_tokens"] = 1
	tokens, cached := e.serve("/v1/chat/completions", 0, body)
	for form, r := range map[string]*api.Ranking{"messages": ranking, "body": whole} {
		got := int(r.GetCandidates()[0].GetCachedTokens().GetGpu())
		if r.Lacks() != "" || int(r.GetPromptTokens()) != tokens || got != cached {
			e.t.Errorf("%s: promised %d of %d tokens (%q), the engine counts %d of %d",
				form, got, r.GetPromptTokens(), r.Lacks(), cached, tokens)
		}
	}
	// The answer overtakes the events.
	want := tokens / size
	e.until("the events have come", func() bool {
		c := e.score(e.chatRequest(messages)).GetCandidates()[0].GetCachedTokens()
		return int(c.GetGpu()) >= min(want, (tokens-1)/size)*size
	})
	return cached
}

func TestPeers13And14ChatHasTheEnginesKeys(t *testing.T) {
	for name, cfg := range map[string]fakevllm.Config{
		"render":        {ScaleOut: true},
		"tokenize only": {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := open(t, stage.Options{}).engine(cfg).watched("pod")
			if n := e.chat(chat(pirate, "Where is the treasure?")); n != 0 {
				t.Errorf("%d tokens cached in an empty engine", n)
			}
			if n := e.chat(chat(pirate, "Who goes there?")); n < len(pirate)-size {
				t.Errorf("only %d tokens of the same system prompt", n)
			}
			if n := e.chat(chat(judge, "Where is the treasure?")); n >= 2*size {
				t.Errorf("%d tokens cached under another system prompt", n)
			}
			if n := e.chat(chat(pirate, "Where is the treasure?")); n < len(pirate) {
				t.Errorf("only %d tokens of the same chat", n)
			}
		})
	}
}

func TestPeers15TheFailedIsNotTriedAgain(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	conn := p.bus()
	q := random(1, 40*size)
	owner := p.speaker(conn, "owner", q)
	p.speaker(conn, "other")
	if first := p.score(q.request()).GetCandidates()[0].GetMember().GetId(); first != owner.id {
		t.Fatalf("first is %s", first)
	}
	for name, ref := range map[string]*api.MemberRef{
		"member":  {Ref: &api.MemberRef_MemberId{MemberId: owner.id}},
		"pod":     {Ref: &api.MemberRef_Pod{Pod: "owner"}},
		"address": {Ref: &api.MemberRef_Address{Address: "owner:8000"}},
	} {
		r := q.request()
		r.Exclude = []*api.MemberRef{ref}
		for _, c := range p.pick(r).GetRanking().GetCandidates() {
			if c.GetMember().GetId() == owner.id {
				t.Errorf("excluded by %s and yet in the answer", name)
			}
		}
	}
	r := q.request(owner.id)
	r.Exclude = r.GetCandidates()
	if _, err := p.Client.Pick(t.Context(), &api.PickRequest{Request: r}); status.Code(err) != codes.Unavailable {
		t.Errorf("nobody is left: %v", err)
	}
}

func TestPeers17OnePredictionForARequest(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	conn := p.bus()
	q := random(1, 3000)
	for i := range 4 {
		p.speaker(conn, fmt.Sprintf("m%d", i), prompt{tokens: q.tokens[:i*20*size]})
	}
	costs := func() map[string]*api.Cost {
		list := make(map[string]*api.Cost)
		for _, c := range p.score(q.request()).GetCandidates() {
			list[c.GetMember().GetId()] = c.GetCost()
		}
		return list
	}
	want := costs()
	for range 20 {
		if d := cmp.Diff(want, costs(), protocmp.Transform()); d != "" {
			t.Fatal(d)
		}
	}
}

func TestPeers18NonsensicalLoadHurtsNobody(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	conn := p.bus()
	q := random(1, 1000)
	var list []*speaker
	for i := range 3 {
		list = append(list, p.speaker(conn, fmt.Sprintf("m%d", i)))
	}
	for name, v := range map[string]float64{"NaN": math.NaN(), "infinite": math.Inf(1), "negative": -1, "zero": 0, "huge": math.MaxFloat64} {
		for _, s := range list {
			v := proto.Float64(v)
			s.loaded(&pb.Load{
				Running: proto.Uint32(math.MaxUint32), Waiting: proto.Uint32(math.MaxUint32), KvUsage: v,
				PromptTokens: v, CachedTokens: v, GenerationTokens: v, PrefillSeconds: v, PrefillComputedTokens: v,
				PrefillRequests: v, InterTokenSeconds: v, InterTokenCount: v, QueueSeconds: v, QueueRequests: v,
			})
		}
		time.Sleep(250 * time.Millisecond) // two heartbeats
		for _, policy := range []string{"default", "least-requests", "least-tokens", "longest-prefix", "random", "round-robin"} {
			r := q.request()
			r.Policy = policy
			candidates := p.pick(r).GetRanking().GetCandidates()
			if len(candidates) != 3 {
				t.Errorf("%s, %s: %d candidates", name, policy, len(candidates))
			}
			for _, c := range candidates {
				if ms := c.GetCost().GetTotalMs(); math.IsNaN(ms) || math.IsInf(ms, 0) || ms < 0 {
					t.Errorf("%s, %s: costs %v", name, policy, c.GetCost())
				}
			}
		}
	}
	// All is well again with the next good sample.
	for _, s := range list {
		s.loaded(idle())
	}
	p.untilMember(list[0].id, "be idle again", func(m *api.MemberState) bool { return m.RunningRequests != nil && m.GetRunningRequests() == 0 })
}

// A reset of an idle engine shows in no event, only in its count of requests.
func TestPeers21ResetEmptiesTheIndex(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{})
	f := newFront(t, e, "/metrics")
	resets := func(n int) func([]byte) []byte {
		return func(page []byte) []byte {
			return fmt.Appendf(page, "http_requests_total{handler=\"/reset_prefix_cache\",method=\"POST\",status=\"2xx\"} %d\n", n)
		}
	}
	f.say(resets(3))
	e.watchedBy(stage.AgentOptions{Pod: "pod", Engine: f.URL})
	e.empties("/reset_prefix_cache", func() { f.say(resets(4)) })
}

func TestPeers21SleepEmptiesTheIndex(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	e.empties("/sleep", func() {
		r := &api.ScoreRequest{Request: random(1, 100).request()}
		p.until("nobody is chosen", func() bool {
			_, err := p.Client.Score(t.Context(), r)
			return status.Code(err) == codes.Unavailable
		})
		e.act("/wake_up", nil)
		p.until("somebody is chosen again", func() bool {
			_, err := p.Client.Score(t.Context(), r)
			return err == nil
		})
	})
}

// empties checks that an idle engine's blocks are forgotten soon after a call,
// and that the cache state goes on from there.
func (e *engine) empties(path string, then func()) {
	e.t.Helper()
	list := several(1, 5)
	e.complete(list...)
	e.truth(soon, list...)
	e.untilMember(e.id(), "be idle", func(m *api.MemberState) bool { return m.RunningRequests != nil && m.GetRunningRequests() == 0 })
	polls := func() float64 { return e.counted(e.agent.Admin(), "kvscout_agent_engine_polls_total", "") }
	seen := polls()
	e.until("the metrics are read that say so", func() bool { return polls() >= seen+3 })
	watch := newStopwatch()
	e.act(path, nil)
	then()
	e.untilMember(e.id(), "hold nothing", func(m *api.MemberState) bool { return m != nil && m.GetHeldGpuBlocks() == 0 })
	if watch.over(2 * time.Second) {
		e.t.Errorf("empty after %v", watch.ours())
	}
	e.truth(soon, list...)
	e.complete(list[1])
	e.truth(soon, list...)
}

func TestPeers22And23MissingLoadIsUnknown(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	conn := p.bus()
	busy := p.speaker(conn, "busy")
	busy.loaded(&pb.Load{Running: proto.Uint32(30), Waiting: proto.Uint32(5)})
	mute := p.speaker(conn, "mute")
	mute.loaded(nil)
	p.untilMember(busy.id, "be busy", func(m *api.MemberState) bool { return m.GetRunningRequests() == 30 })
	// The sample that it gave first is not believed for ever.
	p.untilMember(mute.id, "have no recent sample", func(m *api.MemberState) bool { return m.RunningRequests == nil || m.GetLoadAgeMs() > 3000 })
	costs := make(map[string]float64)
	for _, c := range p.score(random(1, 1000).request()).GetCandidates() {
		costs[c.GetMember().GetId()] = c.GetCost().GetTotalMs()
	}
	if costs[mute.id] < costs[busy.id] {
		t.Errorf("the one without a sample looks idle: %v", costs)
	}
}

func TestPeers25OneRequestNeverOutweighsACachedPrefix(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	conn := p.bus()
	q := random(1, 4096+size)
	owner := p.speaker(conn, "owner", q)
	owner.loaded(&pb.Load{Running: proto.Uint32(1), Waiting: proto.Uint32(0)})
	p.speaker(conn, "empty")
	p.untilMember(owner.id, "run one request", func(m *api.MemberState) bool { return m.GetRunningRequests() == 1 })
	if ranking := p.score(q.request()); ranking.GetCandidates()[0].GetMember().GetId() != owner.id {
		t.Errorf("%v", ranking)
	}
}

func TestPeers26OwnersKeepTheirRequestsAtSaturation(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	conn := p.bus()
	var prompts []prompt
	var owners []*speaker
	for i := range 4 {
		q := random(uint64(i), 4000)
		prompts = append(prompts, q)
		owners = append(owners, p.speaker(conn, fmt.Sprintf("m%d", i), q))
	}
	for _, s := range owners {
		s.loaded(&pb.Load{Running: proto.Uint32(200), Waiting: proto.Uint32(100), KvUsage: proto.Float64(1)})
	}
	for _, s := range owners {
		p.untilMember(s.id, "have a queue", func(m *api.MemberState) bool { return m.GetWaitingRequests() == 100 })
	}
	hits := 0
	for round := range 25 {
		for i, q := range prompts {
			q = q.branch(3900, uint64(1000*round+i), 100)
			if p.pick(q.request()).GetRanking().GetCandidates()[0].GetMember().GetId() == owners[i].id {
				hits++
			}
		}
	}
	if hits < 95 {
		t.Errorf("only %d of 100 requests stayed with their owner", hits)
	}
}

func TestSmallHashesAndAllWidthsAreRead(t *testing.T) {
	t.Parallel()
	e := open(t, stage.Options{}).engine(fakevllm.Config{}).watched("pod")
	q := random(1, 6*size+1)
	list := []any{1, 200, 70_000, int64(-5), uint64(1) << 63, []byte("0123456789abcdef0123456789abcdef")}
	for i, h := range list {
		event := stored{tokens: q.tokens[i*size : (i+1)*size]}.event()
		event["block_hashes"] = []any{h}
		if i > 0 {
			event["parent_block_hash"] = list[i-1]
		}
		e.publish(event)
	}
	e.expect("hashes of all forms", q, 6*size)
}

func TestRemovedMemberLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	q := random(1, 10*size)
	stays := p.engine(fakevllm.Config{}).watched("stays")
	leaves := p.engine(fakevllm.Config{}).watched("leaves")
	for _, e := range []*engine{stays, leaves} {
		e.complete(q)
		e.truth(soon, q)
	}
	leaves.agent.Stop()
	p.untilMember(leaves.id(), "leave", func(m *api.MemberState) bool { return m == nil })
	want := map[string]int{stays.id(): 9 * size}
	if d := cmp.Diff(want, p.gpu(q)); d != "" {
		t.Error(d)
	}
	// Whoever gets its number next has nothing of its blocks.
	fresh := p.engine(fakevllm.Config{}).watched("fresh")
	want[fresh.id()] = 0
	if d := cmp.Diff(want, p.gpu(q)); d != "" {
		t.Error(d)
	}
}
