package fleet

import (
	"container/heap"
	"math/rand/v2"
	"time"
)

// decisions are all that can still be reported. A decision with a reservation on its
// member and one that is released have deadlines of their own, so that at the
// bound nothing that is reserved goes before what is not.
type decisions struct {
	numbers  *rand.ChaCha8
	byID     map[Decision]*decision
	live     deadlines // of those with a reservation
	released deadlines
}

func newDecisions(seed [32]byte) decisions {
	return decisions{numbers: rand.NewChaCha8(seed), byID: make(map[Decision]*decision)}
}

// due is the heap that the decision is in.
func (o *decisions) due(d *decision) *deadlines {
	if d.reserves() {
		return &o.live
	}
	return &o.released
}

func (o *decisions) add(d *decision) {
	for d.id == 0 || o.byID[d.id] != nil {
		d.id = Decision(o.numbers.Uint64())
	}
	o.byID[d.id] = d
	heap.Push(o.due(d), d)
}

func (o *decisions) drop(d *decision) {
	delete(o.byID, d.id)
	heap.Remove(o.due(d), d.index)
}

func (o *decisions) postpone(d *decision, deadline time.Time) {
	d.deadline = deadline
	heap.Fix(o.due(d), d.index)
}

// release keeps a decision, which must be off its ledger, for a late report.
func (o *decisions) release(d *decision, deadline time.Time) {
	heap.Remove(o.due(d), d.index)
	d.phase, d.deadline = released, deadline
	heap.Push(&o.released, d)
}

// overdue is a decision whose deadline has come, or nil.
func (o *decisions) overdue(now time.Time) *decision {
	for _, due := range [...]deadlines{o.live, o.released} {
		if len(due) > 0 && !due[0].deadline.After(now) {
			return due[0]
		}
	}
	return nil
}

// least is the decision that can be spared best: a released one if there is any,
// else the one that expires first.
func (o *decisions) least() *decision {
	if len(o.released) > 0 {
		return o.released[0]
	}
	return o.live[0]
}

// deadlines is a heap, the earliest first.
type deadlines []*decision

func (h deadlines) Len() int           { return len(h) }
func (h deadlines) Less(i, j int) bool { return h[i].deadline.Before(h[j].deadline) }
func (h deadlines) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}
func (h *deadlines) Push(x any) {
	d := x.(*decision)
	d.index = len(*h)
	*h = append(*h, d)
}
func (h *deadlines) Pop() any {
	old := *h
	d := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return d
}
