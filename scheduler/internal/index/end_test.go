package index

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// ends is the model: of each member the blocks that it holds and those of them
// at which a hit may end.
type ends struct {
	held, marked map[Member]map[blockkey.Key]bool
}

func newEnds() *ends {
	return &ends{held: map[Member]map[blockkey.Key]bool{}, marked: map[Member]map[blockkey.Key]bool{}}
}

func (e *ends) of(m Member) (held, marked map[blockkey.Key]bool) {
	if e.held[m] == nil {
		e.held[m], e.marked[m] = map[blockkey.Key]bool{}, map[blockkey.Key]bool{}
	}
	return e.held[m], e.marked[m]
}

// deepest is the naive answer.
func (e *ends) deepest(m Member, keys []blockkey.Key, limit int) uint32 {
	_, marked := e.of(m)
	for i := min(limit, len(keys)); i > 0; i-- {
		if marked[keys[i-1]] {
			return uint32(i)
		}
	}
	return 0
}

// TestEndsModel follows members whose lanes are closed, as agents keep them.
func TestEndsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		chains := tree(t)
		x, model := New(Config{}), newEnds()
		member := rapid.Custom(func(t *rapid.T) Member {
			return Member(rapid.SampledFrom([]uint32{0, 1, 2, 3, 900, 4095}).Draw(t, "member"))
		})
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			m := member.Draw(t, "m")
			held, marked := model.of(m)
			chain := chains[rapid.IntRange(0, len(chains)-1).Draw(t, "chain")]
			from := rapid.IntRange(0, len(chain)-1).Draw(t, "from")
			to := rapid.IntRange(from+1, len(chain)).Draw(t, "to")
			before, keys := blockkey.Before(chain, from), chain[from:to]
			switch op := rapid.IntRange(0, 19).Draw(t, "op"); {
			case op < 7:
				lane := rapid.SampledFrom([]Lane{LaneGPU, LaneGPU, LaneHost}).Draw(t, "lane")
				x.Store(m, lane, nil, 0, chain[:to])
				for _, k := range chain[:to] {
					held[k] = held[k] || lane == LaneGPU
				}
			case op < 12:
				x.MarkEnds(m, before, uint32(from), keys)
				for _, k := range keys {
					if held[k] {
						marked[k] = true
					}
				}
			case op < 14:
				x.ClearEnds(m, before, uint32(from), keys)
				for _, k := range keys {
					delete(marked, k)
				}
			case op < 17:
				for _, c := range chains { // with all that follows chain[from]
					if len(c) <= from || c[from] != chain[from] {
						continue
					}
					x.Remove(m, LaneGPU, blockkey.Before(c, from), uint32(from), c[from:])
					for _, k := range c[from:] {
						delete(held, k)
						delete(marked, k)
					}
				}
			case op < 18:
				x.Forget(m)
				delete(model.held, m)
				delete(model.marked, m)
			case op < 19:
				x.ForgetLane(m, LaneGPU)
				delete(model.held, m)
				delete(model.marked, m)
			default:
				x.ForgetLane(m, LaneHost)
			}
			if err := sameEnds(x, model, chains); err != nil {
				t.Fatal(err)
			}
			if err := x.verifyEnds(); err != nil {
				t.Fatal(err)
			}
		}
		for m := range Member(4096) {
			x.Forget(m)
		}
		if err := x.empty(); err != nil {
			t.Fatal(err)
		}
		if x.ends.bytes != 0 && x.pages.total == 0 {
			t.Fatalf("%d bytes of ends are left", x.ends.bytes)
		}
	})
}

func sameEnds(x *Index, model *ends, chains [][]blockkey.Key) error {
	for c, keys := range chains {
		for _, limit := range []int{len(keys), len(keys) - 1, len(keys) / 2, 1, 0} {
			var asked []End
			for m := range model.held {
				asked = append(asked, End{Member: m, Limit: uint32(limit)})
			}
			asked = append(asked, End{Member: 77, Limit: uint32(limit)})
			x.Ends(keys, asked)
			for _, e := range asked {
				if want := model.deepest(e.Member, keys, limit); e.Blocks != want {
					return fmt.Errorf("chain %d, member %d, limit %d: %d, want %d", c, e.Member, limit, e.Blocks, want)
				}
			}
		}
	}
	for m, marked := range model.marked {
		if got := x.CountEnds(m); got != len(marked) {
			return fmt.Errorf("member %d has %d ends, want %d", m, got, len(marked))
		}
	}
	return nil
}

// verifyEnds checks that marks lie where their members hold blocks, and that
// each member is in one group of a page.
func (x *Index) verifyEnds() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	marks := map[Member]int64{}
	dir := *x.ends.dir.Load()
	for chunk := range dir {
		c := dir[chunk].Load()
		if c == nil {
			continue
		}
		for cell := range c {
			p := uint32(chunk)<<pagesBits | uint32(cell)
			seen := map[Member]bool{}
			for _, g := range x.groups(&c[cell]) {
				owner := x.pages.chunk(p).owner[cell]
				n, first := uint32(owner>>32), uint32(owner)<<pageBits
				for _, e := range x.members(holders(g), new([1]uint32)) {
					m, mask := Member(e>>laneBits), cutoff(g)
					h := x.known(m, LaneGPU)
					if h == nil || mask == 0 || mask > 0xFFFF || seen[m] || e&laneMask != 1<<LaneGPU {
						return fmt.Errorf("page %d: member %d with mask %x, seen %v, holder %v", p, m, mask, seen[m], h)
					}
					seen[m] = true
					for bit := range uint32(pageKeys) {
						if mask>>bit&1 != 0 {
							marks[m]++
							if first+bit >= h.runs.cutoff(h.runs.find(n)) {
								return fmt.Errorf("run %d: member %d has a mark at %d beyond its cutoff", n, m, first+bit)
							}
						}
					}
				}
			}
		}
	}
	for _, h := range x.holders {
		if h != nil && h.ends != marks[h.member] && h.lane == 1<<LaneGPU {
			return fmt.Errorf("member %d: %d ends, counted %d", h.member, marks[h.member], h.ends)
		}
	}
	return nil
}

// TestEndsUnderTheBound sheds blocks with marks: none stays behind for whoever
// comes next to the same number or the same page.
func TestEndsUnderTheBound(t *testing.T) {
	x := New(Config{MaxBytes: minBytes})
	rng := rand.New(rand.NewPCG(1, 2))
	for c := range uint64(5000) {
		keys := long(c, 512)
		m := Member(rng.IntN(8))
		x.Store(m, LaneGPU, nil, 0, keys)
		for range 20 {
			i := rng.IntN(len(keys))
			x.MarkEnds(m, blockkey.Before(keys, i), uint32(i), keys[i:i+1])
		}
		if rng.IntN(50) == 0 {
			x.Forget(Member(rng.IntN(8)))
		}
	}
	if x.Stats().Shed == 0 {
		t.Fatal("nothing was shed: the bound was not reached")
	}
	if err := x.verifyEnds(); err != nil {
		t.Fatal(err)
	}
}

func long(chain uint64, n int) []blockkey.Key {
	keys := make([]blockkey.Key, n)
	k := blockkey.Key(chain + 1)
	for i := range keys {
		k = blockkey.Chain(k, uint64(i))
		keys[i] = k
	}
	return keys
}

// TestEndsBesideWriters holds answers, given while marks come and go, against
// the marks that are never touched.
func TestEndsBesideWriters(t *testing.T) {
	x := New(Config{})
	const members, length, stays, comes = 24, 700, 100, 333
	keys := long(1, length)
	for m := range Member(members) {
		x.Store(m, LaneGPU, nil, 0, keys)
		x.MarkEnds(m, blockkey.Before(keys, stays), stays, keys[stays:stays+1])
	}
	var stop atomic.Bool
	var wait sync.WaitGroup
	wait.Go(func() {
		defer stop.Store(true)
		rng := rand.New(rand.NewPCG(3, 4))
		for range 20000 {
			m := Member(rng.IntN(members))
			switch rng.IntN(3) {
			case 0:
				x.MarkEnds(m, blockkey.Before(keys, comes), comes, keys[comes:comes+1])
			case 1:
				x.ClearEnds(m, blockkey.Before(keys, comes), comes, keys[comes:comes+1])
			default:
				x.Remove(m, LaneGPU, blockkey.Before(keys, 200), 200, keys[200:])
				x.Store(m, LaneGPU, nil, 0, keys)
			}
		}
	})
	for range 2 {
		wait.Go(func() {
			asked := make([]End, members)
			for !stop.Load() {
				for m := range asked {
					asked[m] = End{Member: Member(m), Limit: length}
				}
				x.Ends(keys, asked)
				for _, e := range asked {
					if e.Blocks != stays+1 && e.Blocks != comes+1 {
						t.Errorf("member %d: end at %d", e.Member, e.Blocks)
						return
					}
				}
			}
		})
	}
	wait.Wait()
	if err := x.verifyEnds(); err != nil {
		t.Fatal(err)
	}
}

// BenchmarkEnds asks for the ends of eight members that hold 64 to 512 blocks of
// one chain, with an end every 40 blocks or so: a page or three below the depth.
func BenchmarkEnds(b *testing.B) {
	x := New(Config{})
	chains := make([][]blockkey.Key, 1953)
	for c := range chains {
		chains[c] = long(uint64(c), 512)
		for m := range Member(8) {
			held := 64 * (int(m) + 1)
			x.Store(m, LaneGPU, nil, 0, chains[c][:held])
			for i := int(m) * 5; i < held; i += 40 {
				x.MarkEnds(m, blockkey.Before(chains[c], i), uint32(i), chains[c][i:i+1])
			}
		}
	}
	asked := make([]End, 8)
	batches(b, chains, func(keys []blockkey.Key) {
		for m := range asked {
			asked[m] = End{Member: Member(m), Limit: uint32(64 * (m + 1))}
		}
		x.Ends(keys, asked)
	})
}
