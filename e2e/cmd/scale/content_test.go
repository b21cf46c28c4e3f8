package main

import (
	"testing"

	"github.com/kvscout/kvscout/agent/synthetic"
	"github.com/kvscout/kvscout/protocol/blockkey"
)

// TestContentIsWhatItsBatchesMake plays two members' batches one by one and
// compares with what each holds in all.
func TestContentIsWhatItsBatchesMake(t *testing.T) {
	f, err := newContent(12, 8000, 8, .4)
	if err != nil {
		t.Fatal(err)
	}
	for _, member := range []int{0, 11} {
		c := cache{f, member}
		held := make(map[blockkey.Key]bool)
		take := func(runs []synthetic.Run) (stored int) {
			stores := false
			for _, r := range runs {
				if len(r.Keys) == 0 || len(r.Before) != min(int(r.Position), blockkey.Lead) {
					t.Fatalf("run at %d: %d keys behind %d", r.Position, len(r.Keys), len(r.Before))
				}
				if r.Remove && stores {
					t.Fatal("a remove behind a store")
				}
				stores = stores || !r.Remove
				if n := len(r.Before); n > 0 && !held[r.Before[n-1]] {
					t.Fatal("a parent is not held")
				}
				for _, k := range r.Keys {
					if held[k] != r.Remove {
						t.Fatalf("key at %d: held %v, remove %v", r.Position, held[k], r.Remove)
					}
					if r.Remove {
						delete(held, k)
					} else {
						held[k] = true
						stored++
					}
				}
			}
			return stored
		}
		first := f.first(member)
		take(c.All(first, nil))
		stored := 0
		for n := first + 1; n <= first+3000; n++ {
			stored += take(c.Batch(n, nil))
			if size := len(held); size < 7400 || size > 8600 {
				t.Fatalf("batch %d: %d blocks", n, size)
			}
			if n%500 > 0 {
				continue
			}
			all := 0
			for _, r := range c.All(n, nil) {
				all += len(r.Keys)
				for _, k := range r.Keys {
					if !held[k] {
						t.Fatalf("batch %d: a key of All is not held", n)
					}
				}
			}
			if all != len(held) {
				t.Fatalf("batch %d: %d keys, %d held", n, all, len(held))
			}
			for q := range int(n)/every + 2 {
				keys := f.prompt(member, q, 0, 0)
				depth := 0
				for depth < len(keys) && held[blockkey.Key(keys[depth])] {
					depth++
				}
				if want := f.held(member, member, q, n); depth != want {
					t.Fatalf("batch %d, request %d: %d blocks held, %d said", n, q, depth, want)
				}
			}
		}
		if perBatch := float64(stored) / 3000; perBatch < 3.8 || perBatch > 4.2 {
			t.Errorf("%.1f blocks a batch", perBatch)
		}
	}
}

func TestSharedChainsHaveTheirHolders(t *testing.T) {
	for _, members := range []int{8, 20, 100} {
		f, err := newContent(members, 8000, 8, .4)
		if err != nil {
			t.Fatal(err)
		}
		holders := make([]int, f.chains)
		for m := range members {
			for j := range f.own {
				if !f.shares(m, f.trunkOf(m, j)) {
					t.Fatalf("member %d does not share its own chain", m)
				}
			}
			for c := range holders {
				if f.shares(m, c) {
					holders[c]++
				}
			}
		}
		for c, n := range holders {
			if n < 8 || n > 9 {
				t.Errorf("%d members: chain %d has %d holders", members, c, n)
			}
		}
	}
}
