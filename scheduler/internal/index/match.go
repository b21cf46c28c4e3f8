package index

import (
	"math/bits"
	"sync/atomic"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// Match answers how many leading keys each member holds without a hole, on
// each of its lanes. Keys start at the head of a chain.
//
// It takes no lock, waits for nobody, and allocates only when the answer is
// too small. Beside writers it sees each block either before or after a change.
func (x *Index) Match(keys []blockkey.Key, a *Answer) {
	a.reset()
	if len(keys) == 0 {
		return
	}
	inside := x.grace.enter()
	x.match(keys, a)
	inside.Add(-1)
}

func (x *Index) match(keys []blockkey.Key, a *Answer) {
	r := x.head(keys[0])
	if r == nil {
		return
	}
	var inline [1]uint64
	groups := x.snapshot(&r.groups, &inline)
	depth := x.depth(r, groups, keys)
	if depth == 0 {
		return
	}
	var next *run
	if int(depth) < len(keys) {
		next = x.head(keys[depth])
	}
	if next == nil {
		var one [1]uint32
		for i := range groups {
			g := atomic.LoadUint64(&groups[i])
			a.add(x.members(holders(g), &one), min(cutoff(g), depth))
		}
		return
	}

	j := join{x: x, answer: a.joined[:0]}
	for i := range groups {
		g := atomic.LoadUint64(&groups[i])
		j.add(holders(g), 0, min(cutoff(g), depth))
	}
	for at := depth; next != nil; at += depth {
		groups = x.snapshot(&next.groups, &inline)
		depth = x.depth(next, groups, keys[at:])
		through := false
		for i := range groups {
			g := atomic.LoadUint64(&groups[i])
			if j.add(holders(g), at, at+min(cutoff(g), depth)) && cutoff(g) >= depth {
				through = true
			}
		}
		next = nil
		if through && int(at+depth) < len(keys) {
			next = x.head(keys[at+depth])
		}
	}
	if j.places != nil {
		x.places.Put(j.places)
	}
	for i := range j.answer {
		j.answer[i].tell(a)
	}
	a.joined = j.answer
}

// head is the run that begins with key, or nil.
func (x *Index) head(key blockkey.Key) *run {
	c, ok := x.heads.find(uint64(key))
	if !ok {
		return nil
	}
	n, offset := x.locate(c)
	if offset != 0 {
		return nil
	}
	return x.run(n)
}

// snapshot is the list of the groups at a word. Only cutoffs move in it; so a
// reader loads each of its words once, atomically.
func (x *Index) snapshot(at *atomic.Uint64, inline *[1]uint64) []uint64 {
	w := at.Load()
	switch w & groupKinds {
	case 0:
		return nil
	case oneGroup:
		inline[0] = w &^ groupKinds
		return inline[:]
	}
	return list(x.lists.chunk(uint32(w)), w)
}

// depth is how many of keys a run begins with, as far as anybody holds them.
// An equal key at one place verifies all before it equal, so it is searched.
func (x *Index) depth(r *run, groups []uint64, keys []blockkey.Key) uint32 {
	held := uint32(0)
	for i := range groups {
		held = max(held, cutoff(atomic.LoadUint64(&groups[i])))
	}
	if held = min(held, uint32(len(keys))); held == 0 {
		return 0
	}
	if x.key(r, held-1) == uint64(keys[held-1]) {
		return held
	}
	low, high := uint32(1), held-1 // the first key is equal, the one at high is not
	for low < high {
		if mid := (low + high) / 2; x.key(r, mid) == uint64(keys[mid]) {
			low = mid + 1
		} else {
			high = mid
		}
	}
	return low
}

// members of a set; one serves for a set of one.
func (x *Index) members(h holders, one *[1]uint32) []uint32 {
	if h&single != 0 {
		one[0] = h &^ single
		return one[:]
	}
	b := cell(x.blocks, h)
	return b[setHead : setHead+b[setSize]]
}

// join brings together what several runs, or several groups of one, say of
// the same members.
type join struct {
	x      *Index
	answer []joined
	places *[]uint32 // by member: where in the answer, unless another is there; nil: few
}

// joined is what one member holds, per lane.
type joined struct {
	member Member
	depth  [Lanes]uint32
}

// tell adds it to an answer, lanes of equal depth together.
func (d *joined) tell(a *Answer) {
	for left := uint32(laneMask); left != 0; {
		depth, lanes := d.depth[bits.TrailingZeros32(left)], uint32(0)
		for l := range d.depth {
			if d.depth[l] == depth {
				lanes |= 1 << l
			}
		}
		if depth > 0 {
			a.addOne(uint32(d.member)<<laneBits|lanes, depth)
		}
		left &^= lanes
	}
}

// few is how many entries are searched one by one.
const few = 12

// add raises the lanes of h's members that stand at from to depth to. From 0
// it adds the members that are missing. It reports whether any lane stood.
func (j *join) add(h holders, from, to uint32) bool {
	var one [1]uint32
	any := false
	for _, e := range j.x.members(h, &one) {
		d := j.find(Member(e>>laneBits), from == 0)
		if d == nil {
			continue
		}
		for l := range d.depth {
			if e>>l&1 != 0 && d.depth[l] == from {
				d.depth[l] = to
				any = true
			}
		}
	}
	return any
}

func (j *join) find(m Member, add bool) *joined {
	if j.places == nil {
		for i := range j.answer {
			if j.answer[i].member == m {
				return &j.answer[i]
			}
		}
	} else if i := (*j.places)[m]; int(i) < len(j.answer) && j.answer[i].member == m {
		return &j.answer[i]
	}
	if !add {
		return nil
	}
	j.answer = append(j.answer, joined{member: m})
	last := len(j.answer) - 1
	if j.places != nil {
		(*j.places)[m] = uint32(last)
	} else if last >= few {
		j.places = j.x.places.Get().(*[]uint32)
		for i := range j.answer {
			(*j.places)[j.answer[i].member] = uint32(i)
		}
	}
	return &j.answer[last]
}
