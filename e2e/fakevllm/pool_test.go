package fakevllm

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// naivePool is the pool's contract in the dumbest form: the free queue is a
// slice, and whatever is asked is searched.
type naivePool struct {
	refs  []int
	hash  []uint64 // 0: none
	since []int    // when the hash was given
	clock int
	queue []int32
}

func newNaive(n int) *naivePool {
	p := &naivePool{refs: make([]int, n), hash: make([]uint64, n), since: make([]int, n)}
	p.refs[0] = 1
	for i := 1; i < n; i++ {
		p.queue = append(p.queue, int32(i))
	}
	return p
}

func (p *naivePool) find(h uint64) (int32, bool) {
	best := -1
	for i := range p.hash {
		if p.hash[i] == h && (best < 0 || p.since[i] < p.since[best]) {
			best = i
		}
	}
	return int32(best), best >= 0
}

func TestPoolAgreesWithNaiveModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 24).Draw(t, "blocks")
		p, q := newPool(n), newNaive(n)
		var live [][]int32 // what sequences hold
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				if p.free != len(q.queue) {
					t.Fatalf("%d free, want %d", p.free, len(q.queue))
				}
				var queue []int32
				for id := p.head; id != none; id = p.blocks[id].next {
					queue = append(queue, id)
				}
				if d := cmp.Diff(q.queue, queue); d != "" && len(queue)+len(q.queue) > 0 {
					t.Fatalf("free queue: %s", d)
				}
				for i := range p.blocks {
					if int(p.blocks[i].refs) != q.refs[i] || p.blocks[i].name.hash != q.hash[i] {
						t.Fatalf("block %d is %+v, want refs %d hash %d", i, p.blocks[i], q.refs[i], q.hash[i])
					}
				}
				for h := uint64(1); h < 9; h++ {
					want, ok := q.find(h)
					got, found := p.byHash[name{hash: h}]
					if ok != found || ok && got != want {
						t.Fatalf("hash %d is block %d %v, want %d %v", h, got, found, want, ok)
					}
				}
			},
			"admit": func(t *rapid.T) {
				hashes := rapid.SliceOfN(rapid.Uint64Range(1, 8), 0, 4).Draw(t, "hashes")
				var hit []int32
				for _, h := range hashes {
					id, ok := q.find(h)
					if !ok {
						break
					}
					hit = append(hit, id)
				}
				if got := p.match(hashes, 0); got != len(hit) {
					t.Fatalf("%d match, want %d", got, len(hit))
				}
				if len(hashes) > 0 && p.match(hashes, 1) != 0 {
					t.Fatal("a block is found by another group")
				}
				p.take(hit)
				for _, id := range hit {
					if q.refs[id]++; q.refs[id] == 1 {
						q.queue = slices.DeleteFunc(q.queue, func(x int32) bool { return x == id })
					}
				}
				k := rapid.IntRange(0, len(q.queue)).Draw(t, "new")
				var evicted, wantEvicted []uint64
				got := p.allocate(nil, k, func(n name) { evicted = append(evicted, n.hash) })
				for _, id := range q.queue[:k] {
					if q.hash[id] != 0 {
						wantEvicted = append(wantEvicted, q.hash[id])
					}
					q.hash[id], q.refs[id] = 0, 1
				}
				if d := cmp.Diff(append([]int32(nil), q.queue[:k]...), got); d != "" {
					t.Fatalf("allocate: %s", d)
				}
				if d := cmp.Diff(wantEvicted, evicted); d != "" {
					t.Fatalf("evicted: %s", d)
				}
				q.queue = slices.Clone(q.queue[k:])
				for _, id := range got {
					if rapid.Bool().Draw(t, "full") {
						h := rapid.Uint64Range(1, 8).Draw(t, "hash")
						p.seal(id, name{hash: h})
						q.clock++
						q.hash[id], q.since[id] = h, q.clock
					}
				}
				live = append(live, append(hit, got...))
			},
			"release": func(t *rapid.T) {
				if len(live) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(live)-1).Draw(t, "which")
				p.release(live[i])
				for _, id := range slices.Backward(live[i]) {
					if q.refs[id]--; q.refs[id] > 0 {
						continue
					}
					if q.hash[id] != 0 {
						q.queue = append(q.queue, id)
					} else {
						q.queue = append([]int32{id}, q.queue...)
					}
				}
				live = slices.Delete(live, i, i+1)
			},
			"clear": func(t *rapid.T) {
				want := len(live) == 0
				for _, ids := range live {
					want = want || len(ids) == 0 && allEmpty(live)
				}
				if got := p.clear(); got != want {
					t.Fatalf("clear is %v, want %v", got, want)
				} else if got {
					clear(q.hash)
				}
			},
		})
	})
}

func allEmpty(live [][]int32) bool {
	return !slices.ContainsFunc(live, func(ids []int32) bool { return len(ids) > 0 })
}

func TestEvictionTakesTailsFirst(t *testing.T) {
	p := newPool(9)
	a := p.allocate(nil, 4, nil)
	for i, id := range a {
		p.seal(id, name{hash: uint64(10 + i)})
	}
	b := p.allocate(nil, 4, nil)
	for i, id := range b {
		p.seal(id, name{hash: uint64(20 + i)})
	}
	p.release(a)
	p.release(b)
	var gone []uint64
	p.allocate(nil, 6, func(n name) { gone = append(gone, n.hash) })
	if d := cmp.Diff([]uint64{13, 12, 11, 10, 23, 22}, gone); d != "" {
		t.Error(d)
	}
}

func BenchmarkPoolTurnover(b *testing.B) {
	const size, prompt = Qwen32BBlocks, 750
	p := newPool(size)
	next := uint64(1)
	b.ReportAllocs()
	for b.Loop() {
		ids := p.allocate(nil, prompt, func(name) {})
		for _, id := range ids {
			p.seal(id, name{hash: next})
			next++
		}
		p.release(ids)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/prompt, "ns/block")
}
