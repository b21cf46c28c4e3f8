package index

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// tree is a forest of chains that fork from each other, some of them far
// longer than a page or a run.
func tree(t *rapid.T) [][]blockkey.Key {
	var chains [][]blockkey.Key
	n := rapid.IntRange(1, 6).Draw(t, "chains")
	for c := range n {
		length := rapid.SampledFrom([]int{1, 3, 15, 16, 17, 40, 130, 300}).Draw(t, "length")
		if c == 0 && rapid.IntRange(0, 29).Draw(t, "huge") == 0 {
			length = maxRun + 50
		}
		fork := 0
		var keys []blockkey.Key
		if c > 0 && rapid.Bool().Draw(t, "forks") {
			from := chains[rapid.IntRange(0, c-1).Draw(t, "from")]
			fork = rapid.IntRange(0, len(from)).Draw(t, "fork")
			keys = append(keys, from[:fork]...)
		}
		k := blockkey.Key(77)
		if fork > 0 {
			k = keys[fork-1]
		}
		for i := range length {
			k = blockkey.Chain(k, uint64(c)<<32+uint64(i))
			keys = append(keys, k)
		}
		chains = append(chains, keys)
	}
	return chains
}

// stretch is a part of a chain.
func stretch(t *rapid.T, chains [][]blockkey.Key, head bool) (before []blockkey.Key, position uint32, keys []blockkey.Key) {
	c := chains[rapid.IntRange(0, len(chains)-1).Draw(t, "chain")]
	from := 0
	if !head {
		from = rapid.IntRange(0, len(c)-1).Draw(t, "from")
	}
	to := rapid.IntRange(from+1, len(c)).Draw(t, "to")
	return blockkey.Before(c, from), uint32(from), c[from:to]
}

func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		chains := tree(t)
		x, model := New(Config{}), newNaive()
		member := rapid.Custom(func(t *rapid.T) Member {
			return Member(rapid.SampledFrom([]uint32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 4095}).Draw(t, "member"))
		})
		lane := rapid.Custom(func(t *rapid.T) Lane {
			return Lane(rapid.SampledFrom([]uint8{0, 0, 0, 1, 2, 3, 4}).Draw(t, "lane"))
		})
		// A caller that keeps its lanes closed stores from the head and
		// removes to the end; any other must be served as exactly.
		closed := rapid.Bool().Draw(t, "closed")
		// A caller that names a false parent harms nobody but itself.
		liar := !closed && rapid.IntRange(0, 3).Draw(t, "liar") == 0
		steps := rapid.IntRange(1, 60).Draw(t, "steps")
		for range steps {
			m, l := member.Draw(t, "m"), lane.Draw(t, "l")
			switch op := rapid.IntRange(0, 19).Draw(t, "op"); {
			case op < 11:
				before, position, keys := stretch(t, chains, closed)
				if !closed && rapid.IntRange(0, 4).Draw(t, "lie") == 0 {
					position = uint32(rapid.IntRange(0, 400).Draw(t, "position"))
					if liar && m == 0 {
						before = []blockkey.Key{blockkey.Key(rapid.Uint64().Draw(t, "parent"))}
					}
				}
				x.Store(m, l, before, position, keys)
				model.Store(m, l, before, position, keys)
			case op < 17:
				before, position, keys := stretch(t, chains, false)
				if rapid.IntRange(0, 4).Draw(t, "lie") == 0 {
					position = uint32(rapid.IntRange(0, 400).Draw(t, "position"))
				}
				x.Remove(m, l, before, position, keys)
				model.Remove(m, l, before, position, keys)
			case op < 18:
				x.Forget(m)
				model.Forget(m)
			case op < 19:
				x.ForgetLane(m, l)
				model.ForgetLane(m, l)
			default:
				for _, c := range chains {
					m := Member(rapid.IntRange(0, 40).Draw(t, "crowd"))
					x.Store(m, l, nil, 0, c)
					model.Store(m, l, nil, 0, c)
				}
			}
			if liar {
				if err := below(x, model, chains); err != nil {
					t.Fatal(err)
				}
				continue
			}
			if err := same(x, model, chains); err != nil {
				t.Fatal(err)
			}
			for l := range Lane(Lanes) {
				if got, want := x.Count(m, l), model.Count(m, l); got != want {
					t.Fatalf("Count(%d, %d) = %d, want %d", m, l, got, want)
				}
			}
			if err := x.verify(); err != nil {
				t.Fatal(err)
			}
		}
		for m := range Member(4096) {
			x.Forget(m)
		}
		if err := x.empty(); err != nil {
			t.Fatal(err)
		}
	})
}

// same compares the answers for all chains.
func same(x *Index, model *naive, chains [][]blockkey.Key) error {
	for i, c := range chains {
		if d := cmp.Diff(ask(model, c), ask(x, c)); d != "" {
			return fmt.Errorf("chain %d of %d keys: -want +got\n%s", i, len(c), d)
		}
	}
	return nil
}

// below checks that no answer says more than is held, or that it shows: a chain
// that was made up can hide a block from its removal, and the member's count,
// which its agent's claim is held against, then is too large.
func below(x *Index, model *naive, chains [][]blockkey.Key) error {
	for i, c := range chains {
		held := ask(model, c)
		for m, d := range ask(x, c) {
			for l := range d {
				if m != 0 && d[l] > held[m][l] && x.Count(m, Lane(l)) <= model.Count(m, Lane(l)) {
					return fmt.Errorf("chain %d: member %d, lane %d: %d, held %d", i, m, l, d[l], held[m][l])
				}
			}
		}
	}
	return nil
}

// verify checks what must hold between two calls.
func (x *Index) verify() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	content := map[uint32]bool{}
	held := int64(0)
	for _, h := range x.holders {
		if h == nil {
			continue
		}
		sum := int64(0)
		for _, e := range h.runs.entries {
			if e == 0 {
				continue
			}
			n, c := uint32(e>>32), uint32(e)
			content[n] = true
			sum += int64(c)
			found := false
			for _, g := range x.groups(&x.run(n).groups) {
				for _, m := range x.members(holders(g), new([1]uint32)) {
					if Member(m>>laneBits) == h.member && m&h.lane != 0 {
						if found || cutoff(g) != c {
							return fmt.Errorf("run %d: holder %d at %d, listed at %d", n, h.id, cutoff(g), c)
						}
						found = true
					}
				}
			}
			if !found {
				return fmt.Errorf("run %d: holder %d not in a group", n, h.id)
			}
		}
		for n := range h.loose {
			content[n] = true
		}
		for n, spans := range x.loose {
			for _, s := range spans {
				if s.holder == h.id {
					sum += int64(s.to - s.from)
					if s.from >= s.to || s.to > x.run(n).length || s.from <= h.runs.cutoff(h.runs.find(n)) {
						return fmt.Errorf("run %d: span %v", n, s)
					}
				}
			}
		}
		if sum != h.held {
			return fmt.Errorf("holder %d: held %d, counted %d", h.id, h.held, sum)
		}
		held += sum
	}
	if held != x.memberships {
		return fmt.Errorf("memberships %d, counted %d", x.memberships, held)
	}
	var keys, entries int64
	users := map[holders]int{}
	for n := range content {
		r := x.run(n)
		longest := uint32(0)
		for i, g := range x.groups(&r.groups) {
			longest = max(longest, cutoff(g))
			if i > 0 && cutoff(x.groups(&r.groups)[i-1]) <= cutoff(g) {
				return fmt.Errorf("run %d: groups out of order", n)
			}
			if h := holders(g); h&single == 0 {
				users[h]++
			}
		}
		for _, s := range x.loose[n] {
			longest = max(longest, s.to)
		}
		if longest != r.length {
			return fmt.Errorf("run %d: length %d, held to %d", n, r.length, longest)
		}
		keys += int64(r.length)
		for o := range r.length {
			if o%pageKeys != 0 {
				continue
			}
			entries++
			if m, p, ok := x.find(blockkey.Key(x.key(r, o))); !ok || m != n || p != o {
				return fmt.Errorf("run %d: key %d found at %d of run %d (%v)", n, o, p, m, ok)
			}
		}
	}
	if keys != x.content || entries != x.heads.used+x.inner.used {
		return fmt.Errorf("%d keys, %d entries; counted %d, %d", keys, entries, x.content, x.heads.used+x.inner.used)
	}
	if len(users) != len(x.sets.byHash) {
		return fmt.Errorf("%d sets in use, %d interned", len(users), len(x.sets.byHash))
	}
	for h, n := range users {
		if got := cell(x.blocks, h)[setUsers]; int(got) != n {
			return fmt.Errorf("set %d: %d users, counted %d", h, got, n)
		}
	}
	return nil
}

// empty checks that nothing is left behind.
func (x *Index) empty() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.grace.flush()
	if n := x.pages.cells + x.runs.cells + x.lists.cells + x.blocks.cells + x.heads.used + x.inner.used + x.content + int64(len(x.loose)) + x.memberships; n != 0 {
		return fmt.Errorf("left: %d pages, %d runs, %d lists, %d blocks, %d keys, %d loose, %d memberships",
			x.pages.cells, x.runs.cells, x.lists.cells, x.blocks.cells, x.content, len(x.loose), x.memberships)
	}
	return nil
}
