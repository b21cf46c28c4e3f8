package mirror

import "github.com/kvscout/kvscout/protocol/blockkey"

// Snapshot yields the whole published cache state as of the last Drain, parents
// before their children, Ends after the blocks that they are. After every Op
// each lane is prefix-closed.
func (m *Mirror) Snapshot(yield func(Op) bool) {
	var stack []int32
	push := func(i int32) {
		for c := m.nodes[i].child; c != 0; c = m.nodes[c].next {
			if m.nodes[c].published != 0 {
				stack = append(stack, c)
			}
		}
	}
	push(0)
	for len(stack) > 0 {
		first := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		n := &m.nodes[first]
		before := m.lead(nil, first)
		var keys []blockkey.Key
		var ends []int // indexes in keys
		for i := first; i != 0; {
			if m.nodes[i].published&isEnd != 0 {
				ends = append(ends, len(keys))
			}
			keys = append(keys, m.nodes[i].key)
			on := int32(0)
			for c := m.nodes[i].child; c != 0; c = m.nodes[c].next {
				switch published := m.nodes[c].published; {
				case published == 0:
				case on == 0 && (published^n.published)&allLanes == 0:
					on = c
				default:
					stack = append(stack, c)
				}
			}
			i = on
		}
		for l := LaneDisk; l != ^Lane(0); l-- {
			op := Op{Lane: l, Position: n.position, Before: before, Keys: keys}
			if n.published&(1<<l) != 0 && !yield(op) {
				return
			}
		}
		for len(ends) > 0 {
			from, to := ends[0], ends[0]
			for ; len(ends) > 0 && ends[0] == to; ends = ends[1:] {
				to++
			}
			op := Op{Lane: Ends, Position: n.position + uint32(from), Before: blockkey.BeforeNext(before, keys[:from]), Keys: keys[from:to:to]}
			if !yield(op) {
				return
			}
		}
	}
}
