package pick

import (
	"math"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

func TestStockCountsSpareAndReuse(t *testing.T) {
	b := newBed(t)
	roomy := b.joinAs(fleet.Info{Name: "roomy", Models: []string{"model"}, BlockSize: 16, Blocks: 100})
	full := b.joinAs(fleet.Info{Name: "full", Models: []string{"model"}, BlockSize: 16, Blocks: 40})
	blank := b.joinAs(fleet.Info{Name: "blank", Models: []string{"model"}, BlockSize: 16})
	le := prompt(1, 0, 640)
	for _, id := range []fleet.ID{roomy, full, blank} {
		b.gpu(id, le, 40)
	}
	b.estimates.Caches.Decided(900, 300)
	b.Tick(t0)
	view := b.fleet.View()
	want := map[string]int{"roomy": 60 * 16, "full": 0, "blank": 0}
	for i := range view.Seats {
		seat := &view.Seats[i]
		if got := b.estimates.Caches.Held().Spare(seat); got != want[seat.Member.Info.Name] {
			t.Errorf("%s has room for %d tokens", seat.Member.Info.Name, got)
		}
	}
	reuse := b.estimates.Caches.Reuse
	if got := reuse(); got != 3 {
		t.Errorf("%v tokens cached for each computed", got)
	}
	b.estimates.Caches.Decided(0, 300)
	b.Tick(t0.Add(5 * time.Minute))
	if got, want := reuse(), 900/(300+300*math.E); math.Abs(got-want) > 1e-9 {
		t.Errorf("%v tokens cached for each computed after some time, want %v", got, want)
	}
	b.Tick(t0.Add(5*time.Minute - time.Second)) // a clock that goes back fades nothing
	if got := reuse(); got > 3 || !(got > 0) {
		t.Errorf("reuse %v", got)
	}
}
