package index

import (
	"math/bits"
	"slices"
	"sync/atomic"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// An end is a block that a member holds on its GPU lane and at which its engine
// would accept a hit to end. Ends are not prefix-closed: the answer is the
// deepest one that is not beyond a limit. Members whose every block is an end
// have none marked and cost nothing.
//
// Ends stand with the pages of keys: groups, as in group.go, with a mask of
// the page's 16 blocks in place of a cutoff. Each member with ends in a page is
// in one group there, so members with equal ends share a set. Marks lie below
// their member's cutoff: what ends the one clears the other.
type pageEnds [1 << pagesBits]atomic.Uint64

// endTable finds the groups of a page. Pages without ends take nothing but, in
// chunks of 1,024, a word.
type endTable struct {
	dir atomic.Pointer[[]atomic.Pointer[pageEnds]] // by chunk of pages

	bytes int64 // guarded by Index.mu
}

// at is where a page's groups are; nil: it has none. Readers may call it.
func (t *endTable) at(p uint32) *atomic.Uint64 {
	if dir := *t.dir.Load(); int(p>>pagesBits) < len(dir) {
		if c := dir[p>>pagesBits].Load(); c != nil {
			return &c[p&(1<<pagesBits-1)]
		}
	}
	return nil
}

// add makes room for the groups of a page.
func (t *endTable) add(p uint32) *atomic.Uint64 {
	n := int(p >> pagesBits)
	dir := *t.dir.Load()
	if n >= len(dir) {
		larger := make([]atomic.Pointer[pageEnds], max(8, 2*n))
		for i := range dir {
			larger[i].Store(dir[i].Load())
		}
		t.dir.Store(&larger)
		dir = larger
	}
	if dir[n].Load() == nil {
		dir[n].Store(new(pageEnds))
		t.bytes += (1 << pagesBits) * 8
	}
	return t.at(p)
}

// drop ends the groups of the chunk that a page was in: all are empty.
func (t *endTable) drop(p uint32) {
	if dir := *t.dir.Load(); int(p>>pagesBits) < len(dir) && dir[p>>pagesBits].Swap(nil) != nil {
		t.bytes -= (1 << pagesBits) * 8
	}
}

// End asks for the deepest end of a member, and is answered in place.
type End struct {
	Member Member
	// Limit in blocks that the hit may take: the depth of the member, or less.
	Limit uint32
	// Blocks of the prompt up to that end; 0: there is none.
	Blocks uint32
}

// MarkEnds says that hits may end at keys, consecutive blocks of one chain from
// position on, which m holds on its GPU lane; those that it does not hold
// there are passed over. before and position are as in Store.
func (x *Index) MarkEnds(m Member, before []blockkey.Key, position uint32, keys []blockkey.Key) {
	x.setEnds(m, before, position, keys, true)
}

// ClearEnds takes back what MarkEnds said.
func (x *Index) ClearEnds(m Member, before []blockkey.Key, position uint32, keys []blockkey.Key) {
	x.setEnds(m, before, position, keys, false)
}

func (x *Index) setEnds(m Member, before []blockkey.Key, position uint32, keys []blockkey.Key, on bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	h := x.known(m, LaneGPU)
	if h == nil {
		return
	}
	x.pieces(h, before, position, keys, func(n uint32, r *run, from, to uint32) {
		if on {
			to = min(to, h.runs.cutoff(h.runs.find(n)))
		}
		x.mark(h, r, from, to, on)
	})
}

// CountEnds is the number of ends that m has.
func (x *Index) CountEnds(m Member) int {
	x.mu.Lock()
	defer x.mu.Unlock()
	if h := x.known(m, LaneGPU); h != nil {
		return int(h.ends)
	}
	return 0
}

// mark sets or clears h's marks at [from, to) of a run.
func (x *Index) mark(h *holder, r *run, from, to uint32, on bool) {
	for from < to {
		next := min(to, from&^(pageKeys-1)+pageKeys)
		low := from & (pageKeys - 1)
		mask := uint32(1)<<(next-from) - 1
		x.markPage(h, x.page(r, from>>pageBits), mask<<low, on)
		from = next
	}
}

func (x *Index) markPage(h *holder, p, mask uint32, on bool) {
	at := x.ends.at(p)
	if at == nil {
		if !on {
			return
		}
		at = x.ends.add(p)
	}
	was := uint32(0)
	for _, g := range x.groups(at) {
		if x.contains(holders(g), h.member) {
			was = cutoff(g)
			break
		}
	}
	is := was &^ mask
	if on {
		is = was | mask
	}
	if is != was {
		h.ends += int64(bits.OnesCount32(is) - bits.OnesCount32(was))
		x.move(at, h.member, 1<<LaneGPU, was, is)
	}
}

// contains says whether a member is in a set. Readers may call it.
func (x *Index) contains(h holders, m Member) bool {
	if h&single != 0 {
		return Member(h&^single>>laneBits) == m
	}
	if h == 0 {
		return false
	}
	b := cell(x.blocks, h)
	set := b[setHead : setHead+b[setSize]]
	i, _ := slices.BinarySearch(set, uint32(m)<<laneBits)
	return i < len(set) && Member(set[i]>>laneBits) == m
}

// Ends finds, for each of asked, the deepest end among the first Limit of keys,
// which start at the head of a chain. Like Match it takes no lock, waits for
// nobody, and allocates nothing.
func (x *Index) Ends(keys []blockkey.Key, asked []End) {
	longest := uint32(0)
	for i := range asked {
		asked[i].Blocks = 0
		asked[i].Limit = min(asked[i].Limit, uint32(len(keys)))
		longest = max(longest, asked[i].Limit)
	}
	if longest == 0 {
		return
	}
	keys = keys[:longest]
	inside := x.grace.enter()
	var inline [1]uint64
	for at := uint32(0); at < longest; {
		r := x.head(keys[at])
		if r == nil {
			break
		}
		depth := x.depth(r, x.snapshot(&r.groups, &inline), keys[at:])
		if depth == 0 {
			break
		}
		x.endsIn(r, at, depth, asked)
		at += depth
	}
	inside.Add(-1)
}

// endsIn looks through the first depth blocks of a run that begins at block
// start of the prompt, page by page from the last. What it finds is deeper than
// what runs before it had.
func (x *Index) endsIn(r *run, start, depth uint32, asked []End) {
	open := 0
	deepest := uint32(0)
	for i := range asked {
		if asked[i].Limit > start {
			open++
			deepest = max(deepest, min(asked[i].Limit-start, depth))
		}
	}
	var inline [1]uint64
	for page := int((deepest+pageKeys-1)>>pageBits) - 1; page >= 0 && open > 0; page-- {
		at := x.ends.at(x.page(r, uint32(page)))
		if at == nil {
			continue
		}
		groups := x.snapshot(at, &inline)
		first := uint32(page) << pageBits
		for i := range groups {
			g := atomic.LoadUint64(&groups[i])
			for j := range asked {
				e := &asked[j]
				if e.Limit <= start+first || e.Blocks > start {
					continue // nothing of this page, or found already
				}
				mask := cutoff(g)
				if room := min(e.Limit-start, depth) - first; room < pageKeys {
					mask &= 1<<room - 1
				}
				if mask != 0 && x.contains(holders(g), e.Member) {
					e.Blocks = start + first + uint32(bits.Len32(mask))
					open--
				}
			}
		}
	}
}
