package index

import "iter"

// Holder is a member with some of its lanes.
type Holder uint32 // member<<laneBits | lanes

// Member of the holder.
func (h Holder) Member() Member { return Member(h >> laneBits) }

// On reports whether l is among the lanes.
func (h Holder) On(l Lane) bool { return h>>l&1 != 0 }

// Answer says how many leading blocks of a query each member holds on each of
// its lanes. The zero value is empty; used again, it keeps its memory.
type Answer struct {
	holders []uint32
	depths  []share
	joined  []joined // scratch
}

// share is the depth of the holders up to end, from that of the share before.
type share struct{ end, depth uint32 }

// All yields every holder with the number of leading blocks that it holds, at
// least one. A member whose lanes differ in depth comes once for each depth.
func (a *Answer) All() iter.Seq2[Holder, uint32] {
	return func(yield func(Holder, uint32) bool) {
		from := uint32(0)
		for _, s := range a.depths {
			for _, h := range a.holders[from:s.end] {
				if !yield(Holder(h), s.depth) {
					return
				}
			}
			from = s.end
		}
	}
}

func (a *Answer) reset() {
	a.holders, a.depths = a.holders[:0], a.depths[:0]
}

// add a set of holders, none of which is there on the same lane.
func (a *Answer) add(holders []uint32, depth uint32) {
	a.holders = append(a.holders, holders...)
	a.depths = append(a.depths, share{uint32(len(a.holders)), depth})
}

// addOne adds one holder.
func (a *Answer) addOne(holder, depth uint32) {
	a.holders = append(a.holders, holder)
	if n := len(a.depths); n > 0 && a.depths[n-1].depth == depth {
		a.depths[n-1].end++
		return
	}
	a.depths = append(a.depths, share{uint32(len(a.holders)), depth})
}
