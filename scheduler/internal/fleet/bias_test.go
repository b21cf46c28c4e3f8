package fleet

import (
	"math/rand/v2"
	"strings"
	"testing"
)

// told reports one request after another on a member of epoch 1, each with
// promised tokens and what was found.
func told(t *testing.T, f *Fleet, id ID, promised, found uint64) {
	t.Helper()
	member := f.View().Member(id)
	decision, ok := f.Decide("", t0, func(ID, bool, []Reserved) (Choice, bool) {
		return Choice{Member: member, Cached: promised, Promised: promised}, true
	})
	if !ok {
		t.Fatal("no decision")
	}
	f.Report(Report{Decision: decision, Outcome: Finished, Counts: true, PromptTokens: 2000, Cached: found}, t0)
}

func TestReportsThatDisagreeInTheSameWayTakeTheTrust(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	id := ids[0]
	f.SetCacheState(id, CacheState{Trust: Exact, Epoch: 1})
	believe := func() (Belief, int) {
		m := f.View().Member(id)
		return f.View().Believe(m, t0), m.Bias().Tokens
	}
	for i := range 29 {
		told(t, f, id, uint64(100+i), uint64(84+i))
	}
	if b, less := believe(); b.Trust != Exact || less != 0 {
		t.Fatalf("after 29: %+v, %d less", b, less)
	}
	told(t, f, id, 1000, 500) // an eviction besides
	b, less := believe()
	if b.Trust != Approximate || b.Credit != Credited || less != 16 || !strings.Contains(b.Reason, "30 of the last 30 requests") || f.Stats().Biased != 1 {
		t.Fatalf("after 30: %+v, %d less, %d began", b, less, f.Stats().Biased)
	}
	// Promises that are kept end it, before all of the others are forgotten.
	kept := 0
	for ; less > 0 && kept < 100; kept++ {
		told(t, f, id, 100, 100)
		b, less = believe()
	}
	if b.Trust != Exact || kept > 10 {
		t.Errorf("after %d kept promises: %+v", kept, b)
	}
	// Nothing of it is held against the engine's next process.
	for range biasWindow {
		told(t, f, id, 100, 50)
	}
	if _, less = believe(); less != 50 {
		t.Fatalf("%d less", less)
	}
	f.SetCacheState(id, CacheState{Trust: Exact, Epoch: 2})
	if b, less = believe(); b.Trust != Exact || less != 0 {
		t.Errorf("next epoch: %+v, %d less", b, less)
	}
}

// What promises lose by chance, and what is wrong both ways, is no bias.
func TestNoiseIsNoBias(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for name, found := range map[string]func(uint64) uint64{
		"exact":              func(p uint64) uint64 { return p },
		"half are evicted":   func(p uint64) uint64 { return p * rng.Uint64N(2) },
		"either way":         func(p uint64) uint64 { return p - 32 + 32*rng.Uint64N(3) },
		"more than promised": func(p uint64) uint64 { return p + 16 },
	} {
		t.Run(name, func(t *testing.T) {
			f, ids := fleetOf(t, Config{}, 1)
			f.SetCacheState(ids[0], CacheState{Trust: Exact, Epoch: 1})
			for range 20_000 {
				promised := 64 + rng.Uint64N(1000)
				told(t, f, ids[0], promised, found(promised))
			}
			if n := f.Stats().Biased; n != 0 {
				t.Errorf("called biased %d times: %+v", n, *f.View().Member(ids[0]).Bias())
			}
		})
	}
}
