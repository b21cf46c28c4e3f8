package mirror

import (
	"runtime"
	"testing"
)

// traffic makes stores of n blocks in prompts of the given length, with events
// of at most 64 blocks and tokens of the given block size.
func traffic(n, prompt, blockSize int) []Store {
	var stores []Store
	tokens := make([]uint32, n*blockSize)
	for i := range tokens {
		tokens[i] = uint32(i*2654435761) % 128000
	}
	hashes := make([]uint64, n)
	for i := range hashes {
		hashes[i] = uint64(i+1) * 0x9E3779B97F4A7C15
	}
	for at := 0; at < n; at += prompt {
		end := min(at+prompt, n)
		for k := at; k < end; k += 64 {
			to := min(k+64, end)
			s := Store{Kind: Full, Hashes: hashes[k:to], Tokens: tokens[k*blockSize : to*blockSize], BlockSize: blockSize}
			if k > at {
				s.HasParent, s.Parent = true, hashes[k-1]
			}
			stores = append(stores, s)
		}
	}
	return stores
}

func heap() uint64 {
	var s runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&s)
	return s.HeapAlloc
}

func TestHundredThousandBlocksStayBelow40MB(t *testing.T) {
	stores := traffic(100_000, 500, 16)
	before := heap()
	m := New(Config{Model: "m"})
	for _, s := range stores {
		m.Store(s)
	}
	m.Drain(nil)
	used := heap() - before
	if m.Count(LaneGPU) != 100_000 {
		t.Fatalf("%d blocks", m.Count(LaneGPU))
	}
	t.Logf("%.1f MB, %d bytes a block", float64(used)/1e6, used/100_000)
	if used > 40e6 {
		t.Errorf("%d bytes", used)
	}
	runtime.KeepAlive(m)
	runtime.KeepAlive(stores)
}

// The CPU time of these benchmarks says more than the clock on a machine that has
// others to serve.

// BenchmarkStore counts blocks: a full pool of 100,000, where every stored block
// evicts an old one, drained after every 1,000 blocks.
func BenchmarkStore(b *testing.B) {
	const n = 100_000
	stores := traffic(2*n, 500, 16)
	m := New(Config{Model: "m"})
	for _, s := range stores[:len(stores)/2] {
		m.Store(s)
	}
	ops := m.Drain(nil)
	one := []uint64{0}
	next, oldest, k := len(stores)/2, 0, 0
	b.ReportAllocs()
	b.ResetTimer()
	cpu := ownCPU(b)
	since, done := 0, 0
	for done < b.N {
		s := &stores[next%len(stores)]
		next++
		for range s.Hashes {
			if k == len(stores[oldest].Hashes) {
				oldest, k = (oldest+1)%len(stores), 0
			}
			old := stores[oldest].Hashes
			one[0] = old[len(old)-1-k]
			k++
			m.Remove(Remove{HasGroup: true, Hashes: one})
		}
		m.Store(*s)
		done += len(s.Hashes)
		if since += len(s.Hashes); since >= 1000 {
			since = 0
			ops = m.Drain(ops[:0])
		}
	}
	b.ReportMetric(float64(ownCPU(b)-cpu)/float64(done), "cpu-ns/op")
}

// BenchmarkStoreOneByOne counts blocks that come in events of their own, as they
// do while an engine decodes.
func BenchmarkStoreOneByOne(b *testing.B) {
	const n = 100_000
	stores := traffic(n, 500, 16)
	m := New(Config{Model: "m"})
	var ops []Op
	b.ReportAllocs()
	b.ResetTimer()
	cpu, i := ownCPU(b), 0
	for i < b.N {
		for _, s := range stores {
			for k := range s.Hashes {
				one := s
				one.Hashes, one.Tokens = s.Hashes[k:k+1], s.Tokens[k*16:(k+1)*16]
				if k > 0 {
					one.HasParent, one.Parent = true, s.Hashes[k-1]
				}
				m.Store(one)
				i++
			}
		}
		ops = m.Drain(ops[:0])
		m.Clear(GPU)
		ops = m.Drain(ops[:0])
	}
	b.ReportMetric(float64(ownCPU(b)-cpu)/float64(i), "cpu-ns/op")
}
