package index

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// BenchmarkScale is W1's query as the index grows, W2's as the members do,
// and what a collection costs with the index alive.
func BenchmarkScale(b *testing.B) {
	for _, blocks := range []int{10_000, 100_000, 1_000_000, 10_000_000, 30_000_000} {
		b.Run(fmt.Sprintf("blocks%d", blocks), func(b *testing.B) {
			x := New(Config{})
			chains := staggered(x, blocks/w1Length, w1Length)
			runtime.GC()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			start, cpu := time.Now(), cpuTime()
			runtime.GC()
			took, used := time.Since(start), cpuTime()-cpu
			runtime.ReadMemStats(&after)
			queries(b, x, chains)
			b.ReportMetric(float64(x.Stats().Bytes)/float64(x.Stats().Blocks), "B/block")
			b.ReportMetric(took.Seconds()*1e3, "gc-ms")
			b.ReportMetric(used.Seconds()*1e3, "gc-cpu-ms")
			b.ReportMetric(float64(after.PauseTotalNs-before.PauseTotalNs)/1e3, "gc-pause-us")
		})
	}
	for _, members := range []int{1, 8, 64, 512, 4096} {
		b.Run(fmt.Sprintf("members%d", members), func(b *testing.B) {
			x := New(Config{})
			keys := contents(7, w1Length)
			for m := range members {
				held(x, Member(m), keys)
			}
			queries(b, x, [][]blockkey.Key{keys})
		})
	}
}
