package mirror

import "github.com/kvscout/kvscout/protocol/blockkey"

// node is one engine hash: a block that has copies, or a ghost that has none
// and only collects the blocks which name it as their parent.
//
// Lifetime: a node lives while it has copies, children, or is published. What
// is published is settled in Drain, so the published tree keeps its links and
// keys from one Drain to the next.
type node struct {
	hash       uint64
	parentHash uint64 // of a root block: the scope's root key
	local      uint64
	key        blockkey.Key // 0: not computed; it outlives its claim until the node is buried

	parent int32 // 0: the trunk, detached: none
	child  int32 // first of the children, 0: none
	next   int32 // sibling, or the next free node
	prev   int32

	position  uint32
	adapter   uint16
	flags     uint16
	visible   laneSet
	published laneSet // visible as of the last Drain
	verified  uint32  // Mirror.proof when last walked by verify
}

const detached int32 = -1

const (
	flagLive     uint16 = 1 << iota
	flagContent         // tokens and parent are known
	flagRoot            // first block of a prompt
	flagWithheld        // never published while it lives
	flagShut            // withheld, or below a withheld block
	flagClaimed         // key is computed and registered
	flagDirty           // in Mirror.dirty
	flagChanged         // in Mirror.changed
	flagWaiting         // counted in Stats.Waiting
	flagHidden          // counted in Stats.Withheld
)

// laneSet has bit l set for lane l. Lanes are nested, and a hit may end only
// where the GPU lane is: it is 0, 4, 6, 7 or 15.
type laneSet uint8

const (
	allLanes laneSet = 1<<Lanes - 1
	onGPU    laneSet = 1 << LaneGPU
	isEnd    laneSet = 1 << Ends
)

func (n *node) has(flag uint16) bool { return n.flags&flag != 0 }

// add makes a node without copies and content. It returns 0 at the bound.
func (m *Mirror) add(hash uint64) int32 {
	i := m.free
	if i != 0 {
		m.free = m.nodes[i].next
	} else {
		if m.used >= m.cfg.MaxNodes {
			return 0
		}
		i = int32(len(m.nodes))
		m.nodes = append(m.nodes, node{})
		for _, g := range m.groups {
			g.copies = append(g.copies, copies{})
			if g.tail != nil {
				g.tail = append(g.tail, 0)
			}
		}
		m.names.grow(len(m.nodes))
	}
	m.used++
	m.nodes[i] = node{
		hash:   hash,
		parent: detached,
		flags:  m.nodes[i].flags&flagDirty | flagLive,
	}
	m.byHash.put(hash, i)
	return i
}

// find returns the node of a hash, 0 if there is none.
func (m *Mirror) find(hash uint64) int32 {
	return m.byHash.get(hash, func(i int32) bool { return m.nodes[i].hash == hash })
}

// claimant returns the node that alone claims a key, 0 if there is none.
func (m *Mirror) claimant(key blockkey.Key) int32 {
	return m.byKey.get(uint64(key), func(i int32) bool { return m.nodes[i].key == key })
}

// lookup returns the node of a hash, made if need be, or 0 at the bound.
func (m *Mirror) lookup(hash uint64) int32 {
	if i := m.find(hash); i != 0 {
		return i
	}
	return m.add(hash)
}

// mark puts a node on the list for the next Drain.
func (m *Mirror) mark(i int32) {
	if n := &m.nodes[i]; !n.has(flagDirty) {
		n.flags |= flagDirty
		m.dirty = append(m.dirty, i)
	}
}

func (m *Mirror) markAll() {
	for i := range m.nodes {
		if m.nodes[i].has(flagLive) {
			m.mark(int32(i))
		}
	}
}

func (m *Mirror) attach(i, parent int32) {
	n, p := &m.nodes[i], &m.nodes[parent]
	n.parent, n.prev, n.next = parent, 0, p.child
	if p.child != 0 {
		m.nodes[p.child].prev = i
	}
	p.child = i
	if m.names.on && parent > 0 && m.alive(i) {
		m.hold(parent, 1)
	}
}

func (m *Mirror) detach(i int32) {
	n := &m.nodes[i]
	if n.parent == detached {
		return
	}
	if n.prev != 0 {
		m.nodes[n.prev].next = n.next
	} else {
		m.nodes[n.parent].child = n.next
	}
	if n.next != 0 {
		m.nodes[n.next].prev = n.prev
	}
	n.parent, n.prev, n.next = detached, 0, 0
}

// bury ends a node that has no copies and is not published: it is freed, or
// stays as a ghost while blocks name it as their parent.
func (m *Mirror) bury(i int32) {
	n := &m.nodes[i]
	resolved := n.key != 0 || n.has(flagShut)
	parent := n.parent
	m.unclaim(i)
	m.detach(i)
	m.reclassify(i, 0)
	n.flags &= flagLive | flagDirty
	n.key, n.visible = 0, 0
	m.untail(i)
	switch {
	case n.child == 0:
		m.release(i)
	case resolved:
		m.unresolve(i)
	}
	if parent > 0 && parent != i {
		m.exorcise(parent)
	}
}

// exorcise frees a ghost that nobody names any more, and what lives no longer
// without having had a copy.
func (m *Mirror) exorcise(i int32) {
	n := &m.nodes[i]
	switch {
	case !n.has(flagLive) || n.child != 0 || n.published != 0 || m.alive(i):
	case n.has(flagContent):
		m.bury(i)
	default:
		m.release(i)
	}
}

func (m *Mirror) release(i int32) {
	n := &m.nodes[i]
	m.byHash.remove(n.hash, i)
	m.names.release(i)
	m.untail(i)
	*n = node{flags: n.flags & flagDirty, next: m.free}
	m.free = i
	m.used--
}

// unresolve takes the keys of everything below a block whose content is gone.
func (m *Mirror) unresolve(top int32) {
	stack := append(m.stack[:0], top)
	for len(stack) > 0 {
		i := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		for c := m.nodes[i].child; c != 0; c = m.nodes[c].next {
			n := &m.nodes[c]
			if n.flags&(flagClaimed|flagShut) == 0 || n.has(flagWithheld) {
				continue
			}
			m.unclaim(c)
			n.flags &^= flagShut
			n.key = 0
			m.untail(c)
			m.reclassify(c, flagWaiting)
			stack = append(stack, c)
		}
	}
	m.stack = stack
}

// claim registers a node under its key. It returns whether others have claimed
// the key before; the one that was alone with it is withheld then.
func (m *Mirror) claim(i int32) (contested bool) {
	n := &m.nodes[i]
	n.flags |= flagClaimed
	if claims := m.shared[n.key]; claims > 0 {
		m.shared[n.key] = claims + 1
		return true
	}
	owner := m.claimant(n.key)
	if owner == 0 {
		m.byKey.put(uint64(n.key), i)
		return false
	}
	m.byKey.remove(uint64(n.key), owner)
	m.shared[n.key] = 2
	if !m.nodes[owner].has(flagWithheld) {
		m.withhold(owner)
		m.shut(owner)
	}
	return true
}

// unclaim takes a node off the register of its key.
func (m *Mirror) unclaim(i int32) {
	n := &m.nodes[i]
	if !n.has(flagClaimed) {
		return
	}
	n.flags &^= flagClaimed
	switch claims := m.shared[n.key]; {
	case claims > 1:
		m.shared[n.key] = claims - 1
	case claims == 1:
		delete(m.shared, n.key)
	default:
		m.byKey.remove(uint64(n.key), i)
	}
}

// reclassify counts a node as waiting, as hidden, or as neither.
func (m *Mirror) reclassify(i int32, class uint16) {
	n := &m.nodes[i]
	old := n.flags & (flagWaiting | flagHidden)
	if old == class {
		return
	}
	switch old {
	case flagWaiting:
		m.stats.Waiting--
	case flagHidden:
		m.stats.Withheld--
	}
	switch class {
	case flagWaiting:
		m.stats.Waiting++
	case flagHidden:
		m.stats.Withheld++
	}
	n.flags = n.flags&^(flagWaiting|flagHidden) | class
}
