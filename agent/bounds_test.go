package agent

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol"
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
	one := func(rng *rand.Rand, s vllm.Store) vllm.Store {
		s.BlockSize, s.Physical = 1, true
		if s.Hashes == nil {
			s.Hashes = []uint64{rng.Uint64()}
		}
		for range s.Hashes {
			s.Tokens = append(s.Tokens, rng.Uint32())
		}
		return s
	}
	for name, next := range map[string]func(*rand.Rand, int) vllm.Store{
		"endless distinct blocks": func(rng *rand.Rand, _ int) vllm.Store { return one(rng, vllm.Store{}) },
		"random parents": func(rng *rand.Rand, _ int) vllm.Store {
			return one(rng, vllm.Store{HasParent: true, Parent: rng.Uint64()})
		},
		"one chain without end": func(rng *rand.Rand, i int) vllm.Store {
			return one(rng, vllm.Store{HasParent: i > 0, Parent: uint64(i), Hashes: []uint64{uint64(i + 1)}})
		},
		"every group there can be": func(rng *rand.Rand, i int) vllm.Store {
			return one(rng, vllm.Store{Group: i % 1000, Kind: vllm.Full})
		},
		"an adapter for each block": func(rng *rand.Rand, i int) vllm.Store {
			return one(rng, vllm.Store{Adapter: fmt.Sprint(strings.Repeat("a", 100), i)})
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := heap()
			rng := rand.New(rand.NewPCG(1, 2))
			r := testRank(t, identity{model: "m", reported: 1})
			r.share(bound)
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
			stats := r.mirrorStats()
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

func TestRanksShareTheMirrorsBound(t *testing.T) {
	a, err := New(Config{NATSURL: "nats://n:1"})
	if err != nil {
		t.Fatal(err)
	}
	a.watch.missing = make(map[int]int)
	a.watch.start = func(n int, id identity, _ hitRule, _ vllm.Source, _ emptied) (*rank, error) {
		return testRank(t, id), nil
	}
	var page vllm.Page
	for n := range vllm.MaxRanks {
		page.Ranks = append(page.Ranks, vllm.RankMetrics{Rank: n})
	}
	a.watch.models.Names = []string{"m"}
	for _, c := range []struct{ ranks, each int }{{1, rankBlocks}, {vllm.MaxRanks, mirrorBlocks / vllm.MaxRanks}} {
		if err := a.watch.settle(vllm.Page{Ranks: page.Ranks[:c.ranks]}, nil, a.watch.since); err != nil {
			t.Fatal(err)
		}
		for _, r := range a.watch.list() {
			if r.nodes != c.each {
				t.Fatalf("%d ranks with %d blocks each, want %d", c.ranks, r.nodes, c.each)
			}
		}
	}
}

func TestHeartbeatHasRoomForItsNames(t *testing.T) {
	a, err := New(Config{NATSURL: "nats://n:1"})
	if err != nil {
		t.Fatal(err)
	}
	m := vllm.Models{Names: []string{"m", "alias"}, Root: "/models/m"}
	for n := range 4000 {
		m.Adapters = append(m.Adapters, vllm.Adapter{Name: fmt.Sprint("adapter-", n), Root: strings.Repeat("/r", 500)})
	}
	a.watch.models = m
	info := a.watch.info(0)
	if n := proto.Size(info); n > protocol.MaxInfo || len(info.Models) != 2 || len(info.Adapters) < 30 || a.watch.unnamed != 4000-len(info.Adapters) {
		t.Errorf("%d bytes, %d models, %d adapters, %d left out", n, len(info.Models), len(info.Adapters), a.watch.unnamed)
	}
}
