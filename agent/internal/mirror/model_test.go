package mirror

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"
	"testing"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"pgregory.net/rapid"
)

const modelBlock = 2 // tokens a block

// engine is a small engine with the rules of vLLM's block pool: physical blocks
// with reference counts, never deduplicated; a free list in eviction order;
// hits before allocation; a full and perhaps other groups; a host and a disk
// tier that forget on their own.
type engine struct {
	send   func(any)
	blocks []physical
	free   []int // next to be evicted first
	groups []GroupKind
	window int // blocks that a hit needs in a sliding group
	chunk  int // blocks of a chunk
	drop   Drop
	below  [3]map[uint64]bool
	chain  map[uint64]content // of every hash ever used
	busy   [][]int            // physical blocks of running requests

	physicalEra bool
}

type physical struct {
	refs   int
	cached bool
	group  int
	hash   uint64
}

type content struct {
	parent uint64
	root   bool
	key    blockkey.Key
}

func newEngine(n int, groups []GroupKind, send func(any)) *engine {
	e := &engine{send: send, groups: groups, blocks: make([]physical, n), chain: map[uint64]content{}, window: 1 + n%2, chunk: 2 + n%3}
	for i := range e.blocks {
		e.free = append(e.free, i)
	}
	for tier := range e.below {
		e.below[tier] = map[uint64]bool{}
	}
	return e
}

// prompt is a chain of blocks by their contents.
type prompt struct {
	adapter, salt string
	blocks        []uint32
}

func (p prompt) tokens() []uint32 {
	var tokens []uint32
	for _, b := range p.blocks {
		tokens = append(tokens, b, 100+b)
	}
	return tokens
}

func (e *engine) hashes(p prompt) []uint64 {
	root := blockkey.Scope{Model: "m", Adapter: p.adapter, Salt: p.salt, BlockSize: modelBlock}.Root()
	keys := blockkey.AppendTokens(nil, root, p.tokens(), modelBlock, nil)
	h := fnv.New64a()
	fmt.Fprint(h, p.adapter, "/", p.salt)
	var hashes []uint64
	for k, b := range p.blocks {
		_ = binary.Write(h, binary.LittleEndian, b)
		hash := h.Sum64()
		c := content{root: k == 0, key: keys[k]}
		if k > 0 {
			c.parent = hashes[k-1]
		}
		e.chain[hash] = c
		hashes = append(hashes, hash)
	}
	return hashes
}

func (e *engine) find(group int, hash uint64) int {
	for i, b := range e.blocks {
		if b.cached && b.group == group && b.hash == hash {
			return i
		}
	}
	return -1
}

// drops says whether a group drops the last block of a hit.
func (e *engine) drops(group int) bool {
	last := 0
	for g, kind := range e.groups {
		if kind != State {
			last = g
		}
	}
	kind := e.groups[group]
	return e.drop == DropAttention && kind != State || e.drop == DropLast && kind == e.groups[last]
}

// accepts says whether a group accepts a hit of so many blocks, by vLLM's rule.
func (e *engine) accepts(group int, hashes []uint64, hit int) bool {
	from, to := 0, hit
	switch e.groups[group] {
	case Sliding:
		from = hit - e.window
	case State:
		from = hit - 1
	case Chunked:
		from = hit / e.chunk * e.chunk
	}
	if e.drops(group) {
		to++
	}
	for k := max(0, from); k < to; k++ {
		if k >= len(hashes) || e.find(group, hashes[k]) < 0 {
			return false
		}
	}
	return true
}

// hit returns the longest prefix that all groups accept, among the first most
// blocks.
func (e *engine) hit(hashes []uint64, most int) int {
	for hit := most; hit > 0; hit-- {
		ok := true
		for g := range e.groups {
			ok = ok && e.accepts(g, hashes[:most], hit)
		}
		if ok {
			return hit
		}
	}
	return 0
}

func (e *engine) store(p prompt, hashes []uint64, group, from, to int, present []uint64) {
	s := Store{
		Group: group, Kind: e.groups[group], Window: e.window*modelBlock + 1, Hashes: present,
		Tokens: p.tokens()[from*modelBlock : to*modelBlock], BlockSize: modelBlock,
		Adapter: p.adapter, Physical: e.physicalEra,
	}
	if from > 0 {
		s.HasParent, s.Parent = true, hashes[from-1]
	} else {
		s.Salt = p.salt
	}
	e.send(s)
}

// run computes a prompt, reports its hit if asked, and stays busy or not.
func (e *engine) run(p prompt, skipHits, report, stay bool, split int, mask []bool) {
	hashes := e.hashes(p)
	n := len(hashes)
	hit := 0
	if !skipHits {
		hit = e.hit(hashes, n-1)
	}
	if report && hit > 0 && !e.physicalEra {
		for g := range e.groups {
			e.store(p, hashes, g, 0, hit, hashes[:hit])
		}
	}
	var mine []int
	for g := range e.groups {
		for k := range hit {
			if i := e.find(g, hashes[k]); i >= 0 {
				if e.blocks[i].refs == 0 {
					e.free = slices.DeleteFunc(e.free, func(f int) bool { return f == i })
				}
				e.blocks[i].refs++
				mine = append(mine, i)
			}
		}
	}
	split = max(hit, min(split, n))
	for _, part := range [][2]int{{hit, split}, {split, n}} {
		if part[0] == part[1] || len(e.free) < (part[1]-part[0])*len(e.groups) {
			continue
		}
		if part[0] > hit && part[0] == split && len(mine) == 0 {
			break // the first part didn't fit
		}
		for g, kind := range e.groups {
			var present []uint64
			for k := part[0]; k < part[1]; k++ {
				if kind != Full && mask[k%len(mask)] {
					continue
				}
				i := e.free[0]
				e.free = e.free[1:]
				e.evict(i)
				e.blocks[i] = physical{refs: 1, cached: true, group: g, hash: hashes[k]}
				mine = append(mine, i)
				present = append(present, hashes[k])
			}
			e.store(p, hashes, g, part[0], part[1], present)
		}
	}
	if stay {
		e.busy = append(e.busy, mine)
	} else {
		e.finish(mine)
	}
}

func (e *engine) finish(mine []int) {
	for _, i := range slices.Backward(mine) {
		if e.blocks[i].refs--; e.blocks[i].refs == 0 {
			e.free = append(e.free, i)
		}
	}
}

func (e *engine) evict(i int) {
	if b := &e.blocks[i]; b.cached {
		b.cached = false
		e.send(Remove{Group: b.group, HasGroup: true, Hashes: []uint64{b.hash}})
	}
}

// truth returns the blocks that a request could really use, per lane, and those
// at which a hit may end.
func (e *engine) truth() [Lanes + 1]map[blockkey.Key]bool {
	var held [Lanes + 1]map[blockkey.Key]bool
	for l := range held {
		held[l] = map[blockkey.Key]bool{}
	}
	var visible func(l Lane, hash uint64) bool
	visible = func(l Lane, hash uint64) bool {
		c := e.chain[hash]
		above := func(l Lane) bool { return c.root || visible(l, c.parent) }
		switch l {
		case LaneGPU:
			for g, kind := range e.groups {
				if kind == Full && e.find(g, hash) < 0 {
					return false
				}
			}
			return above(LaneGPU)
		case LaneHost:
			return visible(LaneGPU, hash) || e.below[Host][hash] && above(LaneHost)
		default:
			return visible(LaneHost, hash) || (e.below[Host][hash] || e.below[Disk][hash]) && above(LaneDisk)
		}
	}
	dropped := 0
	if e.drop != DropNone {
		dropped = 1
	}
	for hash, c := range e.chain {
		for l := range Lane(Lanes) {
			if visible(l, hash) {
				held[l][c.key] = true
			}
		}
		hashes := e.path(hash)
		end, sparse := visible(LaneGPU, hash) && len(hashes) > dropped, false
		for g, kind := range e.groups {
			end = end && e.accepts(g, hashes, len(hashes)-dropped)
			sparse = sparse || kind != Full
		}
		if end && sparse {
			held[Ends][c.key] = true
		}
	}
	return held
}

// path is the chain that ends with a hash.
func (e *engine) path(hash uint64) []uint64 {
	c := e.chain[hash]
	if c.root {
		return []uint64{hash}
	}
	return append(e.path(c.parent), hash)
}

// known returns hashes with a copy somewhere, in a stable order.
func (e *engine) known() []uint64 {
	set := map[uint64]bool{}
	for _, b := range e.blocks {
		if b.cached {
			set[b.hash] = true
		}
	}
	for _, tier := range e.below {
		for hash := range tier {
			set[hash] = true
		}
	}
	hashes := make([]uint64, 0, len(set))
	for hash := range set {
		hashes = append(hashes, hash)
	}
	slices.Sort(hashes)
	return hashes
}

func TestMirrorFollowsTheBlockPool(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		groups := rapid.SampledFrom([][]GroupKind{
			{Full}, {Full}, {Sliding, Full}, {Full, Sliding}, {Full, Full}, {State, State, Full}, {Full, State},
			{Chunked, Full}, {Sliding, State, Full},
		}).Draw(t, "groups")
		n := rapid.IntRange(4, 24).Draw(t, "blocks") * len(groups)
		drop := rapid.SampledFrom([]Drop{DropNone, DropNone, DropAttention, DropLast}).Draw(t, "drop")
		m := New(Config{Model: "m", MaxBlocks: n})
		r := newReplica()
		undrained := 0
		e := newEngine(n, groups, func(event any) {
			undrained++
			switch event := event.(type) {
			case Store:
				m.Store(event)
			case Remove:
				m.Remove(event)
			case Tier:
				m.Clear(event)
			}
		})
		e.drop = drop
		early := rapid.Bool().Draw(t, "the rule is known early")
		rule := Rule{Chunk: e.chunk * modelBlock, Drop: drop}
		if early {
			m.SetRule(rule)
		}
		e.physicalEra = rapid.Bool().Draw(t, "physical era")
		drain := func(t *rapid.T) {
			undrained = 0
			m.SetRule(rule)
			if err := r.drainInto(m); err != nil {
				t.Fatal(err)
			}
			exact := m.Stats().Repeated == 0
			for l, want := range e.truth() {
				for key := range r.held[l] {
					if !want[key] {
						t.Fatalf("lane %d: %x is believed held and is not", l, key)
					}
				}
				if exact && len(r.held[l]) != len(want) {
					t.Fatalf("lane %d: %d held, %d believed", l, len(want), len(r.held[l]))
				}
			}
			if m.Overflown() || m.Stats().UnknownRemoved > 0 || m.Stats().Contradictions > 0 {
				t.Fatalf("drifted: %+v", m.Stats())
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"run": func(t *rapid.T) {
				p := prompt{
					adapter: rapid.SampledFrom([]string{"", "", "a"}).Draw(t, "adapter"),
					salt:    rapid.SampledFrom([]string{"", "", "s"}).Draw(t, "salt"),
					blocks:  rapid.SliceOfN(rapid.Uint32Range(1, 2), 1, 6).Draw(t, "prompt"),
				}
				e.run(p,
					rapid.IntRange(0, 5).Draw(t, "skip hits") == 0,
					rapid.Bool().Draw(t, "report"),
					rapid.IntRange(0, 3).Draw(t, "stay") == 0,
					rapid.IntRange(0, 6).Draw(t, "split"),
					rapid.SliceOfN(rapid.Bool(), 1, 4).Draw(t, "mask"))
			},
			"finish": func(t *rapid.T) {
				if len(e.busy) > 0 {
					k := rapid.IntRange(0, len(e.busy)-1).Draw(t, "request")
					e.finish(e.busy[k])
					e.busy = slices.Delete(e.busy, k, k+1)
				}
			},
			"lose": func(t *rapid.T) {
				if len(e.free) > 0 {
					e.evict(rapid.SampledFrom(e.free).Draw(t, "block"))
				}
			},
			"reset": func(t *rapid.T) {
				if len(e.busy) == 0 && rapid.IntRange(0, 3).Draw(t, "really") == 0 {
					for i := range e.blocks {
						e.blocks[i].cached = false
					}
					e.send(GPU)
				}
			},
			"copy down": func(t *rapid.T) {
				known := e.known()
				if len(known) == 0 {
					t.Skip()
				}
				tier := rapid.SampledFrom([]Tier{Host, Disk}).Draw(t, "tier")
				hash := rapid.SampledFrom(known).Draw(t, "hash")
				e.below[tier][hash] = true
				for g := range groups {
					e.send(Store{Tier: tier, Group: g, Hashes: []uint64{hash}})
				}
			},
			"forget below": func(t *rapid.T) {
				tier := rapid.SampledFrom([]Tier{Host, Disk}).Draw(t, "tier")
				for _, hash := range e.known() {
					if e.below[tier][hash] && rapid.Bool().Draw(t, "this") {
						delete(e.below[tier], hash)
						for g := range groups {
							e.send(Remove{Tier: tier, Group: g, HasGroup: true, Hashes: []uint64{hash}})
						}
					}
				}
			},
			"drain": drain,
			"": func(t *rapid.T) {
				if err := m.check(undrained == 0); err != nil {
					t.Fatal(err)
				}
			},
		})
		drain(t)
	})
}
