package pick

import (
	"math"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

// What engines count becomes the speed that decisions use, and a number that
// another member got does not bring the old one's speed.
func TestTickLearnsFromLoadSamples(t *testing.T) {
	b := newBed(t)
	slow, fast := b.join("slow"), b.join("fast")
	totals := func(id fleet.ID, second int, msPerToken float64) {
		n := float64(second) * 3
		at := t0.Add(time.Duration(second) * time.Second)
		tt := fleet.NoTotals()
		tokens := n*1000 + float64(second*second%50)*200
		tt.PrefillRequests, tt.PrefillComputedTokens, tt.PrefillSeconds = n, tokens, tokens*msPerToken/1000
		b.fleet.Heard(id, *b.fleet.View().Member(id).Info, &fleet.Load{At: at, Running: 0, Waiting: 0, KVUsage: math.NaN(), Totals: tt}, at)
	}
	var now time.Time
	for s := range 100 {
		totals(slow, s, 0.3)
		totals(fast, s, 0.1)
		now = t0.Add(time.Duration(s) * time.Second)
		b.Tick(now)
	}
	d := b.pickAt(Request{Prompt: tokens(prompt(1, 0, 4000))}, now)
	byName := make(map[string]float64)
	for _, c := range d.Candidates {
		byName[c.Member.Info.Name] = c.Cost.Prefill
	}
	if first(d) != "fast" || math.Abs(byName["slow"]-1200) > 120 || math.Abs(byName["fast"]-400) > 40 {
		t.Errorf("first %s, prefill %v; want 1,200 and 400 ms", first(d), byName)
	}
	b.fleet.Leave(slow)
	b.Tick(now)
	if got := b.estimates.Speeds.Of(&fleet.Member{ID: slow, Info: &fleet.Info{Name: "another"}}); got.B != learn.Prior().B {
		t.Errorf("a new member has the speed of the one before: %+v", got)
	}
}

// What callers measure reaches the member that they measured it on, and no
// other.
func TestReportedTimesTeachTheMemberThatServed(t *testing.T) {
	b := newBed(t)
	id, other := b.join("served"), b.join("other")
	b.load(id, 0, 0, t0)
	b.load(other, 0, 0, t0)
	b.Tick(t0)
	for i := range 40 {
		now := t0.Add(time.Duration(i) * time.Millisecond)
		d := b.pickAt(Request{Prompt: tokens(prompt(uint32(i), 0, 800)), Reserve: true, Candidates: []Ref{{Member: "served"}}}, now)
		r := Report{Decision: d.ID, Outcome: fleet.Finished, TTFTMS: d.Candidates[0].Cost.FirstToken() + 25}
		switch {
		case i >= 20:
			r.Member, r.TTFTMS = "other", 9000 // served elsewhere: the prediction was not for it
		case i%2 == 1:
			r.TTFTMS = math.NaN()
		}
		b.Report(r, now)
	}
	b.Tick(t0.Add(time.Second))
	view := b.fleet.View()
	if o := b.Speed(view.Member(id)).OverheadMS; math.Abs(o-25) > 1e-6 {
		t.Errorf("overhead %v, want 25", o)
	}
	if o := b.Speed(view.Member(other)).OverheadMS; o != 0 {
		t.Errorf("the other's overhead is %v", o)
	}
}
