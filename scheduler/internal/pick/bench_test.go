package pick

import (
	"fmt"
	"math"
	"testing"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/books"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// BenchmarkPick: a prompt of 8,192 tokens that comes as block keys, so many
// members, half to all of it held by each of the first eight; a reservation
// and its report with each decision. "match" is the index alone, "tokens" adds
// the hashing, "booked" the account of what became of each token.
func BenchmarkPick(b *testing.B) {
	for _, n := range []int{64, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			bed := newBed(b)
			le := prompt(1, 0, 8192)
			for i := range n {
				id := bed.join(fmt.Sprintf("m%03d", i))
				if i < 8 {
					bed.gpu(id, le, 32*(i+1))
				}
				bed.load(id, i%5, 0, t0)
			}
			keys, _ := blockkey.AppendBytes(nil, blockkey.Scope{Model: "model", BlockSize: 16}.Root(), le, 16, nil)
			asked := Prompt{Keys: keys, BlockSize: 16, Length: 8192}
			b.Run("match", func(b *testing.B) {
				var held index.Answer
				for b.Loop() {
					bed.index.Match(keys, &held)
				}
			})
			bed.bench(b, "tokens", Request{Prompt: tokens(le)})
			bed.bench(b, "cold", Request{Prompt: tokens(prompt(2, 0, 8192))})
			bed.bench(b, "none", Request{})
			bed.books = books.New()
			bed.bench(b, "booked", Request{Prompt: tokens(le)})
			bed.books = nil
			for _, name := range policy.Names() {
				bed.bench(b, name, Request{Policy: name, Session: "s", Prompt: asked})
			}
		})
	}
}

func (b *bed) bench(on *testing.B, name string, r Request) {
	r.Model, r.Reserve, r.Top = "model", true, 1
	on.Run(name, func(on *testing.B) {
		on.ReportAllocs()
		length, found := uint64(len(r.Prompt.Tokens)/4), uint64(0)
		for on.Loop() {
			d, err := b.Pick(&r, t0)
			if err != nil {
				on.Fatal(err)
			}
			b.Report(Report{Decision: d.ID, Outcome: fleet.Finished, PromptTokens: &length, CachedTokens: &found}, t0)
		}
	})
}

// A decision allocates as much for a thousand candidates as for ten, by any
// policy.
func TestNothingIsAllocatedForACandidate(t *testing.T) {
	few, many := fleetOf(t, 10, false), fleetOf(t, 1000, false)
	for _, name := range policy.Names() {
		count := func(b *bed) float64 {
			r := Request{Model: "model", Policy: name, Prompt: tokens(prompt(1, 0, 1000)), Top: 1}
			// The least of several: a decision that finds no memory of an earlier
			// one takes its own, and the race detector makes that frequent.
			least := math.Inf(1)
			for range 20 {
				least = min(least, testing.AllocsPerRun(1, func() {
					if _, err := b.Pick(&r, t0); err != nil {
						t.Fatal(err)
					}
				}))
			}
			return least
		}
		if a, b := count(few), count(many); b > a {
			t.Errorf("%s: %v allocations for 10 candidates, %v for 1,000", name, a, b)
		}
	}
}
