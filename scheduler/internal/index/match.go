package index

import (
	"slices"
	"sync/atomic"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// Match appends to dst, in no order, one entry for each member that holds
// keys[0] on any lane: how many leading keys it holds without a hole. Keys
// start at the head of a chain.
//
// It takes no lock, waits for nobody, and allocates only when dst is too
// small. Beside writers it sees each block either before or after a change.
func (x *Index) Match(keys []blockkey.Key, dst []Depths) []Depths {
	if len(keys) == 0 {
		return dst
	}
	inside := x.grace.enter()
	dst = x.match(keys, dst)
	inside.Add(-1)
	return dst
}

func (x *Index) match(keys []blockkey.Key, dst []Depths) []Depths {
	r := x.head(keys[0])
	if r == nil {
		return dst
	}
	var inline [1]uint64
	groups := x.snapshot(r, &inline)
	depth := x.depth(r, groups, keys)
	if depth == 0 {
		return dst
	}
	var next *run
	if int(depth) < len(keys) {
		next = x.head(keys[depth])
	}
	if next == nil {
		if lanes := x.lanes(groups); lanes != 0 {
			for i := range groups {
				g := atomic.LoadUint64(&groups[i])
				dst = x.emit(dst, holders(g), lanes, min(cutoff(g), depth))
			}
			return dst
		}
	}

	j := join{x: x, dst: dst, base: len(dst)}
	for i := range groups {
		g := atomic.LoadUint64(&groups[i])
		j.add(holders(g), 0, min(cutoff(g), depth))
	}
	for at := depth; next != nil; at += depth {
		groups = x.snapshot(next, &inline)
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
	return j.dst
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

// snapshot is the list of a run's groups. Only cutoffs move in it; so a
// reader loads each of its words once, atomically.
func (x *Index) snapshot(r *run, inline *[1]uint64) []uint64 {
	w := r.groups.Load()
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
// An equal key at one place proves all before it equal, so it is searched.
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

// lanes that all holders in groups have, and no others; 0 if they differ.
// Then nobody is in two groups.
func (x *Index) lanes(groups []uint64) uint32 {
	all := uint32(0)
	for i := range groups {
		var lanes uint32
		if h := holders(atomic.LoadUint64(&groups[i])); h&single != 0 {
			lanes = h & laneMask
		} else {
			lanes = cell(x.blocks, h)[setSize] & laneMask
		}
		if i > 0 && lanes != all {
			return 0
		}
		all = lanes
	}
	return all
}

// members of a set; one serves for a set of one.
func (x *Index) members(h holders, one *[1]uint32) []uint32 {
	if h&single != 0 {
		one[0] = h &^ single
		return one[:]
	}
	b := cell(x.blocks, h)
	return b[setHead : setHead+b[setSize]>>laneBits]
}

// emit appends an entry for each member of h, which all have the same lanes.
func (x *Index) emit(dst []Depths, h holders, lanes, depth uint32) []Depths {
	depths := at(lanes, depth)
	if h&single != 0 {
		return append(dst, Depths{Member(h &^ single >> laneBits), depths})
	}
	b := cell(x.blocks, h)
	n := int(b[setSize] >> laneBits)
	dst = slices.Grow(dst, n)
	to := dst[len(dst) : len(dst)+n]
	entry := Depths{Depth: depths}
	for i, e := range b[setHead : setHead+n] {
		// The member goes into the copy: written into entry, each copy would
		// wait for it.
		t := &to[i]
		*t = entry
		t.Member = Member(e >> laneBits)
	}
	return dst[:len(dst)+n]
}

// at is depth on each of lanes.
func at(lanes, depth uint32) (d [Lanes]uint32) {
	for l := range d {
		d[l] = depth & -(lanes >> l & 1)
	}
	return d
}

// join brings together what several runs, or several groups of one, say of
// the same members.
type join struct {
	x      *Index
	dst    []Depths
	base   int       // dst from here on is this answer
	places *[]uint32 // by member: where in the answer, unless another is there; nil: few
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
		for l := range d.Depth {
			if e>>l&1 != 0 && d.Depth[l] == from {
				d.Depth[l] = to
				any = true
			}
		}
	}
	return any
}

func (j *join) find(m Member, add bool) *Depths {
	answer := j.dst[j.base:]
	if j.places == nil {
		for i := range answer {
			if answer[i].Member == m {
				return &answer[i]
			}
		}
	} else if i := (*j.places)[m]; int(i) < len(answer) && answer[i].Member == m {
		return &answer[i]
	}
	if !add {
		return nil
	}
	j.dst = append(j.dst, Depths{Member: m})
	answer = j.dst[j.base:]
	if j.places != nil {
		(*j.places)[m] = uint32(len(answer) - 1)
	} else if len(answer) > few {
		j.places = j.x.places.Get().(*[]uint32)
		for i := range answer {
			(*j.places)[answer[i].Member] = uint32(i)
		}
	}
	return &answer[len(answer)-1]
}
