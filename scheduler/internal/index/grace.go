package index

import (
	"sync/atomic"
	"unsafe"
)

// grace decides when memory that was taken out of readers' sight may be used
// again: when every reader that could still see it has left.
//
// A reader counts itself in on enter and out when it leaves, in one of a few
// counters, picked so that readers rarely share one. It never waits and never
// retries. A writer first unlinks a thing by an atomic store and only then
// watches the counters: once each of them was seen at zero, at whatever time
// after the store, every reader that entered before the store has left, and
// every other one finds the new state. Atomic operations of Go are
// sequentially consistent, and so a reader's last look happens before the
// reuse.
//
// Readers enter on one of two parities. A grace period first waits for the
// parity that nobody enters, then switches, then waits for the other one: so
// that a steady stream of readers cannot keep a counter above zero for ever.
type grace struct {
	parity atomic.Uint32
	slots  [graceSlots]graceSlot

	// The writers' half, guarded by Index.mu.
	next     int    // slots before it were seen empty in this half
	switched bool   // the second half has begun
	done     uint32 // grace periods completed, modulo 2^32
	fresh    []retired
	waiting  []retired // retired before the grace period under way began
	reclaim  func(retired)
}

const (
	graceSlots = 32
	// graceBatch is how many things may be retired between two looks at
	// the counters.
	graceBatch = 64
)

type graceSlot struct {
	active [2]atomic.Int64
	_      [112]byte // no two slots in one pair of cache lines
}

// retired is a thing to be reclaimed: its kind and its number.
type retired struct {
	kind   retiredKind
	number uint32
}

type retiredKind uint32

const (
	retiredPage retiredKind = iota
	retiredRun
	retiredList
	retiredBlock
)

// enter counts a reader in; the reader leaves by adding -1 to the counter.
func (g *grace) enter() *atomic.Int64 {
	var here byte
	// The stack tells goroutines that run at once from each other. Any other
	// choice of slot would be as right.
	h := uint64(uintptr(unsafe.Pointer(&here))>>11) * 0x9E3779B97F4A7C15
	c := &g.slots[h>>59].active[g.parity.Load()&1]
	c.Add(1)
	return c
}

// retire hands over a thing that no reader entering from now on can reach.
func (g *grace) retire(kind retiredKind, number uint32) {
	g.fresh = append(g.fresh, retired{kind, number})
	if len(g.fresh)%graceBatch == 0 {
		g.poll()
	}
}

// poll takes the grace period under way as far as it goes without waiting,
// and reports whether it ended.
func (g *grace) poll() bool {
	for {
		p := g.parity.Load()&1 ^ 1 // nobody enters here now
		for g.next < graceSlots {
			if g.slots[g.next].active[p].Load() != 0 {
				return false
			}
			g.next++
		}
		g.next = 0
		if g.switched {
			break
		}
		g.switched = true
		g.parity.Store(g.parity.Load() ^ 1)
	}
	g.switched = false
	g.done++
	for _, r := range g.waiting {
		g.reclaim(r)
	}
	g.waiting, g.fresh = g.fresh, g.waiting[:0]
	return true
}

// flush polls until all is reclaimed or a reader stands in the way.
func (g *grace) flush() {
	for len(g.fresh)+len(g.waiting) > 0 && g.poll() {
	}
	if cap(g.fresh) > 1<<14 && len(g.fresh) == 0 {
		g.fresh = nil
	}
	if cap(g.waiting) > 1<<14 && len(g.waiting) == 0 {
		g.waiting = nil
	}
}

// since tells later whether every reader of now has left.
func (g *grace) since() uint32 { return g.done }

// passed reports whether a whole grace period lies between the call of since
// that returned mark and now.
func (g *grace) passed(mark uint32) bool {
	for g.done-mark < 2 {
		if !g.poll() {
			return false
		}
	}
	return true
}
