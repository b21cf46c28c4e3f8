package mirror

import (
	"slices"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// run is a run of consecutive blocks of one chain that change alike.
type run struct {
	first int32 // node of the first block
	lanes laneSet
	// Of the keys of this Drain: those before the run from before to start,
	// its own from start to end.
	before, start, end int
}

// Drain appends what changed in the published cache state since the last Drain.
// Removes come first, those of Ends before all, then children before their
// parents; then stores, parents before their children, those of Ends last.
// After every single Op each lane is prefix-closed, and Ends lie on the GPU lane.
func (m *Mirror) Drain(ops []Op) []Op {
	m.resolve()
	m.evaluate()
	ops = m.emit(ops)
	m.sweep()
	return ops
}

// resolve brings keys and withholding down from the roots.
func (m *Mirror) resolve() {
	for _, i := range m.dirty {
		n := &m.nodes[i]
		switch {
		case !n.has(flagLive):
		case !m.alive(i):
			m.unclaim(i)
		case n.has(flagWithheld) && !n.has(flagShut):
			m.shut(i)
		}
	}
	for k := 0; k < len(m.dirty); k++ { // grows while blocks resolve
		m.resolveFrom(m.dirty[k])
	}
}

func (m *Mirror) resolveFrom(top int32) {
	stack := append(m.stack[:0], top)
	for len(stack) > 0 {
		i := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		if !m.resolveOne(i) {
			continue
		}
		m.mark(i)
		for c := m.nodes[i].child; c != 0; c = m.nodes[c].next {
			stack = append(stack, c)
		}
	}
	m.stack = stack
}

// resolveOne gives a block its key if its parent has one, or shuts it if its
// parent is shut. It returns whether anything changed.
func (m *Mirror) resolveOne(i int32) bool {
	n := &m.nodes[i]
	if n.flags&(flagLive|flagContent) != flagLive|flagContent || n.flags&(flagClaimed|flagShut) != 0 || !m.alive(i) {
		return false
	}
	key, position := blockkey.Key(n.parentHash), uint32(0)
	if !n.has(flagRoot) {
		p := &m.nodes[n.parent]
		switch {
		case p.has(flagShut):
			n.flags |= flagShut
			m.reclassify(i, flagHidden)
			return true
		case !p.has(flagClaimed):
			m.reclassify(i, flagWaiting)
			return false
		case p.adapter != n.adapter:
			m.stats.Contradictions++
			n.flags |= flagWithheld | flagShut
			m.reclassify(i, flagHidden)
			return true
		}
		key, position = p.key, p.position+1
	}
	key = blockkey.Chain(key, n.local)
	n.key, n.position = key, position
	m.reclassify(i, 0)
	if m.claim(i) {
		m.stats.Contradictions++
		m.withhold(i)
		n.flags |= flagShut
		m.reclassify(i, flagHidden)
	}
	return true
}

// shut closes a withheld block and all below it. Its stack is its own, because
// it runs inside the walk of resolveFrom.
func (m *Mirror) shut(top int32) {
	stack := []int32{top}
	for len(stack) > 0 {
		i := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		n := &m.nodes[i]
		n.flags |= flagShut
		m.untail(i)
		m.reclassify(i, flagHidden)
		for c := n.child; c != 0; c = m.nodes[c].next {
			if !m.nodes[c].has(flagShut) {
				stack = append(stack, c)
			}
		}
	}
}

// evaluate finds the lanes of all blocks that may have changed and lists those
// that differ from what was told.
func (m *Mirror) evaluate() {
	m.changed = m.changed[:0]
	for _, top := range m.dirty {
		m.evaluateFrom(top)
	}
}

type visit struct {
	node int32
	more uint32 // blocks below it that are to be visited although nothing changes here
}

func (m *Mirror) evaluateFrom(top int32) {
	stack := append(m.visits[:0], visit{top, 0})
	for len(stack) > 0 {
		i, more := stack[len(stack)-1].node, stack[len(stack)-1].more
		stack = stack[:len(stack)-1]
		n := &m.nodes[i]
		lanes := m.lanes(i)
		retailed := m.retail(i)
		if lanes&onGPU != 0 && m.usable(i) {
			lanes |= isEnd
		}
		if lanes != n.published && !n.has(flagChanged) {
			n.flags |= flagChanged
			m.changed = append(m.changed, i)
		}
		moved := (lanes^n.visible)&allLanes != 0
		n.visible = lanes
		switch {
		case moved || retailed:
			more = max(1, m.dropped)
		case more == 0:
			continue
		}
		for c := n.child; c != 0; c = m.nodes[c].next {
			stack = append(stack, visit{c, more - 1})
		}
	}
	m.visits = stack
}

// lanes returns where a block is visible. It follows from the block's own
// copies and from where its parent is visible: on a lower lane a block needs
// to be on the lane above, or to have a copy of its own there.
func (m *Mirror) lanes(i int32) laneSet {
	n := &m.nodes[i]
	if n.flags&(flagClaimed|flagShut) != flagClaimed || m.noCredit != "" || m.silent {
		return 0
	}
	parent := allLanes
	if n.parent != 0 {
		if n.parent == detached {
			return 0
		}
		parent = m.nodes[n.parent].visible
	}
	gpu, host, cold := m.held(i)
	switch {
	case gpu && parent&(1<<LaneGPU) != 0:
		return allLanes
	case host && parent&(1<<LaneHost) != 0:
		return 1<<LaneHost | 1<<LaneDisk
	case cold && parent&(1<<LaneDisk) != 0:
		return 1 << LaneDisk
	}
	return 0
}

// lost and gained are the lanes that a node leaves and enters; closed and
// opened those of them that is Ends.
func (n *node) lost() laneSet   { return n.published &^ n.visible & allLanes }
func (n *node) gained() laneSet { return n.visible &^ n.published & allLanes }
func (n *node) closed() laneSet { return n.published &^ n.visible & isEnd }
func (n *node) opened() laneSet { return n.visible &^ n.published & isEnd }

func (m *Mirror) emit(ops []Op) []Op {
	if len(m.changed) == 0 {
		return ops
	}
	keys := make([]blockkey.Key, 0, len(m.changed))

	m.runs = m.runs[:0]
	keys = m.collect(keys, (*node).closed)
	for _, r := range m.runs {
		ops = m.appendOp(ops, r, keys, Ends, true)
	}
	m.runs = m.runs[:0]
	keys = m.collect(keys, (*node).lost)
	for k := len(m.runs) - 1; k >= 0; k-- {
		for l := LaneGPU; l <= LaneDisk; l++ {
			ops = m.appendOp(ops, m.runs[k], keys, l, true)
		}
	}
	m.runs = m.runs[:0]
	keys = m.collect(keys, (*node).gained)
	for _, r := range m.runs {
		for l := LaneDisk; l != ^Lane(0); l-- {
			ops = m.appendOp(ops, r, keys, l, false)
		}
	}

	m.runs = m.runs[:0]
	keys = m.collect(keys, (*node).opened)
	for _, r := range m.runs {
		ops = m.appendOp(ops, r, keys, Ends, false)
	}

	for _, i := range m.changed {
		n := &m.nodes[i]
		n.flags &^= flagChanged
		digest := blockkey.Digest(n.key)
		for l := range m.count {
			bit := laneSet(1) << l
			switch {
			case n.published&^n.visible&bit != 0:
				m.count[l]--
				m.digest[l] ^= digest
			case n.visible&^n.published&bit != 0:
				m.count[l]++
				m.digest[l] ^= digest
			}
		}
		n.published = n.visible
	}
	return ops
}

// collect appends to m.runs the changed blocks for which change returns lanes,
// a block always after its parent.
func (m *Mirror) collect(keys []blockkey.Key, change func(*node) laneSet) []blockkey.Key {
	for _, top := range m.changed {
		n := &m.nodes[top]
		if change(n) == 0 || n.parent > 0 && change(&m.nodes[n.parent]) != 0 {
			continue
		}
		stack := append(m.stack[:0], top)
		for len(stack) > 0 {
			i := stack[len(stack)-1]
			stack = stack[:len(stack)-1]
			r := run{first: i, lanes: change(&m.nodes[i]), before: len(keys)}
			keys = m.lead(keys, i)
			r.start = len(keys)
			for i != 0 {
				keys = append(keys, m.nodes[i].key)
				on := int32(0)
				for c := m.nodes[i].child; c != 0; c = m.nodes[c].next {
					switch lanes := change(&m.nodes[c]); {
					case lanes == 0:
					case on == 0 && lanes == r.lanes:
						on = c
					default:
						stack = append(stack, c)
					}
				}
				i = on
			}
			r.end = len(keys)
			m.runs = append(m.runs, r)
		}
		m.stack = stack
	}
	return keys
}

func (m *Mirror) appendOp(ops []Op, r run, keys []blockkey.Key, l Lane, remove bool) []Op {
	if r.lanes&(1<<l) == 0 {
		return ops
	}
	n := &m.nodes[r.first]
	return append(ops, Op{
		Remove:   remove,
		Lane:     l,
		Position: n.position,
		Before:   keys[r.before:r.start:r.start],
		Keys:     keys[r.start:r.end:r.end],
	})
}

// lead appends the keys before a published block, as far as an Op names them.
func (m *Mirror) lead(keys []blockkey.Key, i int32) []blockkey.Key {
	from := len(keys)
	for i = m.nodes[i].parent; i > 0 && len(keys)-from < blockkey.Lead; i = m.nodes[i].parent {
		keys = append(keys, m.nodes[i].key)
	}
	slices.Reverse(keys[from:])
	return keys
}

// sweep buries what has no copies left and empties the list of changes.
func (m *Mirror) sweep() {
	for _, i := range m.dirty {
		n := &m.nodes[i]
		n.flags &^= flagDirty
		if n.has(flagLive) {
			m.settle(i)
		}
	}
	m.dirty = m.dirty[:0]
}
