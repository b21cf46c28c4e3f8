package pick

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

func TestWhoMayServe(t *testing.T) {
	b := newBed(t)
	base := fleet.Info{Models: []string{"base", "alias"}, Root: "r", BlockSize: 16}
	add := func(name, pod, address string, adapters ...string) fleet.ID {
		i := base
		i.Name, i.Pod, i.Address = name, pod, address
		for _, a := range adapters {
			i.Adapters = append(i.Adapters, fleet.Adapter{Name: a})
		}
		return b.joinAs(i)
	}
	add("a0", "a", "10.0.0.1:8000", "lora")
	add("a1", "a", "10.0.0.1:8001", "lora", "other")
	add("b0", "b", "10.0.0.2:8000")
	for _, c := range []struct {
		name string
		r    Request
		want string
		err  error
	}{
		{"model", Request{Model: "base"}, "a0 a1 b0", nil},
		{"alias", Request{Model: "alias"}, "a0 a1 b0", nil},
		{"adapter by name", Request{Model: "lora"}, "a0 a1", nil},
		{"adapter beside the model", Request{Model: "base", Adapter: "other"}, "a1", nil},
		{"adapter twice", Request{Model: "lora", Adapter: "lora"}, "a0 a1", nil},
		{"two adapters", Request{Model: "lora", Adapter: "other"}, "", ErrAdapter},
		{"unknown model", Request{Model: "what"}, "", ErrModel},
		{"unknown adapter", Request{Model: "base", Adapter: "what"}, "", ErrAdapter},
		{"unknown policy", Request{Model: "base", Policy: "what"}, "", ErrPolicy},
		{"candidates", Request{Model: "base", Candidates: []Ref{{Member: "a1"}, {Pod: "b"}, {Member: "gone"}}}, "a1 b0", nil},
		{"without a pod", Request{Model: "base", Exclude: []Ref{{Pod: "a"}}}, "b0", nil},
		{"without an address", Request{Model: "base", Exclude: []Ref{{Address: "10.0.0.1:8000"}}}, "a1 b0", nil},
		{"empty reference", Request{Model: "base", Exclude: []Ref{{}}}, "a0 a1 b0", nil},
		{"nobody left", Request{Model: "base", Exclude: []Ref{{Pod: "a"}, {Pod: "b"}}}, "", ErrExcluded},
	} {
		d, err := b.Pick(&c.r, t0)
		if !errors.Is(err, c.err) || (err == nil) != (c.err == nil) {
			t.Errorf("%s: error %v, want %v", c.name, err, c.err)
			continue
		}
		if err != nil {
			continue
		}
		var names []string
		for n := range cachedBy(d) {
			names = append(names, n)
		}
		slices.Sort(names)
		if got := strings.Join(names, " "); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	if _, err := newBed(t).Pick(&Request{Model: "base"}, t0); !errors.Is(err, ErrNoMembers) {
		t.Errorf("empty fleet: %v", err)
	}
}

func TestBadPrompts(t *testing.T) {
	b := newBed(t)
	b.join("m")
	for name, p := range map[string]Prompt{
		"ragged tokens":                 {Tokens: make([]byte, 7)},
		"keys of a size nobody has":     {Keys: []blockkey.Key{1}, BlockSize: 64},
		"keys without a size":           {Keys: []blockkey.Key{1}},
		"key 0":                         {Keys: []blockkey.Key{1, 0}, BlockSize: 16},
		"more keys than tokens":         {Keys: []blockkey.Key{1, 2}, BlockSize: 16, Length: 31},
		"negative size":                 {BlockSize: -1},
		"negative length":               {Length: -1},
		"tokens and keys, who is right": {Tokens: make([]byte, 8), Keys: []blockkey.Key{1}, BlockSize: 16},
	} {
		if _, err := b.Pick(&Request{Model: "model", Prompt: p}, t0); !errors.Is(err, ErrPrompt) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, p := range map[string]Prompt{
		"none":            {},
		"empty keys":      {BlockSize: 16},
		"less than a key": {BlockSize: 16, Length: 3},
		"one token":       {Tokens: make([]byte, 4)},
		"2 M tokens":      {Tokens: make([]byte, 8<<20)},
	} {
		if _, err := b.Pick(&Request{Model: "model", Prompt: p, Reserve: true}, t0); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Peers' bug 15: a retry excludes the member that failed.
func TestExcludedIsNotChosen(t *testing.T) {
	b := newBed(t)
	le := prompt(1, 0, 1000)
	b.gpu(b.join("m0"), le, 60)
	b.join("m1")
	if d := b.pick(Request{Prompt: tokens(le), Session: "s", Reserve: true}); first(d) != "m0" {
		t.Fatalf("first %s", first(d))
	}
	d := b.pick(Request{Prompt: tokens(le), Session: "s", Exclude: []Ref{{Address: "m0:8000"}}})
	if first(d) != "m1" || len(d.Candidates) != 1 {
		t.Fatalf("first %s of %d", first(d), len(d.Candidates))
	}
}

func TestSilentAndSleepingAreNotChosen(t *testing.T) {
	b := newBed(t)
	m0, m1 := b.join("m0"), b.join("m1")
	le := prompt(1, 0, 1000)
	b.gpu(m0, le, 60)
	for s := range 6 {
		b.load(m1, 0, 0, t0.Add(time.Duration(s)*time.Second))
	}
	now := t0.Add(5 * time.Second)
	if d := b.pickAt(Request{Prompt: tokens(le)}, now); first(d) != "m1" || len(d.Candidates) != 1 {
		t.Errorf("m0 is silent: %s", first(d))
	}
	if d := b.pickAt(Request{Prompt: tokens(le), Candidates: []Ref{{Member: "m0"}}}, now); first(d) != "m0" {
		t.Errorf("a silent one is better than none: %s", first(d))
	}
	info := *b.fleet.View().Member(m1).Info
	b.fleet.Receive(m1, info, &fleet.Load{At: now.Add(1), Sleeping: true, Running: 0, Waiting: 0, Totals: fleet.NoTotals()}, now.Add(1))
	if d := b.pickAt(Request{Prompt: tokens(le)}, now.Add(1)); first(d) != "m0" {
		t.Errorf("m1 sleeps: %s", first(d))
	}
	d := b.pickAt(Request{Prompt: tokens(le)}, now.Add(time.Hour))
	if first(d) != "m0" || !d.Stale || !strings.Contains(d.Fallback(), "last known") {
		t.Errorf("nobody is heard: %s, stale %v, %q", first(d), d.Stale, d.Fallback())
	}
}

// Whose pod is about to go is picked where no other can be, and before those that
// failed.
func TestWithdrawnAreNotChosen(t *testing.T) {
	b := newBed(t)
	stays, goes := b.join("stays"), b.join("goes")
	p := prompt(1, 0, 3200)
	b.gpu(goes, p, 200)
	r := Request{Prompt: tokens(p)}
	if got := first(b.pick(r)); got != "goes" {
		t.Fatalf("%s before", got)
	}
	b.fleet.Withdraw(goes, fleet.Deleting)
	if d := b.pick(r); first(d) != "stays" || d.Fallback() != "" || len(d.Candidates) != 1 {
		t.Errorf("%s of %d, fallback %q", first(d), len(d.Candidates), d.Fallback())
	}
	only := r
	only.Candidates = []Ref{{Member: "goes"}}
	if d := b.pick(only); first(d) != "goes" || !strings.Contains(d.Fallback(), "its pod is being deleted") || d.Fallbacks[0].Kind != AllWithdrawn {
		t.Errorf("%s is better than none: fallback %q", first(d), d.Fallback())
	}
	b.fail(stays, t0)
	if d := b.pick(r); first(d) != "goes" {
		t.Errorf("%s is picked, which failed", first(d))
	}
	b.fleet.Withdraw(goes, fleet.InService)
	if d := b.pick(r); first(d) != "goes" || d.Fallback() != "" {
		t.Errorf("%s, fallback %q, after it came back", first(d), d.Fallback())
	}
}

func (b *bed) fail(id fleet.ID, now time.Time) {
	for range 3 {
		m := b.fleet.View().Member(id)
		d, _ := b.fleet.Decide("", now, func(fleet.ID, bool, []fleet.Reserved) (fleet.Choice, bool) {
			return fleet.Choice{Member: m, Anyway: true}, true
		})
		b.fleet.Report(fleet.Report{Decision: d, Outcome: fleet.Failed}, now)
	}
}

func TestWhoFailsIsLeftOutWhileAnotherIsThere(t *testing.T) {
	b := newBed(t)
	good, bad := b.join("good"), b.join("bad")
	p := prompt(1, 0, 3200)
	b.gpu(bad, p, 200)
	r := Request{Prompt: tokens(p), Reserve: true}
	if got := first(b.pick(r)); got != "bad" {
		t.Fatalf("%s before any failure", got)
	}
	b.fail(bad, t0)
	if d := b.pick(r); first(d) != "good" || d.Fallback() != "" || len(d.Candidates) != 1 {
		t.Fatalf("%s, fallback %q", first(d), d.Fallback())
	}
	b.fail(good, t0)
	d := b.pick(r)
	if first(d) != "bad" || len(d.Candidates) != 2 || !strings.Contains(d.Fallback(), "failed lately") {
		t.Errorf("all fail: %s of %d, fallback %q", first(d), len(d.Candidates), d.Fallback())
	}
	r.Exclude = []Ref{{Member: "bad"}}
	if d := b.pick(r); first(d) != "good" {
		t.Errorf("%s is chosen though excluded", first(d))
	}
}
