// Package fleet knows who is there: the members, what they last said of
// themselves, how loaded they are between two samples, and which session went
// where. It knows no keys and scores nothing, has no clock (every call that
// depends on time takes now) and starts no goroutine.
//
// Readers take a View, which is replaced and never edited. Choosing a member
// and reserving on it happen under one lock, in Decide, so that equal requests at
// one moment see each other.
//
// What is not known is never taken for zero: gauges are -1 or NaN then.
package fleet

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"
)

// ErrFull says that the fleet has as many members as it may have.
var ErrFull = errors.New("fleet is full")

// ID is a dense number of a member. Numbers are used again only after Leave,
// the longest unused first.
type ID uint32

// Config bounds a Fleet. Every zero value stands for the default named.
type Config struct {
	// MaxMembers at a time; 4096.
	MaxMembers int
	// MaxDecisions remembered at a time; 65536. At the bound the one goes that
	// would expire first, of those that reserve nothing as long as there are any.
	MaxDecisions int
	// MaxSessions remembered at a time; 65536. At the bound the longest
	// unused goes.
	MaxSessions int
	// Silence is how long a member may be silent and still be chosen while the
	// wire is alive; 3 s.
	Silence time.Duration
	// Grace is how long a silent member is remembered; 30 s.
	Grace time.Duration
	// Settle is the time that a request needs from the decision to an engine and
	// from there to the gauges where nothing is to be computed before; 200 ms.
	Settle time.Duration
	// Seed of the decisions' numbers. It must be a secret that no other
	// scheduler has, nor this one in another life; zero: as good as none, for
	// whoever plays the same again.
	Seed [32]byte
}

func (c Config) withDefaults() Config {
	if c.MaxMembers <= 0 {
		c.MaxMembers = 4096
	}
	if c.MaxDecisions <= 0 {
		c.MaxDecisions = 65536
	}
	if c.MaxSessions <= 0 {
		c.MaxSessions = 65536
	}
	if c.Silence <= 0 {
		c.Silence = 3 * time.Second
	}
	if c.Grace <= 0 {
		c.Grace = 30 * time.Second
	}
	if c.Settle <= 0 {
		c.Settle = 200 * time.Millisecond
	}
	return c
}

// Fleet is safe for concurrent use.
type Fleet struct {
	cfg  Config
	view atomic.Pointer[View]
	// stale says that view is behind slots.
	stale atomic.Bool
	// failing is how many members have a record of failures.
	failing atomic.Int32
	// cut says that the link to the members is lost.
	cut atomic.Bool

	mu         sync.Mutex // guards what follows
	slots      []*slot    // by ID, nil where free
	free       []ID       // oldest first
	names      map[string]*slot
	members    []*Member  // by name; the next view's
	rows       []Row      // of members
	sums       []Reserved // of the ledgers, by ID
	origin     time.Time  // of View.Since; the first sign of life
	roster     *roster    // who serves what; nil after a change
	newest     time.Time  // last sign of life of the wire
	resumed    time.Time  // when there was one again after a time without
	others     int        // schedulers besides this one
	departed   departed
	open       decisions
	unreported int // reservations that ran out since the last report
	sessions   sessions
	stats      Stats
}

// Stats counts what happened since New.
type Stats struct {
	Members, Decisions, Sessions int
	// Decided counts decisions, Expired those whose prefill was never
	// reported done, Evicted those dropped at the bound, Refused members that
	// could not join, Failures reports of one, Paused members that were left
	// out for them, Adopted decisions of other schedulers, Biased members whose
	// reports began to disagree with their promises.
	// Delivered sums what was reported of requests on the members that they were
	// predicted for.
	Delivered                                                             Delivered
	Decided, Expired, Evicted, Refused, Failures, Paused, Adopted, Biased uint64
}

// Delivered are prompt tokens, and the cached ones by prediction and by the
// engines' own counts.
type Delivered struct{ Prompt, Predicted, Cached uint64 }

// slot is the mutable side of a member, guarded by Fleet.mu.
type slot struct {
	member   *Member // what views show
	position int     // in Fleet.members
	ledger   ledger
	breaker  breaker
	observed observed
}

// publishBreakerLocked lets readers see whether the member is left out.
func (f *Fleet) publishBreakerLocked(s *slot) {
	account := s.member.account
	was := *account.failing.Load()
	if was == s.breaker.state {
		return
	}
	state := s.breaker.state
	account.failing.Store(&state)
	switch (Failing{}) {
	case was:
		f.failing.Add(1)
	case state:
		f.failing.Add(-1)
	}
}

// New returns an empty fleet.
func New(cfg Config) *Fleet {
	cfg = cfg.withDefaults()
	f := &Fleet{
		cfg:        cfg,
		names:      make(map[string]*slot),
		departed:   make(departed),
		open:       newDecisions(cfg.Seed),
		unreported: maxUnreported,
		sessions:   newSessions(cfg.MaxSessions),
	}
	f.view.Store(&View{cfg: &f.cfg, roster: &roster{}, failing: &f.failing, cut: &f.cut})
	return f
}

// Join names a member and returns its number; a member that is there keeps
// the one that it has.
func (f *Fleet) Join(name string, now time.Time) (ID, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s, ok := f.names[name]; ok {
		return s.member.ID, nil
	}
	if len(f.names) >= f.cfg.MaxMembers {
		f.stats.Refused++
		return 0, fmt.Errorf("join of %q, %d members there: %w", name, len(f.names), ErrFull)
	}
	var id ID
	if len(f.slots) < f.cfg.MaxMembers {
		id = ID(len(f.slots))
		f.slots = append(f.slots, nil)
		f.sums = append(f.sums, Reserved{})
	} else {
		id, f.free = f.free[0], f.free[1:]
		f.sums[id] = Reserved{}
	}
	if f.origin.IsZero() {
		f.origin = now
	}
	s := &slot{member: &Member{
		ID:            id,
		Hash:          xxhash.Sum64String(name),
		Info:          &Info{Name: name},
		Load:          noLoad(),
		LastHeartbeat: now,
		account:       newAccount(),
	}}
	f.slots[id] = s
	f.names[name] = s
	f.insertLocked(s)
	f.aliveLocked(now)
	return id, nil
}

// Receive takes what a member says of itself. A nil load, or one taken before
// the sample at hand, leaves that as it is. The slices of info and load are
// the fleet's from here on.
func (f *Fleet) Receive(id ID, info Info, load *Load, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.slotLocked(id)
	if s == nil {
		return
	}
	m := *s.member
	info.Name = m.Info.Name
	if !m.Info.equal(&info) {
		m.Info = &info
		f.roster = nil
	}
	if now.After(m.LastHeartbeat) {
		m.LastHeartbeat = now
	}
	if load != nil {
		sample := load.clean(now)
		if sample.At.After(m.Load.At) {
			if sample.reborn(&m.Load) {
				s.breaker = breaker{born: sample.At}
				f.publishBreakerLocked(s)
			}
			m.Load = sample
			f.sampleLocked(s, &sample, now)
		}
	}
	f.aliveLocked(now)
	f.replaceLocked(s, &m)
}

// SetCacheState says which cache state of its cache the index has. Another epoch is
// another engine process: what was reserved on the last one is void.
func (f *Fleet) SetCacheState(id ID, p CacheState) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.slotLocked(id)
	if s == nil || s.member.CacheState == p {
		return
	}
	m := *s.member
	if m.CacheState.Epoch != 0 && p.Epoch != m.CacheState.Epoch {
		f.dropMemberLocked(s)
		s.breaker = breaker{}
		f.publishBreakerLocked(s)
	}
	m.CacheState = p
	f.replaceLocked(s, &m)
}

// Leave forgets a member with all its reservations and sessions.
func (f *Fleet) Leave(id ID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.slotLocked(id)
	if s == nil {
		return
	}
	f.dropMemberLocked(s)
	s.breaker = breaker{}
	f.publishBreakerLocked(s)
	f.sessions.dropMember(id)
	f.removeLocked(s)
	f.departed.add(s.member.Info, f.newest)
	f.slots[id] = nil
	f.free = append(f.free, id)
	delete(f.names, s.member.Info.Name)
}

// Sweep lets reservations run out and returns the members that were silent
// for longer than the grace period, for the caller to forget and then Leave.
// If nothing at all was heard for the time of silence, neither a member nor by
// Answered, the wire is gone and not the engines: nobody is to be forgotten.
func (f *Fleet) Sweep(now time.Time) (forget []ID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.expireLocked(now)
	if now.Sub(f.newest) > f.cfg.Silence {
		return nil
	}
	for _, m := range f.members {
		if now.Sub(later(m.LastHeartbeat, f.resumed)) > f.cfg.Grace {
			forget = append(forget, m.ID)
		}
	}
	return forget
}

// Stats returns the counts.
func (f *Fleet) Stats() Stats {
	f.mu.Lock()
	defer f.mu.Unlock()
	st := f.stats
	st.Members = len(f.names)
	st.Decisions = len(f.open.byID)
	st.Sessions = len(f.sessions.at)
	return st
}

func (f *Fleet) slotLocked(id ID) *slot {
	if int(id) >= len(f.slots) {
		return nil
	}
	return f.slots[id]
}

// aliveLocked notes a sign of life of the wire. After a time without any,
// everybody's silence counts from the first on: otherwise the first member that
// is heard would be the only one to be chosen.
func (f *Fleet) aliveLocked(now time.Time) {
	if !f.newest.IsZero() && now.Sub(f.newest) > f.cfg.Silence {
		f.resumed = now
	}
	f.newest = later(f.newest, now)
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
