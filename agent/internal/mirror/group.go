package mirror

import (
	"cmp"
	"math"
	"slices"
)

// group is one KV-cache group of the engine.
type group struct {
	id        int
	kind      GroupKind
	blockSize int      // the largest that was announced; 0: none was
	window    int      // of a sliding group, in tokens; 0: not known
	copies    []copies // by node

	// What follows is decided by judge.
	size   uint32 // of a block, in blocks of the mirror
	drops  bool   // the last block of a hit
	lag    uint32 // what it drops, in blocks of the mirror
	prefix bool   // it needs the whole prefix
	// tail is, by node, how many consecutive blocks of the group up to it have a
	// copy, counted to longest; of a group that needs the whole prefix, 1 where all
	// blocks have. Inside a block it is that of the block before. It is kept up to
	// date by Drain; nil: what the group needs is what the GPU lane is.
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
	g, changed := m.group(s.Group), false
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
		g = &group{id: s.Group, kind: s.Kind, size: 1, copies: make([]copies, len(m.nodes), cap(m.nodes))}
		m.groups = append(m.groups, g)
		changed = true
	}
	if s.Kind != Unspecified && s.Kind != g.kind && g.kind != Other {
		if g.kind == Unspecified {
			g.kind = s.Kind
		} else {
			g.kind = Other // two kinds for one group
		}
		changed = true
	}
	if s.Tier == GPU && s.BlockSize > g.blockSize && (g.blockSize == 0 || len(m.groups) > 1) {
		g.blockSize, changed = s.BlockSize, true
	}
	if s.Window > g.window {
		g.window, changed = s.Window, true
	}
	if changed {
		m.judge()
	}
	return g
}

// Expect tells of a store that is about to follow: what its group is decides
// how those before it count.
func (m *Mirror) Expect(s Store) {
	if s.valid() {
		m.learnGroup(&s)
	}
}

// like says whether two groups accept the same hits when they hold the same.
func (g *group) like(o *group) bool {
	return g.kind == o.kind && g.window == o.window && g.blockSize == o.blockSize
}

// attention says whether a group holds keys and values, not states.
func (g *group) attention() bool { return g.kind != State && g.kind != Other }

// judge decides anew what is followed, how, and whether anything can be
// credited at all.
func (m *Mirror) judge() {
	m.guess = ""
	for _, g := range m.groups {
		if said := &m.cfg.Rule.Groups; g.kind == Unspecified && g.id < len(said) {
			g.kind, g.window = said[g.id].Kind, max(g.window, said[g.id].Window)
		}
	}
	m.judgeSizes()
	m.judgeNames()
	m.judgeDrops()
	reason := ""
	unspecified := 0
	for _, g := range m.groups {
		switch {
		case g.kind == Other:
			reason = "a KV-cache group of a kind that is not known"
		case m.blockSize != 0 && g.blockSize%m.blockSize != 0 && !m.alone():
			reason = "KV-cache groups of different block sizes"
		}
		if g.kind == Unspecified {
			unspecified++
		}
		m.judgeTail(g)
	}
	switch {
	case m.crowded:
		reason = "more KV-cache groups than can be followed"
	case m.outgrown != "":
		reason = m.outgrown
	}
	if unspecified > 0 && len(m.groups) > 1 {
		m.guess = "several KV-cache groups whose kind is not told: each is followed like full attention; -groups can say them"
	}
	if silent := m.someSilent(); silent != m.silent {
		m.silent = silent
		m.markAll()
	}
	if m.silent {
		m.guess = "a KV-cache group has announced nothing yet: its blocks are larger than what was computed so far, and a hit needs one"
	}
	if m.dropped > 1 {
		m.guess = "blocks of different sizes are dropped of a hit: as much is followed as if all were of the largest"
	}
	m.forbid(reason)
}

// someSilent says whether the engine has a group that is not known yet. Groups
// are numbered from 0, and each announces what it fills: one that is silent has
// larger blocks than anything that was computed, and what it does not hold is no
// hit.
func (m *Mirror) someSilent() bool {
	if m.heard || len(m.groups) == 0 {
		return false
	}
	there := 1
	if m.cfg.Rule.Several {
		there = 2
	}
	for id, said := range m.cfg.Rule.Groups {
		if said.Kind != Unspecified {
			there = max(there, id+1)
		}
	}
	for _, g := range m.groups {
		there = max(there, g.id+1)
	}
	return there > len(m.groups)
}

// Heard tells that the engine has used what it holds: groups that are not known
// by then take no part in it.
func (m *Mirror) Heard() {
	if !m.heard {
		m.heard = true
		m.judge()
	}
}

// judgeSizes decides how large the blocks of the mirror are, at which of them
// hits may end, and how many of them a block of each group is.
func (m *Mirror) judgeSizes() {
	unit := 0
	for _, g := range m.groups {
		unit = divisor(unit, g.blockSize)
	}
	if told := m.cfg.Rule.Unit; len(m.groups) > 1 && told > 0 && unit%told == 0 && unit > 0 {
		unit = told
	}
	unit = cmp.Or(m.cfg.BlockSize, divisor(unit, m.names.unit))
	if unit == 0 {
		return
	}
	if m.blockSize != 0 && m.blockSize != unit && m.used > 0 {
		m.names.unit = unit
		m.outgrow("KV-cache groups of different block sizes")
	}
	m.blockSize = unit
	m.align = 1
	inside := false // hits may end inside of blocks
	for _, g := range m.groups {
		g.size = max(1, uint32(g.blockSize/unit))
		inside = inside || g.kind == State && g.size > 1
	}
	for _, g := range m.groups {
		inside = inside && (g.size == 1 || g.kind == State || g.full())
	}
	for _, g := range m.groups {
		if !inside {
			m.align = m.align / uint32(divisor(int(m.align), int(g.size))) * g.size
		}
	}
}

// divisor is the largest that two sizes have in common; 0 is not known.
func divisor(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// outgrow says that what came before must be told again.
func (m *Mirror) outgrow(reason string) {
	if m.outgrown == "" {
		m.outgrown = reason
		m.forbid(reason)
	}
}

// inside says whether hits may end inside of blocks.
func (m *Mirror) inside() bool {
	return m.align == 1 && slices.ContainsFunc(m.groups, func(g *group) bool { return g.size > 1 })
}

// judgeDrops decides which groups drop the last block of a hit.
func (m *Mirror) judgeDrops() {
	var last *group
	for _, g := range m.groups {
		if g.attention() && (last == nil || g.id > last.id) {
			last = g
		}
	}
	m.dropped = 0
	if m.cfg.Rule.Drop != DropNone {
		m.dropped = 1
	}
	inside := m.inside()
	for _, g := range m.groups {
		g.drops = m.cfg.Rule.Drop == DropAttention && g.attention() ||
			m.cfg.Rule.Drop == DropLast && g.attention() && g.like(last)
		switch {
		case !g.drops:
			g.lag = 0
		case inside:
			g.lag = 1
		default:
			g.lag = g.size
		}
		m.dropped = max(m.dropped, g.lag)
	}
}

// judgeTail decides whether a group needs the whole prefix, and else how much
// of it at the most.
func (m *Mirror) judgeTail(g *group) {
	longest := 0
	switch size := g.blockSize; {
	case m.blockSize == 0 || size == 0:
	case g.kind == Sliding && g.window > 0:
		longest = (g.window - 2 + size) / size
	case g.kind == Sliding:
		m.guess = "the window of a sliding group is not known: it is followed like full attention"
	case g.kind == State:
		longest = 1
	case g.kind == Chunked && m.cfg.Rule.Chunk >= size:
		longest = m.cfg.Rule.Chunk/size + 1
	case g.kind == Chunked:
		m.guess = "the chunk of chunked-local attention is not known: it is followed like full attention"
	}
	prefix := longest == 0
	if g.drops && longest > 0 {
		longest++
	}
	if prefix && (m.names.on || g.size > 1) {
		longest = 1
	}
	longest = min(longest, math.MaxUint16)
	if uint16(longest) == g.longest && prefix == g.prefix {
		return
	}
	g.prefix, g.longest, g.tail = prefix, uint16(longest), nil
	if longest > 0 {
		g.tail = make([]uint16, len(m.nodes), cap(m.nodes))
	}
	m.markAll()
}

// needed is how many blocks, the last ones, a group must hold for a hit of so
// many blocks of the mirror.
func (m *Mirror) needed(g *group, hit uint32) int {
	if g.drops {
		return m.reach(g, hit) + 1
	}
	return m.reach(g, hit)
}

// reach is needed without what is dropped.
func (m *Mirror) reach(g *group, hit uint32) int {
	blocks, need := int(hit/g.size), int(g.longest)
	if g.drops {
		need--
	}
	if chunk := m.cfg.Rule.Chunk; g.kind == Chunked {
		tokens := int(hit) * m.blockSize
		need = blocks - tokens/chunk*chunk/g.blockSize
	}
	return min(need, blocks)
}

// retail brings a block's tails up to date, and says whether one changed: those
// of the blocks below may have changed then, too.
func (m *Mirror) retail(i int32) (changed bool) {
	n := &m.nodes[i]
	for _, g := range m.groups {
		if g.tail == nil {
			continue
		}
		above := uint16(0)
		switch {
		case n.parent > 0:
			above = g.tail[n.parent]
		case n.parent == 0 && g.prefix:
			above = 1
		}
		tail := uint16(0)
		switch {
		case n.flags&(flagClaimed|flagShut) != flagClaimed: // it is in no chain, or in none that is told
		case g.size > 1 && g.kind != State && (n.position+1)%g.size != 0:
			tail = above
		case g.copies[i].sure == 0:
		case g.prefix:
			tail = above
		default:
			tail = min(above+1, g.longest)
		}
		changed = changed || tail != g.tail[i]
		g.tail[i] = tail
	}
	return changed
}

// untail forgets the tails of a block that is in no chain any more.
func (m *Mirror) untail(i int32) {
	for _, g := range m.groups {
		if g.tail != nil {
			g.tail[i] = 0
		}
	}
}

// usable says whether the engine would accept a hit that ends at a block on the
// GPU lane. Where blocks are dropped, it is the last of them.
func (m *Mirror) usable(i int32) bool {
	length := m.nodes[i].position + 1
	if length <= m.dropped || (length-m.dropped)%m.align != 0 {
		return false
	}
	any := false
	for _, g := range m.groups {
		if g.tail == nil {
			continue
		}
		any = true
		if !m.accepts(g, m.above(i, m.dropped-g.lag), length-m.dropped) {
			return false
		}
	}
	return any
}

// accepts says whether a group accepts a hit of so many blocks. at is the last
// block of the hit, or of what the group drops.
func (m *Mirror) accepts(g *group, at int32, hit uint32) bool {
	whole := (hit+g.lag)%g.size == 0
	switch {
	case g.kind == State:
		return g.copies[at].sure > 0
	case g.prefix:
		// Inside of a block it takes one that begins it and ends there. A longer
		// one does, too, but only for prompts that go on as it does.
		return g.tail[at] > 0 && (whole || g.copies[at].sure > 0)
	}
	return whole && int(g.tail[at]) >= m.needed(g, hit)
}

// above is the block so many before one.
func (m *Mirror) above(i int32, blocks uint32) int32 {
	for ; blocks > 0 && i > 0; blocks-- {
		i = m.nodes[i].parent
	}
	return max(i, 0)
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
		gpu = gpu && (c.sure > 0 || g.tail != nil) // with names, every block leads to a copy
		host = host && c.tiers&onHost != 0
		cold = cold && c.tiers != 0
	}
	return gpu, host, cold
}

// alive says whether a block has a copy anywhere, or leads to one where blocks
// without copies have names.
func (m *Mirror) alive(i int32) bool {
	return m.copied(i) || m.names.on && m.names.reasons[i] > 0
}

// copied says whether a block has a copy anywhere.
func (m *Mirror) copied(i int32) bool {
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
	if m.names.on {
		m.setNamed(g, i, c)
	}
	g.copies[i] = c
	m.gpuCopies += int(c.sure) - int(old.sure)
	m.suspects += suspect(c) - suspect(old)
	if suspect(c) > suspect(old) {
		m.proof++
	}
	m.mark(i)
}

func suspect(c copies) int {
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

// addSuspect counts a copy that may only be the report of a hit. In a full group
// the report itself proves that one copy is there.
func (m *Mirror) addSuspect(g *group, i int32) {
	c := g.copies[i]
	switch {
	case g.full() && c.sure == 0:
		c.sure = 1
	case c.maybe < math.MaxUint16:
		c.maybe++
	}
	m.set(g, i, c)
}

// verify uses that a running request holds all blocks before those it stores:
// what may be there above them is there. A walk ends where another has passed
// since the last suspect came.
func (m *Mirror) verify(i int32) {
	if m.suspects == 0 {
		return
	}
	for range maxProof {
		if i <= 0 || m.nodes[i].verified == m.proof {
			return
		}
		for _, g := range m.groups {
			if c := g.copies[i]; g.kind == Full && suspect(c) == 1 {
				c.sure, c.maybe = 1, c.maybe-1
				m.set(g, i, c)
			}
		}
		if m.nodes[i].has(flagContent) {
			m.nodes[i].verified = m.proof
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

// dropSuspects forgets all unverified copies of blocks that have no other.
func (m *Mirror) dropSuspects() {
	m.lossy = true
	for i := 1; i < len(m.nodes) && m.suspects > 0; i++ {
		if !m.nodes[i].has(flagLive) {
			continue
		}
		touched := false
		for _, g := range m.groups {
			if c := g.copies[i]; suspect(c) == 1 {
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
