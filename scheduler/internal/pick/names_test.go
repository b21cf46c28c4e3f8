package pick

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// excluding is a request with 4,096 entries of which the last names m000.
func excluding() Request {
	r := Request{Model: "model", Top: 1}
	for i := range 4095 {
		e := Ref{Member: fmt.Sprintf("ns_gone-%d_0", i)}
		switch i % 3 {
		case 1:
			e = Ref{Pod: fmt.Sprintf("gone-%d", i)}
		case 2:
			e = Ref{Address: fmt.Sprintf("10.9.%d.%d:8000", i/250, i%250)}
		}
		r.Exclude = append(r.Exclude, e)
	}
	r.Exclude = append(r.Exclude, Ref{Member: "m000"})
	return r
}

// The least of several: other programs have the processor in between.
func TestLongExcludeListsCostLittle(t *testing.T) {
	b := newBed(t)
	for i := range 1000 {
		b.load(b.join(fmt.Sprintf("m%03d", i)), 0, 0, t0)
	}
	long, short := excluding(), Request{Model: "model", Top: 1}
	least := func(r *Request) time.Duration {
		least := time.Hour
		for range 50 {
			start := time.Now()
			d, err := b.Pick(r, t0)
			least = min(least, time.Since(start))
			if err != nil {
				t.Fatal(err)
			}
			if want := 1000 - min(len(r.Exclude), 1); d.Number != want {
				t.Fatalf("%d candidates, want %d", d.Number, want)
			}
		}
		return least
	}
	without := least(&short)
	if with := least(&long); with > without+raced*time.Millisecond {
		t.Errorf("4,096 excluded among 1,000 members: %v a Pick, %v without", with, without)
	}
}

func TestAReferenceNamesByItsFirstPartOnly(t *testing.T) {
	var n names
	n.add([]Ref{{Member: "m1", Pod: "p2", Address: "a3"}, {Pod: "p4", Address: "a5"}, {Address: "a6"}, {}})
	for _, c := range []struct {
		info fleet.Info
		want bool
	}{
		{fleet.Info{Name: "m1"}, true},
		{fleet.Info{Name: "m2", Pod: "p2"}, false},
		{fleet.Info{Name: "m3", Pod: "p3", Address: "a3"}, false},
		{fleet.Info{Name: "m4", Pod: "p4"}, true},
		{fleet.Info{Name: "m5", Address: "a5"}, false},
		{fleet.Info{Name: "m6", Address: "a6"}, true},
		{fleet.Info{Name: "m7"}, false},
	} {
		if got := n.name(&c.info); got != c.want {
			t.Errorf("%+v: %v", c.info, got)
		}
	}
	n.release()
	if n.name(&fleet.Info{Name: "m1"}) {
		t.Error("it is still named after the release")
	}
}

func BenchmarkPickExcluding(on *testing.B) {
	b := newBed(on)
	for i := range 1000 {
		b.load(b.join(fmt.Sprintf("m%03d", i)), 0, 0, t0)
	}
	r := excluding()
	r.Prompt = tokens(prompt(1, 0, 256))
	b.bench(on, "4096", r)
}
