package index

import (
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// TestAdversaries compares the index with the map in states that are hard on
// its structure.
func TestAdversaries(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	store := func(x subject, m Member, keys []blockkey.Key) { held(x, m, keys) }
	for _, c := range []struct {
		name  string
		build func(xs ...subject) [][]blockkey.Key
	}{
		{"random holders of each chain", func(xs ...subject) (chains [][]blockkey.Key) {
			for c := range 300 {
				keys := contents(uint64(c), 64)
				for m := range Member(128) {
					if n := r.IntN(65); r.IntN(3) == 0 && n > 0 {
						for _, x := range xs {
							store(x, m, keys[:n])
						}
					}
				}
				chains = append(chains, keys)
			}
			return chains
		}},
		{"a set of its own for each block", func(xs ...subject) (chains [][]blockkey.Key) {
			for c := range 30 {
				keys := contents(uint64(c), 200)
				for m := range Member(200) {
					for _, x := range xs {
						store(x, m, keys[:1+int(m)])
						store(x, m+200, keys[:200-int(m)])
					}
				}
				chains = append(chains, keys)
			}
			return chains
		}},
		{"a fork at every block", func(xs ...subject) (chains [][]blockkey.Key) {
			trunk := contents(0, 300)
			for c := range 300 {
				keys := append(trunk[:c:c], contents(uint64(1+c), 3)...)
				for _, x := range xs {
					store(x, Member(c%20), keys)
				}
				chains = append(chains, keys)
			}
			return append(chains, trunk)
		}},
		{"a staircase of one-block runs", func(xs ...subject) [][]blockkey.Key {
			keys := contents(5, 200)
			for p := len(keys) - 1; p >= 0; p-- { // every parent is unknown
				for _, x := range xs {
					storeEvent(x, Member(p%3), keys, p, 1)
					storeEvent(x, 9, keys, p, 1)
				}
			}
			return [][]blockkey.Key{keys}
		}},
		{"keys with equal low bits", func(xs ...subject) (chains [][]blockkey.Key) {
			for c := range 500 {
				keys := make([]blockkey.Key, 20)
				for p := range keys {
					keys[p] = blockkey.Key(c*20+p+1)<<40 | 0x1234567
				}
				for _, x := range xs {
					store(x, Member(c%50), keys)
				}
				chains = append(chains, keys)
			}
			return chains
		}},
		{"a chain of 130,000 blocks", func(xs ...subject) [][]blockkey.Key {
			keys := contents(8, 130_000)
			for _, x := range xs {
				for m := range Member(4) {
					store(x, m, keys[:len(keys)-1000*int(m)])
				}
				x.Remove(0, LaneGPU, blockkey.Before(keys, 70_001), 70_001, keys[70_001:70_002])
				x.Remove(1, LaneGPU, nil, 0, keys[:1])
				x.Remove(2, LaneGPU, blockkey.Before(keys, 60_000), 60_000, keys[60_000:70_000])
				x.Store(2, LaneGPU, blockkey.Before(keys, 60_000), 60_000, keys[60_000:69_000])
			}
			return [][]blockkey.Key{keys}
		}},
		{"a thousand members come and go", func(xs ...subject) (chains [][]blockkey.Key) {
			for c := range 20 {
				chains = append(chains, contents(uint64(c), 300))
			}
			for range 4000 {
				m, keys := Member(r.IntN(1000)), chains[r.IntN(20)]
				n := 1 + r.IntN(len(keys))
				forget := r.IntN(40) == 0
				for _, x := range xs {
					if forget {
						x.Forget(m)
					} else {
						store(x, m, keys[:n])
					}
				}
			}
			return chains
		}},
		{"cycles and repeated keys", func(xs ...subject) [][]blockkey.Key {
			k := contents(3, 4)
			for _, x := range xs {
				x.Store(1, LaneGPU, nil, 0, []blockkey.Key{k[0], k[1], k[0], k[1], k[0]})
				x.Store(1, LaneGPU, k[1:2], 2, []blockkey.Key{k[0], k[0]})
				x.Store(2, LaneGPU, k[3:4], 2, []blockkey.Key{k[3], k[3], k[3]})
				x.Store(2, LaneGPU, nil, 0, nil)
				x.Remove(1, LaneGPU, nil, 0, []blockkey.Key{k[1], k[0], k[1], 0})
				x.Remove(2, LaneGPU, nil, 0, nil)
				x.Forget(2)
			}
			return nil
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, model := New(Config{}), newNaive()
			chains := c.build(x, model)
			if err := same(x, model, chains); err != nil {
				t.Error(err)
			}
			if chains != nil {
				if err := x.verify(); err != nil {
					t.Error(err)
				}
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

// TestSnapshotEqualsDeltas builds one index by changes, and another from what
// the changes led to.
func TestSnapshotEqualsDeltas(t *testing.T) {
	for seed := range uint64(8) {
		h := newHistory(rand.New(rand.NewPCG(seed, 9)), 8, 600)
		x, y, model := New(Config{}), New(Config{}), newNaive()
		for _, c := range h.changes {
			x.apply(c)
		}
		last := h.depths[len(h.depths)-1]
		for m := range Member(8) {
			y.Store(m, LaneHost, nil, 0, contents(1, 40)) // to be forgotten
			y.Forget(m)
			for c, keys := range h.chains {
				for l, d := range last[c][m] {
					y.Store(m, Lane(l), nil, 0, keys[:d])
					model.Store(m, Lane(l), nil, 0, keys[:d])
				}
			}
		}
		for _, index := range []*Index{x, y} {
			if err := same(index, model, h.chains); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
	}
}

func TestMemoryShrinksWhenALargeMemberLeaves(t *testing.T) {
	x := New(Config{})
	for c := range uint64(50) {
		held(x, 1, contents(c, 200))
	}
	before := x.Stats().Bytes
	for c := range uint64(3000) {
		held(x, 2, contents(1000+c, 200))
	}
	full := x.Stats().Bytes
	x.Forget(2)
	if after := x.Stats().Bytes; after > before+full/10 {
		t.Errorf("%d bytes, %d with the large member, %d after it left", before, full, after)
	}
}

func TestMembersComeAndGoWithoutGrowth(t *testing.T) {
	x := New(Config{})
	round := func(n uint64) {
		for m := range Member(40) {
			for c := range uint64(20) {
				held(x, m, contents(n*100+c+uint64(m)*20, 100))
			}
		}
		for m := range Member(40) {
			x.Forget(m)
		}
	}
	round(0)
	before := x.Stats().Bytes
	for n := range uint64(20) {
		round(n + 1)
	}
	if after := x.Stats().Bytes; after > before*11/10 {
		t.Errorf("%d bytes after one round, %d after twenty", before, after)
	}
}

func TestMatchAllocatesNothing(t *testing.T) {
	x := New(Config{})
	trunk := contents(1, 100)
	for m := range Member(60) {
		keys := append(trunk[:50:50], contents(uint64(2+m%3), 50)...)
		x.Store(m, LaneGPU, nil, 0, keys[:40+m])
		x.Store(m, LaneHost, nil, 0, keys)
	}
	var a Answer
	keys := append(trunk[:50:50], contents(2, 60)...)
	if n := testing.AllocsPerRun(1000, func() { x.Match(keys, &a) }); n > 0.01 && !raceEnabled {
		t.Errorf("%v allocations", n)
	}
	if n := len(depthsOf(&a)); n != 60 {
		t.Errorf("%d members", n)
	}
}

// TestForgottenMembersAreNotNamed looks at members that come and go with
// thousands of runs, so that chunks and segments come and go with them.
func TestForgottenMembersAreNotNamed(t *testing.T) {
	churn(t, 1, 8)
}

func churn(t *testing.T, seed uint64, rounds int) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	x := New(Config{})
	const members = 4
	r := rand.New(rand.NewPCG(seed, 1))
	var chains [][]blockkey.Key
	trunk := contents(seed<<32, 40)
	for c := range 1500 {
		keys := contents(seed<<32+uint64(c+1), 1+r.IntN(60))
		if c%3 > 0 {
			keys = append(trunk[:1+c%40:1+c%40], keys...)
		}
		chains = append(chains, keys)
		x.Store(members, LaneGPU, nil, 0, keys) // one that stays
	}
	// Of each member: 0 while it stores, odd while it holds all, even and
	// more while it holds nothing.
	var epochs [members]atomic.Int64
	var stop atomic.Bool
	var wg sync.WaitGroup
	for reader := range 2 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(reader+2)))
			var a Answer
			for !stop.Load() {
				keys := chains[r.IntN(len(chains))]
				var before [members]int64
				for m := range before {
					before[m] = epochs[m].Load()
				}
				x.Match(keys, &a)
				var got [members + 1]uint32
				for h, depth := range a.All() {
					got[h.Member()] = depth
				}
				if got[members] != uint32(len(keys)) {
					t.Errorf("the member that stays holds %d of %d", got[members], len(keys))
					stop.Store(true)
				}
				for m := range before {
					if before[m] == 0 || epochs[m].Load() != before[m] {
						continue
					}
					if want := uint32(len(keys)) * uint32(before[m]&1); got[m] != want {
						t.Errorf("member %d: depth %d, want %d", m, got[m], want)
						stop.Store(true)
					}
				}
			}
		})
	}
	for round := 1; round <= rounds && !stop.Load(); round++ {
		for m := range Member(members) {
			epochs[m].Store(0)
			for _, keys := range chains {
				x.Store(m, LaneGPU, nil, 0, keys)
			}
			epochs[m].Store(int64(4*round + 1))
			if o := (m + 2) % members; round > 1 || o < m {
				epochs[o].Store(0)
				x.Forget(o)
				epochs[o].Store(int64(4*round + 2))
			}
		}
	}
	stop.Store(true)
	wg.Wait()
	for m := range Member(members + 1) {
		x.Forget(m)
	}
	if err := x.empty(); err != nil {
		t.Error(err)
	}
}

// TestSoak repeats the tests with readers on new seeds for as long as
// KVSCOUT_SOAK says, a duration.
func TestSoak(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv("KVSCOUT_SOAK"))
	if err != nil {
		t.Skip("KVSCOUT_SOAK is not set to a duration")
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("first seed %d", seed)
	for end := time.Now().Add(length); time.Now().Before(end) && !t.Failed(); seed++ {
		if err := observe(seed, 1+int(seed%60), 3000); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		churn(t, seed, 5)
	}
	t.Logf("last seed %d", seed)
}
