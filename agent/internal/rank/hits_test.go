package rank

import (
	"log/slog"
	"slices"
	"testing"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/pb"
)

// What the engine tells counts before what the operator says, and that before
// what can be seen. What stays unknown promises least and says so.
func TestHitRuleIsTheMostCertainOne(t *testing.T) {
	told := func(method string) vllm.Config { return vllm.Config{Told: true, Speculative: method} }
	for name, c := range map[string]struct {
		told       vllm.Config
		cfg        HitSettings
		speculates bool
		drop       mirror.Drop
		guess      bool
	}{
		"nothing speculates":                {drop: mirror.DropNone},
		"it speculates, by which method?":   {speculates: true, drop: mirror.DropAttention, guess: true},
		"the operator knows":                {cfg: HitSettings{Speculative: "ngram"}, speculates: true, drop: mirror.DropNone},
		"the operator says none":            {cfg: HitSettings{Speculative: "none"}, speculates: true, drop: mirror.DropNone},
		"the engine tells":                  {told: told("eagle3"), speculates: true, drop: mirror.DropAttention},
		"the engine knows better":           {told: told("eagle"), cfg: HitSettings{Speculative: "ngram"}, drop: mirror.DropAttention},
		"the engine tells that it has none": {told: told(""), cfg: HitSettings{Speculative: "eagle"}, drop: mirror.DropNone},
		"multi-token prediction":            {told: told("mtp"), drop: mirror.DropLast},
		"by its old name":                   {told: told("qwen3_next_mtp"), drop: mirror.DropLast},
		"drafts of another model":           {told: told("draft_model"), drop: mirror.DropNone},
		"a method of tomorrow":              {told: told("oracle"), drop: mirror.DropAttention, guess: true},
		"the drop is switched off":          {told: vllm.Config{Told: true, Speculative: "eagle", KeepsLastBlock: true}, drop: mirror.DropNone},
	} {
		got := HitRuleOf(c.told, c.cfg, c.speculates, vllm.Cache{}, 0, "0.32.0")
		if got.Drop != c.drop || (got.guess != "") != c.guess {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if got := HitRuleOf(vllm.Config{Told: true, Chunk: 128}, HitSettings{AttentionChunk: 64}, false, vllm.Cache{}, 0, ""); got.Chunk != 128 {
		t.Errorf("%+v", got)
	}
	if got := HitRuleOf(vllm.Config{}, HitSettings{AttentionChunk: 64}, false, vllm.Cache{}, 0, ""); got.Chunk != 64 {
		t.Errorf("%+v", got)
	}
}

// Each fact names who said it, whatever else was said by somebody else.
func TestFactsNameTheirSources(t *testing.T) {
	for name, c := range map[string]struct {
		told       vllm.Config
		said       HitSettings
		speculates bool
		want       []Fact
	}{
		"a plain engine":           {want: []Fact{{"dropped blocks", "0", "metrics"}}},
		"it speculates":            {speculates: true, want: []Fact{{"dropped blocks", "1", "metrics"}}},
		"options":                  {said: HitSettings{Speculative: "eagle", AttentionChunk: 64}, want: []Fact{{"dropped blocks", "1", "-speculative"}, {"attention chunk", "64", "-attention-chunk"}}},
		"one option":               {said: HitSettings{AttentionChunk: 64}, want: []Fact{{"dropped blocks", "0", "metrics"}, {"attention chunk", "64", "-attention-chunk"}}},
		"the engine":               {told: vllm.Config{Told: true, Speculative: "eagle", Chunk: 128}, said: HitSettings{AttentionChunk: 64}, want: []Fact{{"dropped blocks", "1", "/server_info"}, {"attention chunk", "128", "/server_info"}}},
		"the engine and an option": {told: vllm.Config{Told: true}, said: HitSettings{Speculative: "eagle", AttentionChunk: 64}, want: []Fact{{"dropped blocks", "0", "/server_info"}, {"attention chunk", "64", "-attention-chunk"}}},
	} {
		r := newRank(Config{Log: slog.New(slog.DiscardHandler)})
		r.follow(HitRuleOf(c.told, c.said, c.speculates, vllm.Cache{}, 0, "0.32.0"))
		r.mu.Lock()
		got := r.factsLocked()
		r.mu.Unlock()
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestGroupsAreRead(t *testing.T) {
	g, err := ParseGroups("sliding:128,full,states,chunked")
	if err != nil || g[0].Kind != mirror.Sliding || g[0].Window != 128 || g[1].Kind != mirror.Full || g[2].Kind != mirror.State || g[3].Kind != mirror.Chunked || g[4].Kind != mirror.Unspecified {
		t.Errorf("%v, %v", g, err)
	}
	if text := formatGroups(g); text != "sliding:128,full,states,chunked" {
		t.Errorf("written as %q", text)
	}
	if g, err = ParseGroups(""); err != nil || g != (mirror.Groups{}) {
		t.Errorf("nothing said: %v, %v", g, err)
	}
	for _, wrong := range []string{"sliding", "sliding:0", "sliding:x", "sliding:9999999999", "full:1", "half", ",", "full,", "full,full,full,full,full,full,full,full,full"} {
		if g, err := ParseGroups(wrong); err == nil {
			t.Errorf("%q: %v", wrong, g)
		}
	}
}

func TestVersionsAreCompared(t *testing.T) {
	for version, want := range map[string]bool{
		"0.32.0": true, "0.32.1.dev3+gabc": true, "0.100.0": true, "1.0": true, "0.31.9": false, "0.9": false, "": false, "unknown": false, "0": false,
	} {
		if newer(version, 0, 32) != want {
			t.Errorf("%q: %v", version, !want)
		}
	}
}

func hybridBatch() vllm.Batch {
	tokens := []uint32{1, 1, 2, 2, 3, 3}
	return vllm.Batch{Events: []vllm.Event{
		{Kind: vllm.Stored, Store: mirror.Store{Group: 0, Kind: mirror.Sliding, Window: 3, Hashes: []uint64{12}, Tokens: tokens, BlockSize: 2}},
		{Kind: vllm.Stored, Store: mirror.Store{Group: 1, Kind: mirror.Full, Hashes: []uint64{11, 12, 13}, Tokens: tokens, BlockSize: 2}},
	}}
}

// A hybrid engine is EXACT with a rule of its own, and a guess makes it
// APPROXIMATE.
func TestHybridEnginesAreExact(t *testing.T) {
	r := testRank(t, Identity{Model: "m", Reported: 2})
	r.State(vllm.Exact, "")
	r.Apply(vllm.Mark{}, hybridBatch())
	_, st := r.Drain(nil)
	if st.Trust != pb.Trust_TRUST_EXACT || !st.Rule.GetEnds() || st.Rule.GetDroppedBlocks() != 0 {
		t.Errorf("%v (%s), rule %v", st.Trust, st.Reason, st.Rule)
	}
	if st.Lanes[mirror.LaneGPU].Count != 3 || st.Lanes[mirror.Ends].Count != 1 {
		t.Errorf("holds %+v", st.Lanes)
	}
	r.follow(HitRule{Rule: mirror.Rule{Drop: mirror.DropAttention}, toTheEnd: true, guess: "who knows"})
	_, st = r.Drain(nil)
	if st.Trust != pb.Trust_TRUST_APPROXIMATE || st.Rule.GetDroppedBlocks() != 1 || !st.Rule.GetDroppedToTheEnd() {
		t.Errorf("%v (%s), rule %v", st.Trust, st.Reason, st.Rule)
	}
}

// One kind of group: the dropped block leaves a token of the prompt behind it.
func TestDroppedBlockOfOneKindOfGroup(t *testing.T) {
	r := testRank(t, Identity{Model: "m", Reported: 2})
	r.State(vllm.Exact, "")
	b := hybridBatch()
	b.Events = b.Events[1:]
	b.Events[0].Store.Group = 0
	r.Apply(vllm.Mark{}, b)
	r.follow(HitRule{Rule: mirror.Rule{Drop: mirror.DropAttention}, toTheEnd: true})
	if _, st := r.Drain(nil); st.Rule.GetEnds() || st.Rule.GetDroppedBlocks() != 1 || st.Rule.GetDroppedToTheEnd() || st.Trust != pb.Trust_TRUST_EXACT {
		t.Errorf("%v (%s), rule %v", st.Trust, st.Reason, st.Rule)
	}
}

// A fresh engine has announced nothing, and is known to have several kinds of
// groups by its size: what is expected of it goes by their rule already.
func TestRuleOfFreshEngines(t *testing.T) {
	r := testRank(t, Identity{Model: "m", Reported: 2})
	r.State(vllm.Exact, "")
	r.follow(HitRule{Rule: mirror.Rule{Drop: mirror.DropAttention, Several: true}, toTheEnd: true})
	if _, st := r.Drain(nil); !st.Rule.GetEnds() || st.Rule.GetDroppedBlocks() != 1 || !st.Rule.GetDroppedToTheEnd() {
		t.Errorf("before the first event: rule %v", st.Rule)
	}
	b := hybridBatch()
	b.Events = b.Events[1:]
	b.Events[0].Store.Group = 0
	r.Apply(vllm.Mark{}, b)
	if _, st := r.Drain(nil); st.Rule.GetEnds() || st.Rule.GetDroppedToTheEnd() {
		t.Errorf("with one group: rule %v", st.Rule)
	}
}

// TestUsersOfTheCacheHaveHeardAllGroups: a group that is still silent when the
// engine has found something cached takes no part; of a stream that was not
// followed from its start nothing of the kind is known.
func TestUsersOfTheCacheHaveHeardAllGroups(t *testing.T) {
	for name, c := range map[string]struct {
		hits  *float64
		whole bool
		want  pb.Trust
	}{
		"no hit yet":           {ptr(0.0), true, pb.Trust_TRUST_APPROXIMATE},
		"hits are not counted": {nil, true, pb.Trust_TRUST_APPROXIMATE},
		"a hit":                {ptr(32.0), true, pb.Trust_TRUST_EXACT},
		"a hit, a late agent":  {ptr(32.0), false, pb.Trust_TRUST_APPROXIMATE},
	} {
		r := testRank(t, Identity{Model: "m", Reported: 2})
		r.State(vllm.Exact, "")
		b := chain(3)
		b.Events[0].Store.Group = 1
		r.Apply(vllm.Mark{}, b)
		r.stream.whole = c.whole
		r.weigh(&vllm.Load{HitTokens: c.hits}, Emptied{}, r.Position(), now())
		n, st := held(t, r)
		if st.Trust != c.want || (n == 3) != (c.want == pb.Trust_TRUST_EXACT) {
			t.Errorf("%s: %d blocks, %v (%s)", name, n, st.Trust, st.Reason)
		}
	}
}
