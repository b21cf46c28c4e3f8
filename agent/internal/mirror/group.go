package mirror

import "math"

// group is one KV-cache group of the engine.
type group struct {
	id        int
	kind      GroupKind
	blockSize int      // the largest that was announced; 0: none was
	window    int      // of a sliding group, in tokens; 0: not known
	copies    []copies // by node

	// What follows is decided by judge.
	drops bool // the last block of a hit
	// tail is, by node, how many consecutive blocks up to it have a copy, counted
	// to longest. It is kept up to date by Drain; nil: the group needs the whole
	// prefix.
	tail    []uint16
	longest uint16
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
	if s.Tier == GPU && (s.BlockSize > g.blockSize || s.Window > g.window) {
		g.blockSize, g.window = max(g.blockSize, s.BlockSize), max(g.window, s.Window)
		m.judge()
	}
	return g
}

// like says whether two groups accept the same hits when they hold the same.
func (g *group) like(o *group) bool {
	return g.kind == o.kind && g.window == o.window && g.blockSize == o.blockSize
}

// attention says whether a group holds keys and values, not states.
func (g *group) attention() bool { return g.kind != State && g.kind != Other }

// judge decides anew whether anything can be credited at all.
func (m *Mirror) judge() {
	m.guess = ""
	m.judgeDrops()
	full, unspecified := 0, 0
	for _, g := range m.groups {
		switch g.kind {
		case Full:
			full++
		case Unspecified:
			unspecified++
		case Other:
			m.forbid("a KV-cache group of a kind that is not known")
			return
		}
		if g.kind > Full && m.blockSize != 0 && g.blockSize != 0 && g.blockSize != m.blockSize {
			m.forbid("KV-cache groups of different block sizes")
			return
		}
		m.judgeTail(g)
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

// judgeDrops decides which groups drop the last block of a hit.
func (m *Mirror) judgeDrops() {
	var last *group
	for _, g := range m.groups {
		if g.attention() && (last == nil || g.id > last.id) {
			last = g
		}
	}
	m.drops = m.cfg.Rule.Drop != DropNone
	for _, g := range m.groups {
		g.drops = m.cfg.Rule.Drop == DropAttention && g.attention() ||
			m.cfg.Rule.Drop == DropLast && g.attention() && g.like(last)
	}
}

// judgeTail decides whether a group needs the whole prefix, and else how much
// of it at the most.
func (m *Mirror) judgeTail(g *group) {
	longest := 0
	switch {
	case m.blockSize == 0:
	case g.kind == Sliding && g.window > 0:
		longest = (g.window - 2 + m.blockSize) / m.blockSize
	case g.kind == Sliding:
		m.guess = "the window of a sliding group is not known: it is followed like full attention"
	case g.kind == State:
		longest = 1
	case g.kind == Chunked && m.cfg.Rule.Chunk > 0:
		longest = m.cfg.Rule.Chunk / m.blockSize
	case g.kind == Chunked:
		m.guess = "the chunk of chunked-local attention is not known: it is followed like full attention"
	}
	if g.drops && longest > 0 {
		longest++
	}
	longest = min(longest, math.MaxUint16)
	switch {
	case uint16(longest) == g.longest:
	case longest == 0:
		g.tail = nil
	default:
		g.tail = make([]uint16, len(m.nodes), cap(m.nodes))
	}
	g.longest = uint16(longest)
}

// needed is how many blocks up to one at a position a group must hold for a hit
// that ends there; for a group that drops, one that ends a block before.
func (m *Mirror) needed(g *group, position uint32) int {
	blocks := int(position) + 1
	if g.drops {
		return m.reach(g, blocks-1) + 1
	}
	return m.reach(g, blocks)
}

// reach is how many of a hit's blocks, the last ones, a group must hold.
func (m *Mirror) reach(g *group, blocks int) int {
	need := int(g.longest)
	if g.drops {
		need--
	}
	if g.kind == Chunked {
		need = blocks % (m.cfg.Rule.Chunk / m.blockSize)
	}
	return min(need, blocks)
}

// retail brings a block's tails up to date, and says whether one changed: those
// of the blocks below may have changed then, too.
func (m *Mirror) retail(i int32) (changed bool) {
	for _, g := range m.groups {
		if g.tail == nil {
			continue
		}
		tail := uint16(0)
		if g.copies[i].sure > 0 {
			tail = 1
			if parent := m.nodes[i].parent; parent > 0 {
				tail = min(g.tail[parent]+1, g.longest)
			}
		}
		changed = changed || tail != g.tail[i]
		g.tail[i] = tail
	}
	return changed
}

// usable says whether the engine would accept a hit that ends at a block on the
// GPU lane. Where a block is dropped, it is the one that is dropped.
func (m *Mirror) usable(i int32) bool {
	if m.drops && m.nodes[i].position == 0 {
		return false // nothing would be left
	}
	any := false
	for _, g := range m.groups {
		if g.tail == nil {
			continue
		}
		any = true
		at, position := i, m.nodes[i].position
		if m.drops && !g.drops {
			at, position = m.nodes[i].parent, position-1
		}
		if int(g.tail[at]) < m.needed(g, position) {
			return false
		}
	}
	return any
}

// forbid sets the reason against any credit, none when empty. It is called
// when the groups changed: what counts as held may have changed with them.
func (m *Mirror) forbid(reason string) {
	if m.noCredit != reason || len(m.groups) > 1 {
		m.markAll()
	}
	m.noCredit = reason
}

// held returns the tiers that have a copy of a block: GPU memory, where every
// group that needs the whole prefix has one; host memory, and either of host
// and disk, where every group has.
func (m *Mirror) held(i int32) (gpu, host, cold bool) {
	if len(m.groups) == 0 {
		return false, false, false
	}
	gpu, host, cold = true, true, true
	for _, g := range m.groups {
		c := g.copies[i]
		gpu = gpu && (c.sure > 0 || g.tail != nil)
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
