package estimate

import (
	"math"
	"testing"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

var t0 = time.Unix(1_700_000_000, 0)

// bed is a fleet of which estimates are made.
type bed struct {
	*testing.T
	*Estimates
	fleet *fleet.Fleet
	index *index.Index
}

func newBed(t *testing.T) *bed {
	return &bed{T: t, Estimates: New(), fleet: fleet.New(fleet.Config{}), index: index.New(index.Config{})}
}

func (b *bed) join(name string, blocks uint64) fleet.ID {
	b.Helper()
	id, err := b.fleet.Join(name, t0)
	if err != nil {
		b.Fatal(err)
	}
	b.fleet.Receive(id, fleet.Info{Models: []string{"model"}, BlockSize: 16, Blocks: blocks}, nil, t0)
	return id
}

// repriced are the members whose prefills take another time from here on.
func (b *bed) tick(now time.Time) (repriced map[fleet.ID]float64) {
	repriced = make(map[fleet.ID]float64)
	b.Tick(b.fleet.View(), b.index, now, func(id fleet.ID, by float64) { repriced[id] = by })
	return repriced
}

func TestCachesCountSpareAndReuse(t *testing.T) {
	b := newBed(t)
	roomy, full, blank := b.join("roomy", 100), b.join("full", 40), b.join("blank", 0)
	keys := make([]blockkey.Key, 40)
	for i := range keys {
		keys[i] = blockkey.Key(i + 1)
	}
	for _, id := range []fleet.ID{roomy, full, blank} {
		b.index.Store(index.Member(id), index.LaneGPU, nil, 0, keys)
	}
	b.Caches.Decided(900, 300)
	b.tick(t0)
	rows := b.fleet.View().Rows
	want := map[fleet.ID]int{roomy: 60 * 16, full: 0, blank: 0}
	for i := range rows {
		if got := b.Caches.Held().Spare(&rows[i]); got != want[rows[i].ID] {
			t.Errorf("%s has %d tokens to spare", rows[i].Member.Info.Name, got)
		}
	}
	if got := b.Caches.Reuse(); got != 3 {
		t.Errorf("%v tokens cached for each computed", got)
	}
	b.Caches.Decided(0, 300)
	b.tick(t0.Add(5 * time.Minute))
	if got, want := b.Caches.Reuse(), 900/(300+300*math.E); math.Abs(got-want) > 1e-9 {
		t.Errorf("%v tokens cached for each computed after some time, want %v", got, want)
	}
	b.tick(t0.Add(5*time.Minute - time.Second)) // a clock that goes back fades nothing
	if got := b.Caches.Reuse(); got > 3 || !(got > 0) {
		t.Errorf("reuse %v", got)
	}
}

// What engines count becomes their speed, what is reserved follows it, and a
// number that another member got does not bring the old one's.
func TestSpeedsAreLearnedFromLoadSamples(t *testing.T) {
	b := newBed(t)
	slow, fast := b.join("slow", 0), b.join("fast", 0)
	totals := func(id fleet.ID, second int, msPerToken float64) {
		n := float64(second) * 3
		at := t0.Add(time.Duration(second) * time.Second)
		tt := fleet.NoTotals()
		tokens := n*1000 + float64(second*second%50)*200
		tt.PrefillRequests, tt.PrefillComputedTokens, tt.PrefillSeconds = n, tokens, tokens*msPerToken/1000
		b.fleet.Receive(id, *b.fleet.View().Member(id).Info, &fleet.Load{At: at, Running: 0, Waiting: 0, KVUsage: math.NaN(), Totals: tt}, at)
	}
	changed := 0
	for s := range 100 {
		totals(slow, s, 0.3)
		totals(fast, s, 0.1)
		changed += len(b.tick(t0.Add(time.Duration(s) * time.Second)))
	}
	view := b.fleet.View()
	for id, want := range map[fleet.ID]float64{slow: 1200, fast: 400} {
		if got := b.Speeds.Of(view.Member(id)).Prefill(4000, 0); math.Abs(got-want) > want/10 {
			t.Errorf("member %d takes %v ms for 4,000 tokens, want %v", id, got, want)
		}
	}
	if changed < 2 {
		t.Error("what is reserved does not follow the speeds")
	}
	b.fleet.Leave(slow)
	b.tick(t0.Add(100 * time.Second))
	if got := b.Speeds.Of(&fleet.Member{ID: slow, Info: &fleet.Info{Name: "another"}}); got.B != learn.Prior().B {
		t.Errorf("a new member has the speed of the one before: %+v", got)
	}
}
