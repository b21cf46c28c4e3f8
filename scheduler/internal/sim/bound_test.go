package sim

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// naiveLRU lists what it holds, what was used longest ago first.
type naiveLRU struct {
	limit int
	keys  []blockkey.Key
}

func (n *naiveLRU) use(chain []blockkey.Key) int {
	held := 0
	for held < len(chain) && slices.Contains(n.keys, chain[held]) {
		held++
	}
	var used []blockkey.Key
	for _, k := range chain {
		if at := slices.Index(n.keys, k); at >= 0 {
			n.keys = slices.Delete(n.keys, at, at+1)
		} else if len(n.keys)+len(used) == n.limit {
			if len(n.keys) == 0 {
				break // the chain fills the pool
			}
			n.keys = n.keys[1:]
		}
		used = append(used, k)
	}
	slices.Reverse(used)
	n.keys = append(n.keys, used...)
	return held
}

// The pool is an LRU of blocks, heads the longest, and no pool that does not know
// the future finds more than the best one.
func TestPooledLRUIsAnLRUThatTheBestPoolPasses(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 20).Draw(t, "blocks")
		var list []arrival.Request
		for range rapid.IntRange(1, 40).Draw(t, "requests") {
			n := rapid.IntRange(1, 12).Draw(t, "length")
			list = append(list, arrival.Request{Length: n*16 + 1, Keys: keys(rapid.IntRange(1, 5).Draw(t, "document"), n)})
		}
		best, err := bestHits(scripted(16, list...), limit)
		if err != nil {
			t.Fatal(err)
		}
		pool, naive := &lruPool{cache: newCache(limit)}, &naiveLRU{limit: limit}
		lru, most := 0, 0
		for i, r := range list {
			got, want := pool.use(r.Keys), naive.use(r.Keys)
			if got != want {
				t.Fatalf("request %d: %d blocks held, want %d", i, got, want)
			}
			if pool.used() != 0 || len(pool.byKey) != len(naive.keys) {
				t.Fatalf("request %d: %d blocks in use, %d held, want %d", i, pool.used(), len(pool.byKey), len(naive.keys))
			}
			lru, most = lru+got, most+int(best[i])
		}
		if lru > most {
			t.Errorf("LRU found %d blocks, the best pool %d", lru, most)
		}
	})
}

// Nothing is found twice of a request that is sent again, and what came out can be
// found by the next turn.
func TestPooledLRUFindsTheTurnBefore(t *testing.T) {
	first := arrival.Request{Length: 64, Output: 64, Keys: keys(1, 8)}
	next := arrival.Request{At: 20_000_000_000, Length: 144, Output: 16, Keys: keys(1, 10)}
	c := fleetOf(2, 16, []arrival.Request{first, next})
	c.Policy, c.Restarts = PooledLRU, []Restart{{Pod: 0, At: 1_000_000}}
	r := mustRun(t, c)
	if got, want := r.TokenHit, 128.0/(64+64+144); got != want || r.Resent != 1 {
		t.Errorf("%v of the tokens found, want %v; %d sent again", got, want, r.Resent)
	}
}
