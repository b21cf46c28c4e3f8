package index

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// Each benchmark has a twin named /naive, the map of the tests under a lock,
// to be measured in the same run.

func BenchmarkMatch(b *testing.B) {
	for _, s := range subjects {
		x := s.make()
		chains := staggered(x, w1Chains, w1Length)
		b.Run("W1"+s.suffix, func(b *testing.B) {
			for _, keys := range chains {
				var a Answer
				if x.Match(keys, &a); checkStaggered(&a, w1Length) != nil {
					b.Fatal(checkStaggered(&a, w1Length))
				}
			}
			queries(b, x, chains)
		})
		b.Run("W1cold"+s.suffix, func(b *testing.B) {
			cold := make([][]blockkey.Key, 512)
			for i := range cold {
				cold[i] = contents(77_000_000+uint64(i), w1Length)
			}
			queries(b, x, cold)
		})
		left := holes(x, chains)
		b.Run("W1holes"+s.suffix, func(b *testing.B) {
			for c, keys := range chains {
				want := make(map[Member]uint32)
				for j := range 8 {
					if d := left[c][j]; d > 0 {
						want[w1Holder(uint64(c), j)] = d
					}
				}
				got := ask(x, keys)
				for m, d := range got {
					if want[m] != d[LaneGPU] {
						b.Fatalf("chain %d: member %d at %d, want %d", c, m, d[LaneGPU], want[m])
					}
				}
				if len(got) != len(want) {
					b.Fatalf("chain %d: %d members, want %d", c, len(got), len(want))
				}
			}
			queries(b, x, chains)
		})
	}
	for _, members := range []int{128, 1000} {
		for _, s := range subjects {
			b.Run(fmt.Sprintf("W2x%d%s", members, s.suffix), func(b *testing.B) {
				x := s.make()
				keys := contents(7, w1Length)
				for m := range members {
					held(x, Member(m), keys)
				}
				answer := ask(x, keys)
				if len(answer) != members || answer[Member(members/2)][LaneGPU] != w1Length {
					b.Fatal("wrong answer")
				}
				queries(b, x, [][]blockkey.Key{keys})
			})
		}
	}
	for _, length := range []int{64, 2048, 8192} {
		for _, s := range subjects {
			b.Run(fmt.Sprintf("len%d%s", length, s.suffix), func(b *testing.B) {
				x := s.make()
				chains := staggered(x, w1Chains*w1Length/length, length)
				var a Answer
				x.Match(chains[0], &a)
				if err := checkStaggered(&a, length); err != nil {
					b.Fatal(err)
				}
				queries(b, x, chains)
			})
		}
	}
	for _, s := range subjects {
		b.Run("W1big"+s.suffix, func(b *testing.B) {
			x := s.make()
			queries(b, x, staggered(x, 10*w1Chains, w1Length))
		})
	}
}

// queries asks for random chains.
func queries(b *testing.B, x subject, chains [][]blockkey.Key) {
	var a Answer
	x.Match(chains[0], &a)
	batches(b, chains, func(keys []blockkey.Key) { x.Match(keys, &a) })
}

// batches calls ask with random chains. It reports the median and the best of
// batches of 16 beside the mean, which on a busy machine counts whatever else
// ran.
func batches(b *testing.B, chains [][]blockkey.Key, ask func(keys []blockkey.Key)) {
	b.ReportAllocs()
	rng := draw(42)
	const batch = 16
	times := make([]float64, 0, 1<<16)
	for n := 0; b.Loop(); n++ {
		switch n % batch {
		case 0:
			start := time.Now()
			for range batch - 1 {
				ask(chains[rng.next()%uint64(len(chains))])
			}
			if took := float64(time.Since(start).Nanoseconds()) / (batch - 1); len(times) < cap(times) {
				times = append(times, took)
			}
		case 1:
			ask(chains[rng.next()%uint64(len(chains))])
		}
	}
	slices.Sort(times)
	b.ReportMetric(times[len(times)/2], "p50-ns")
	b.ReportMetric(times[0], "min-ns")
}

func BenchmarkMemory(b *testing.B) {
	for _, m := range []struct {
		name   string
		chains int
		fill   func(x subject, chains int) (blocks, memberships int)
	}{
		{"W3one", w1Chains, fillOne},
		{"W3eight", w1Chains, fillEight},
		{"W3big", 10 * w1Chains, fillOne},
	} {
		for _, s := range subjects {
			b.Run(m.name+s.suffix, func(b *testing.B) {
				for b.Loop() {
					// Twice, as a table's cost depends on how full it is.
					for i, chains := range []int{m.chains, m.chains * 11 / 10} {
						before := heap()
						x := s.make()
						blocks, memberships := m.fill(x, chains)
						bytes := float64(heap() - before)
						b.ReportMetric(bytes/float64(blocks), []string{"B/block", "B/block-2"}[i])
						b.ReportMetric(bytes/float64(memberships), []string{"B/membership", "B/membership-2"}[i])
						runtime.KeepAlive(x)
					}
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

func fillOne(x subject, chains int) (blocks, memberships int) {
	for c := range uint64(chains) {
		held(x, Member(mix(0x5EED+c)%128), contents(c, w1Length))
	}
	return chains * w1Length, chains * w1Length
}

func fillEight(x subject, chains int) (blocks, memberships int) {
	staggered(x, chains, w1Length)
	return chains * w1Length, chains * w1Length * 36 / 8
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// event is a store of W4 and, later, its removal.
type event struct {
	member Member
	before []blockkey.Key
	keys   []blockkey.Key
}

// extensions builds n events that extend W1's chains.
func extensions(from uint64, n int) []event {
	events := make([]event, n)
	leads := make([][]blockkey.Key, w1Chains)
	for c := range leads {
		leads[c] = blockkey.Before(contents(uint64(c), w1Length), w1Length)
	}
	for i := range events {
		c := uint64(i) % w1Chains
		events[i] = event{w1Holder(c, 7), leads[c], contents(from+uint64(i), 64)}
	}
	return events
}

func apply(x subject, events []event, part, parts int) {
	for _, e := range events {
		if int(e.member)%parts == part {
			x.Store(e.member, LaneGPU, e.before, w1Length, e.keys)
		}
	}
	for _, e := range events {
		if int(e.member)%parts == part {
			x.Remove(e.member, LaneGPU, e.before, w1Length, e.keys)
		}
	}
}

func BenchmarkApply(b *testing.B) {
	for _, w := range []struct {
		name    string
		writers int
		k       int
	}{
		{"W4x1", 1, 8},
		{"W4x1k1", 1, 1},
		{"W4x2", 2, 8},
	} {
		for _, s := range subjects {
			b.Run(w.name+s.suffix, func(b *testing.B) {
				x := s.make()
				chains := staggered(x, w1Chains, w1Length)
				round, n := uint64(0), w.k*w1Chains
				var rates, cpu []float64
				build := func() []event {
					round++
					return extensions(1_000_000+(round-1)*uint64(n), n)
				}
				run := func(events []event) {
					start, before := time.Now(), cpuTime()
					var wg sync.WaitGroup
					for part := range w.writers {
						wg.Go(func() { apply(x, events, part, w.writers) })
					}
					wg.Wait()
					rates = append(rates, float64(2*n*64)/time.Since(start).Seconds())
					cpu = append(cpu, float64(2*n*64)/(cpuTime()-before).Seconds())
				}
				run(build())
				rates, cpu = nil, nil
				for b.Loop() {
					b.StopTimer()
					events := build()
					b.StartTimer()
					run(events)
				}
				var a Answer
				for _, keys := range chains {
					x.Match(keys, &a)
					if err := checkStaggered(&a, w1Length); err != nil {
						b.Fatal(err)
					}
				}
				report(b, "blocks/s", rates)
				report(b, "blocks/cpu-s", cpu)
			})
		}
	}
}

func BenchmarkMixed(b *testing.B) {
	for _, s := range subjects {
		b.Run("W5"+s.suffix, func(b *testing.B) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(6))
			x := s.make()
			chains := staggered(x, w1Chains, w1Length)
			for b.Loop() {
				mixed(b, x, chains)
			}
		})
	}
}

// mixed runs two readers beside a writer that applies one event of 64 blocks
// a millisecond, for four seconds.
func mixed(b *testing.B, x subject, chains [][]blockkey.Key) {
	const events = 4000
	changes := extensions(5_000_000, events/2)
	var stop atomic.Bool
	var wg sync.WaitGroup
	type reader struct {
		times histogram
		err   error
	}
	var readers [2]reader
	start := time.Now()
	for i := range readers {
		r := &readers[i]
		wg.Go(func() {
			rng := draw(100 + i)
			var a Answer
			last := time.Now()
			for !stop.Load() {
				x.Match(chains[rng.next()%w1Chains], &a)
				now := time.Now()
				r.times.add(now.Sub(last))
				last = now
				if err := checkStaggered(&a, w1Length); err != nil {
					r.err = err
					return
				}
			}
		})
	}
	late := 0
	for i := range events {
		due := start.Add(time.Duration(i) * time.Millisecond)
		time.Sleep(time.Until(due))
		if time.Since(due) > 5*time.Millisecond {
			late++
		}
		e := changes[i/2]
		if i%2 == 0 {
			x.Store(e.member, LaneGPU, e.before, w1Length, e.keys)
		} else {
			x.Remove(e.member, LaneGPU, e.before, w1Length, e.keys)
		}
	}
	took := time.Since(start)
	stop.Store(true)
	wg.Wait()
	for i := range readers {
		if readers[i].err != nil {
			b.Fatal(readers[i].err)
		}
	}
	all := &readers[0].times
	all.merge(&readers[1].times)
	b.ReportMetric(float64(all.count)/took.Seconds(), "lookups/s")
	b.ReportMetric(events*64/took.Seconds(), "applied/s")
	b.ReportMetric(all.quantile(0.5).Seconds()*1e6, "p50-us")
	b.ReportMetric(all.quantile(0.99).Seconds()*1e6, "p99-us")
	b.ReportMetric(float64(late), "late-events")
}

func BenchmarkForget(b *testing.B) {
	for _, s := range subjects {
		b.Run("W6"+s.suffix, func(b *testing.B) {
			x := s.make()
			chains := staggered(x, w1Chains, w1Length)
			var a Answer
			m := Member(5)
			var took []float64
			for b.Loop() {
				start := time.Now()
				x.Forget(m)
				took = append(took, time.Since(start).Seconds()*1e3)

				b.StopTimer()
				for c, keys := range chains {
					for j := range 8 {
						if w1Holder(uint64(c), j) != m {
							continue
						}
						got := ask(x, keys)
						if _, named := got[m]; named || len(got) != 7 {
							b.Fatalf("chain %d: %v", c, got)
						}
						held(x, m, keys[:64*(j+1)])
						x.Match(keys, &a)
						if err := checkStaggered(&a, w1Length); err != nil {
							b.Fatal(err)
						}
					}
				}
				m = (m + 12) % 132
				if m > 127 {
					m = 5
				}
				b.StartTimer()
			}
			slices.Sort(took)
			b.ReportMetric(took[len(took)/2], "p50-ms")
			b.ReportMetric(took[0], "min-ms")
		})
	}
}

func BenchmarkSnapshot(b *testing.B) {
	for _, s := range subjects {
		b.Run("replace"+s.suffix, func(b *testing.B) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(6))
			x := s.make()
			chains := staggered(x, w1Chains, w1Length)
			const m, length = Member(200), 500 // 200 chains of 500 blocks, half of them shared
			var mine [][]blockkey.Key
			for c := range 200 {
				keys := chains[c]
				if c%2 == 0 {
					keys = contents(9_000_000+uint64(c), length)
				}
				mine = append(mine, keys[:length])
			}
			var stop atomic.Bool
			var wg sync.WaitGroup
			var times histogram
			wg.Go(func() {
				rng := draw(7)
				var a Answer
				last := time.Now()
				for !stop.Load() {
					x.Match(chains[200+rng.next()%(w1Chains-200)], &a)
					now := time.Now()
					times.add(now.Sub(last))
					last = now
					if err := checkStaggered(&a, w1Length); err != nil {
						b.Error(err)
						return
					}
				}
			})
			var took []float64
			for b.Loop() {
				start := time.Now()
				x.Forget(m)
				for _, keys := range mine {
					held(x, m, keys)
				}
				took = append(took, time.Since(start).Seconds()*1e3)
			}
			stop.Store(true)
			wg.Wait()
			b.ReportMetric(times.quantile(0.99).Seconds()*1e6, "p99-us")
			slices.Sort(took)
			b.ReportMetric(took[len(took)/2], "p50-ms")
			b.ReportMetric(took[0], "min-ms")
		})
	}
}

// report the median and the best of a rate.
func report(b *testing.B, unit string, rates []float64) {
	slices.Sort(rates)
	b.ReportMetric(rates[len(rates)/2], unit)
	b.ReportMetric(rates[len(rates)-1], "best-"+unit)
}

// cpuTime of the process: what a busy machine leaves comparable.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// histogram of durations, in buckets of 5 ns up to 100 us, then one.
type histogram struct {
	buckets [20_001]uint32
	count   int
}

func (h *histogram) add(d time.Duration) {
	h.buckets[min(int(d/5), len(h.buckets)-1)]++
	h.count++
}

func (h *histogram) merge(o *histogram) {
	for i, n := range o.buckets {
		h.buckets[i] += n
	}
	h.count += o.count
}

func (h *histogram) quantile(q float64) time.Duration {
	left := int(q * float64(h.count))
	for i, n := range h.buckets {
		if left -= int(n); left < 0 {
			return time.Duration(5*i + 5)
		}
	}
	return 0
}
