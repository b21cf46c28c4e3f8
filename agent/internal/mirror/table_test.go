package mirror

import (
	"math/rand/v2"
	"runtime"
	"testing"

	"pgregory.net/rapid"
)

// owned is a table with the numbers of its nodes.
type owned struct {
	table
	keys []uint64 // of node i+1
}

func (o *owned) find(key uint64) int32 {
	return o.get(key, func(i int32) bool { return o.keys[i-1] == key })
}

func TestTableIsAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := owned{table: newTable(), keys: rapid.SliceOfNDistinct(rapid.Uint64(), 1, 200, rapid.ID[uint64]).Draw(t, "keys")}
		there := map[int32]bool{}
		for range rapid.IntRange(1, 1000).Draw(t, "actions") {
			node := rapid.Int32Range(1, int32(len(o.keys))).Draw(t, "node")
			if there[node] {
				o.remove(o.keys[node-1], node)
				delete(there, node)
			} else {
				o.put(o.keys[node-1], node)
				there[node] = true
			}
			if o.used != len(there) {
				t.Fatalf("%d entries, want %d", o.used, len(there))
			}
		}
		for i, key := range o.keys {
			want := int32(0)
			if there[int32(i+1)] {
				want = int32(i + 1)
			}
			if got := o.find(key); got != want {
				t.Fatalf("%x leads to %d, want %d", key, got, want)
			}
		}
	})
}

// A wrong move after a removal would lose entries of the same neighbourhood.
func TestTableClosesHoles(t *testing.T) {
	o := owned{table: newTable()} // all at home in the last slot
	for key := uint64(1); len(o.keys) < firstSlots/2; key++ {
		if int(o.mark(key)>>o.shift) == firstSlots-1 {
			o.keys = append(o.keys, key)
			o.put(key, int32(len(o.keys)))
		}
	}
	for gone, key := range o.keys {
		o.remove(key, int32(gone+1))
		for i, other := range o.keys {
			want := int32(i + 1)
			if i <= gone {
				want = 0
			}
			if got := o.find(other); got != want {
				t.Fatalf("after %d removals entry %d leads to %d, want %d", gone+1, i, got, want)
			}
		}
	}
	if o.used != 0 {
		t.Errorf("%d entries left", o.used)
	}
}

// BenchmarkTable holds the table against Go's map: finding, and removing and
// putting back, one of 100,000 numbers; B/entry is what each takes.
func BenchmarkTable(b *testing.B) {
	const n = 100_000
	keys := make([]uint64, n)
	for i := range keys {
		keys[i] = rand.Uint64()
	}
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	o, m := owned{table: newTable(), keys: keys}, make(map[uint64]int32)
	for i, k := range keys {
		o.put(k, int32(i+1))
	}
	middle := heap()
	for i, k := range keys {
		m[k] = int32(i + 1)
	}
	table, gomap := float64(middle-before)/n, float64(heap()-middle)/n
	for _, c := range []struct {
		name  string
		bytes float64
		do    func(i int, key uint64)
	}{
		{"find/table", table, func(_ int, k uint64) { o.find(k) }},
		{"find/map", gomap, func(_ int, k uint64) { _ = m[k] }},
		{"churn/table", table, func(i int, k uint64) { o.remove(k, int32(i+1)); o.put(k, int32(i+1)) }},
		{"churn/map", gomap, func(i int, k uint64) { delete(m, k); m[k] = int32(i + 1) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			for i := 0; b.Loop(); i = (i + 7919) % n {
				c.do(i, keys[i])
			}
			b.ReportMetric(c.bytes, "B/entry")
		})
	}
}
