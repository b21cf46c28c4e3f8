package index_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// chain returns n keys of the chain c, forked from chain 0 at position fork.
func chain(c uint64, fork, n int) []blockkey.Key {
	keys := make([]blockkey.Key, n)
	k := blockkey.Key(1)
	for i := range keys {
		local := uint64(i)
		if i >= fork {
			local += c << 32
		}
		k = blockkey.Chain(k, local)
		keys[i] = k
	}
	return keys
}

type depths map[index.Member][index.Lanes]uint32

func match(x *index.Index, keys []blockkey.Key) depths {
	got := make(depths)
	var a index.Answer
	x.Match(keys, &a)
	for h, depth := range a.All() {
		d := got[h.Member()]
		for l := range index.Lane(index.Lanes) {
			if h.On(l) {
				d[l] = depth
			}
		}
		got[h.Member()] = d
	}
	return got
}

func TestMatchCountsLeadingBlocks(t *testing.T) {
	x := index.New(index.Config{})
	a, b := chain(0, 0, 10), chain(1, 4, 10)
	x.Store(1, index.LaneGPU, nil, 0, a[:8])
	x.Store(1, index.LaneHost, nil, 0, a)
	x.Store(2, index.LaneGPU, nil, 0, a[:4])
	x.Store(2, index.LaneGPU, a[:4], 4, b[4:])
	x.Store(3, index.LaneGPU, a[:1], 1, a[1:]) // a hole at the head
	for _, c := range []struct {
		name string
		keys []blockkey.Key
		want depths
	}{
		{"trunk", a, depths{1: {8, 10}, 2: {4}}},
		{"branch", b, depths{1: {4, 4}, 2: {10}}},
		{"short", a[:2], depths{1: {2, 2}, 2: {2}}},
		{"unknown", chain(2, 0, 3), depths{}},
		{"empty", nil, depths{}},
	} {
		if d := cmp.Diff(c.want, match(x, c.keys)); d != "" {
			t.Errorf("%s: -want +got\n%s", c.name, d)
		}
	}
	x.Remove(1, index.LaneGPU, a[:5], 5, a[5:6])
	if got := match(x, a)[1][index.LaneGPU]; got != 5 {
		t.Errorf("depth after a hole at 5 = %d", got)
	}
	x.Forget(1)
	if d := cmp.Diff(depths{2: {4}}, match(x, a)); d != "" {
		t.Errorf("after forget: -want +got\n%s", d)
	}
	if got := x.Count(1, index.LaneHost); got != 0 {
		t.Errorf("count after forget = %d", got)
	}
}
