package fleet

import (
	"math/bits"
	"testing"
	"time"
)

// numbers are those of n decisions one after the other.
func numbers(t *testing.T, f *Fleet, id ID, n int) []Decision {
	t.Helper()
	list := make([]Decision, n)
	for i := range list {
		list[i] = decide(t, f, id, "", t0)
	}
	return list
}

// Who has seen decisions of his own must not find those of others near them:
// every bit differs between two that follow each other as often as not.
func TestDecisionsCannotBeGuessed(t *testing.T) {
	f, ids := fleetOf(t, Config{Seed: [32]byte{1}}, 1)
	const n = 4096
	list := numbers(t, f, ids[0], n)
	var differ [64]int
	for i := 1; i < n; i++ {
		for x := uint64(list[i] ^ list[i-1]); x != 0; x &= x - 1 {
			differ[bits.TrailingZeros64(x)]++
		}
	}
	for bit, times := range differ {
		// Six standard deviations are 192.
		if times < n/2-192 || times > n/2+192 {
			t.Fatalf("bit %d changed %d times in %d decisions", bit, times, n)
		}
	}
	for _, d := range list {
		for near := Decision(1); near <= 8; near++ {
			for _, guess := range []Decision{d + near, d - near} {
				if _, known := f.Report(Report{Decision: guess, Outcome: Failed}, t0); known {
					t.Fatalf("%#x was known, beside %#x", guess, d)
				}
			}
		}
	}
}

func TestDecisionsOfTwoSchedulersAndIncarnationsDiffer(t *testing.T) {
	seen := make(map[Decision]bool)
	for incarnation := range 8 {
		f, ids := fleetOf(t, Config{Seed: [32]byte{byte(incarnation + 1)}}, 1)
		for _, d := range numbers(t, f, ids[0], 1024) {
			if d == 0 || seen[d] {
				t.Fatalf("%#x is not one of a kind", d)
			}
			seen[d] = true
		}
	}
}

func TestNumberingADecisionAllocatesNothing(t *testing.T) {
	o := newDecisions([32]byte{1})
	d := &decision{deadline: t0.Add(time.Second)}
	o.add(d)
	if n := testing.AllocsPerRun(1000, func() { o.drop(d); d.id = 0; o.add(d) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
