package pick

import (
	"slices"
	"testing"
	"time"
)

// workload of the simulation: requests a second, the chance of a chat to go
// on, the capacity of eight engines, and whether every other one is three
// times slower.
type workload struct {
	name       string
	rate, more float64
	capacity   int
	mixed      bool
}

func (w workload) play(t testing.TB, policy string, seed uint64, span time.Duration) simResult {
	engines := make([]simProfile, 8)
	for i := range engines {
		engines[i] = qwen
		if w.mixed && i%2 == 0 {
			engines[i] = qwen.times(3)
		}
	}
	s := newSim(newBed(t), policy, w.capacity*simCapacity, engines...)
	s.run(simChats(seed, w.rate, w.more, span))
	return s.result()
}

func TestEqualEnginesShareTheWork(t *testing.T) {
	w := workload{"chats", 8, 0.45, 4, false}
	r := w.play(t, "default", 1, 90*time.Second)
	t.Log(r)
	if mean := r.requests / 8; r.least < mean/2 || r.most > 2*mean {
		t.Errorf("%d to %d requests an engine", r.least, r.most)
	}
	if low, high := slices.Min(r.learned), slices.Max(r.learned); high > 1.5*low {
		t.Errorf("equal engines are believed to take %.0f", r.learned)
	}
	if o := w.play(t, "least-tokens", 1, 90*time.Second); r.mean > 0.9*o.mean || r.p99 > o.p99 || r.itl > o.itl {
		t.Errorf("not better than least-tokens: %v", o)
	}
}

func TestNothingIsLostWithoutSharing(t *testing.T) {
	w := workload{"alone", 8, 0, 4, false}
	r, o := w.play(t, "default", 1, 90*time.Second), w.play(t, "least-tokens", 1, 90*time.Second)
	t.Log(r)
	if r.mean > 1.05*o.mean || r.p99 > 1.05*o.p99 || r.itl > 1.05*o.itl {
		t.Errorf("worse than least-tokens: %v", o)
	}
}

func TestTwoKindsOfEnginesAreToldApart(t *testing.T) {
	w := workload{"mixed", 4, 0.45, 4, true}
	r := w.play(t, "default", 1, 90*time.Second)
	t.Log(r)
	for i, slow := range r.learned {
		if fast := r.learned[i|1]; i%2 == 0 && (slow < 2*fast || slow > 5*fast) {
			t.Errorf("engine %d is 3 times slower than its neighbour, believed: %.0f", i, r.learned)
		}
	}
	if o := w.play(t, "least-tokens", 1, 90*time.Second); r.mean > 0.85*o.mean {
		t.Errorf("not better than least-tokens: %v", o)
	}
}

// BenchmarkPolicies compares policies in the simulation: an iteration is one
// seed of three minutes.
func BenchmarkPolicies(b *testing.B) {
	for _, w := range []workload{
		{"chats-5-x1", 5, 0.45, 1, false},
		{"chats-10-x4", 10, 0.45, 4, false},
		{"chats-13-x4", 13, 0.45, 4, false},
		{"mixed-6-x4", 6, 0.45, 4, true},
		{"alone-8", 8, 0, 4, false},
		{"alone-11", 11, 0, 4, false},
	} {
		for _, policy := range []string{"round-robin", "least-tokens", "least-ttft", "default"} {
			b.Run(w.name+"/"+policy, func(b *testing.B) {
				var mean, p99, itl, hit float64
				for seed := range uint64(b.N) {
					r := w.play(b, policy, seed, 3*time.Minute)
					mean += r.mean
					p99 += r.p99
					itl += r.itl
					hit += r.hit
				}
				n := float64(b.N)
				b.ReportMetric(mean/n, "ttft-ms")
				b.ReportMetric(p99/n, "p99-ms")
				b.ReportMetric(itl/n, "itl-ms")
				b.ReportMetric(100*hit/n, "hit-%")
			})
		}
	}
}
