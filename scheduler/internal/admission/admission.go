// Package admission is where requests wait for room: who may wait, who is next,
// and who is tried when a member gets room. It scores nothing: whether there is
// room, and where, the picker says.
//
// Queue is pure. It has no clock and starts nothing: when those who wait are
// tried again, and for how long they wait, is up to whoever owns it. Waits, in
// wait.go, is the shell that lets calls wait in one.
//
// Models. Each model has a queue of its own, with bounds of its own: a request
// is held only behind others of its model. Other names of a model, and its
// adapters, wait in the queue of the model, as they need the same members.
//
// Rank. A request is due when its target leaves no more time than it is
// predicted to take, but never later than Age after it came, with a target or
// without, and never before it came. The first due is the first tried. A step
// of priority counts as one Age. So nobody is passed by a request of the same
// priority and tenant that came more than Age later.
//
// Fairness. Tenants take turns of Quantum ms of predicted work: one that has had
// its turn is tried after all that have not. So a tenant that got more than
// Quantum more than another that waits stands back. Who comes begins where one
// is that waited all the time and got its share: not to have asked gives no
// credit, and however many come, they do not keep others from their turn. Where
// a queue is full, the tenant that takes most of it gives way to one that takes
// less.
//
// Room. A request that is tried in vain waits for one member. It is ahead, on
// that member, of all whose rank is later, and that member has no room for them
// then. So whoever needs a whole member gets it when it has drained, and those
// behind go elsewhere as the wait grows. Such a member is closed until it has
// changed or Pass polls, and a request is tried again when one that it can use
// is open: those who wait for a busy member are not in the way of others.
package admission

import (
	"cmp"
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// ErrFull says that a request may not wait, or not any more, as too many do.
var ErrFull = errors.New("the queue is full")

// PollEvery is how often Pass should poll while requests wait: load samples
// come in, and reservations run out.
const PollEvery = 50 * time.Millisecond

// maxWaiting bounds the requests that wait over all models.
const maxWaiting = 32768

// Rules say how requests wait. Every zero value but that of Length stands for
// the default named.
type Rules struct {
	// Length is how many requests may wait for one model. 0: none waits that
	// comes from now on, and those that wait are let go.
	Length int
	// Bytes that the requests of one model may take; 256 MiB. But for the first
	// of each model, those of all models together take no more than twice that.
	Bytes int64
	// Age is how long a request can be passed by later ones; 10 s.
	Age time.Duration
	// QuantumMS is how much work a tenant gets in one turn; 2000.
	QuantumMS float64
	// BudgetMS is the prefill that a member may have before requests wait; 1000.
	BudgetMS float64
	// Wait is how long a request waits at most; 60 s.
	Wait time.Duration
}

// Open tells whether requests may wait.
func (r *Rules) Open() bool { return r.Length > 0 }

func (r Rules) withDefaults() Rules {
	r.Length = max(r.Length, 0)
	r.Bytes = cmp.Or(max(r.Bytes, 0), 256<<20)
	r.Age = cmp.Or(max(r.Age, 0), 10*time.Second)
	if !(r.QuantumMS > 0) {
		r.QuantumMS = 2000
	}
	if !(r.BudgetMS > 0) {
		r.BudgetMS = 1000
	}
	r.Wait = cmp.Or(max(r.Wait, 0), time.Minute)
	return r
}

// Queue is safe for concurrent use.
type Queue struct {
	fleet   *fleet.Fleet
	attempt attempt
	picker  *pick.Picker
	rules   atomic.Pointer[Rules]
	seed    maphash.Seed

	mu     sync.RWMutex // guards models
	models map[string]*model
	// total of what waits over all models.
	total   struct{ requests, bytes atomic.Int64 }
	counted struct{ pushed, admitted, failed, cancelled, refused, displaced atomic.Uint64 }

	passing sync.Mutex // held by Pass and Set; guards what follows
	scratch scratch
}

// attempt tries a request with what is ahead of it. Where there is no room, it
// lists in among who can be used.
type attempt func(w *Waiter, room *pick.Admission, now time.Time) verdict

// verdict is what became of a request that was tried.
type verdict struct {
	// noRoom is why it waits on; nil: it does not.
	noRoom *pick.NoRoom
	// What it got otherwise.
	decision *pick.Decision
	err      error
	workMS   float64 // spent on it
}

// Outcome is what became of a request that waited.
type Outcome struct {
	// Decision; nil: Err says why there is none.
	Decision *pick.Decision
	Err      error
	// At is when it was decided.
	At time.Time
}

// Waiter is a request that waits.
type Waiter struct {
	request  pick.Request
	came     time.Time
	done     func(Outcome)
	priority int
	bytes    int64
	slackMS  float64 // what the predicted time leaves of the target; NaN: none

	model *model

	// What follows is guarded by the mutex of the model.
	tenant *tenant // nil: does not wait
	class  *class
	key    key
	awaits fleet.ID // the member that it waits for, and
	adds   fleet.Ahead
	fresh  bool   // it was not tried by a pass
	passed uint64 // number of the last pass that came by
	trying bool
	left   bool // while it was tried
}

// New returns a queue without anybody in it.
func New(r Rules, f *fleet.Fleet, p *pick.Picker) *Queue {
	q := &Queue{fleet: f, picker: p, seed: maphash.MakeSeed(), models: make(map[string]*model)}
	q.attempt = q.try
	r = r.withDefaults()
	q.rules.Store(&r)
	return q
}

// Rules that are in force; not to be changed.
func (q *Queue) Rules() *Rules { return q.rules.Load() }

// Set changes the rules. Those who wait go on waiting, also beyond the new
// bounds, unless nobody may wait any more.
func (q *Queue) Set(r Rules) {
	q.passing.Lock()
	defer q.passing.Unlock()
	r = r.withDefaults()
	q.rules.Store(&r)
	for _, m := range q.list(nil) {
		m.apply(&r)
	}
}

// Stats counts what happened since New. Pushed is the sum of what follows it
// and Waiting, Refused apart.
type Stats struct {
	// Waiting requests, and what they take.
	Waiting int
	Bytes   int64
	// Pushed: had to wait. Admitted got a place. Failed could not be served any
	// more. Cancelled gave up, or waited as long as they may. Displaced gave way
	// to a tenant that had less. Refused found no room to wait.
	Pushed, Admitted, Failed, Cancelled, Displaced, Refused uint64
}

// Stats returns the counts.
func (q *Queue) Stats() Stats {
	return Stats{
		Waiting: q.Waiting(), Bytes: q.total.bytes.Load(),
		Pushed: q.counted.pushed.Load(), Admitted: q.counted.admitted.Load(), Failed: q.counted.failed.Load(),
		Cancelled: q.counted.cancelled.Load(), Displaced: q.counted.displaced.Load(), Refused: q.counted.refused.Load(),
	}
}

// Waiting is how many requests wait.
func (q *Queue) Waiting() int { return int(q.total.requests.Load()) }

// Try decides at once where there is room and nobody of the model waits, or
// nobody may wait. It fails with a pick.NoRoom where the request has to Enter.
func (q *Queue) Try(r *pick.Request, now time.Time) (*pick.Decision, error) {
	r.Admission = nil
	if rules := q.Rules(); rules.Open() {
		r.Admission = &pick.Admission{BudgetMS: rules.BudgetMS, Hold: q.held(r.Model)}
	}
	return q.picker.Pick(r, now)
}

// held tells whether anybody waits in the queue of that name.
func (q *Queue) held(name string) bool {
	if q.total.requests.Load() == 0 {
		return false
	}
	q.mu.RLock()
	m := q.models[q.modelOf(name)]
	q.mu.RUnlock()
	return m != nil && m.waits.Load() > 0
}

// modelOf is the model in whose queue requests for a name wait: that in which
// the keys of who serves it are rooted.
func (q *Queue) modelOf(name string) string {
	view := q.fleet.View()
	if services := view.Serving(name); len(services) > 0 {
		if root := view.Rows[services[0].Position].Model; root != "" {
			return root
		}
	}
	return name
}

// Enter lets a request wait that Try found no room for, or fails with ErrFull.
// Beside the prompt it takes so many bytes. done is called once, from a Pass or
// an Enter, with what became of it, unless Leave returns true; it must not call
// the queue.
func (q *Queue) Enter(r *pick.Request, noRoom *pick.NoRoom, priority int, bytes int64, now time.Time, done func(Outcome)) (*Waiter, error) {
	w := &Waiter{
		request: *r, came: now, done: done, priority: priority,
		bytes:  bytes + int64(len(r.Prompt.Tokens)+8*len(r.Prompt.Keys)),
		awaits: noRoom.Member, adds: noRoom.Adds, slackMS: noRoom.SlackMS, fresh: true,
	}
	name, kind := q.modelOf(r.Model), q.classOf(r)
	for {
		m := q.model(name)
		m.mu.Lock()
		if m.gone {
			m.mu.Unlock()
			continue
		}
		err := m.enterLocked(w, kind)
		m.mu.Unlock()
		if err != nil {
			q.counted.refused.Add(1)
			return nil, fmt.Errorf("model %q: no member has room, and %w", r.Model, err)
		}
		q.counted.pushed.Add(1)
		return w, nil
	}
}

// Leave takes a request out. It returns false if done was or will be called.
func (q *Queue) Leave(w *Waiter) bool {
	m := w.model
	m.mu.Lock()
	defer m.mu.Unlock()
	if w.tenant == nil {
		return false
	}
	if w.trying {
		w.left = true
		return false
	}
	q.counted.cancelled.Add(1)
	m.settleLocked(m.removeLocked(w))
	m.open.add(w.awaits) // somebody else is the next to get it
	return true
}

// model returns the queue of a model, a new one if there is none.
func (q *Queue) model(name string) *model {
	q.mu.RLock()
	m := q.models[name]
	q.mu.RUnlock()
	if m != nil {
		return m
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if m = q.models[name]; m == nil {
		m = newModel(q, name)
		q.models[name] = m
	}
	return m
}

// list appends the models, in any order.
func (q *Queue) list(to []*model) []*model {
	q.mu.RLock()
	defer q.mu.RUnlock()
	for _, m := range q.models {
		to = append(to, m)
	}
	return to
}

// forget drops a model for which nobody waits.
func (q *Queue) forget(m *model) {
	q.mu.Lock()
	defer q.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.waiting) == 0 && !m.gone {
		m.gone = true
		delete(q.models, m.name)
	}
}
