package ingest

import (
	"math/bits"
	"math/rand/v2"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
)

// blocks is the universe of the simulated agent: a forest of this many blocks.
const blocks = 48

// forest is what an engine could hold: block i's parent comes before it.
type forest struct {
	parent   [blocks]int // -1: a root's child
	position [blocks]uint32
	key      [blocks]blockkey.Key
	root     blockkey.Key
}

func newForest(rng *rand.Rand) *forest {
	f := &forest{root: blockkey.Scope{Model: "m", BlockSize: 16}.Root()}
	for i := range f.parent {
		f.parent[i] = -1
		if i > 0 && rng.IntN(6) > 0 {
			f.parent[i] = max(0, i-1-rng.IntN(3))
			f.position[i] = f.position[f.parent[i]] + 1
		}
		f.key[i] = blockkey.Chain(f.parentKey(i), uint64(i)+1)
	}
	return f
}

func (f *forest) parentKey(i int) blockkey.Key {
	if f.parent[i] < 0 {
		return f.root
	}
	return f.key[f.parent[i]]
}

// before are the keys that the wire names with block i.
func (f *forest) before(i int) (keys []uint64) {
	for p := f.parent[i]; p >= 0 && len(keys) < blockkey.Lead; p = f.parent[p] {
		keys = append([]uint64{uint64(f.key[p])}, keys...)
	}
	return keys
}

// chain is the keys from the root down to block i.
func (f *forest) chain(i int) (ids []int, keys []blockkey.Key) {
	for ; i >= 0; i = f.parent[i] {
		ids = append([]int{i}, ids...)
		keys = append([]blockkey.Key{f.key[i]}, keys...)
	}
	return ids, keys
}

// sets is a cache state: one bit a block and lane.
type sets [protocol.Lanes]uint64

func (s sets) has(l, i int) bool { return s[l]>>i&1 == 1 }

func (f *forest) held(s sets) (h protocol.Held) {
	for l, set := range s {
		h[l].Count = uint64(bits.OnesCount64(set))
		for i := range blocks {
			if s.has(l, i) {
				h[l].Digest ^= blockkey.Digest(f.key[i])
			}
		}
	}
	return h
}

// simAgent is an agent that is right: it changes its cache state at random and
// says so by the rules.
type simAgent struct {
	*forest
	rng      *rand.Rand
	name     string
	epoch    uint64
	sequence uint64
	now      sets
	past     map[[2]uint64]sets // by epoch and sequence
}

func newSimAgent(name string, rng *rand.Rand, epoch uint64) *simAgent {
	a := &simAgent{forest: newForest(rng), rng: rng, name: name, past: make(map[[2]uint64]sets)}
	a.restart(epoch)
	return a
}

// restart begins an epoch.
func (a *simAgent) restart(epoch uint64) {
	a.epoch, a.sequence, a.now = epoch, 0, sets{}
	a.past[[2]uint64{epoch, 0}] = sets{}
}

// change makes one step of the cache state: store or remove a block on a lane and
// what the nesting of lanes and the closure of prefixes ask for.
func (a *simAgent) change() (out []*pb.Change) {
	i, l := a.rng.IntN(blocks), a.rng.IntN(protocol.Lanes)
	if a.rng.IntN(3) > 0 {
		ids, _ := a.chain(i)
		for _, id := range ids {
			last := l - 1 // of the lanes from l on that lack it
			for lane := l; lane < protocol.Lanes && !a.now.has(lane, id); lane++ {
				a.now[lane] |= 1 << id
				last = lane
			}
			if last >= l {
				out = append(out, &pb.Change{Change: &pb.Change_Stored{Stored: a.stored(l, last, id)}})
			}
		}
		return out
	}
	for id := blocks - 1; id >= i; id-- {
		if !a.now.has(l, id) || !a.under(id, i) {
			continue
		}
		first := l
		for lane := l; lane >= 0 && a.now.has(lane, id); lane-- {
			a.now[lane] &^= 1 << id
			first = lane
		}
		out = append(out, &pb.Change{Change: &pb.Change_Removed{Removed: &pb.Removed{
			Lane: pb.Lane(first + 1), Through: pb.Lane(l + 1), Position: a.position[id], Before: a.before(id), Keys: []uint64{uint64(a.key[id])},
		}}})
	}
	return out
}

func (a *simAgent) under(id, ancestor int) bool {
	for ; id >= 0; id = a.parent[id] {
		if id == ancestor {
			return true
		}
	}
	return false
}

func (a *simAgent) stored(first, last, id int) *pb.Stored {
	return &pb.Stored{Lane: pb.Lane(first + 1), Through: pb.Lane(last + 1), Position: a.position[id], Before: a.before(id), Keys: []uint64{uint64(a.key[id])}}
}

// delta makes a few steps of the cache state one message.
func (a *simAgent) delta() *pb.Delta {
	d := &pb.Delta{}
	for range 1 + a.rng.IntN(4) {
		d.Changes = append(d.Changes, a.change()...)
	}
	a.sequence++
	a.past[[2]uint64{a.epoch, a.sequence}] = a.now
	d.Header = a.header()
	d.Lanes = lanesOf(a.held(a.now))
	return d
}

// split makes a few steps of the cache state two messages, of which the first one
// verifies nothing.
func (a *simAgent) split() (first, second *pb.Delta) {
	first, second = a.delta(), a.delta()
	first.Lanes = nil
	return first, second
}

func (a *simAgent) heartbeat() *pb.Heartbeat {
	m, err := protocol.ParseMember(a.name)
	if err != nil {
		panic(err)
	}
	return &pb.Heartbeat{
		Header: a.header(), Trust: pb.Trust_TRUST_EXACT, Lanes: lanesOf(a.held(a.now)), IntervalMs: 1000,
		Info: &pb.MemberInfo{Namespace: m.Namespace, Pod: "pod", PodUid: m.PodUID, Rank: m.Rank, Models: []string{"m"}, BlockSize: 16},
	}
}

func (a *simAgent) chunks() (out []*pb.SnapshotChunk) {
	c := &pb.SnapshotChunk{Header: a.header()}
	for l := range a.now {
		for i := range blocks {
			if !a.now.has(l, i) {
				continue
			}
			if c.Stored = append(c.Stored, a.stored(l, l, i)); len(c.Stored) == 20 {
				out = append(out, c)
				c = &pb.SnapshotChunk{Header: a.header(), Index: uint32(len(out))}
			}
		}
	}
	c.Last, c.Trust, c.Lanes = true, pb.Trust_TRUST_EXACT, lanesOf(a.held(a.now))
	return append(out, c)
}

func (a *simAgent) header() *pb.Header {
	return &pb.Header{Version: protocol.Version, Member: a.name, Epoch: a.epoch, Sequence: a.sequence}
}

func lanesOf(h protocol.Held) (out []*pb.LaneState) {
	for l, s := range h {
		out = append(out, &pb.LaneState{Lane: pb.Lane(l + 1), Count: s.Count, Digest: s.Digest})
	}
	return out
}
