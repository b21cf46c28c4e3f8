package admission

import (
	"hash/maphash"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// class are the requests of a model that can use the same members, as they name
// the same adapter, candidates and excluded members.
type class struct {
	kind    uint64
	waiters int
	poll    uint64 // number of the poll since which the members are known
	members set    // that were candidates when one of the class was last tried
	any     bool   // all may be
}

// classOf tells requests apart by what they can use.
func (q *Queue) classOf(r *pick.Request) uint64 {
	if r.Adapter == "" && len(r.Candidates)+len(r.Exclude) == 0 {
		return maphash.String(q.seed, r.Model)
	}
	var h maphash.Hash
	h.SetSeed(q.seed)
	write := func(s string) {
		h.WriteString(s)
		h.WriteByte(0)
	}
	write(r.Model)
	write(r.Adapter)
	for _, refs := range [][]pick.Ref{r.Candidates, r.Exclude} {
		for _, ref := range refs {
			write(ref.Member)
			write(ref.Pod)
			write(ref.Address)
		}
		write("")
	}
	return h.Sum64()
}

// classLocked returns a class of requests, a new one if there is none.
func (m *model) classLocked(kind uint64) *class {
	c, ok := m.classes[kind]
	if !ok {
		c = &class{kind: kind}
		m.classes[kind] = c
		m.unknown++
	}
	return c
}

func (m *model) dropLocked(c *class) {
	delete(m.classes, c.kind)
	if !m.knowsLocked(c) {
		m.unknown--
	}
}

func (m *model) knowsLocked(c *class) bool { return c.poll == m.poll && c.poll > 0 }

// learnLocked notes whom a request of the class could use just now; an empty
// list: that cannot be said.
func (m *model) learnLocked(c *class, members []fleet.ID) {
	if !m.knowsLocked(c) {
		c.poll = m.poll
		m.unknown--
	}
	c.any = len(members) == 0
	c.members.clear()
	for _, id := range members {
		c.members.add(id)
	}
}

// set of members.
type set struct {
	words []uint64
	count int
}

func (s *set) add(id fleet.ID) {
	for int(id/64) >= len(s.words) {
		s.words = append(s.words, 0)
	}
	if bit := uint64(1) << (id % 64); s.words[id/64]&bit == 0 {
		s.words[id/64] |= bit
		s.count++
	}
}

func (s *set) remove(id fleet.ID) {
	if bit := uint64(1) << (id % 64); int(id/64) < len(s.words) && s.words[id/64]&bit != 0 {
		s.words[id/64] &^= bit
		s.count--
	}
}

func (s *set) clear() {
	clear(s.words)
	s.count = 0
}

// meets tells whether the sets have a member in common.
func (s *set) meets(o *set) bool {
	for i := range min(len(s.words), len(o.words)) {
		if s.words[i]&o.words[i] != 0 {
			return true
		}
	}
	return false
}
