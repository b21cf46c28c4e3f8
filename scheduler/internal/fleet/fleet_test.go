package fleet

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var t0 = time.Unix(1_700_000_000, 0)

func after(d time.Duration) time.Time { return t0.Add(d) }

// fleetOf joins members m0 .. m(n-1) that serve "model".
func fleetOf(t *testing.T, cfg Config, n int) (*Fleet, []ID) {
	t.Helper()
	f := New(cfg)
	ids := make([]ID, n)
	for i := range n {
		id, err := f.Join(fmt.Sprintf("m%d", i), t0)
		if err != nil {
			t.Fatal(err)
		}
		f.Receive(id, Info{Models: []string{"model"}, BlockSize: 16}, nil, t0)
		ids[i] = id
	}
	return f, ids
}

func TestJoinIsIdempotentAndBounded(t *testing.T) {
	f := New(Config{MaxMembers: 2})
	a, _ := f.Join("a", t0)
	b, _ := f.Join("b", t0)
	if again, err := f.Join("a", t0); err != nil || again != a {
		t.Fatalf("second join of a: %d, %v; want %d", again, err, a)
	}
	if _, err := f.Join("c", t0); !errors.Is(err, ErrFull) {
		t.Fatalf("join beyond the bound: %v", err)
	}
	f.Leave(a)
	c, err := f.Join("c", t0)
	if err != nil || c != a || b == c {
		t.Fatalf("join after a leave: %d, %v; want the free number %d", c, err, a)
	}
	if m := f.View().Named("a"); m != nil {
		t.Fatalf("a is still seen: %+v", m)
	}
}

func TestSilence(t *testing.T) {
	f, ids := fleetOf(t, Config{Grace: 10 * time.Second}, 2)
	update := func(i int, at time.Duration) {
		f.Receive(ids[i], Info{Models: []string{"model"}}, nil, after(at))
	}
	silent := func(at time.Duration) [2]bool {
		v := f.View()
		return [2]bool{v.Silent(v.Member(ids[0]), after(at)), v.Silent(v.Member(ids[1]), after(at))}
	}
	for s := range 8 {
		update(0, time.Duration(s)*time.Second)
	}
	if got := silent(3 * time.Second); got != [2]bool{} {
		t.Errorf("after three heartbeats: %v", got)
	}
	if got := silent(7 * time.Second); got != [2]bool{false, true} {
		t.Errorf("m1 has not spoken for 7 s: %v", got)
	}
	if got := f.Sweep(after(8 * time.Second)); got != nil {
		t.Errorf("forgotten within the grace period: %v", got)
	}
	update(0, 9*time.Second)
	update(0, 10500*time.Millisecond)
	if got := f.Sweep(after(10500 * time.Millisecond)); len(got) != 1 || got[0] != ids[1] {
		t.Errorf("to forget: %v, want m1", got)
	}
}

// When all fall silent it is the wire: nobody is forgotten, and the first to
// speak again is not the only one to be chosen.
func TestSilenceOfAllIsTheWire(t *testing.T) {
	f, ids := fleetOf(t, Config{Grace: 10 * time.Second}, 2)
	later := after(time.Hour)
	v := f.View()
	if !v.Stale(later) || v.Silent(v.Member(ids[0]), later) {
		t.Error("all are silent: the view is stale and everybody can be chosen")
	}
	if got := f.Sweep(later); got != nil {
		t.Errorf("to forget: %v", got)
	}
	f.Receive(ids[0], Info{Models: []string{"model"}}, nil, later)
	v = f.View()
	if v.Stale(later) || v.Silent(v.Member(ids[1]), later.Add(time.Second)) {
		t.Error("m1 had no time to speak yet")
	}
	if got := f.Sweep(later.Add(time.Second)); got != nil {
		t.Errorf("to forget: %v", got)
	}
	f.Receive(ids[0], Info{Models: []string{"model"}}, nil, later.Add(2*time.Second))
	f.Receive(ids[0], Info{Models: []string{"model"}}, nil, later.Add(5*time.Second))
	v = f.View()
	if !v.Silent(v.Member(ids[1]), later.Add(5*time.Second)) {
		t.Error("m1 stays silent while m0 is heard")
	}
}

// Peers' bug 22: what is missing or cannot be is unknown, and not 0.
func TestMissingLoadIsUnknown(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	m := f.View().Member(ids[0])
	if m.Load.Running != -1 || m.Load.Waiting != -1 || !math.IsNaN(m.Load.KVUsage) || !math.IsNaN(m.Load.Totals.PrefillSeconds) {
		t.Errorf("before a sample: %+v", m.Load)
	}
	f.Receive(ids[0], Info{}, &Load{
		At: after(time.Hour), Running: -7, Waiting: -7, KVUsage: 1.5,
		Totals: Totals{PrefillSeconds: math.Inf(1), QueueSeconds: -1},
	}, t0)
	m = f.View().Member(ids[0])
	if m.Load.Running != -1 || m.Load.Waiting != -1 || !math.IsNaN(m.Load.KVUsage) ||
		!math.IsNaN(m.Load.Totals.PrefillSeconds) || !math.IsNaN(m.Load.Totals.QueueSeconds) || m.Load.At.After(t0) {
		t.Errorf("after nonsense: %+v", m.Load)
	}
}

func TestServing(t *testing.T) {
	f := New(Config{})
	a, _ := f.Join("a", t0)
	b, _ := f.Join("b", t0)
	f.Receive(b, Info{Models: []string{"base", "alias", "base"}, Adapters: []Adapter{{Name: "lora"}, {Name: "base"}}}, nil, t0)
	f.Receive(a, Info{Models: []string{"lora"}}, nil, t0)
	for name, want := range map[string][]Service{
		"base":  {{Position: 1}},
		"alias": {{Position: 1}},
		"lora":  {{Position: 0}, {Position: 1, Adapter: true}},
		"other": nil,
	} {
		if diff := cmp.Diff(want, f.View().Serving(name)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func BenchmarkUpdateAndView(b *testing.B) {
	f := New(Config{})
	var ids []ID
	for i := range 4096 {
		id, _ := f.Join(fmt.Sprint(i), t0)
		ids = append(ids, id)
	}
	info := Info{Models: []string{"model"}, BlockSize: 16}
	for _, id := range ids {
		f.Receive(id, info, nil, t0)
	}
	f.View()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		f.Receive(ids[i%4096], info, nil, after(time.Duration(i)))
		f.View()
	}
}
