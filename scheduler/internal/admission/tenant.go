package admission

import "container/heap"

// maxIdle bounds the tenants that are remembered for what they were served
// though none of their requests waits.
const maxIdle = 1024

// tenant is on whose behalf requests wait for one model.
type tenant struct {
	name     string
	servedMS float64
	turn     int64 // servedMS in quanta
	// What waits, and how much of the queue that is.
	requests int
	bytes    int64
	use      float64
	index    int // in model.most, while any waits
}

func (n *tenant) turnOf(quantumMS float64) int64 { return int64(min(n.servedMS/quantumMS, 1<<62)) }

// start lets a tenant wait that did not: it begins as if it had waited all the
// time, and so gets nothing for that, nor keeps others waiting for ever.
func (n *tenant) start(turnMS, quantumMS float64) {
	n.servedMS = max(n.servedMS, turnMS)
	n.turn = n.turnOf(quantumMS)
}

// use is the share of a queue that somebody takes.
func (r *Rules) use(requests int, bytes int64) float64 {
	return max(float64(requests)/float64(max(r.Length, 1)), float64(bytes)/float64(r.Bytes))
}

// tenantLocked returns the tenant of that name, a new one if there is none.
func (m *model) tenantLocked(name string) *tenant {
	n, ok := m.tenants[name]
	if !ok {
		n = &tenant{name: name}
		m.tenants[name] = n
	}
	return n
}

// settleLocked forgets a tenant that does not wait and has had no more than
// whoever comes, and all such tenants where there are too many.
func (m *model) settleLocked(n *tenant) {
	if n.requests > 0 {
		return
	}
	if n.servedMS <= m.turnMS {
		delete(m.tenants, n.name)
		return
	}
	if len(m.tenants)-len(m.most) <= maxIdle {
		return
	}
	for name, n := range m.tenants {
		if n.requests == 0 {
			delete(m.tenants, name)
		}
	}
}

// byUse is a heap, who takes most of the queue first.
type byUse []*tenant

func (h byUse) Len() int           { return len(h) }
func (h byUse) Less(i, j int) bool { return h[i].use > h[j].use }
func (h byUse) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}
func (h *byUse) Push(x any) {
	n := x.(*tenant)
	n.index = len(*h)
	*h = append(*h, n)
}
func (h *byUse) Pop() any {
	old := *h
	n := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return n
}

var _ heap.Interface = (*byUse)(nil)
