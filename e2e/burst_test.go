package e2e

import (
	"context"
	"net/url"
	"slices"
	"testing"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
)

// What is expected to be cached when a request starts is what the engine then
// finds, also where nothing of it was held when the request was asked for.
func TestBurstsAreExpected(t *testing.T) {
	sliding := []fakevllm.Group{{Kind: fakevllm.Sliding, Span: 64}, {Kind: fakevllm.Full}}
	for name, c := range map[string]struct {
		cfg  fakevllm.Config
		tail int // tokens that they do not share
	}{
		"equal":                        {},
		"equal, longer than a step":    {cfg: fakevllm.Config{MaxBatchedTokens: 256}},
		"equal, one at a time":         {cfg: fakevllm.Config{MaxSequences: 1}},
		"the same beginning":           {tail: 150},
		"equal, the last block drops":  {cfg: fakevllm.Config{Drops: true}},
		"equal, sliding and full":      {cfg: fakevllm.Config{Groups: sliding}},
		"equal, sliding, drops":        {cfg: fakevllm.Config{Groups: sliding, Drops: true}},
		"equal, states and full":       {cfg: fakevllm.Config{Groups: []fakevllm.Group{{Kind: fakevllm.StateSpace}, {Kind: fakevllm.Full}}}},
		"the same beginning, one step": {cfg: fakevllm.Config{MaxBatchedTokens: 1 << 16}, tail: 37},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t, stage.Options{})
			c.cfg.NoRequestCounts = true // a pause that keeps the cache looks like one that does not
			e := p.engine(c.cfg)
			opt := stage.AgentOptions{Pod: "pod"}
			if c.cfg.Drops {
				opt.Speculative = "eagle"
			}
			e.watchedBy(opt)
			e.truth(soon) // nothing is held, and that is EXACT
			// Few enough that how long events take is not learned: patience stays
			// long, however slow the machine is.
			doubted := 0
			for round, length := range []int{96, 1000} {
				head := random(uint64(round), length)
				var list [][]uint32
				for i := range 8 {
					list = append(list, head.branch(length-c.tail*length/1000, uint64(100*round+i), c.tail*length/1000).tokens)
				}
				// All are sent before the first is admitted, and arrive in this order.
				e.act("/pause", url.Values{"mode": {"keep"}, "clear_cache": {"false"}})
				before := e.State(0).Counters.Finished
				answers, err := p.Burst(t.Context(), model, list, func(_ context.Context, tokens []uint32) (int, error) {
					_, cached := e.serve("/v1/completions", 0, map[string]any{"model": model, "prompt": tokens, "max_tokens": 1})
					return cached, nil
				}, func(n int) {
					p.until("the engine has it", func() bool { return e.State(0).Waiting == n })
					if n == len(list) {
						e.act("/resume", nil)
					}
				})
				if err != nil {
					t.Fatal(err)
				}
				for i, s := range answers {
					if s.Expected != s.Cached || s.Held > s.Cached {
						t.Errorf("%d tokens, request %d: %+v", length, i, s)
					}
					if !s.Exact {
						doubted++
						t.Logf("%d tokens, request %d: %s", length, i, s.Why)
					}
				}
				if got := e.State(0).Counters.Finished - before; got != 8 || !slices.ContainsFunc(answers, func(s stage.Served) bool { return s.Held < s.Cached }) {
					t.Errorf("%d were served, and nothing had to be expected: %+v", got, answers)
				}
			}
			if doubted > 1 { // an agent that was held up may doubt for a moment
				t.Errorf("%d of 16 answers were not EXACT", doubted)
			}
		})
	}
}
