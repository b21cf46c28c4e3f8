package sim

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// naiveCache is the rule written down: a list of free blocks in order, and who
// uses what.
type naiveCache struct {
	free  []int32 // the next to be taken first
	fresh int     // blocks never used
	key   map[int32]blockkey.Key
	users map[int32]int
}

func (n *naiveCache) find(k blockkey.Key) (int32, bool) {
	for at, have := range n.key {
		if have == k {
			return at, true
		}
	}
	return none, false
}

// The cache does what the rule says, whatever requests do with it, and tells
// every change of what it holds.
func TestCacheAgreesWithNaiveOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 8).Draw(t, "blocks")
		c := newCache(limit)
		n := &naiveCache{fresh: limit, key: map[int32]blockkey.Key{}, users: map[int32]int{}}
		told := map[blockkey.Key]bool{}
		c.change = func(held bool, at int32) {
			k := c.blocks[at].key
			if told[k] == held {
				t.Fatalf("key %d told twice as held %v", k, held)
			}
			told[k] = held
		}
		var using []int32
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				if c.room() == 0 {
					return
				}
				at := c.take()
				if n.users[at] > 0 {
					t.Fatalf("block %d is in use and was taken", at)
				}
				if i := slices.Index(n.free, at); i >= 0 {
					// An unused block with content goes only if it is the first
					// and none was never used.
					if n.key[at] != 0 && (i > 0 || n.fresh > 0) {
						t.Fatalf("took %d, the order is %v, %d fresh", at, n.free, n.fresh)
					}
					n.free = slices.Delete(n.free, i, i+1)
				} else {
					n.fresh--
				}
				delete(n.key, at)
				n.users[at] = 1
				using = append(using, at)
			},
			"use": func(t *rapid.T) {
				k := blockkey.Key(rapid.IntRange(1, 12).Draw(t, "key"))
				at, ok := c.use(k)
				want, held := n.find(k)
				if ok != held || ok && at != want {
					t.Fatalf("use of %d gave %d %v, want %d %v", k, at, ok, want, held)
				}
				if !ok {
					return
				}
				if i := slices.Index(n.free, at); i >= 0 {
					n.free = slices.Delete(n.free, i, i+1)
				}
				n.users[at]++
				using = append(using, at)
			},
			"name": func(t *rapid.T) {
				if len(using) == 0 {
					return
				}
				at := rapid.SampledFrom(using).Draw(t, "block")
				k := blockkey.Key(rapid.IntRange(1, 12).Draw(t, "key"))
				if n.key[at] != 0 {
					return // content does not change while it is used
				}
				c.name(at, []blockkey.Key{k}, 0)
				if _, held := n.find(k); !held {
					n.key[at] = k
				}
			},
			"release": func(t *rapid.T) {
				if len(using) == 0 {
					return
				}
				i := rapid.IntRange(0, len(using)-1).Draw(t, "which")
				keep := rapid.Bool().Draw(t, "keep")
				at := using[i]
				using = slices.Delete(using, i, i+1)
				c.release(at, keep)
				if n.users[at]--; n.users[at] == 0 {
					if keep {
						n.free = append(n.free, at)
					} else {
						n.free = slices.Insert(n.free, 0, at)
					}
				}
			},
			"": func(t *rapid.T) {
				if c.room() != n.fresh+len(n.free) || c.used()+c.room() != limit {
					t.Fatalf("room %d, used %d of %d, want room %d", c.room(), c.used(), limit, n.fresh+len(n.free))
				}
				held := map[blockkey.Key]bool{}
				for k := blockkey.Key(1); k <= 12; k++ {
					if _, ok := n.find(k); ok != (c.match([]blockkey.Key{k}, 1) == 1) {
						t.Fatalf("key %d held: %v", k, ok)
					} else if ok {
						held[k] = true
					}
				}
				for k, h := range told {
					if h != held[k] {
						t.Fatalf("key %d was told as held %v", k, h)
					}
				}
			},
		})
	})
}

func TestHeadsLiveLongest(t *testing.T) {
	c := newCache(4)
	var blocks []int32
	for i := range 4 {
		at := c.take()
		c.name(at, []blockkey.Key{1, 2, 3, 4}, i)
		blocks = append(blocks, at)
	}
	for _, at := range slices.Backward(blocks) {
		c.release(at, true)
	}
	var gone []blockkey.Key
	c.change = func(_ bool, at int32) { gone = append(gone, c.blocks[at].key) }
	for range 3 {
		c.take()
	}
	if diff := cmp.Diff([]blockkey.Key{4, 3, 2}, gone); diff != "" {
		t.Error(diff)
	}
}
