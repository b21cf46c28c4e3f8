package fleet

import (
	"errors"
	"fmt"
	"testing"
	"time"
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
		f.Heard(id, Info{Models: []string{"model"}, BlockSize: 16}, nil, t0)
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
