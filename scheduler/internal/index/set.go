package index

import "slices"

// holders is a set of (member, lane) pairs: 0 is empty, a number with the top
// bit is one member with its lanes, anything else the address of an interned
// set in blocks. Equal sets are equal numbers, and a set never changes.
//
// An interned set starts with a head of four words, its size, the number of
// groups that use it, and its hash; then come its members in rising order.
type holders = uint32

const (
	single   holders = 1 << 31
	maxID            = 1 << 23
	laneBits         = 8 // an element is member<<8 | lanes
	laneMask         = 1<<Lanes - 1

	setSize  = 0
	setUsers = 1
	setHash  = 2
	setHead  = 4
)

// sets interns holder sets. Guarded by Index.mu.
type sets struct {
	blocks *slab[blocks]
	grace  *grace
	byHash map[uint64]holders
	work   []uint32
}

// cell is what a slab of blocks holds at addr, to the end of its chunk.
func cell(s *slab[blocks], addr uint32) []uint32 {
	return s.chunk(addr)[addr&(1<<blockBits-1):]
}

func one(m Member, lanes uint32) holders {
	return single | uint32(m)<<laneBits | lanes
}

// elements of a set, in s.work.
func (s *sets) elements(h holders) []uint32 {
	switch {
	case h == 0:
		s.work = s.work[:0]
	case h&single != 0:
		s.work = append(s.work[:0], h&^single)
	default:
		b := cell(s.blocks, h)
		s.work = append(s.work[:0], b[setHead:setHead+b[setSize]]...)
	}
	return s.work
}

func (s *sets) hash(h holders) uint64 {
	switch {
	case h == 0:
		return 0
	case h&single != 0:
		return elementHash(h &^ single)
	}
	b := cell(s.blocks, h)
	return uint64(b[setHash]) | uint64(b[setHash+1])<<32
}

func elementHash(e uint32) uint64 {
	z := (uint64(e) + 1) * 0x9E3779B97F4A7C15
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// with is the set h and the pair (m, lane). It belongs to the caller, who
// releases it, or puts it where somebody else will.
func (s *sets) with(h holders, m Member, lane uint32) holders {
	hash := s.hash(h)
	e := s.elements(h)
	i, _ := slices.BinarySearch(e, uint32(m)<<laneBits)
	if i < len(e) && e[i]>>laneBits == uint32(m) {
		hash ^= elementHash(e[i])
		e[i] |= lane
	} else {
		e = slices.Insert(e, i, uint32(m)<<laneBits|lane)
		s.work = e
	}
	return s.intern(e, hash^elementHash(e[i]))
}

// without is the set h less the pair (m, lane), on the same terms as with.
func (s *sets) without(h holders, m Member, lane uint32) holders {
	hash := s.hash(h)
	e := s.elements(h)
	i, _ := slices.BinarySearch(e, uint32(m)<<laneBits)
	if i == len(e) || e[i]>>laneBits != uint32(m) {
		panic("index: holder not in its set")
	}
	hash ^= elementHash(e[i])
	if e[i] &^= lane; e[i]&laneMask == 0 {
		e = slices.Delete(e, i, i+1)
	} else {
		hash ^= elementHash(e[i])
	}
	return s.intern(e, hash)
}

func (s *sets) intern(e []uint32, hash uint64) holders {
	switch len(e) {
	case 0:
		return 0
	case 1:
		return single | e[0]
	}
	known, taken := s.byHash[hash]
	if taken {
		b := cell(s.blocks, known)
		if int(b[setSize]) == len(e) && slices.Equal(b[setHead:setHead+len(e)], e) {
			b[setUsers]++
			return known
		}
	}
	c := class(setHead + len(e))
	h := s.blocks.alloc(c, sizes[c])
	b := cell(s.blocks, h)
	b[setSize] = uint32(len(e))
	b[setUsers] = 1
	b[setHash], b[setHash+1] = uint32(hash), uint32(hash>>32)
	copy(b[setHead:], e)
	if !taken {
		s.byHash[hash] = h
	}
	return h
}

// hold counts one more user of a set.
func (s *sets) hold(h holders) {
	if h&single == 0 && h != 0 {
		cell(s.blocks, h)[setUsers]++
	}
}

// release counts one user less. Nobody who enters from now on may reach the
// set by that user.
func (s *sets) release(h holders) {
	if h&single != 0 || h == 0 {
		return
	}
	b := cell(s.blocks, h)
	if b[setUsers]--; b[setUsers] > 0 {
		return
	}
	if hash := s.hash(h); s.byHash[hash] == h {
		delete(s.byHash, hash)
	}
	s.grace.retire(retiredBlock, h)
}
