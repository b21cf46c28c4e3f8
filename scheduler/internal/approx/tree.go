package approx

import (
	"slices"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

// walkLocked leaves in path the nodes that keys consist of, the first first,
// making and splitting them as need be, and returns the last one. It returns 0
// if keys contradict what is known of them.
func (x *Mirror) walkLocked(keys []blockkey.Key, size uint32) int32 {
	x.path = x.path[:0]
	parent := int32(0)
	for at := 0; at < len(keys); {
		n := x.heads[keys[at]]
		if n == 0 {
			n = x.newNode(node{parent: parent, start: uint32(at), size: size, keys: slices.Clone(keys[at:])})
			if parent != 0 {
				x.nodes[parent].children++
			}
			x.path = append(x.path, n)
			return n
		}
		if x.nodes[n].parent != parent || x.nodes[n].start != uint32(at) {
			return 0 // no chain has these keys: equal keys have equal pasts
		}
		same := common(x.nodes[n].keys, keys[at:])
		if same < len(x.nodes[n].keys) {
			n = x.split(n, uint32(same))
		}
		x.path = append(x.path, n)
		parent = n
		at += same
	}
	return parent
}

// common is how many of keys a node begins with. An equal key verifies all
// before it equal, so it is searched.
func common(node, keys []blockkey.Key) int {
	low, high := 1, min(len(node), len(keys))
	if node[high-1] == keys[high-1] {
		return high
	}
	for low < high {
		if mid := (low + high) / 2; node[mid] == keys[mid] {
			low = mid + 1
		} else {
			high = mid
		}
	}
	return low
}

func (x *Mirror) newNode(n node) int32 {
	var id int32
	if len(x.spare) > 0 {
		id = x.spare[len(x.spare)-1]
		x.spare = x.spare[:len(x.spare)-1]
		x.nodes[id] = n
	} else {
		id = int32(len(x.nodes))
		x.nodes = append(x.nodes, n)
	}
	x.heads[n.keys[0]] = id
	x.live++
	return id
}

// split makes the first blocks of a node one of their own and returns it. All
// that went through the whole went through both parts.
func (x *Mirror) split(id int32, at uint32) int32 {
	first := x.nodes[id]
	first.keys = slices.Clone(first.keys[:at])
	first.places, first.children, first.share = nil, 1, learn.Work{}
	first.owners, first.moved = nil, false
	up := x.newNode(first)
	n := &x.nodes[id]
	n.parent, n.start, n.keys = up, n.start+at, slices.Clone(n.keys[at:])
	x.heads[n.keys[0]] = id
	for i := 0; i < len(n.places); {
		p := n.places[i]
		if cut := x.places[p].cut; cut > at {
			x.places[p].cut = cut - at
			x.newPlace(x.places[p].member, up, at, x.places[p].prev)
			i++
			continue
		}
		// It holds nothing of the rest.
		m := x.places[p].member
		x.newPlace(m, up, x.places[p].cut, x.places[p].prev)
		m.held += int(x.places[p].cut) // dropLocked takes it off
		x.unlinkLocked(p)
	}
	x.charge(id)
	x.charge(up)
	x.release(id) // nobody may have held the rest any more
	return up
}

// newPlace lets m hold the first cut blocks of a node, behind another place in
// the order of use; 0: before all.
func (x *Mirror) newPlace(m *member, id int32, cut uint32, behind int32) {
	n := &x.nodes[id]
	p := place{node: id, member: m, cut: cut, slot: int32(len(n.places))}
	var i int32
	if len(x.unused) > 0 {
		i = x.unused[len(x.unused)-1]
		x.unused = x.unused[:len(x.unused)-1]
	} else {
		i = int32(len(x.places))
		x.places = append(x.places, place{})
	}
	x.places[i] = p
	x.link(m, i, behind)
	n.places = append(n.places, i)
	m.at[id] = i
	m.lately = plus(m.lately, n.share, 1)
}

func (x *Mirror) link(m *member, i, behind int32) {
	p := &x.places[i]
	p.prev = behind
	if behind == 0 {
		p.next, m.newest = m.newest, i
	} else {
		p.next, x.places[behind].next = x.places[behind].next, i
	}
	if p.next == 0 {
		m.oldest = i
	} else {
		x.places[p.next].prev = i
	}
}

func (x *Mirror) unlink(m *member, i int32) {
	p := &x.places[i]
	if p.prev == 0 {
		m.newest = p.next
	} else {
		x.places[p.prev].next = p.next
	}
	if p.next == 0 {
		m.oldest = p.prev
	} else {
		x.places[p.next].prev = p.prev
	}
}

// useLocked lets m hold all of path, the head of it most recently.
func (x *Mirror) useLocked(m *member, keys []blockkey.Key) {
	covered := 0
	for _, id := range x.path {
		if i := m.at[id]; i != 0 {
			covered += int(x.places[i].cut)
		}
	}
	for _, id := range slices.Backward(x.path) {
		length := uint32(len(x.nodes[id].keys))
		if i := m.at[id]; i != 0 {
			x.places[i].cut = length
			x.unlink(m, i)
			x.link(m, i, 0)
			continue
		}
		x.newPlace(m, id, length, 0)
		x.charge(id)
	}
	m.held += len(keys) - covered
	if m.lane && covered < len(keys) {
		before := blockkey.Before(keys, covered)
		x.index.Store(m.id, index.LaneApproximate, before, uint32(covered), keys[covered:])
	}
}

// evictLocked takes from m what it has not used for longest: the end of a
// chain.
func (x *Mirror) evictLocked(m *member) {
	p := &x.places[m.oldest]
	n := &x.nodes[p.node]
	count := p.cut // too many pieces
	if more := m.held - x.shareOf(m); more > 0 {
		count = min(uint32(more), p.cut)
	}
	x.stats.Evicted += uint64(count)
	if count == p.cut {
		x.dropLocked(m.oldest)
		return
	}
	from := p.cut - count
	if m.lane {
		x.index.Remove(m.id, index.LaneApproximate, x.before(p.node, from), n.start+from, n.keys[from:p.cut])
	}
	p.cut = from
	m.held -= int(count)
	if len(n.places) == 1 && n.children == 0 && n.count == 0 && int(from) < len(n.keys)/2 {
		n.keys = slices.Clone(n.keys[:from])
	}
}

// dropLocked takes a place with all its blocks from its member.
func (x *Mirror) dropLocked(i int32) {
	p := &x.places[i]
	n := &x.nodes[p.node]
	if p.member.lane {
		x.index.Remove(p.member.id, index.LaneApproximate, x.before(p.node, 0), n.start, n.keys[:p.cut])
	}
	id := p.node
	x.unlinkLocked(i)
	x.charge(id)
	x.release(id)
}

// unlinkLocked takes a place out of use.
func (x *Mirror) unlinkLocked(i int32) {
	p := x.places[i]
	n := &x.nodes[p.node]
	x.unlink(p.member, i)
	p.member.held -= int(p.cut)
	p.member.lately = plus(p.member.lately, n.share, -1)
	delete(p.member.at, p.node)
	if len(p.member.at) == 0 {
		p.member.lately = learn.Work{} // no rounding is left behind
	}
	last := int32(len(n.places) - 1)
	n.places[p.slot] = n.places[last]
	x.places[n.places[p.slot]].slot = p.slot
	n.places = n.places[:last]
	x.places[i] = place{}
	x.unused = append(x.unused, i)
}

// release drops a node that nobody holds and no prompt of the window went
// through, and then perhaps the one above it.
func (x *Mirror) release(id int32) {
	for id != 0 {
		n := &x.nodes[id]
		if len(n.places) > 0 || n.count > 0 || n.children > 0 {
			return
		}
		if x.heads[n.keys[0]] == id {
			delete(x.heads, n.keys[0])
		}
		up := n.parent
		*n = node{}
		x.spare = append(x.spare, id)
		x.live--
		if up != 0 {
			x.nodes[up].children--
		}
		id = up
	}
}
