package rank

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/pb"
)

// heap is what lives on it.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestHostileEngineStaysBounded feeds a rank what no engine would send, four
// times as much as it may remember, and holds its memory against the bound.
func TestHostileEngineStaysBounded(t *testing.T) {
	const bound = 1 << 16
	one := func(rng *rand.Rand, s mirror.Store) mirror.Store {
		s.BlockSize, s.Physical = 1, true
		if s.Hashes == nil {
			s.Hashes = []uint64{rng.Uint64()}
		}
		for range s.Hashes {
			s.Tokens = append(s.Tokens, rng.Uint32())
		}
		return s
	}
	for name, next := range map[string]func(*rand.Rand, int) mirror.Store{
		"endless distinct blocks": func(rng *rand.Rand, _ int) mirror.Store { return one(rng, mirror.Store{}) },
		"random parents": func(rng *rand.Rand, _ int) mirror.Store {
			return one(rng, mirror.Store{HasParent: true, Parent: rng.Uint64()})
		},
		"one chain without end": func(rng *rand.Rand, i int) mirror.Store {
			return one(rng, mirror.Store{HasParent: i > 0, Parent: uint64(i), Hashes: []uint64{uint64(i + 1)}})
		},
		"every group there can be": func(rng *rand.Rand, i int) mirror.Store {
			return one(rng, mirror.Store{Group: i % 1000, Kind: mirror.Full})
		},
		"an adapter for each block": func(rng *rand.Rand, i int) mirror.Store {
			return one(rng, mirror.Store{Adapter: fmt.Sprint(strings.Repeat("a", 100), i)})
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := heap()
			rng := rand.New(rand.NewPCG(1, 2))
			r := testRank(t, Identity{Model: "m", Reported: 1})
			r.bound(bound)
			r.State(vllm.Exact, "")
			var ops []mirror.Op
			batch := vllm.Batch{Events: make([]vllm.Event, 1)}
			for i := range 4 * bound {
				batch.Events[0] = vllm.Event{Kind: vllm.Stored, Store: next(rng, i)}
				r.Apply(vllm.Mark{Sequence: uint64(i)}, batch)
				if i%1000 == 0 {
					ops, _ = r.Drain(ops[:0])
				}
			}
			_, st := r.Drain(nil)
			grown := heap() - before
			runtime.KeepAlive(ops)
			stats := r.Mirror()
			t.Logf("%d blocks remembered, %d dropped, %d KB, %d bytes a block", stats.Nodes, stats.Dropped, grown>>10, grown/bound)
			if stats.Nodes > bound || grown > bound*400 {
				t.Errorf("%d blocks, %d bytes", stats.Nodes, grown)
			}
			if st.Trust == pb.Trust_TRUST_EXACT {
				t.Error("calls itself EXACT although blocks were dropped")
			}
			runtime.KeepAlive(r)
		})
	}
}
