package e2e

import (
	"math/rand/v2"
	"testing"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// hybrids are engines whose hits several groups must accept, or that drop the
// last block of each.
var hybrids = []struct {
	name   string
	engine fakevllm.Config
	agent  stage.AgentOptions // what the wire does not tell
}{
	{name: "sliding and full", engine: fakevllm.Config{Groups: []fakevllm.Group{{Kind: fakevllm.Sliding, Span: 64}, {Kind: fakevllm.Full}}}},
	{name: "sliding and full, dense", engine: fakevllm.Config{Dense: true, Groups: []fakevllm.Group{{Kind: fakevllm.Sliding, Span: 64}, {Kind: fakevllm.Full}}}},
	{name: "five sliding and one full", engine: fakevllm.Config{Groups: []fakevllm.Group{
		{Kind: fakevllm.Sliding, Span: 50}, {Kind: fakevllm.Sliding, Span: 50}, {Kind: fakevllm.Sliding, Span: 50},
		{Kind: fakevllm.Sliding, Span: 50}, {Kind: fakevllm.Sliding, Span: 50}, {Kind: fakevllm.Full},
	}}},
	{name: "states and full", engine: fakevllm.Config{Groups: []fakevllm.Group{{Kind: fakevllm.StateSpace}, {Kind: fakevllm.Full}}}},
	{name: "states and full, dense", engine: fakevllm.Config{Dense: true, Groups: []fakevllm.Group{{Kind: fakevllm.StateSpace}, {Kind: fakevllm.StateSpace}, {Kind: fakevllm.Full}}}},
	{
		name:   "chunks and full",
		engine: fakevllm.Config{Groups: []fakevllm.Group{{Kind: fakevllm.Chunked, Span: 64}, {Kind: fakevllm.Full}}},
		agent:  stage.AgentOptions{AttentionChunk: 64},
	},
	{name: "full, EAGLE", engine: fakevllm.Config{Drops: true}, agent: stage.AgentOptions{Speculative: "eagle"}},
	{
		name:   "sliding and full, EAGLE",
		engine: fakevllm.Config{Drops: true, Groups: []fakevllm.Group{{Kind: fakevllm.Sliding, Span: 64}, {Kind: fakevllm.Full}}},
		agent:  stage.AgentOptions{Speculative: "eagle3"},
	},
}

// TestHybridEnginesArePromisedWhatTheyFind judges request by request, with a
// pool so small that blocks of all groups are evicted all the time.
func TestHybridEnginesArePromisedWhatTheyFind(t *testing.T) {
	for i, h := range hybrids {
		t.Run(h.name, func(t *testing.T) {
			t.Parallel()
			p := open(t, stage.Options{})
			cfg := h.engine
			cfg.BlockSize, cfg.MaxModelLen, cfg.MaxBatchedTokens = size, 600, 128
			cfg.Blocks = 60*max(len(cfg.Groups), 1) + 1
			h.agent.Pod = "hybrid"
			e := p.engine(cfg).watchedBy(h.agent)
			seed := uint64(i + 1)
			r := rand.New(rand.NewPCG(seed, 2))
			roots := []prompt{random(seed*100, 500), random(seed*100+1, 250), random(seed*100+2, 64)}
			e.complete(roots[0]) // its groups are known by their events
			found, below, evicted := 0, 0, e.State(0).Counters.Evicted
			for n := range 60 {
				q := roots[r.IntN(len(roots))]
				q = q.branch(1+r.IntN(len(q.tokens)-1), seed<<32+uint64(n), r.IntN(3)*r.IntN(40))
				if r.IntN(3) == 0 && len(q.tokens) >= size { // to a block's end
					q.tokens = q.tokens[:len(q.tokens)/size*size]
				}
				want := e.held(q)
				e.wait(patience, "be the truth, or a lower bound that says so", []prompt{q}, func(got, want int, p *api.CacheState) bool {
					return got == want && p.GetTrust() == api.Trust_TRUST_EXACT || got <= want && p.GetTrust() == api.Trust_TRUST_APPROXIMATE
				})
				if got, _ := e.promised(q); got != want {
					below++ // behind a store that may have been the report of a hit
				}
				_, cached := e.serve("/v1/completions", 0, map[string]any{"model": model, "prompt": q.tokens, "max_tokens": []int{1, 4, 40}[r.IntN(3)]})
				if cached != want {
					t.Fatalf("request %d of %d tokens: the engine found %d, a look before it %d", n, len(q.tokens), cached, want)
				}
				if cached > 0 {
					found++
				}
			}
			if below > 12 {
				t.Errorf("seed %d: %d of 60 answers were below", seed, below)
			}
			if evicted = e.State(0).Counters.Evicted - evicted; found < 8 || evicted < 100 {
				t.Errorf("seed %d: %d of 60 requests found something, %d blocks were evicted: this shows nothing", seed, found, evicted)
			}
		})
	}
}
