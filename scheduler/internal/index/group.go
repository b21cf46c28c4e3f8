package index

import "sync/atomic"

// A group is a set of holders that hold the same number of leading blocks of
// a run: cutoff<<32 | holders. The groups of a run are disjoint and stand in
// falling order of their cutoffs.
//
// A run shows its groups to readers in one word: none (0), one (the group
// itself), or where a list of them is and how long. A change replaces that
// word, or, when only a cutoff moves between its neighbours, one word of the
// list. So no holder is ever in two groups of a list, or in none of a list
// that has it, and a reader finds each holder's cutoff of before or after.
const (
	groupShift = 32
	oneGroup   = uint64(1) << 62
	groupList  = uint64(2) << 62
	groupKinds = uint64(3) << 62
)

func cutoff(g uint64) uint32 { return uint32(g>>groupShift) &^ (3 << 30) }

// groups at a word, as the writer sees them.
func (x *Index) groups(at *atomic.Uint64) []uint64 {
	w := at.Load()
	switch w & groupKinds {
	case 0:
		return nil
	case oneGroup:
		x.alone[0] = w &^ groupKinds
		return x.alone[:]
	}
	return list(x.lists.chunk(uint32(w)), w)
}

func list(c *lists, w uint64) []uint64 {
	at := uint32(w) & (1<<listsBits - 1)
	return c[at : at+cutoff(w)]
}

// move takes (m, lane) from the group with cutoff from to the one with cutoff
// to; 0 is no group.
func (x *Index) move(at *atomic.Uint64, m Member, lane uint32, from, to uint32) {
	me := one(m, lane)
	w := at.Load()
	if w&groupKinds == oneGroup && holders(w) == me || w == 0 {
		if to == 0 {
			at.Store(0)
		} else {
			at.Store(oneGroup | uint64(to)<<groupShift | uint64(me))
		}
		return
	}
	old := x.groups(at)
	if from != 0 && to != 0 && w&groupKinds == groupList && moveAlone(old, me, from, to) {
		return
	}

	next := x.next[:0]
	placed := to == 0
	for _, g := range old {
		c, h := cutoff(g), holders(g)
		if !placed && c <= to {
			placed = true
			if c < to {
				next = append(next, uint64(to)<<groupShift|uint64(me))
			} else {
				next = append(next, uint64(to)<<groupShift|uint64(x.sets.with(h, m, lane)))
				continue
			}
		}
		if c == from {
			if h = x.sets.without(h, m, lane); h != 0 {
				next = append(next, uint64(c)<<groupShift|uint64(h))
			}
			continue
		}
		x.sets.hold(h)
		next = append(next, g)
	}
	if !placed {
		next = append(next, uint64(to)<<groupShift|uint64(me))
	}
	x.next = next

	switch len(next) {
	case 0:
		at.Store(0)
	case 1:
		at.Store(oneGroup | next[0])
	default:
		c := class(len(next))
		cell := x.lists.alloc(c, sizes[c])
		w := groupList | uint64(len(next))<<groupShift | uint64(cell)
		copy(list(x.lists.chunk(cell), w), next)
		at.Store(w)
	}
	for _, g := range old {
		x.sets.release(holders(g))
	}
	if w&groupKinds == groupList {
		x.grace.retire(retiredList, uint32(w))
	}
}

// moveAlone moves a holder that is alone in its group, if it passes nobody.
func moveAlone(groups []uint64, me holders, from, to uint32) bool {
	for i, g := range groups {
		if cutoff(g) != from {
			continue
		}
		if holders(g) != me ||
			i > 0 && cutoff(groups[i-1]) <= to ||
			i+1 < len(groups) && cutoff(groups[i+1]) >= to {
			return false
		}
		atomic.StoreUint64(&groups[i], uint64(to)<<groupShift|uint64(me))
		return true
	}
	return false
}
