package fleet

import (
	"hash/maphash"
	"time"

	"github.com/cespare/xxhash/v2"
)

// SessionMark is what a session is recognised by, the same at every scheduler.
func SessionMark(name string) uint64 { return xxhash.Sum64String(name) }

// sessions remembers the last member of each session, and of each conversation
// without a name, the longest unused going first at the bound. It goes by marks,
// so that callers cannot make it large by long names.
//
// The latest decision counts in whatever order they come, so that schedulers that
// tell each other agree.
type sessions struct {
	seed  maphash.Seed
	limit int
	at    map[uint64]int32
	ring  []session // ring[0] is the anchor of the order of use
}

type session struct {
	hash       uint64 // of the mark
	member     ID
	at         time.Time // of the decision
	prev, next int32
}

func newSessions(limit int) sessions {
	return sessions{
		seed:  maphash.MakeSeed(),
		limit: limit,
		at:    make(map[uint64]int32),
		ring:  make([]session, 1),
	}
}

// last returns the member that served the session last.
func (s *sessions) last(name string) (ID, bool) {
	if name == "" {
		return 0, false
	}
	return s.lastOf(s.hash(SessionMark(name)))
}

func (s *sessions) lastOf(hash uint64) (ID, bool) {
	i, ok := s.at[hash]
	if !ok {
		return 0, false
	}
	return s.ring[i].member, true
}

// hash of a mark. Who chooses marks must not choose where they come to lie.
func (s *sessions) hash(mark uint64) uint64 { return maphash.Comparable(s.seed, mark) }

// setHash notes where a decision of a time sent a session, unless a later one is
// known.
func (s *sessions) setHash(h uint64, m ID, at time.Time) {
	i, ok := s.at[h]
	switch {
	case ok && s.ring[i].at.After(at):
		return
	case ok:
		s.unlink(i)
	case len(s.at) >= s.limit:
		i = s.ring[0].prev
		s.unlink(i)
		delete(s.at, s.ring[i].hash)
	default:
		i = int32(len(s.ring))
		s.ring = append(s.ring, session{})
	}
	s.at[h] = i
	e := &s.ring[i]
	e.hash, e.member, e.at = h, m, at
	first := s.ring[0].next
	e.prev, e.next = 0, first
	s.ring[0].next = i
	s.ring[first].prev = i
}

func (s *sessions) unlink(i int32) {
	e := s.ring[i]
	s.ring[e.prev].next = e.next
	s.ring[e.next].prev = e.prev
}

// dropMember forgets all sessions of a member.
func (s *sessions) dropMember(m ID) {
	old := *s
	s.at = make(map[uint64]int32, len(old.at))
	s.ring = make([]session, 1, len(old.ring))
	for i := old.ring[0].prev; i != 0; i = old.ring[i].prev {
		if e := old.ring[i]; e.member != m {
			s.setHash(e.hash, e.member, e.at)
		}
	}
}
