package mirror

import (
	"math/bits"
	"math/rand/v2"
)

// table finds a node by one of its 64-bit numbers, which it leaves in the node. It
// is an open-addressed hash table with linear probing: one line of memory for
// nearly every call. The numbers come from outside, so where one has its home
// depends on a seed of this process.
type table struct {
	slots []slot // a power of two of them
	shift uint   // of a slot's mark: what remains is its home
	used  int
	seed  uint64
}

// slot is free when its node is 0, which is the trunk.
type slot struct {
	mark uint32
	node int32
}

const (
	firstSlots = 64
	mixer      = 0x9E3779B97F4A7C15
)

func newTable() table {
	t := table{seed: rand.Uint64()}
	t.resize(firstSlots)
	return t
}

func (t *table) mark(key uint64) uint32 {
	hi, lo := bits.Mul64(key^t.seed, mixer)
	return uint32((hi ^ lo) >> 32)
}

// get returns the node of key, 0 if there is none. Whether a node is the one,
// its owner says.
func (t *table) get(key uint64, is func(node int32) bool) int32 {
	mark := t.mark(key)
	mask := len(t.slots) - 1
	for i := int(mark >> t.shift); ; i++ {
		s := t.slots[i&mask]
		if s.node == 0 || s.mark == mark && is(s.node) {
			return s.node
		}
	}
}

// put enters a node whose key is not there.
func (t *table) put(key uint64, node int32) {
	if t.used++; 4*t.used > 3*len(t.slots) {
		t.resize(2 * len(t.slots))
	}
	t.enter(slot{mark: t.mark(key), node: node})
}

func (t *table) enter(s slot) {
	mask := len(t.slots) - 1
	i := int(s.mark >> t.shift)
	for t.slots[i&mask].node != 0 {
		i++
	}
	t.slots[i&mask] = s
}

// remove takes out a node that is there.
func (t *table) remove(key uint64, node int32) {
	mask := len(t.slots) - 1
	hole := int(t.mark(key) >> t.shift)
	for t.slots[hole].node != node {
		hole = (hole + 1) & mask
	}
	t.used--
	// What stands behind the hole moves up unless that is before its home.
	for i := (hole + 1) & mask; t.slots[i].node != 0; i = (i + 1) & mask {
		home := int(t.slots[i].mark >> t.shift)
		if (i-home)&mask >= (i-hole)&mask {
			t.slots[hole] = t.slots[i]
			hole = i
		}
	}
	t.slots[hole] = slot{}
}

func (t *table) resize(n int) {
	old := t.slots
	t.slots = make([]slot, n)
	t.shift = uint(32 - bits.TrailingZeros(uint(n)))
	for _, s := range old {
		if s.node != 0 {
			t.enter(s)
		}
	}
}
