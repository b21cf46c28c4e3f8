package fleet

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// pair reserves 1,000 tokens on one member and a slot to another.
func pair(t *testing.T, f *Fleet, prefill, decode ID) Decision {
	t.Helper()
	view := f.View()
	d, ok := f.Decide("", t0, func(ID, bool, []Reserved) (Choice, bool) {
		return Choice{Member: view.Member(prefill), Decode: view.Member(decode), Uncached: 1000, PrefillMS: 100, FirstTokenMS: 100}, true
	})
	if !ok {
		t.Fatal("nothing was reserved")
	}
	return d
}

func open(f *Fleet, ids ...ID) (n []int) {
	for _, id := range ids {
		n = append(n, reserved(f, id).Open)
	}
	return n
}

func TestPairReservesOnBothUntilEachIsDone(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 2)
	d := pair(t, f, ids[0], ids[1])
	if got := open(f, ids...); !cmp.Equal(got, []int{1, 1}) || reserved(f, ids[1]).Tokens != 0 {
		t.Fatalf("open %v, tokens on the decoding member %d", got, reserved(f, ids[1]).Tokens)
	}
	if p, q := reserved(f, ids[0]).Prompt, reserved(f, ids[1]).Prompt; p != 1000 || q != 1000 {
		t.Fatalf("prompts of %d and %d tokens", p, q)
	}
	f.Report(Report{Decision: d, Outcome: FirstToken, Member: "m1"}, t0)
	if p, q := reserved(f, ids[0]).Prompt, reserved(f, ids[1]).Prompt; p != 0 || q != 1000 {
		t.Fatalf("after the first token prompts of %d and %d tokens", p, q)
	}
	if got := open(f, ids...); !cmp.Equal(got, []int{0, 1}) {
		t.Fatalf("after the first token: %v", got)
	}
	f.Report(Report{Decision: d, Outcome: Finished}, t0)
	if got := open(f, ids...); !cmp.Equal(got, []int{0, 0}) || f.Stats().Decisions != 0 {
		t.Fatalf("after the end: %v, %d decisions", got, f.Stats().Decisions)
	}
}

func TestPairEndsWithEitherMember(t *testing.T) {
	for gone := range 2 {
		f, ids := fleetOf(t, Config{}, 2)
		d := pair(t, f, ids[0], ids[1])
		f.Leave(ids[gone])
		f.Report(Report{Decision: d, Outcome: Finished}, t0)
		if r := reserved(f, ids[1-gone]); r.Open != 0 {
			t.Errorf("member %d left: %+v stays on the other", gone, r)
		}
		if n := f.Stats().Decisions; n != 0 {
			t.Errorf("member %d left: %d decisions", gone, n)
		}
	}
}

func TestShareStaysUntilTheEnd(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	m := f.View().Member(ids[0])
	f.Decide("", t0, func(ID, bool, []Reserved) (Choice, bool) {
		return Choice{Member: m, Uncached: 10, PrefillMS: 10, FirstTokenMS: 10, Share: 0.25, EndMS: 5000}, true
	})
	for _, c := range []struct {
		at    time.Duration
		share float64
		wait  bool
	}{{0, 0.25, true}, {4 * time.Second, 0.25, false}, {5 * time.Second, 0, false}} {
		f.Sweep(after(c.at))
		r := reserved(f, ids[0])
		if r.Share != c.share || (r.Prefills > 0) != c.wait {
			t.Errorf("after %v: %+v", c.at, r)
		}
	}
}

func TestReportSaysWhatWasAsked(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	m, asked := f.View().Member(ids[0]), Asked{Model: "m", Tenant: "t", PromptTokens: 7}
	d, _ := f.Decide("", t0, func(ID, bool, []Reserved) (Choice, bool) { return Choice{Member: m, Asked: asked}, true })
	if got, ok := f.Report(Report{Decision: d, Outcome: Finished}, t0); !ok || got != asked {
		t.Errorf("%+v, %v", got, ok)
	}
}
