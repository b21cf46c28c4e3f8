package watch

import (
	"cmp"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/rank"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/pb"
)

// audited watches an engine of a few pages, with a rank that holds three blocks.
func audited(t *testing.T, engine http.HandlerFunc) (*Watch, *rank.Rank) {
	t.Helper()
	s := httptest.NewServer(engine)
	t.Cleanup(s.Close)
	r, err := opener(t)(rank.Config{Identity: rank.Identity{Model: "m", Reported: 2}, Info: &pb.MemberInfo{}, Poll: func() {}, Audited: true})
	if err != nil {
		t.Fatal(err)
	}
	r.State(vllm.Exact, "")
	r.Apply(vllm.Mark{}, chain(3))
	r.Drain(nil)
	return New(Config{Engine: engineAt(t, s.URL), Log: quiet}), r
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
			page, asked := c.before, 0
			w, r := audited(t, func(w http.ResponseWriter, r *http.Request) {
				answer := page
				switch r.URL.Path {
				case "/v1/models":
					answer = `{"data":[{"id":"m"}]}`
				case "/v1/completions":
					asked++
					answer, page = c.answer, cmp.Or(c.after, page)
					if answer == "" {
						w.WriteHeader(http.StatusNotFound)
					}
				}
				_, _ = io.WriteString(w, answer)
			})
			w.auditRank(t.Context(), r, false)
			ended := w.Audits()
			for outcome, n := range map[string]uint64{
				"held": ended.Held, "missing": ended.Missing, "skipped": ended.Skipped, "error": ended.Failed,
			} {
				if (n == 1) != (outcome == c.outcome) {
					t.Errorf("%s: %d", outcome, n)
				}
			}
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
	w, r := audited(t, http.NotFound)
	r.State(vllm.Syncing, "")
	w.auditRank(t.Context(), r, false)
	r.State(vllm.Exact, "")
	r.Apply(vllm.Mark{Sequence: 1}, vllm.Batch{Events: []vllm.Event{{Kind: vllm.Cleared}}})
	r.Drain(nil)
	w.auditRank(t.Context(), r, false)
	if n := w.Audits().Skipped; n != 2 {
		t.Errorf("%d skipped", n)
	}
}
