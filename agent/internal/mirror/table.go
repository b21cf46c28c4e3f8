package mirror

import (
	"math/bits"
	"math/rand/v2"
)

// table finds a node by a 64-bit number. It is an open-addressed hash table with
// linear probing: one line of memory for nearly every call. The numbers come
// from outside, so where one has its home depends on a seed of this process.
type table struct {
	slots []slot // a power of two of them
	shift uint   // of a slot's mark: what remains is its home
	used  int
	seed  uint64
}

// slot is free when its node is 0, which is the trunk.
type slot struct {
	key  uint64
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

// at is where key is, or the free slot where it would be.
func (t *table) at(key uint64) (int, uint32) {
	mark := t.mark(key)
	mask := len(t.slots) - 1
	i := int(mark >> t.shift)
	for {
		s := &t.slots[i&mask]
		if s.node == 0 || s.key == key {
			return i & mask, mark
		}
		i++
	}
}

// get returns the node of key, 0 if there is none.
func (t *table) get(key uint64) int32 {
	i, _ := t.at(key)
	return t.slots[i].node
}

// put enters or replaces the node of key.
func (t *table) put(key uint64, node int32) {
	i, mark := t.at(key)
	if t.slots[i].node == 0 {
		if t.used++; 4*t.used > 3*len(t.slots) {
			t.resize(2 * len(t.slots))
			i, _ = t.at(key)
		}
	}
	t.slots[i] = slot{key: key, mark: mark, node: node}
}

// remove takes key out if it is there.
func (t *table) remove(key uint64) {
	mask := len(t.slots) - 1
	hole, _ := t.at(key)
	if t.slots[hole].node == 0 {
		return
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
			i := int(s.mark >> t.shift)
			for ; t.slots[i&(n-1)].node != 0; i++ {
			}
			t.slots[i&(n-1)] = s
		}
	}
}
