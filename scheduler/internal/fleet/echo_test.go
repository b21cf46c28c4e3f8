package fleet

import (
	"testing"
	"time"
)

func TestOthersAreExpectedToDecideAlike(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	f.SetCacheState(ids[0], CacheState{Trust: Exact, Epoch: 7})
	name := f.View().Member(ids[0]).Info.Name
	f.SetOthers(2)
	decide(t, f, ids[0], "", t0)
	expect := func(now time.Time, tokens uint64, open int) {
		t.Helper()
		r := reserved(f, ids[0]).Expected(now, &Reserved{})
		if r.Tokens != tokens || r.Open != open || r.Prefills != open || r.Unsampled != open || r.PrefillMS != float64(tokens)/10 {
			t.Errorf("%+v, want %d tokens of %d", r, tokens, open)
		}
	}
	expect(t0, 3000, 3)
	// What they really did takes the place of what was expected.
	if !f.Adopt(1<<50, name, 7, "", Choice{Uncached: 1000, PrefillMS: 100, FirstTokenMS: 100}, t0, t0) {
		t.Fatal("not adopted")
	}
	expect(t0, 3000, 3)
	if !f.Adopt(1<<50+1, name, 7, "", Choice{Uncached: 1000, PrefillMS: 100, FirstTokenMS: 100}, t0, t0) {
		t.Fatal("not adopted")
	}
	expect(t0, 3000, 3)
	expect(after(flight), 3000, 3)
}

func TestExpectationsEndWithTheFlight(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	f.unreported = 0 // somebody reports
	f.SetOthers(1)
	decide(t, f, ids[0], "", t0)
	if r := reserved(f, ids[0]).Expected(after(flight), &Reserved{}); r.Tokens != 1000 || r.Open != 1 {
		t.Errorf("%+v", r)
	}
	f.SetOthers(0)
	decide(t, f, ids[0], "", after(time.Second))
	if r := reserved(f, ids[0]).Expected(after(time.Second), &Reserved{}); r.Tokens != 2000 || r.Open != 2 {
		t.Errorf("alone: %+v", r)
	}
}

func TestAdoptedDecisionsEndLikeOwnOnes(t *testing.T) {
	f, ids := fleetOf(t, Config{Seed: [32]byte{1}}, 2)
	for _, id := range ids {
		f.SetCacheState(id, CacheState{Trust: Exact, Epoch: 7})
	}
	name := f.View().Member(ids[0]).Info.Name
	c := Choice{Uncached: 1000, PrefillMS: 100, FirstTokenMS: 100}
	const foreign = Decision(2)<<40 | 1
	if f.Adopt(foreign, name, 8, "", c, t0, t0) || f.Adopt(foreign, "ns_nobody_0", 7, "", c, t0, t0) {
		t.Error("adopted for another process or for nobody")
	}
	if !f.Adopt(foreign, name, 7, "", c, t0, t0) || f.Adopt(foreign, name, 7, "", c, t0, t0) {
		t.Error("must be adopted once")
	}
	if own := decide(t, f, ids[1], "", t0); own == foreign {
		t.Error("two decisions with one number")
	}
	if _, ok := f.Report(Report{Decision: foreign, Outcome: Finished}, t0); !ok {
		t.Error("not known")
	}
	f.Adopt(foreign+1, name, 7, "", c, t0, t0)
	f.Sweep(after(2 * time.Minute))
	if r := reserved(f, ids[0]); r.Open != 0 || r.Tokens != 0 {
		t.Errorf("left: %+v", r)
	}
	if st := f.Stats(); st.Adopted != 2 || st.Decided != 1 {
		t.Errorf("%+v", st)
	}
}
