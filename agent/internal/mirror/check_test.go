package mirror

import (
	"fmt"
	"slices"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// check verifies everything that must hold of a mirror between two calls.
// Drained says that Drain was the last of them.
func (m *Mirror) check(drained bool) error {
	live, free := 0, 0
	copied, suspects, waiting, hidden := 0, 0, 0, 0
	claims := map[blockkey.Key]int32{}
	var count [Lanes + 1]int
	var digest [Lanes + 1]uint64
	for i := int32(1); i < int32(len(m.nodes)); i++ {
		n := &m.nodes[i]
		for _, g := range m.groups {
			if len(g.copies) != len(m.nodes) {
				return fmt.Errorf("group %d has %d copies for %d nodes", g.id, len(g.copies), len(m.nodes))
			}
			copied += int(g.copies[i].sure)
			suspects += suspect(g.copies[i])
		}
		if !n.has(flagLive) {
			if m.alive(i) {
				return fmt.Errorf("free node %d has copies", i)
			}
			free++
			continue
		}
		live++
		if at := m.find(n.hash); at != i {
			return fmt.Errorf("hash %x of node %d leads to %d", n.hash, i, at)
		}
		if !m.alive(i) && n.child == 0 && n.published == 0 {
			return fmt.Errorf("node %d has no reason to live", i)
		}
		if n.has(flagContent) == (n.parent == detached) {
			return fmt.Errorf("node %d: content and parent disagree: %+v", i, *n)
		}
		if n.has(flagRoot) != (n.parent == 0) {
			return fmt.Errorf("node %d: root flag and trunk disagree: %+v", i, *n)
		}
		if n.parent > 0 && m.nodes[n.parent].hash != n.parentHash {
			return fmt.Errorf("node %d hangs below the wrong hash", i)
		}
		if n.has(flagClaimed) {
			claims[n.key]++
		}
		if n.has(flagWaiting) {
			waiting++
		}
		if n.has(flagHidden) {
			hidden++
		}
		if n.has(flagDirty) != slices.Contains(m.dirty, i) && len(m.nodes) < 1000 {
			return fmt.Errorf("node %d: dirty flag and list disagree", i)
		}
		for l := range count {
			if n.published&(1<<l) != 0 {
				count[l]++
				digest[l] ^= blockkey.Digest(n.key)
			}
		}
		if n.published != 0 && n.parent > 0 && n.published&^m.nodes[n.parent].published&allLanes != 0 {
			return fmt.Errorf("node %d is told on %03b, its parent on %03b", i, n.published, m.nodes[n.parent].published)
		}
		if n.published != n.visible {
			return fmt.Errorf("node %d: told %03b, visible %03b", i, n.published, n.visible)
		}
		if drained {
			want := m.lanes(i)
			if want&onGPU != 0 && m.usable(i) {
				want |= isEnd
			}
			if n.published != want {
				return fmt.Errorf("node %d: told %04b, is %04b", i, n.published, want)
			}
			if m.retail(i) {
				return fmt.Errorf("node %d: a tail is out of date", i)
			}
			if n.has(flagDirty) {
				return fmt.Errorf("node %d is dirty after a drain", i)
			}
		}
	}
	children := 0
	for i := range m.nodes {
		before := int32(0)
		for c := m.nodes[i].child; c != 0; c = m.nodes[c].next {
			if n := &m.nodes[c]; !n.has(flagLive) || n.parent != int32(i) || n.prev != before {
				return fmt.Errorf("child %d of %d is not linked back", c, i)
			}
			before = c
			if children++; children > live {
				return fmt.Errorf("child lists share nodes")
			}
		}
	}
	for i := m.free; i != 0; i = m.nodes[i].next {
		if free--; free < 0 || m.nodes[i].has(flagLive) {
			return fmt.Errorf("free list is broken at %d", i)
		}
	}
	switch {
	case free != 0:
		return fmt.Errorf("%d free nodes are lost", free)
	case live != m.used || live != m.byHash.used:
		return fmt.Errorf("%d nodes live, %d counted, %d hashes", live, m.used, m.byHash.used)
	case copied != m.gpuCopies || suspects != m.suspects:
		return fmt.Errorf("copies %d counted %d, suspects %d counted %d", copied, m.gpuCopies, suspects, m.suspects)
	case waiting != m.stats.Waiting || hidden != m.stats.Withheld:
		return fmt.Errorf("waiting %d counted %d, withheld %d counted %d", waiting, m.stats.Waiting, hidden, m.stats.Withheld)
	case count != m.count || digest != m.digest:
		return fmt.Errorf("counts %v kept %v, digests %x kept %x", count, m.count, digest, m.digest)
	case len(claims) != m.byKey.used+len(m.shared):
		return fmt.Errorf("%d keys claimed, %d registered, %d of them by several", len(claims), m.byKey.used, len(m.shared))
	}
	for key, n := range claims {
		switch at := m.claimant(key); {
		case m.shared[key] != 0 && (at != 0 || m.shared[key] != n):
			return fmt.Errorf("key %x claimed %d times, shared by %d, registered for %d", key, n, m.shared[key], at)
		case m.shared[key] == 0 && (n != 1 || at == 0 || m.nodes[at].key != key):
			return fmt.Errorf("key %x claimed %d times, registered for %d", key, n, at)
		}
	}
	return nil
}

// replica is what a receiver of the ops believes.
type replica struct {
	parent map[blockkey.Key]blockkey.Key
	depth  map[blockkey.Key]uint32
	held   [Lanes + 1]map[blockkey.Key]bool
	below  [Lanes]map[blockkey.Key]int // children held
}

func newReplica() *replica {
	r := &replica{parent: map[blockkey.Key]blockkey.Key{}, depth: map[blockkey.Key]uint32{}}
	for l := range r.held {
		r.held[l] = map[blockkey.Key]bool{}
	}
	for l := range r.below {
		r.below[l] = map[blockkey.Key]int{}
	}
	return r
}

// apply returns an error when the op doesn't fit, or leaves a lane that isn't
// prefix-closed or not within the next.
func (r *replica) apply(op Op) error {
	if len(op.Keys) == 0 {
		return fmt.Errorf("empty op")
	}
	if want := min(int(op.Position), blockkey.Lead); len(op.Before) != want {
		return fmt.Errorf("%d keys before position %d, want %d", len(op.Before), op.Position, want)
	}
	for i, key := range op.Before {
		if i > 0 && r.parent[key] != op.Before[i-1] {
			return fmt.Errorf("key %x before %x is not its parent", op.Before[i-1], key)
		}
	}
	parent := blockkey.Key(0)
	if n := len(op.Before); n > 0 {
		parent = op.Before[n-1]
	}
	keys := slices.Clone(op.Keys)
	for k, key := range keys {
		at := op.Position + uint32(k)
		if p, ok := r.parent[key]; ok && (p != parent || r.depth[key] != at) {
			return fmt.Errorf("key %x moved from %x to %x", key, p, parent)
		}
		r.parent[key], r.depth[key] = parent, at
		parent = key
	}
	if op.Remove {
		slices.Reverse(keys)
	}
	for _, key := range keys {
		p, l := r.parent[key], op.Lane
		if r.held[l][key] != op.Remove {
			return fmt.Errorf("%+v: key %x held already or not at all", op, key)
		}
		if l == Ends {
			if op.Remove {
				delete(r.held[l], key)
			} else if r.held[l][key] = true; !r.held[LaneGPU][key] {
				return fmt.Errorf("%x is an end and not on the GPU lane", key)
			}
			continue
		}
		if op.Remove {
			delete(r.held[l], key)
			r.below[l][p]--
			if r.below[l][key] > 0 {
				return fmt.Errorf("lane %d: %x removed before its children", l, key)
			}
			if l == LaneGPU && r.held[Ends][key] {
				return fmt.Errorf("%x removed while it is an end", key)
			}
			if l > 0 && r.held[l-1][key] {
				return fmt.Errorf("lane %d: %x removed before lane %d", l, key, l-1)
			}
			continue
		}
		r.held[l][key] = true
		r.below[l][p]++
		if r.depth[key] > 0 && !r.held[l][p] {
			return fmt.Errorf("lane %d: %x stored before its parent", l, key)
		}
		if l+1 < Lanes && !r.held[l+1][key] {
			return fmt.Errorf("lane %d: %x stored before lane %d", l, key, l+1)
		}
	}
	return nil
}

// drainInto drains the mirror into the replica and checks both.
func (r *replica) drainInto(m *Mirror) error {
	removing := true
	for _, op := range m.Drain(nil) {
		if op.Remove && !removing {
			return fmt.Errorf("a remove after a store")
		}
		removing = op.Remove
		if err := r.apply(op); err != nil {
			return err
		}
	}
	if err := m.check(true); err != nil {
		return err
	}
	snapshot := newReplica()
	for op := range m.Snapshot {
		if err := snapshot.apply(op); err != nil {
			return fmt.Errorf("snapshot: %w", err)
		}
	}
	for l := range Ends + 1 {
		if len(r.held[l]) != m.Count(l) || len(snapshot.held[l]) != m.Count(l) {
			return fmt.Errorf("lane %d: count %d, replica %d, snapshot %d", l, m.Count(l), len(r.held[l]), len(snapshot.held[l]))
		}
		digest := uint64(0)
		for key := range r.held[l] {
			digest ^= blockkey.Digest(key)
			if !snapshot.held[l][key] {
				return fmt.Errorf("lane %d: snapshot lacks %x", l, key)
			}
		}
		if digest != m.Digest(l) {
			return fmt.Errorf("lane %d: digest %x, replica %x", l, m.Digest(l), digest)
		}
	}
	return nil
}

// match returns how many leading keys are held on a lane.
func (r *replica) match(l Lane, keys []blockkey.Key) int {
	for k, key := range keys {
		if !r.held[l][key] {
			return k
		}
	}
	return len(keys)
}
