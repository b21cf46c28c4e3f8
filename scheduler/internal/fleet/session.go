package fleet

import "hash/maphash"

// sessions remembers the last member of each session, and of each conversation
// without a name, the longest unused going first at the bound. It keeps hashes,
// so that callers cannot make it large by long names, nor choose where two meet.
type sessions struct {
	seed  maphash.Seed
	limit int
	at    map[uint64]int32
	ring  []session // ring[0] is the anchor of the order of use
}

type session struct {
	hash       uint64
	member     ID
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
	return s.lastOf(maphash.String(s.seed, name))
}

func (s *sessions) lastOf(hash uint64) (ID, bool) {
	i, ok := s.at[hash]
	if !ok {
		return 0, false
	}
	return s.ring[i].member, true
}

// hash of what a conversation without a name is recognised by.
func (s *sessions) hash(mark uint64) uint64 { return maphash.Comparable(s.seed, mark) }

func (s *sessions) setHash(h uint64, m ID) {
	i, ok := s.at[h]
	switch {
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
	e.hash, e.member = h, m
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
			s.setHash(e.hash, e.member)
		}
	}
}
