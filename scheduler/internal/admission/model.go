package admission

import (
	"cmp"
	"container/heap"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// maxPriority bounds what priorities differ in: beyond it the oldest of all
// would wait for hours.
const maxPriority = 100

// model is the queue of one model.
type model struct {
	queue *Queue
	name  string
	waits atomic.Int64 // how many

	mu      sync.Mutex // guards what follows, and the waiters
	gone    bool       // it was forgotten: nobody may enter
	waiting []*Waiter  // by key
	bytes   int64
	number  uint64 // of the last that entered
	fresh   int    // of those that wait
	tenants map[string]*tenant
	most    byUse   // tenants that wait, the one that takes most first
	turnMS  float64 // what a tenant got that waited all the time; never falls
	classes map[uint64]*class
	sweep
}

// key is a request's rank.
type key struct {
	turn   int64 // of the tenant
	due    int64 // in ns
	number uint64
}

func (k key) compare(o key) int {
	return cmp.Or(cmp.Compare(k.turn, o.turn), cmp.Compare(k.due, o.due), cmp.Compare(k.number, o.number))
}

func newModel(q *Queue, name string) *model {
	return &model{
		queue: q, name: name, tenants: make(map[string]*tenant), classes: make(map[uint64]*class),
		sweep: sweep{seen: make(map[fleet.ID]*fleet.Reserved)},
	}
}

// rank sets the key of a request that has a tenant and a number.
func (w *Waiter) rank(age time.Duration) {
	slack := age
	if ms := w.slackMS; !math.IsNaN(ms) {
		slack = time.Duration(min(max(ms, 0), float64(age)/1e6) * 1e6)
	}
	priority := min(max(w.priority, -maxPriority), maxPriority)
	w.key.turn = w.tenant.turn
	w.key.due = w.came.Add(slack).UnixNano() - int64(priority)*int64(age)
}

// findLocked is where the request with that key stands, or would.
func (m *model) findLocked(k key) (at int, found bool) {
	return slices.BinarySearchFunc(m.waiting, k, func(w *Waiter, k key) int { return w.key.compare(k) })
}

func (m *model) placeLocked(w *Waiter) {
	at, _ := m.findLocked(w.key)
	m.waiting = slices.Insert(m.waiting, at, w)
}

func (m *model) unplaceLocked(w *Waiter) {
	at, _ := m.findLocked(w.key)
	m.waiting = slices.Delete(m.waiting, at, at+1)
}

// enterLocked lets a request wait, or fails with ErrFull.
func (m *model) enterLocked(w *Waiter, kind uint64) error {
	rules := m.queue.rules.Load()
	n := m.tenantLocked(w.request.Tenant)
	if err := m.allowLocked(w, n, rules); err != nil {
		m.settleLocked(n)
		return err
	}
	w.model, w.tenant, w.class = m, n, m.classLocked(kind)
	if n.requests == 0 {
		n.start(m.turnMS, rules.QuantumMS)
	}
	m.takeLocked(n, 1, w.bytes, rules)
	w.class.waiters++
	m.number++
	w.key.number = m.number
	w.rank(rules.Age)
	m.placeLocked(w)
	m.fresh++
	m.waits.Store(int64(len(m.waiting)))
	return nil
}

// allowLocked adds a newcomer to the totals if there is room for it to wait,
// or makes room.
func (m *model) allowLocked(w *Waiter, n *tenant, rules *Rules) error {
	total := &m.queue.total
	requests, bytes := total.requests.Add(1), total.bytes.Add(w.bytes)
	// A model takes no more than all leave free, so that another finds room.
	fits := func(fewer int, less int64) bool {
		count, size := len(m.waiting)-fewer, m.bytes-less
		switch {
		case !rules.Open():
			return true // let go by the next pass
		case count >= rules.Length || int64(count)+requests-int64(fewer) > maxWaiting:
			return false
		}
		return count == 0 || size+w.bytes <= rules.Bytes && size+bytes-less <= 2*rules.Bytes
	}
	if fits(0, 0) {
		return nil
	}
	var victims []*Waiter
	if len(m.most) > 0 && m.most[0] != n {
		victim, freed := m.most[0], int64(0)
		need := rules.use(n.requests+1, n.bytes+w.bytes)
		for i := len(m.waiting) - 1; i >= 0; i-- {
			if rules.use(victim.requests-len(victims), victim.bytes-freed) <= need {
				break
			}
			last := m.waiting[i]
			if last.tenant != victim || last.trying {
				continue
			}
			victims, freed = append(victims, last), freed+last.bytes
			if !fits(len(victims), freed) {
				continue
			}
			for _, v := range victims {
				m.settleLocked(m.removeLocked(v))
				m.queue.counted.displaced.Add(1)
				v.done(Outcome{At: w.came, Err: fmt.Errorf("model %q: %w: the request gave way to one of a tenant with fewer: send less, or try again later", m.name, ErrFull)})
			}
			return nil
		}
	}
	total.requests.Add(-1)
	total.bytes.Add(-w.bytes)
	return fmt.Errorf("%w: %d requests of %d bytes wait, %d and %d of them of the tenant: "+
		"send less, try again later, add members or let more wait (-queue-length, -queue-memory)",
		ErrFull, len(m.waiting), m.bytes, n.requests, n.bytes)
}

// removeLocked takes a request out and returns its tenant, which is to be
// settled.
func (m *model) removeLocked(w *Waiter) *tenant {
	n, c := w.tenant, w.class
	m.unplaceLocked(w)
	w.tenant, w.class = nil, nil
	if w.fresh {
		m.fresh--
	}
	if c.waiters--; c.waiters == 0 {
		m.dropLocked(c)
	}
	m.takeLocked(n, -1, -w.bytes, m.queue.rules.Load())
	m.queue.total.requests.Add(-1)
	m.queue.total.bytes.Add(-w.bytes)
	m.waits.Store(int64(len(m.waiting)))
	return n
}

// takeLocked notes that a tenant takes so much more of the queue.
func (m *model) takeLocked(n *tenant, requests int, bytes int64, rules *Rules) {
	waited := n.requests > 0
	n.requests += requests
	n.bytes += bytes
	m.bytes += bytes
	n.use = rules.use(n.requests, n.bytes)
	switch waits := n.requests > 0; {
	case waits && waited:
		heap.Fix(&m.most, n.index)
	case waits:
		heap.Push(&m.most, n)
	case waited:
		heap.Remove(&m.most, n.index)
	}
}

// creditWorkLocked notes work that was spent on a request, by its key, of a tenant.
func (m *model) chargeLocked(n *tenant, served key, workMS float64, rules *Rules) {
	m.turnMS = max(m.turnMS, float64(served.turn)*rules.QuantumMS)
	if !(workMS > 0 && workMS <= math.MaxFloat64) {
		return
	}
	tenants := len(m.most)
	if n.requests == 0 {
		tenants++ // this was its last
	}
	m.turnMS += workMS / float64(tenants)
	n.servedMS += workMS
	if turn := n.turnOf(rules.QuantumMS); turn != n.turn {
		n.turn = turn
		if n.requests > 0 {
			m.mergeLocked(n)
		}
	}
}

// mergeLocked puts the requests of a tenant where its turn is.
func (m *model) mergeLocked(n *tenant) {
	own := make([]*Waiter, 0, n.requests)
	m.waiting = slices.DeleteFunc(m.waiting, func(w *Waiter) bool {
		if w.tenant != n {
			return false
		}
		w.key.turn = n.turn
		own = append(own, w)
		return true
	})
	// From the end, so that nothing is overwritten before it was moved.
	rest := len(m.waiting)
	m.waiting = append(m.waiting, own...)
	for to := len(m.waiting) - 1; len(own) > 0; to-- {
		if last := own[len(own)-1]; rest == 0 || m.waiting[rest-1].key.compare(last.key) < 0 {
			m.waiting[to], own = last, own[:len(own)-1]
		} else {
			rest--
			m.waiting[to] = m.waiting[rest]
		}
	}
}

// apply ranks all who wait by rules that have changed.
func (m *model) apply(rules *Rules) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range m.tenants {
		n.turn, n.use = n.turnOf(rules.QuantumMS), rules.use(n.requests, n.bytes)
	}
	heap.Init(&m.most)
	for _, w := range m.waiting {
		w.rank(rules.Age)
	}
	slices.SortFunc(m.waiting, func(a, b *Waiter) int { return a.key.compare(b.key) })
	m.resume = key{}
	m.fillLocked(m.queue.fleet.View()) // budgets may have grown
}
