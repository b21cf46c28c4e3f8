package sim

import (
	"cmp"
	"container/heap"
	"time"
)

// calendar is the virtual clock: it knows what happens next. What happens at
// one moment happens in the order in which it was entered.
type calendar struct {
	now     time.Duration
	entered uint64
	entries entries
}

// entry is something that will happen.
type entry struct {
	at    time.Duration
	order uint64
	what  func()
	place int // in the heap; -1: it is not in it
}

// at enters what for a moment that has not passed.
func (c *calendar) at(t time.Duration, what func()) {
	c.entered++
	heap.Push(&c.entries, &entry{at: max(t, c.now), order: c.entered, what: what})
}

// set moves an entry to another moment, and enters it again if it has happened.
func (c *calendar) set(e *entry, t time.Duration) {
	c.entered++
	e.at, e.order = max(t, c.now), c.entered
	if e.place < 0 {
		heap.Push(&c.entries, e)
		return
	}
	heap.Fix(&c.entries, e.place)
}

// drop takes an entry out.
func (c *calendar) drop(e *entry) {
	if e.place >= 0 {
		heap.Remove(&c.entries, e.place)
	}
}

// next is the time of what happens next.
func (c *calendar) next() (time.Duration, bool) {
	if len(c.entries) == 0 {
		return 0, false
	}
	return c.entries[0].at, true
}

// step lets the next thing happen.
func (c *calendar) step() {
	e := heap.Pop(&c.entries).(*entry)
	c.now = e.at
	e.what()
}

type entries []*entry

func (h entries) Len() int { return len(h) }
func (h entries) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(h[i].at, h[j].at), cmp.Compare(h[i].order, h[j].order)) < 0
}
func (h entries) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i, j
}
func (h *entries) Push(x any) {
	e := x.(*entry)
	e.place = len(*h)
	*h = append(*h, e)
}
func (h *entries) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	e.place = -1
	return e
}
