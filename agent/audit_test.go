package agent

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/blockkey"
)

func TestHeadsAreFewAndPlain(t *testing.T) {
	var h heads
	note := func(first uint64, blocks int, change func(*vllm.Store)) {
		s := vllm.Store{Kind: vllm.Full, BlockSize: 2}
		for k := range uint64(blocks) {
			s.Hashes = append(s.Hashes, first+k)
			s.Tokens = append(s.Tokens, uint32(first), uint32(k))
		}
		change(&s)
		h.note(&s)
	}
	same := func(*vllm.Store) {}
	for name, change := range map[string]func(*vllm.Store){
		"child":     func(s *vllm.Store) { s.HasParent = true },
		"adapter":   func(s *vllm.Store) { s.Adapter = "sql" },
		"salt":      func(s *vllm.Store) { s.Salt = "s" },
		"image":     func(s *vllm.Store) { s.Refs = [][]blockkey.Ref{nil, {{ID: "cat"}}} },
		"withheld":  func(s *vllm.Store) { s.Withhold = true },
		"old era":   func(s *vllm.Store) { s.HidesExtras = true },
		"host":      func(s *vllm.Store) { s.Tier = vllm.Host },
		"sliding":   func(s *vllm.Store) { s.Kind = vllm.Sliding },
		"misshaped": func(s *vllm.Store) { s.Tokens = s.Tokens[1:] },
		"no size":   func(s *vllm.Store) { s.BlockSize, s.Tokens = 0, nil },
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

// audited is an agent whose engine stub answers completions, with a rank that
// holds three blocks. The agent never runs.
func audited(t *testing.T) (*Agent, *engineStub, *rank) {
	t.Helper()
	e := newEngineStub(t)
	a, err := New(Config{NATSURL: "nats://x:1", Engine: e.URL, Pod: "x"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.engine.Close)
	r := testRank(t, identity{model: "m", reported: 2})
	r.heads = new(heads)
	r.State(vllm.Exact, "")
	r.Apply(vllm.Mark{}, chain(3))
	r.Drain(nil)
	return a, e, r
}

func usageOf(details string) string {
	return fmt.Sprintf(`{"usage":{"prompt_tokens":7,"prompt_tokens_details":%s}}`, details)
}

func countersPage(running, prompt, cached int) string {
	return fmt.Sprintf("vllm:num_requests_running{engine=\"0\"} %d\nvllm:prompt_tokens_total{engine=\"0\"} %d\nvllm:prompt_tokens_cached_total{engine=\"0\"} %d\n", running, prompt, cached)
}

func TestAudit(t *testing.T) {
	for _, c := range []struct {
		name, answer  string
		before, after string // metrics
		outcome       string
		held          uint64
	}{
		{"found", usageOf(`{"cached_tokens":4}`), countersPage(0, 0, 0), "", "held", 3},
		{"missing", usageOf(`{"cached_tokens":0}`), countersPage(0, 0, 0), "", "missing", 0},
		{"found by the counters", usageOf(`null`), countersPage(0, 100, 50), countersPage(0, 107, 54), "held", 3},
		{"missing by the counters", usageOf(`null`), countersPage(0, 100, 50), countersPage(0, 107, 50), "missing", 0},
		{"somebody else was counted", usageOf(`null`), countersPage(0, 100, 50), countersPage(0, 300, 50), "error", 3},
		{"no counters", usageOf(`null`), "vllm:num_requests_running{engine=\"0\"} 0\n", "", "error", 3},
		{"busy", usageOf(`{"cached_tokens":0}`), countersPage(1, 0, 0), "", "skipped", 3},
		{"asleep", usageOf(`{"cached_tokens":0}`), countersPage(0, 0, 0) + "vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 0\n", "", "skipped", 3},
		{"load unknown", usageOf(`{"cached_tokens":0}`), "vllm:prompt_tokens_total{engine=\"0\"} 1\n", "", "skipped", 3},
		{"no completions", "", countersPage(0, 0, 0), "", "error", 3},
		{"rubbish", "<html>", countersPage(0, 0, 0), "", "error", 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, e, r := audited(t)
			e.set("/metrics", c.before)
			asked := 0
			e.mu.Lock()
			e.asked = func(path string, pages map[string]string) {
				if path == "/v1/completions" {
					if asked++; c.after != "" {
						pages["/metrics"] = c.after
					}
				}
			}
			e.mu.Unlock()
			if c.answer != "" {
				e.set("/v1/completions", c.answer)
			}
			a.auditRank(t.Context(), r, false)
			for outcome, n := range map[string]uint64{
				"held": a.audits.held.Load(), "missing": a.audits.missing.Load(), "skipped": a.audits.skipped.Load(), "error": a.audits.failed.Load(),
			} {
				if (n == 1) != (outcome == c.outcome) {
					t.Errorf("%s: %d", outcome, n)
				}
			}
			e.mu.Lock()
			defer e.mu.Unlock()
			if (asked == 0) != (c.outcome == "skipped") {
				t.Errorf("asked %d times", asked)
			}
			_, st := r.Drain(nil)
			if st.Lanes[mirror.LaneGPU].Count != c.held || strings.Contains(st.Reason, "audit") != (c.held == 0) {
				t.Errorf("%+v", st)
			}
		})
	}
}

func TestAuditAsksNothingWhenSuspectedOrWithoutBlocks(t *testing.T) {
	a, _, r := audited(t)
	r.State(vllm.Syncing, "")
	a.auditRank(t.Context(), r, false)
	r.State(vllm.Exact, "")
	r.Apply(vllm.Mark{Sequence: 1}, vllm.Batch{Events: []vllm.Event{{Kind: vllm.Cleared}}})
	r.Drain(nil)
	a.auditRank(t.Context(), r, false)
	r.NewIncarnation("test")
	if len(*r.heads) != 0 {
		t.Error("tokens outlive their life")
	}
	if n := a.audits.skipped.Load(); n != 2 {
		t.Errorf("%d skipped", n)
	}
}

// TestAnnouncedLossIsNoDriftOfTheMirror: the audit's own request makes the
// engine announce a reset, and what it stored then is held.
func TestAnnouncedLossIsNoDriftOfTheMirror(t *testing.T) {
	_, _, r := audited(t)
	_, at := r.question()
	b := chain(3)
	b.Events = append([]vllm.Event{{Kind: vllm.Cleared}}, b.Events...)
	r.Apply(vllm.Mark{Sequence: 1}, b)
	r.disprove(at)
	if _, st := r.Drain(nil); st.Lanes[0].Count != 3 || st.Reason != "" {
		t.Errorf("%+v", st)
	}
}
