package line

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/queue"
)

var t0 = time.Unix(1_700_000_000, 0)

// one is a picker in front of one idle member, and a line that gives it one
// request at a time.
func one(t *testing.T, r Rules) (*pick.Picker, *Line) {
	t.Helper()
	f := fleet.New(fleet.Config{})
	id, err := f.Join("m", t0)
	if err != nil {
		t.Fatal(err)
	}
	f.Heard(id, fleet.Info{Name: "m", Models: []string{"m"}, BlockSize: 16, Heartbeat: time.Hour},
		&fleet.Load{At: t0, KVUsage: math.NaN(), Totals: fleet.NoTotals()}, t0)
	p, err := pick.New(pick.Config{Fleet: f, Index: index.New(index.Config{})})
	if err != nil {
		t.Fatal(err)
	}
	r.BudgetMS = 1e-6
	return p, New(r, p)
}

func request() *pick.Request {
	return &pick.Request{Model: "m", Reserve: true, Prompt: pick.Prompt{BlockSize: 16, Length: 1600}}
}

func TestWhoWaitsGetsAPlaceByRankAndOnce(t *testing.T) {
	p, l := one(t, Rules{Queue: queue.Config{Length: 3}})
	running, err := l.Try(request(), t0)
	if err != nil {
		t.Fatal(err)
	}
	var order []string
	var last *pick.Decision
	enter := func(name string, priority int) *Waiting {
		t.Helper()
		r := request()
		_, err := l.Try(r, t0)
		var full *pick.Full
		if !errors.As(err, &full) {
			t.Fatalf("%s: %v, want that there is no room", name, err)
		}
		w, err := l.Enter(r, full, priority, t0, func(d *pick.Decision, at time.Time, err error) {
			if err != nil || !at.Equal(t0.Add(time.Second)) {
				t.Errorf("%s: at %v, %v", name, at, err)
			}
			order, last = append(order, name), d
		})
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	now := func() time.Time { return t0.Add(time.Second) }
	early, _, gone := enter("early", 0), enter("urgent", 1), enter("gone", 2)
	if _, err := l.Enter(request(), &pick.Full{}, 0, t0, nil); !errors.Is(err, queue.ErrFull) {
		t.Errorf("a fourth: %v", err)
	}
	if !l.Leave(gone) || l.Leave(gone) {
		t.Error("one that waits may leave once")
	}
	for i := range 3 {
		l.Pass(now)
		if len(order) != i {
			t.Fatalf("%v have a place before one is free", order)
		}
		p.Report(pick.Report{Decision: running.ID, Outcome: fleet.Finished}, now())
		l.Pass(now)
		running = last
		if i == 2 || running == nil {
			break
		}
	}
	if want := []string{"urgent", "early"}; !cmp.Equal(order, want) || l.Leave(early) {
		t.Errorf("%v, want %v", order, want)
	}
	if st := l.Stats(); st.Waiting != 0 || st.Admitted != 2 || st.Cancelled != 1 || st.Refused != 1 {
		t.Errorf("%+v", st)
	}
}

func TestAClosedLineLetsEverybodyPass(t *testing.T) {
	_, l := one(t, Rules{Queue: queue.Config{Length: 1}})
	if _, err := l.Try(request(), t0); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Try(request(), t0); err == nil || fmt.Sprintf("%T", err) != "*pick.Full" {
		t.Fatalf("%v, want that there is no room", err)
	}
	l.Set(Rules{})
	if _, err := l.Try(request(), t0); err != nil {
		t.Error(err)
	}
}
