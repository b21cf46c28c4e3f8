package realvllm_test

import (
	"context"
	"slices"
	"time"

	"github.com/kvscout/kvscout/e2e/realvllm"
)

// bursts sends eight requests at once, again and again, and holds what was
// expected to be cached when they start against what the engine then found.
// Requests that are sent at one moment may overtake each other on their way, so
// that another one than was expected is the first: all of a burst are judged
// together. Between bursts lone requests are judged.
func (r *run) bursts() {
	equal := func() [][]uint32 { return slices.Repeat([][]uint32{r.tokens(1000)}, 8) }
	sharing := func() (list [][]uint32) {
		head := r.tokens(700)
		for range 8 {
			list = append(list, append(slices.Clone(head), r.tokens(150)...))
		}
		return list
	}
	mixed := func() (list [][]uint32) {
		for range 8 {
			list = append(list, r.prompt())
		}
		return list
	}
	var all, wrong int
	for _, shape := range []struct {
		name  string
		make  func() [][]uint32
		apart time.Duration
	}{
		{"equal prompts", equal, 0},
		{"the same beginning", sharing, 0},
		{"equal prompts, 10 ms apart", equal, 10 * time.Millisecond},
		{"the same beginning, 10 ms apart", sharing, 10 * time.Millisecond},
		{"prompts of all kinds", mixed, 0},
	} {
		var prompt, held, each, off, requests, near int
		for range short(3) {
			r.settle()
			list, err := r.stage.Burst(r.t.Context(), realvllm.Model, shape.make(), func(ctx context.Context, tokens []uint32) (int, error) {
				usage, err := r.engine.Complete(ctx, realvllm.Request{Tokens: tokens, MaxTokens: 8})
				return usage.CachedTokens, err
			}, func(int) { time.Sleep(shape.apart) })
			if err != nil {
				r.t.Fatal(err)
			}
			total := 0
			for _, s := range list {
				prompt += s.Prompt
				held += max(s.Held-s.Cached, s.Cached-s.Held)
				each += s.Off()
				total += s.Expected - s.Cached
				requests++
				if s.Off() <= r.engine.BlockSize() {
					near++
				}
			}
			off += max(total, -total)
		}
		all, wrong = all+prompt, wrong+off
		percent := func(n int) float64 { return 100 * float64(n) / float64(prompt) }
		r.t.Logf("8 at once, %-32s of %d prompt tokens not as held %.1f %%, not as expected %.1f %% (bursts %.1f %%); within a block %d of %d",
			shape.name, prompt, percent(held), percent(each), percent(off), near, requests)
		r.requests(5, realvllm.Request{})
	}
	if 100*wrong > 3*all {
		r.t.Errorf("in bursts %d of %d prompt tokens were not as expected", wrong, all)
	}
}
