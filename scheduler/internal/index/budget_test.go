package index

import (
	"math/rand/v2"
	"testing"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// TestBudgetIsKeptUnderAnyLoad fills an index far over its bound in ways that
// stress each kind of memory. It never takes more, never says more than is
// held, and keeps shared prefixes rather than the ends of chains.
func TestBudgetIsKeptUnderAnyLoad(t *testing.T) {
	const bound = 4 << 20
	root := contents(1, 64)
	loads := map[string]func(r *rand.Rand, i int) (Member, []blockkey.Key){
		"long chains": func(r *rand.Rand, i int) (Member, []blockkey.Key) {
			return Member(i % 8), append(root[:64:64], contents(uint64(1000+i), 600)...)
		},
		"a fork at every block": func(r *rand.Rand, i int) (Member, []blockkey.Key) {
			return Member(i % 8), append(root[:1+i%64:1+i%64], contents(uint64(1000+i), 1)...)
		},
		"a set of its own for each block": func(r *rand.Rand, i int) (Member, []blockkey.Key) {
			c := contents(uint64(1000+r.IntN(8000)), 64)
			return Member(r.IntN(1000)), append(root[:8:8], c[:1+r.IntN(64)]...)
		},
		"many members": func(r *rand.Rand, i int) (Member, []blockkey.Key) {
			return Member(i % 4096), append(root[:64:64], contents(uint64(1000+i%20_000), 5)...)
		},
	}
	for name, load := range loads {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			x := New(Config{MaxBytes: bound})
			model := newNaive()
			var recent [][]blockkey.Key
			// On for half as long again once it sheds.
			for i, end := 0, 60_000; i < end; i++ {
				m, keys := load(r, i)
				x.Store(m, LaneGPU, nil, 0, keys)
				model.Store(m, LaneGPU, nil, 0, keys)
				if recent = append(recent, keys); len(recent) > 10 {
					recent = recent[1:]
				}
				if i%512 != 0 {
					continue
				}
				s := x.Stats()
				if s.Bytes > bound {
					t.Fatalf("after %d stores: %d bytes of %d", i, s.Bytes, bound)
				}
				if s.Shed > 0 && end == 60_000 {
					end = i * 3 / 2
				}
				if err := below(x, model, recent); err != nil {
					t.Fatal(err)
				}
				m, keys = load(r, r.IntN(i+1))
				x.Remove(m, LaneGPU, blockkey.Before(keys, len(keys)/2), 0, keys[len(keys)/2:])
				model.Remove(m, LaneGPU, nil, 0, keys[len(keys)/2:])
			}
			s := x.Stats()
			if s.Shed == 0 {
				t.Fatalf("never came to the bound: %+v", s)
			}
			if s.Bytes < bound/2 {
				t.Errorf("keeps %d bytes of %d", s.Bytes, bound)
			}
			if got := ask(x, root); len(got) < 8 {
				t.Errorf("the shared prefix was shed: %d members", len(got))
			}
			if err := x.verify(); err != nil {
				t.Error(err)
			}
			for m := range Member(4096) {
				x.Forget(m)
			}
			if err := x.empty(); err != nil {
				t.Error(err)
			}
		})
	}
}
