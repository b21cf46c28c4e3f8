package agent

import (
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
		cfg        Config
		speculates bool
		drop       mirror.Drop
		guess      bool
	}{
		"nothing speculates":                {drop: mirror.DropNone},
		"it speculates, by which method?":   {speculates: true, drop: mirror.DropAttention, guess: true},
		"the operator knows":                {cfg: Config{Speculative: "ngram"}, speculates: true, drop: mirror.DropNone},
		"the operator says none":            {cfg: Config{Speculative: "none"}, speculates: true, drop: mirror.DropNone},
		"the engine tells":                  {told: told("eagle3"), speculates: true, drop: mirror.DropAttention},
		"the engine knows better":           {told: told("eagle"), cfg: Config{Speculative: "ngram"}, drop: mirror.DropAttention},
		"the engine tells that it has none": {told: told(""), cfg: Config{Speculative: "eagle"}, drop: mirror.DropNone},
		"multi-token prediction":            {told: told("mtp"), drop: mirror.DropLast},
		"by its old name":                   {told: told("qwen3_next_mtp"), drop: mirror.DropLast},
		"drafts of another model":           {told: told("draft_model"), drop: mirror.DropNone},
		"a method of tomorrow":              {told: told("oracle"), drop: mirror.DropAttention, guess: true},
		"the drop is switched off":          {told: vllm.Config{Told: true, Speculative: "eagle", KeepsLastBlock: true}, drop: mirror.DropNone},
	} {
		got := hitRuleOf(c.told, &c.cfg, c.speculates, vllm.Cache{}, "0.32.0")
		if got.Drop != c.drop || (got.guess != "") != c.guess {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if got := hitRuleOf(vllm.Config{Told: true, Chunk: 128}, &Config{AttentionChunk: 64}, false, vllm.Cache{}, ""); got.Chunk != 128 {
		t.Errorf("%+v", got)
	}
	if got := hitRuleOf(vllm.Config{}, &Config{AttentionChunk: 64}, false, vllm.Cache{}, ""); got.Chunk != 64 {
		t.Errorf("%+v", got)
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
		{Kind: vllm.Stored, Store: vllm.Store{Group: 0, Kind: vllm.Sliding, Window: 3, Hashes: []uint64{12}, Tokens: tokens, BlockSize: 2}},
		{Kind: vllm.Stored, Store: vllm.Store{Group: 1, Kind: vllm.Full, Hashes: []uint64{11, 12, 13}, Tokens: tokens, BlockSize: 2}},
	}}
}

// A hybrid engine is EXACT with a rule of its own, and a guess makes it
// APPROXIMATE.
func TestHybridEnginesAreExact(t *testing.T) {
	r := testRank(t, identity{model: "m", reported: 2})
	r.State(vllm.Exact, "")
	r.Apply(vllm.Mark{}, hybridBatch())
	_, st := r.Drain(nil)
	if st.Trust != pb.Trust_TRUST_EXACT || !st.Rule.GetEnds() || st.Rule.GetDroppedBlocks() != 0 {
		t.Errorf("%v (%s), rule %v", st.Trust, st.Reason, st.Rule)
	}
	if st.Lanes[mirror.LaneGPU].Count != 3 || st.Lanes[mirror.Ends].Count != 1 {
		t.Errorf("holds %+v", st.Lanes)
	}
	r.follow(hitRule{Rule: mirror.Rule{Drop: mirror.DropAttention}, toTheEnd: true, guess: "who knows"})
	_, st = r.Drain(nil)
	if st.Trust != pb.Trust_TRUST_APPROXIMATE || st.Rule.GetDroppedBlocks() != 1 || !st.Rule.GetDroppedToTheEnd() {
		t.Errorf("%v (%s), rule %v", st.Trust, st.Reason, st.Rule)
	}
}

// One kind of group: the dropped block leaves a token of the prompt behind it.
func TestDroppedBlockOfOneKindOfGroup(t *testing.T) {
	r := testRank(t, identity{model: "m", reported: 2})
	r.State(vllm.Exact, "")
	b := hybridBatch()
	b.Events = b.Events[1:]
	r.Apply(vllm.Mark{}, b)
	r.follow(hitRule{Rule: mirror.Rule{Drop: mirror.DropAttention}, toTheEnd: true})
	if _, st := r.Drain(nil); st.Rule.GetEnds() || st.Rule.GetDroppedBlocks() != 1 || st.Rule.GetDroppedToTheEnd() || st.Trust != pb.Trust_TRUST_EXACT {
		t.Errorf("%v (%s), rule %v", st.Trust, st.Reason, st.Rule)
	}
}
