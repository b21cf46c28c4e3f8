package rank

import (
	"slices"
	"testing"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/blockkey"
)

func TestHeadsAreFewAndPlain(t *testing.T) {
	var h heads
	note := func(first uint64, blocks int, change func(*mirror.Store)) {
		s := mirror.Store{Kind: mirror.Full, BlockSize: 2}
		for k := range uint64(blocks) {
			s.Hashes = append(s.Hashes, first+k)
			s.Tokens = append(s.Tokens, uint32(first), uint32(k))
		}
		change(&s)
		h.note(&s)
	}
	same := func(*mirror.Store) {}
	for name, change := range map[string]func(*mirror.Store){
		"child":     func(s *mirror.Store) { s.HasParent = true },
		"adapter":   func(s *mirror.Store) { s.Adapter = "sql" },
		"salt":      func(s *mirror.Store) { s.Salt = "s" },
		"image":     func(s *mirror.Store) { s.Refs = [][]blockkey.Ref{nil, {{ID: "cat"}}} },
		"withheld":  func(s *mirror.Store) { s.Withhold = true },
		"old era":   func(s *mirror.Store) { s.HidesExtras = true },
		"host":      func(s *mirror.Store) { s.Tier = mirror.Host },
		"sliding":   func(s *mirror.Store) { s.Kind = mirror.Sliding },
		"misshaped": func(s *mirror.Store) { s.Tokens = s.Tokens[1:] },
		"no size":   func(s *mirror.Store) { s.BlockSize, s.Tokens = 0, nil },
	} {
		if note(1, 3, change); len(h) != 0 {
			t.Errorf("%s was kept: %+v", name, h)
			h = nil
		}
	}
	if note(1, 1, same); len(h) != 0 {
		t.Error("a single block was kept")
	}
	for n := range uint64(20) {
		note(100*(n+1), 6, same)
	}
	note(1300, 6, same) // the eldest, once more
	if len(h) != auditHeads || len(h[0].hashes) != auditBlocks || len(h[0].tokens) != 2*auditBlocks || h[7].hashes[0] != 1300 {
		t.Errorf("%d heads: %+v", len(h), h)
	}
	none := func(uint64) bool { return false }
	if got := h.question(none); got != nil {
		t.Errorf("asks for %v", got)
	}
	got := h.question(func(hash uint64) bool { return hash/100 == 19 && hash%100 < 3 || hash == 1300 })
	if want := []uint32{1900, 0, 1900, 1, 1900, 2, 2}; !slices.Equal(got, want) {
		t.Errorf("asks for %v, want %v", got, want)
	}
}

// TestAnnouncedLossIsNoDriftOfTheMirror: the audit's own request makes the
// engine announce a reset, and what it stored then is held.
func TestAnnouncedLossIsNoDriftOfTheMirror(t *testing.T) {
	r := audited(t)
	_, at := r.Question()
	b := chain(3)
	b.Events = append([]vllm.Event{{Kind: vllm.Cleared}}, b.Events...)
	r.Apply(vllm.Mark{Sequence: 1}, b)
	r.Disprove(at)
	if _, st := r.Drain(nil); st.Lanes[0].Count != 3 || st.Reason != "" {
		t.Errorf("%+v", st)
	}
}

func TestTokensForAuditsEndWithTheirIncarnation(t *testing.T) {
	r := audited(t)
	if tokens, _ := r.Question(); len(tokens) != 7 {
		t.Errorf("asks for %v", tokens)
	}
	r.NewIncarnation("test")
	if len(*r.heads) != 0 {
		t.Error("tokens outlive their incarnation")
	}
}

// audited is a rank that keeps prompts for audits and holds three blocks.
func audited(t *testing.T) *Rank {
	t.Helper()
	r := testRank(t, Identity{Model: "m", Reported: 2})
	r.heads = new(heads)
	r.State(vllm.Exact, "")
	r.Apply(vllm.Mark{}, chain(3))
	r.Drain(nil)
	return r
}
