package admission

import (
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

const (
	// passWork bounds one pass over a model, in members that are looked at: a try
	// looks at all of the model's, and counts tryWork at least. Half of it is for
	// those who are next, half goes on where the last pass ended.
	passWork = 2048
	tryWork  = 32
)

// errLeft is the outcome of a request that nobody waits for.
var errLeft = errors.New("the request was given up")

// Panic is the error of a request whose try panicked.
type Panic struct {
	Value any
	Stack []byte
}

func (p *Panic) Error() string { return fmt.Sprintf("%v\n\n%s", p.Value, p.Stack) }

// sweep is how far the passes over a model have come. It is guarded by the
// model's mutex.
type sweep struct {
	pass    uint64
	poll    uint64 // number of the last poll
	open    set    // members that may have room
	seen    map[fleet.ID]*fleet.Reserved
	unknown int  // classes of which no request was tried in vain since the last poll
	resume  key  // where the next pass goes on; zero: all had their turn
	again   bool // members opened since the first of them had
}

// scratch is used by one pass after the other.
type scratch struct {
	models []*model
	ahead  []fleet.Ahead
	among  []fleet.ID
	room   pick.Admission
}

// Pass tries those who wait for members that may have room, in turn, at the time
// that now says. With poll that is every member, otherwise those on which
// reservations have changed. A pass is bounded; it returns true if it ended before
// all had their turn. No lock is held while a request is tried.
func (q *Queue) Pass(now func() time.Time, poll bool) (more bool) {
	q.passing.Lock()
	defer q.passing.Unlock()
	q.scratch.models = q.list(q.scratch.models[:0])
	slices.SortFunc(q.scratch.models, func(a, b *model) int { return strings.Compare(a.name, b.name) })
	for i, m := range q.scratch.models {
		more = m.round(now, poll) || more
		if m.waits.Load() == 0 {
			q.forget(m)
		}
		q.scratch.models[i] = nil
	}
	return more
}

// round is one pass over those who wait for a model.
func (m *model) round(now func() time.Time, poll bool) (more bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, rules, view := &m.queue.scratch, m.queue.rules.Load(), m.queue.fleet.View()
	m.pass++
	m.openLocked(view, poll)
	s.ahead = slices.Grow(s.ahead[:0], view.IDs())[:view.IDs()]
	clear(s.ahead)
	next, rest, try := passWork/2, passWork/2, max(tryWork, len(view.Serving(m.name)))
	i := 0
	for i < len(m.waiting) && (m.open.count > 0 || m.fresh > 0 || m.unknown > 0 || !rules.Open()) {
		w := m.waiting[i]
		switch {
		case w.passed == m.pass: // it was ranked again meanwhile
			i++
			continue
		case rules.Open() && !m.wantsLocked(w), next <= 0 && w.key.compare(m.resume) < 0:
			w.passed = m.pass
			s.wait(w)
			i++
			continue
		case next <= 0 && rest <= 0:
			m.resume = w.key
			return true
		}
		w.passed = m.pass
		at := w.key
		m.tryLocked(w, rules, now())
		work := &rest
		if next > 0 {
			work = &next
		}
		*work -= try
		// Others came and went meanwhile.
		var found bool
		if i, found = m.findLocked(at); found {
			i++
		}
	}
	m.resume = key{}
	if m.again {
		m.again = false
		return true
	}
	if i >= len(m.waiting) {
		m.open.clear() // all had the choice
	}
	return false
}

// wantsLocked tells whether there is a reason to try a request.
func (m *model) wantsLocked(w *Waiter) bool {
	return w.fresh || !m.knowsLocked(w.class) || w.class.any && m.open.count > 0 || w.class.members.meets(&m.open)
}

// wait puts a request ahead of those behind it.
func (s *scratch) wait(w *Waiter) {
	if int(w.awaits) < len(s.ahead) {
		a := &s.ahead[w.awaits]
		a.Requests += w.adds.Requests
		a.MS += w.adds.MS
		a.Share += w.adds.Share
	}
}

// openLocked notes which members may have room.
func (m *model) openLocked(view *fleet.View, poll bool) {
	if poll || m.poll == 0 {
		m.poll++
		m.unknown = len(m.classes)
		clear(m.seen) // members come and go
		m.fillLocked(view)
		return
	}
	for _, s := range view.Serving(m.name) {
		member := view.Members[s.Position]
		if r := member.Reserved(); m.seen[member.ID] != r {
			m.seen[member.ID] = r
			m.open.add(member.ID)
			m.again = m.resume != key{}
		}
	}
}

// fillLocked opens all members.
func (m *model) fillLocked(view *fleet.View) {
	m.open.clear()
	for _, s := range view.Serving(m.name) {
		member := view.Members[s.Position]
		m.seen[member.ID] = member.Reserved()
		m.open.add(member.ID)
	}
}

// tryLocked tries one that waits, and unlocks the model meanwhile.
func (m *model) tryLocked(w *Waiter, rules *Rules, at time.Time) {
	s := &m.queue.scratch
	s.among = s.among[:0]
	room := &s.room
	*room = pick.Admission{BudgetMS: rules.BudgetMS, Ahead: s.ahead, Among: &s.among}
	if !rules.Open() {
		room = nil
	}
	w.trying = true
	m.mu.Unlock()
	v := m.queue.safely(w, room, at)
	m.mu.Lock()
	w.trying = false
	if v.noRoom != nil && !w.left {
		m.waitOnLocked(w, v.noRoom, rules)
		return
	}
	n, counted := m.removeLocked(w), &m.queue.counted
	switch {
	case v.noRoom != nil:
		v.err = errLeft
		counted.cancelled.Add(1)
	case v.err != nil:
		counted.failed.Add(1)
	default:
		counted.admitted.Add(1)
		m.chargeLocked(n, w.key, v.workMS, rules)
	}
	m.settleLocked(n)
	w.done(Outcome{Decision: v.decision, Err: v.err, At: at})
}

// waitOnLocked lets a request wait that was tried in vain. The member that it
// waits for has no room for those behind it.
func (m *model) waitOnLocked(w *Waiter, noRoom *pick.NoRoom, rules *Rules) {
	s := &m.queue.scratch
	if w.fresh {
		w.fresh = false
		m.fresh--
	}
	w.awaits, w.adds = noRoom.Member, noRoom.Adds
	m.learnLocked(w.class, s.among)
	m.open.remove(noRoom.Member)
	s.wait(w)
	if was := w.key; noRoom.SlackMS != w.slackMS {
		w.slackMS = noRoom.SlackMS
		if w.rank(rules.Age); w.key != was {
			now := w.key
			w.key = was
			m.unplaceLocked(w)
			w.key = now
			m.placeLocked(w)
		}
	}
}

// safely tries a request; a panic is its own.
func (q *Queue) safely(w *Waiter, room *pick.Admission, at time.Time) (v verdict) {
	defer func() {
		if r := recover(); r != nil {
			v = verdict{err: &Panic{Value: r, Stack: debug.Stack()}}
		}
	}()
	return q.attempt(w, room, at)
}

// try asks the picker for a place.
func (q *Queue) try(w *Waiter, room *pick.Admission, at time.Time) verdict {
	w.request.Elapsed, w.request.Admission = at.Sub(w.came), room
	d, err := q.picker.Pick(&w.request, at)
	var noRoom *pick.NoRoom
	switch {
	case err == nil:
		return verdict{decision: d, workMS: d.Candidates[0].Cost.Load + d.Candidates[0].Cost.Prefill}
	case errors.As(err, &noRoom):
		return verdict{noRoom: noRoom}
	case errors.Is(err, pick.ErrModel) || errors.Is(err, pick.ErrGone) || errors.Is(err, pick.ErrAdapter) || errors.Is(err, pick.ErrExcluded):
		// It was served when the request came, and may be again.
		err = fmt.Errorf("%w: the last member that served it left while the request waited: %s", pick.ErrNoCandidate, err.Error())
	}
	return verdict{err: err}
}
