package mirror

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvscout/kvscout/agent/internal/blockhash"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"pgregory.net/rapid"
)

// sizedGroup is a group of an engine whose groups have blocks of any size.
type sizedGroup struct {
	kind   GroupKind
	size   int // of a block, in units of the hash
	window int // tokens
}

// unitEngine keeps for each group and hash how many blocks there are, and tells
// them with the holes that a real engine leaves: what a group keeps of a prompt
// is drawn.
type unitEngine struct {
	hasher *blockhash.Hasher
	groups []sizedGroup
	align  int // of hits, in units
	inside bool
	drop   Drop
	chunk  int // tokens
	copies []map[uint64]int
	told   map[int]bool // groups that events have named
	send   func(any)
	chains map[string][]uint64
}

func (e *unitEngine) hashes(tokens []uint32) []uint64 {
	name := fmt.Sprint(tokens)
	if known, ok := e.chains[name]; ok {
		return known
	}
	digest := e.hasher.Root()
	var hashes []uint64
	for k := range len(tokens) / modelBlock {
		digest, _ = e.hasher.Next(&digest, tokens[k*modelBlock:(k+1)*modelBlock], &blockhash.Extras{})
		hashes = append(hashes, e.hasher.Short(&digest))
	}
	e.chains[name] = hashes
	return hashes
}

func (e *unitEngine) drops(g int) bool {
	if e.groups[g].kind == State {
		return false
	}
	last := 0
	for k := range e.groups {
		if e.groups[k].kind != State {
			last = k
		}
	}
	return e.drop == DropAttention || e.drop == DropLast && e.groups[g] == e.groups[last]
}

// lag is what a group drops, in units.
func (e *unitEngine) lag(g int) int {
	switch {
	case !e.drops(g):
		return 0
	case e.inside:
		return 1
	}
	return e.groups[g].size
}

func (e *unitEngine) dropped() int {
	most := 0
	for g := range e.groups {
		most = max(most, e.lag(g))
	}
	if e.drop != DropNone {
		most = max(most, 1)
	}
	return most
}

// accepts says whether a group accepts a hit of so many units, as the contract
// has it.
func (e *unitEngine) accepts(g int, hashes []uint64, hit int) bool {
	group := e.groups[g]
	size, held := group.size, func(end int) bool { return end <= len(hashes) && e.copies[g][hashes[end-1]] > 0 }
	if group.kind == State {
		return held(hit)
	}
	to := hit + e.lag(g)
	from := 0
	tokens := size * modelBlock
	switch group.kind {
	case Sliding:
		from = max(0, hit/size-(group.window-2+tokens)/tokens) * size
	case Chunked:
		from = hit * modelBlock / e.chunk * e.chunk / tokens * size
	}
	for end := from + size; end <= to; end += size {
		if !held(end) {
			return false
		}
	}
	return to%size == 0 || group.kind == Full && held(to)
}

// ends are the units at which the engine would accept a hit of a prompt to end;
// where blocks are dropped, the last of them.
func (e *unitEngine) ends(hashes []uint64) []bool {
	ends := make([]bool, len(hashes))
	dropped := e.dropped()
	for k := range ends {
		hit := k + 1 - dropped
		ends[k] = hit > 0 && hit%e.align == 0
		for g := range e.groups {
			ends[k] = ends[k] && e.accepts(g, hashes, hit)
		}
	}
	return ends
}

// store tells what each group keeps of units from and up to of a prompt.
func (e *unitEngine) store(t *rapid.T, tokens []uint32, from, to int) {
	hashes := e.hashes(tokens)
	for g, group := range e.groups {
		first, last := from/group.size*group.size, to/group.size*group.size
		if first == last {
			continue
		}
		s := Store{
			Group: g, Kind: group.kind, Window: group.window, BlockSize: group.size * modelBlock,
			Tokens: tokens[first*modelBlock : last*modelBlock], HasParent: first > 0, Physical: true,
		}
		if first > 0 {
			s.Parent = hashes[first-1]
		}
		for end := first + group.size; end <= last; end += group.size {
			if group.kind != Full && rapid.IntRange(0, 2).Draw(t, "hole") == 0 {
				continue
			}
			s.Hashes = append(s.Hashes, hashes[end-1])
			e.copies[g][hashes[end-1]]++
		}
		e.told[g] = true
		e.send(s)
	}
	// The beginning of a block, filled as far as the prompt goes.
	for g, group := range e.groups {
		if !e.inside || to%group.size == 0 || to == from || rapid.IntRange(0, 2).Draw(t, "no part") == 0 {
			continue
		}
		s := Store{
			Group: g, Kind: group.kind, Window: group.window, BlockSize: modelBlock, Hashes: hashes[to-1 : to],
			Tokens: tokens[(to-1)*modelBlock : to*modelBlock], HasParent: to > 1, Physical: true,
		}
		if to > 1 {
			s.Parent = hashes[to-2]
		}
		e.copies[g][hashes[to-1]]++
		e.told[g] = true
		e.send(s)
	}
}

func lcm(sizes []sizedGroup) int {
	all := 1
	for _, g := range sizes {
		all = all / divisor(all, g.size) * g.size
	}
	return all
}

// Groups of any sizes, with holes, with and without full attention: the mirror's
// ends are the engine's, and never more than those, also where the seed is not
// known, where groups show up one by one, and after a restart of the agent.
func TestMirrorFollowsGroupsOfAnySize(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		groups := rapid.SampledFrom([][]sizedGroup{
			{{Sliding, 1, 5}},
			{{Sliding, 2, 9}, {Full, 1, 0}},
			{{Sliding, 1, 3}, {Full, 2, 0}},
			{{State, 3, 0}, {State, 3, 0}, {Full, 3, 0}},
			{{Sliding, 1, 4}, {Sliding, 2, 6}},
			{{Chunked, 1, 0}, {Full, 2, 0}},
			{{Full, 2, 0}, {State, 4, 0}},
			{{Sliding, 1, 4}, {State, 2, 0}, {Full, 2, 0}},
		}).Draw(t, "groups")
		known := rapid.Bool().Draw(t, "the seed is known")
		seed := "of nobody"
		if known {
			seed = rapid.SampledFrom([]string{blockhash.DefaultSeed, "0", "special"}).Draw(t, "seed")
		}
		algorithm := rapid.SampledFrom(blockhash.Algorithms).Draw(t, "algorithm")
		hasher, err := blockhash.New(algorithm, seed, false)
		if err != nil {
			t.Fatal(err)
		}
		e := &unitEngine{hasher: hasher, groups: groups, chunk: 8, align: lcm(groups), chains: map[string][]uint64{}, told: map[int]bool{}}
		e.drop = rapid.SampledFrom([]Drop{DropNone, DropNone, DropAttention, DropLast}).Draw(t, "drop")
		rule := Rule{Chunk: e.chunk, Drop: e.drop, Algorithm: algorithm}
		if known {
			rule.Seed = seed
		}
		units := 0
		for _, g := range groups {
			e.copies = append(e.copies, map[uint64]int{})
			units = divisor(units, g.size)
		}
		if units > 1 { // hits inside of blocks: the engine says what its unit is
			rule.Unit = modelBlock
		}
		if slices.ContainsFunc(groups, func(g sizedGroup) bool { return g.kind == State && g.size > 1 }) {
			e.align, e.inside = 1, true
		}
		m := New(Config{Model: "m", Rule: rule})
		for g, group := range groups {
			m.Expect(Store{Group: g, Kind: group.kind, Window: group.window, BlockSize: group.size * modelBlock})
		}
		r := newReplica()
		var log []any
		apply := func(event any) {
			switch event := event.(type) {
			case Store:
				m.Store(event)
			case Remove:
				m.Remove(event)
			}
		}
		e.send = func(event any) {
			log = append(log, event)
			apply(event)
		}
		var prompts [][]uint32
		drain := func(t *rapid.T) {
			for told := 0; m.Outgrown() != ""; told++ {
				if told == 2 {
					t.Fatal("told anew again and again: " + m.Outgrown())
				}
				m.Reset()
				r = newReplica()
				for _, event := range log {
					apply(event)
				}
			}
			if err := r.drainInto(m); err != nil {
				t.Fatal(err)
			}
			s := m.Stats()
			if a, s, proved := m.Hashing(); proved && (!known || a != algorithm || s != seed) {
				t.Fatalf("hashes by %s of %s are taken for those by %s of %s", algorithm, seed, a, s)
			}
			for _, tokens := range prompts {
				keys := blockkey.AppendTokens(nil, blockkey.Scope{Model: "m", BlockSize: modelBlock}.Root(), tokens, modelBlock, nil)
				for k, end := range e.ends(e.hashes(tokens)) {
					switch got := r.held[Ends][keys[k]]; {
					case got && !end && len(e.told) == len(groups): // what no event names is not known
						t.Fatalf("%v: %d is believed an end and is none: %+v", tokens, k+1, s)
					case end && !got && s.Guess == "":
						t.Fatalf("%v: %d is an end and not believed one: %+v", tokens, k+1, s)
					case end && !got && known && m.names.unnamed == 0 && s.Waiting == 0 && m.dropped <= 1:
						t.Fatalf("%v: %d is an end, everything is known, and it is not believed one: %+v", tokens, k+1, s)
					}
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"store": func(t *rapid.T) {
				blocks := rapid.SliceOfN(rapid.Uint32Range(1, 2), 1, 9).Draw(t, "prompt")
				tokens := prompt{blocks: blocks}.tokens()
				n := len(blocks)
				prompts = append(prompts[max(0, len(prompts)-9):], tokens)
				cut := rapid.IntRange(0, n).Draw(t, "cut")
				cut = cut / e.align * e.align
				for _, g := range groups {
					cut = cut / g.size * g.size
				}
				e.store(t, tokens, 0, cut)
				e.store(t, tokens, cut, n)
			},
			"remove": func(t *rapid.T) {
				g := rapid.IntRange(0, len(groups)-1).Draw(t, "group")
				var hashes []uint64
				for hash, n := range e.copies[g] {
					if n > 0 {
						hashes = append(hashes, hash)
					}
				}
				if len(hashes) == 0 {
					t.Skip()
				}
				slices.Sort(hashes)
				hash := rapid.SampledFrom(hashes).Draw(t, "hash")
				e.copies[g][hash]--
				e.send(Remove{Group: g, HasGroup: true, Hashes: []uint64{hash}})
			},
			"restart": func(t *rapid.T) {
				if m.Outgrown() != "" {
					t.Skip()
				}
				state := m.Append(nil)
				m = New(m.cfg)
				if err := m.Restore(state); err != nil {
					t.Fatal(err)
				}
				r = newReplica()
			},
			"drain": drain,
		})
		drain(t)
	})
}

// Since 0.31 a hash covers where its adapter was loaded from, which no event
// tells: without it blocks that were left out have no names, with a wrong one
// none is believed to be there.
func TestAdaptersAreNamedByWhereTheyWereLoadedFrom(t *testing.T) {
	hasher, err := blockhash.New("sha256", blockhash.DefaultSeed, true)
	if err != nil {
		t.Fatal(err)
	}
	tokens := prompt{blocks: []uint32{1, 2, 3, 4}}.tokens()
	for root, known := range map[string]bool{"/adapters/sql": true, "": false, "/elsewhere": false} {
		m := New(Config{Model: "m", Rule: Rule{Algorithm: "sha256", Tagged: true}})
		for _, adapter := range []string{"", "sql"} {
			x, digest := blockhash.Extras{Adapter: adapter}, hasher.Root()
			if adapter != "" {
				x.Root = "/adapters/sql"
			}
			for k := range 4 {
				digest, _ = hasher.Next(&digest, tokens[k*modelBlock:(k+1)*modelBlock], &x)
			}
			s := Store{Kind: Sliding, Window: modelBlock, BlockSize: modelBlock, Tokens: tokens, Hashes: []uint64{hasher.Short(&digest)}, Adapter: adapter}
			if adapter != "" {
				s.Root = root
			}
			m.Store(s) // all but the last block are left out
		}
		r := newReplica()
		if err := r.drainInto(m); err != nil {
			t.Fatal(err)
		}
		for adapter, want := range map[string]bool{"": true, "sql": known} {
			keys := blockkey.AppendTokens(nil, blockkey.Scope{Model: "m", BlockSize: modelBlock, Adapter: adapter}.Root(), tokens, modelBlock, nil)
			if got := r.held[Ends][keys[3]]; got != want {
				t.Errorf("loaded from %q: the end of adapter %q is believed: %v", root, adapter, got)
			}
		}
		if s := m.Stats(); (s.Guess == "") != known {
			t.Errorf("loaded from %q: %+v", root, s)
		}
	}
}
