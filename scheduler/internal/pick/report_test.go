package pick

import (
	"math"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

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
