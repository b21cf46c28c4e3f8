package mirror

import "math"

// group is one KV-cache group of the engine.
type group struct {
	id        int
	kind      GroupKind
	blockSize int      // 0: not seen yet
	copies    []copies // by node
}

// copies of one block in one group. In GPU memory there are at least sure and
// at most sure+maybe of them.
type copies struct {
	sure  uint16
	maybe uint16
	tiers uint8 // bit per tier: Host, Disk
}

const (
	onHost = 1 << Host
	onDisk = 1 << Disk
)

func (c copies) none() bool { return c == copies{} }

// full groups decide the credit. A group of unspecified kind is only credited
// when it is the only one.
func (g *group) full() bool { return g.kind == Full || g.kind == Unspecified }

func (m *Mirror) group(id int) *group {
	for _, g := range m.groups {
		if g.id == id {
			return g
		}
	}
	return nil
}

// learnGroup returns the group that a store names, nil if it can't be followed.
func (m *Mirror) learnGroup(s *Store) *group {
	g := m.group(s.Group)
	if g == nil {
		if s.Tier != GPU && s.Kind == Unspecified {
			return nil // a placeholder tells nothing about its group
		}
		if len(m.groups) == maxGroups {
			if !m.crowded {
				m.crowded = true
				m.judge()
			}
			return nil
		}
		g = &group{id: s.Group, kind: s.Kind, copies: make([]copies, len(m.nodes), cap(m.nodes))}
		m.groups = append(m.groups, g)
		m.judge()
	}
	if s.Kind != Unspecified && s.Kind != g.kind && g.kind != Other {
		if g.kind == Unspecified {
			g.kind = s.Kind
		} else {
			g.kind = Other // two kinds for one group
		}
		m.judge()
	}
	if s.Tier == GPU && s.BlockSize > 0 && g.blockSize == 0 {
		g.blockSize = s.BlockSize
		m.judge()
	}
	return g
}

// judge decides anew whether anything can be credited at all.
func (m *Mirror) judge() {
	full, unspecified := 0, 0
	for _, g := range m.groups {
		switch g.kind {
		case Full:
			full++
		case Unspecified:
			unspecified++
		case Sliding:
			if m.blockSize != 0 && g.blockSize != 0 && g.blockSize != m.blockSize {
				m.forbid("KV-cache groups of different block sizes")
				return
			}
		case Other:
			m.forbid("a KV-cache group that is neither full nor sliding-window attention")
			return
		}
	}
	switch {
	case m.crowded:
		m.forbid("more KV-cache groups than can be followed")
	case unspecified > 0 && len(m.groups) > 1:
		m.forbid("several KV-cache groups of unknown kind")
	case full+unspecified == 0:
		m.forbid("no full-attention group")
	default:
		m.forbid("")
	}
}

// forbid sets the reason against any credit, none when empty. It is called
// when the groups changed: what counts as held may have changed with them.
func (m *Mirror) forbid(reason string) {
	if m.noCredit != reason || len(m.groups) > 1 {
		m.markAll()
	}
	m.noCredit = reason
}

// held returns the tiers on which every group has a copy of a block: in GPU
// memory, in host memory, in either of host and disk.
func (m *Mirror) held(i int32) (gpu, host, cold bool) {
	if len(m.groups) == 0 {
		return false, false, false
	}
	gpu, host, cold = true, true, true
	for _, g := range m.groups {
		c := g.copies[i]
		gpu = gpu && c.sure > 0
		host = host && c.tiers&onHost != 0
		cold = cold && c.tiers != 0
	}
	return gpu, host, cold
}

// alive says whether a block has a copy anywhere.
func (m *Mirror) alive(i int32) bool {
	for _, g := range m.groups {
		if !g.copies[i].none() {
			return true
		}
	}
	return false
}

// set replaces the copies of a block in a group and keeps the sums.
func (m *Mirror) set(g *group, i int32, c copies) {
	old := g.copies[i]
	if old == c {
		return
	}
	g.copies[i] = c
	m.gpuCopies += int(c.sure) - int(old.sure)
	m.doubts += doubt(c) - doubt(old)
	if doubt(c) > doubt(old) {
		m.proof++
	}
	m.mark(i)
}

func doubt(c copies) int {
	if c.sure == 0 && c.maybe > 0 {
		return 1
	}
	return 0
}

// addCopy counts a copy that is there for certain.
func (m *Mirror) addCopy(g *group, i int32) {
	c := g.copies[i]
	if c.sure < math.MaxUint16 {
		c.sure++
	}
	m.set(g, i, c)
}

// addDoubt counts a copy that may only be the report of a hit. In a full group
// the report itself proves that one copy is there.
func (m *Mirror) addDoubt(g *group, i int32) {
	c := g.copies[i]
	switch {
	case g.full() && c.sure == 0:
		c.sure = 1
	case c.maybe < math.MaxUint16:
		c.maybe++
	}
	m.set(g, i, c)
}

// prove uses that a running request holds all blocks before those it stores:
// what may be there above them is there. A walk ends where another has passed
// since the last doubt arose.
func (m *Mirror) prove(i int32) {
	if m.doubts == 0 {
		return
	}
	for range maxProof {
		if i <= 0 || m.nodes[i].proven == m.proof {
			return
		}
		for _, g := range m.groups {
			if c := g.copies[i]; g.kind == Full && doubt(c) == 1 {
				c.sure, c.maybe = 1, c.maybe-1
				m.set(g, i, c)
			}
		}
		if m.nodes[i].has(flagContent) {
			m.nodes[i].proven = m.proof
		}
		i = m.nodes[i].parent
	}
}

// removeCopy takes one copy out of GPU memory. It returns false if there was
// none.
func (m *Mirror) removeCopy(g *group, i int32) bool {
	c := g.copies[i]
	switch {
	case c.sure > 0:
		c.sure--
	case c.maybe > 0:
		c.maybe--
	default:
		return false
	}
	m.set(g, i, c)
	return true
}

// dropDoubts forgets all unproven copies of blocks that have no other.
func (m *Mirror) dropDoubts() {
	m.lossy = true
	for i := 1; i < len(m.nodes) && m.doubts > 0; i++ {
		if !m.nodes[i].has(flagLive) {
			continue
		}
		touched := false
		for _, g := range m.groups {
			if c := g.copies[i]; doubt(c) == 1 {
				c.maybe = 0
				m.set(g, int32(i), c)
				touched = true
			}
		}
		if touched {
			m.settle(int32(i))
		}
	}
}
