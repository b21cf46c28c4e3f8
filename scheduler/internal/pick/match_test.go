package pick

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

func TestCachedTokensByTier(t *testing.T) {
	for _, c := range []struct {
		name            string
		length          int
		gpu, host, disk int // depth of each lane
		want            Cached
	}{
		{"nothing", 100, 0, 0, 0, Cached{}},
		{"part of the prompt", 100, 3, 3, 3, Cached{GPU: 48}},
		{"a partial last block", 100, 6, 6, 6, Cached{GPU: 96}},
		{"the last token is computed", 96, 6, 6, 6, Cached{GPU: 80}},
		{"a connector may leave the last block out", 96, 0, 6, 6, Cached{Host: 80}},
		{"the last block from the host", 96, 5, 6, 6, Cached{GPU: 80}},
		{"each tier has what is beyond the last", 100, 1, 3, 6, Cached{GPU: 16, Host: 32, Disk: 48}},
		{"disk only beyond the GPU", 96, 2, 2, 6, Cached{GPU: 32, Disk: 48}},
		{"one token", 1, 0, 0, 0, Cached{}},
		{"one block", 16, 1, 1, 1, Cached{}},
		{"one block on the host", 16, 0, 1, 1, Cached{}},
	} {
		b := newBed(t)
		id := b.join("m")
		le := prompt(1, 0, c.length)
		b.hold(id, index.LaneGPU, le, c.gpu)
		b.hold(id, index.LaneHost, le, c.host)
		b.hold(id, index.LaneDisk, le, c.disk)
		d := b.pick(Request{Prompt: tokens(le)})
		got := d.Candidates[0]
		if diff := cmp.Diff(c.want, got.Cached); diff != "" {
			t.Errorf("%s: %s", c.name, diff)
		}
		if sum := got.Cached.Known() + got.Uncached; sum != c.length || d.PromptTokens != c.length {
			t.Errorf("%s: cached and uncached are %d of %d", c.name, sum, c.length)
		}
	}
}

// Peers' bug 3: what one member evicts, the other still has. Bug 4: what lies
// behind a hole does not count.
func TestEvictionIsOneMembersAndHolesEndAPrefix(t *testing.T) {
	b := newBed(t)
	m0, m1 := b.join("m0"), b.join("m1")
	le := prompt(1, 0, 100)
	b.gpu(m0, le, 6)
	b.gpu(m1, le, 6)
	keys, _ := blockkey.AppendBytes(nil, blockkey.Scope{Model: "model", BlockSize: 16}.Root(), le, 16, nil)
	b.index.Remove(index.Member(m0), index.LaneGPU, keys[:2], 2, keys[2:3])
	b.index.Remove(index.Member(m0), index.LaneHost, keys[:2], 2, keys[2:3])
	b.index.Remove(index.Member(m0), index.LaneDisk, keys[:2], 2, keys[2:3])
	got := cachedBy(b.pick(Request{Prompt: tokens(le)}))
	if want := map[string]int{"m0": 32, "m1": 96}; !cmp.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// An engine's own rule says where a hit may end, and what is dropped of it.
func TestHitsFollowTheEnginesRule(t *testing.T) {
	drops, toTheEnd := fleet.HitRule{Dropped: 1}, fleet.HitRule{Dropped: 1, DroppedToTheEnd: true}
	for _, c := range []struct {
		name        string
		rule        fleet.HitRule
		length, gpu int
		ends        []int // blocks up to each end
		want        int
	}{
		{"no end", fleet.HitRule{Ends: true}, 100, 6, nil, 0},
		{"the deepest end", fleet.HitRule{Ends: true}, 100, 6, []int{2, 4}, 64},
		{"an end behind the prompt's last token", fleet.HitRule{Ends: true}, 96, 6, []int{3, 6}, 48},
		{"a dropped block", drops, 100, 6, nil, 80},
		{"a token must be left behind the dropped block", drops, 96, 6, nil, 64},
		{"or not", toTheEnd, 96, 6, nil, 80},
		{"nothing is left", drops, 100, 1, nil, 0},
		{"ends that are dropped", fleet.HitRule{Ends: true, Dropped: 1}, 100, 6, []int{3, 6}, 80},
		{"ends that are dropped, whole blocks", fleet.HitRule{Ends: true, Dropped: 1, DroppedToTheEnd: true}, 96, 6, []int{6}, 80},
	} {
		b := newBed(t)
		id := b.join("m")
		le := prompt(1, 0, c.length)
		b.hold(id, index.LaneGPU, le, c.gpu)
		b.hold(id, index.LaneHost, le, c.length/16)
		keys, _ := blockkey.AppendBytes(nil, blockkey.Scope{Model: "model", BlockSize: 16}.Root(), le, 16, nil)
		for _, e := range c.ends {
			b.index.MarkEnds(index.Member(id), blockkey.Before(keys, e-1), uint32(e-1), keys[e-1:e])
		}
		b.fleet.SetCacheState(id, fleet.CacheState{Trust: fleet.Exact, Epoch: 1, Rule: c.rule})
		if got := b.pick(Request{Prompt: tokens(le)}).Candidates[0].Cached; got != (Cached{GPU: c.want}) {
			t.Errorf("%s: %+v, want %d", c.name, got, c.want)
		}
	}
}

// Of a prompt of whole blocks that an engine with a tier below the GPU holds, it
// may find the last one, too, also where all of it is in GPU memory.
func TestWholeBlocksAreALowerBoundWhereAnEngineOffloads(t *testing.T) {
	le := prompt(1, 0, 96)
	for _, lane := range []index.Lane{index.LaneGPU, index.LaneHost} {
		for _, offloads := range []bool{true, false} {
			b := newBed(t)
			id := b.joinAs(fleet.Info{Name: "m", Models: []string{"model"}, BlockSize: 16, Offloads: offloads})
			for l := lane; l <= index.LaneDisk; l++ {
				b.hold(id, l, le, 6)
			}
			for length, want := range map[int]fleet.Trust{96: fleet.Approximate, 95: fleet.Exact} {
				if !offloads {
					want = fleet.Exact
				}
				d := b.pick(Request{Prompt: tokens(le[:4*length])})
				if got := d.Candidates[0]; got.Trust != want || got.Cached.Known() != 80 {
					t.Errorf("lane %d, offloads %v, %d tokens: %+v", lane, offloads, length, got)
				}
			}
		}
	}
}

func TestRequestsThatSkipTheCacheGetNoCredit(t *testing.T) {
	b := newBed(t)
	id := b.join("m")
	le := prompt(1, 0, 100)
	b.gpu(id, le, 6)
	if got := b.pick(Request{Prompt: tokens(le), SkipsCache: true}).Candidates[0].Cached; got != (Cached{}) {
		t.Errorf("%+v", got)
	}
}

func cachedBy(d *Decision) map[string]int {
	m := make(map[string]int)
	for _, c := range d.Candidates {
		m[c.Member.Info.Name] = c.Cached.Known()
	}
	return m
}

func TestTrustDecidesWhatCounts(t *testing.T) {
	for trust, want := range map[fleet.Trust]int{fleet.Exact: 96, fleet.Approximate: 96, fleet.Syncing: 0, fleet.Unknown: 0} {
		b := newBed(t)
		id := b.join("m")
		le := prompt(1, 0, 100)
		b.gpu(id, le, 6)
		b.trust(id, trust)
		d := b.pick(Request{Prompt: tokens(le)})
		if got := d.Candidates[0].Cached.Known(); got != want {
			t.Errorf("%v: %d tokens, want %d", trust, got, want)
		}
		if (d.Fallback() == "") != (trust == fleet.Exact) {
			t.Errorf("%v: fallback %q", trust, d.Fallback())
		}
	}
}

// Peers' bug 8: lanes that hold assumptions are never taken for the GPU.
func TestAssumedLanesAreNotFacts(t *testing.T) {
	b := newBed(t)
	id := b.join("m")
	le := prompt(1, 0, 100)
	b.hold(id, index.LanePredicted, le, 6)
	b.hold(id, index.LaneApproximate, le, 6)
	if got := b.pick(Request{Prompt: tokens(le)}).Candidates[0].Cached; got != (Cached{}) {
		t.Errorf("%+v", got)
	}
}

// Adapters and salts have keys of their own.
func TestScopesNeverMeet(t *testing.T) {
	b := newBed(t)
	id := b.joinAs(fleet.Info{Name: "m", Models: []string{"model", "alias"}, BlockSize: 16, Adapters: []fleet.Adapter{{Name: "lora"}}})
	le := prompt(1, 0, 100)
	b.holdIn(blockkey.Scope{Model: "model", Adapter: "lora", Salt: "s", BlockSize: 16}, id, index.LaneGPU, le, 6)
	for _, c := range []struct {
		r    Request
		want int
	}{
		{Request{Model: "lora", Salt: "s"}, 96},
		{Request{Model: "alias", Adapter: "lora", Salt: "s"}, 96},
		{Request{Model: "lora"}, 0},
		{Request{Model: "model", Salt: "s"}, 0},
	} {
		c.r.Prompt = tokens(le)
		d := b.pick(c.r)
		if got := d.Candidates[0].Cached.GPU; got != c.want {
			t.Errorf("%+v: %d, want %d", c.r.Model, got, c.want)
		}
	}
}

// Members with another size of blocks have their own keys of the same tokens.
func TestBlockSizesMix(t *testing.T) {
	b := newBed(t)
	m16 := b.join("m16")
	m32 := b.joinAs(fleet.Info{Name: "m32", Models: []string{"model"}, BlockSize: 32})
	b.joinAs(fleet.Info{Name: "new", Models: []string{"model"}})
	le := prompt(1, 0, 200)
	b.gpu(m16, le, 5)
	b.holdIn(blockkey.Scope{Model: "model", BlockSize: 32}, m32, index.LaneGPU, le, 4)
	if got, want := cachedBy(b.pick(Request{Prompt: tokens(le)})), (map[string]int{"m16": 80, "m32": 128, "new": 0}); !cmp.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	keys, _ := blockkey.AppendBytes(nil, blockkey.Scope{Model: "model", BlockSize: 16}.Root(), le, 16, nil)
	d := b.pick(Request{Prompt: Prompt{Keys: keys, BlockSize: 16, Length: 200}})
	if got, want := cachedBy(d), (map[string]int{"m16": 80, "m32": 0, "new": 0}); !cmp.Equal(got, want) || !strings.Contains(d.Fallback(), "1 of 3") {
		t.Errorf("%v, want %v; fallback %q", got, want, d.Fallback())
	}
}
