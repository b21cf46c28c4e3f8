package ingest

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

const (
	name = "default_uid_0"
	id   = fleet.ID(3)
)

var start = time.Unix(1_700_000_000, 0)

// rig is one member with everything around it, and no wire.
type rig struct {
	t     interface{ Fatalf(string, ...any) }
	agent *simAgent
	count counters
	index *index.Index
	m     *member
	now   time.Time
}

func newRig(t interface{ Fatalf(string, ...any) }, seed uint64) *rig {
	r := &rig{t: t, index: index.New(index.Config{}), now: start}
	r.agent = newSimAgent(name, rand.New(rand.NewPCG(seed, 1)), 100)
	r.m = newMember(name, id, r.index, rand.New(rand.NewPCG(seed, 2)), &r.count, r.now)
	return r
}

func (r *rig) later(d time.Duration) { r.now = r.now.Add(d) }
func (r *rig) heartbeat()            { r.m.heartbeat(r.agent.heartbeat(), r.now) }
func (r *rig) delta()                { r.m.delta(r.agent.delta(), 0, r.now) }

// snapshot lets the member ask as soon as it wants, and answers.
func (r *rig) snapshot() {
	r.later(maxBackoff)
	if !r.m.wants(r.now) {
		r.t.Fatalf("wants no snapshot: synced %v, asked %v", r.m.synced, r.m.asked)
	}
	attempt := r.m.ask(r.now)
	for _, c := range r.agent.chunks() {
		r.m.chunk(attempt, c, 0, r.now)
	}
}

// check holds the promise: what is called EXACT equals the agent's cache state at
// the same epoch and sequence, block for block.
func (r *rig) check() {
	p := r.m.cacheState()
	if p.Trust != fleet.Exact {
		return
	}
	want, ok := r.agent.past[[2]uint64{p.Epoch, p.Sequence}]
	if !ok {
		return // a damaged header made this one up; the next message tells
	}
	r.equals(want)
}

func (r *rig) equals(want sets) {
	for l := range want {
		if got, want := uint64(r.index.Count(index.Member(id), index.Lane(l))), r.agent.held(want)[l].Count; got != want {
			r.t.Fatalf("lane %d holds %d blocks, the agent %d", l, got, want)
		}
	}
	for i := range blocks {
		ids, keys := r.agent.chain(i)
		var got [index.Lanes]uint32
		var answer index.Answer
		r.index.Match(keys, &answer)
		for h, depth := range answer.All() {
			for l := range got {
				if h.On(index.Lane(l)) {
					got[l] = depth
				}
			}
		}
		for l := range want {
			depth := uint32(0)
			for _, id := range ids {
				if !want.has(l, id) {
					break
				}
				depth++
			}
			if got[l] != depth {
				r.t.Fatalf("lane %d, block %d: depth %d, the agent's is %d", l, i, got[l], depth)
			}
		}
	}
}

func (r *rig) want(trust fleet.Trust, snapshotWanted bool) {
	if p := r.m.cacheState(); p.Trust != trust {
		r.t.Fatalf("trust %v (%s), want %v", p.Trust, p.Reason, trust)
	}
	if wanted := !r.m.synced; wanted != snapshotWanted {
		r.t.Fatalf("snapshot wanted: %v, want %v", wanted, snapshotWanted)
	}
	if !r.m.synced {
		r.equals(sets{}) // nothing suspect is answered
	}
	r.check()
}

func TestMember(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(r *rig)
		want fleet.Trust
	}{
		"an empty member is followed from its first heartbeat": {func(*rig) {}, fleet.Exact},
		"deltas are applied": {func(r *rig) { r.delta(); r.delta(); r.heartbeat() }, fleet.Exact},
		"a repeated delta changes nothing": {func(r *rig) {
			d := r.agent.delta()
			r.m.delta(d, 0, r.now)
			r.m.delta(d, 0, r.now)
		}, fleet.Exact},
		"a gap asks":                           {func(r *rig) { r.agent.delta(); r.delta() }, fleet.Syncing},
		"a heartbeat ahead of the deltas asks": {func(r *rig) { r.agent.delta(); r.heartbeat() }, fleet.Syncing},
		"an old heartbeat verifies nothing": {func(r *rig) {
			h := r.agent.heartbeat()
			r.delta()
			r.m.heartbeat(h, r.now)
		}, fleet.Exact},
		"a digest that differs asks": {func(r *rig) {
			d := r.agent.delta()
			d.Lanes[0].Digest ^= 1
			r.m.delta(d, 0, r.now)
		}, fleet.Syncing},
		"a heartbeat's digest that differs asks": {func(r *rig) {
			r.delta()
			h := r.agent.heartbeat()
			h.Lanes[2].Digest ^= 1
			r.m.heartbeat(h, r.now)
		}, fleet.Syncing},
		"a block stored twice asks": {func(r *rig) {
			d := r.agent.delta()
			r.m.delta(d, 0, r.now)
			again := proto.CloneOf(d)
			again.Header.Sequence++
			r.m.delta(again, 0, r.now)
		}, fleet.Syncing},
		"more removed than held asks": {func(r *rig) {
			r.m.delta(&pb.Delta{Header: &pb.Header{Epoch: 100, Sequence: 1}, Changes: []*pb.Change{
				{Change: &pb.Change_Removed{Removed: &pb.Removed{Lane: 1, Keys: []uint64{1}}}},
			}}, 0, r.now)
		}, fleet.Syncing},
		"a new epoch from its first delta needs nobody": {func(r *rig) {
			r.delta()
			r.agent.restart(200)
			r.delta()
		}, fleet.Exact},
		"a new epoch from its empty heartbeat needs nobody": {func(r *rig) {
			r.delta()
			r.agent.restart(200)
			r.heartbeat()
		}, fleet.Exact},
		"a new epoch from its second delta asks": {func(r *rig) {
			r.delta()
			r.agent.restart(200)
			r.agent.delta()
			r.delta()
		}, fleet.Syncing},
		"a new epoch in a heartbeat asks": {func(r *rig) {
			r.agent.restart(200)
			r.agent.delta()
			r.heartbeat()
		}, fleet.Syncing},
		"an epoch that went back asks": {func(r *rig) {
			r.delta()
			r.agent.restart(50)
			r.delta()
		}, fleet.Syncing},
		"a heartbeat of an epoch that went back asks": {func(r *rig) {
			r.agent.restart(50)
			r.heartbeat()
		}, fleet.Syncing},
		"a lost connection is no reason to forget": {func(r *rig) { r.delta(); r.m.suspect(r.now); r.heartbeat() }, fleet.Exact},
		"a contradicting message asks":             {func(r *rig) { r.delta(); r.m.malformed(isDelta, r.now) }, fleet.Syncing},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 1)
			r.heartbeat()
			c.do(r)
			r.want(c.want, c.want != fleet.Exact)
			if c.want == fleet.Exact {
				return
			}
			r.snapshot()
			r.want(fleet.Exact, false)
			r.delta()
			r.heartbeat()
			r.want(fleet.Exact, false)
		})
	}
}

func TestLostConnectionNeedsVerification(t *testing.T) {
	r := newRig(t, 1)
	r.heartbeat()
	r.delta()
	r.m.suspect(r.now)
	r.want(fleet.Syncing, false)
	r.equals(r.agent.now)
	r.delta() // its digest is proof
	r.want(fleet.Exact, false)
}

// The answer went to the connection that is gone; waiting for it costs 3 s.
func TestLostConnectionEndsTheRequest(t *testing.T) {
	r := newRig(t, 1)
	r.agent.delta()
	r.heartbeat() // of a member that is known too late: it must be asked
	r.later(maxBackoff)
	r.m.ask(r.now)
	r.m.suspect(r.now)
	r.later(2 * backoff)
	if r.m.asked || !r.m.wants(r.now) {
		t.Errorf("asked %v, wants %v", r.m.asked, r.m.wants(r.now))
	}
	r.snapshot()
	r.want(fleet.Exact, false)
}

func TestHalfAChangeIsNotExact(t *testing.T) {
	r := newRig(t, 1)
	r.heartbeat()
	first, second := r.agent.split()
	r.m.delta(first, 0, r.now)
	r.want(fleet.Syncing, false)
	r.m.delta(second, 0, r.now)
	r.want(fleet.Exact, false)
}

func TestDeltasAreHeldWhileASnapshotIsAwaited(t *testing.T) {
	r := newRig(t, 1)
	for range 5 {
		r.agent.delta()
	}
	r.heartbeat()
	r.later(time.Second)
	attempt := r.m.ask(r.now)
	r.delta() // before the cut
	chunks := r.agent.chunks()
	r.delta() // after it
	r.m.chunk(attempt-1, chunks[0], 0, r.now)
	for _, c := range chunks {
		r.want(fleet.Syncing, true)
		r.m.chunk(attempt, c, 0, r.now)
	}
	r.want(fleet.Exact, false)
	r.equals(r.agent.now)
}

func TestHeldDeltasOfAnOlderEpochRaiseNoSuspicion(t *testing.T) {
	r := newRig(t, 1)
	r.agent.delta()
	r.heartbeat()
	r.later(time.Second)
	attempt := r.m.ask(r.now)
	r.delta()
	r.agent.restart(200)
	r.agent.delta()
	for _, c := range r.agent.chunks() {
		r.m.chunk(attempt, c, 0, r.now)
	}
	r.want(fleet.Exact, false)
	if n := r.count.resyncs.Load(); n != 0 {
		t.Errorf("%d resyncs", n)
	}
}

func TestIndexIsHeldAgainstTheCacheState(t *testing.T) {
	r := newRig(t, 1)
	r.heartbeat()
	r.delta()
	r.index.Store(index.Member(id), index.LaneGPU, nil, 0, []blockkey.Key{77})
	r.heartbeat()
	r.want(fleet.Syncing, true)
	r.snapshot()
	for i := range blocks { // as an index that is full would
		_, keys := r.agent.chain(i)
		r.index.Remove(index.Member(id), index.LaneDisk, nil, 0, keys)
	}
	r.heartbeat()
	if p := r.m.cacheState(); p.Trust != fleet.Approximate || !r.m.synced {
		t.Errorf("%+v", p)
	}
}

func TestBadSnapshotNeverTouchesTheIndex(t *testing.T) {
	for name, spoil := range map[string]func([]*pb.SnapshotChunk) []*pb.SnapshotChunk{
		"digest":   func(c []*pb.SnapshotChunk) []*pb.SnapshotChunk { c[len(c)-1].Lanes[0].Digest ^= 4; return c },
		"key":      func(c []*pb.SnapshotChunk) []*pb.SnapshotChunk { c[0].Stored[0].Keys[0] ^= 4; return c },
		"lost":     func(c []*pb.SnapshotChunk) []*pb.SnapshotChunk { return c[1:] },
		"doubled":  func(c []*pb.SnapshotChunk) []*pb.SnapshotChunk { return append(c[:1], c...) },
		"two cuts": func(c []*pb.SnapshotChunk) []*pb.SnapshotChunk { c[1].Header.Sequence++; return c },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 1)
			for range 20 {
				r.agent.delta()
			}
			r.heartbeat()
			r.later(time.Second)
			attempt := r.m.ask(r.now)
			chunks := r.agent.chunks()
			if len(chunks) < 2 {
				t.Fatalf("%d chunks", len(chunks))
			}
			for _, c := range spoil(chunks) {
				r.m.chunk(attempt, c, 0, r.now)
			}
			r.want(fleet.Syncing, true)
			if r.m.asked || r.m.wants(r.now) {
				t.Fatal("asks again without a pause")
			}
			r.snapshot()
			r.want(fleet.Exact, false)
		})
	}
}

func TestUnansweredRequestsAreRepeatedLaterAndLater(t *testing.T) {
	r := newRig(t, 1)
	r.agent.delta()
	r.heartbeat()
	var asked int
	for range 60_000 { // a minute in steps of 1 ms
		r.later(time.Millisecond)
		if r.m.wants(r.now) {
			asked++
			r.m.refused(r.m.ask(r.now), r.now)
		}
	}
	if asked < 10 || asked > 30 {
		t.Errorf("asked %d times in a minute", asked)
	}
	attempt := r.m.ask(r.now)
	r.later(maxPatience + 1)
	r.m.expire(r.now)
	if r.m.asked {
		t.Error("waits for ever")
	}
	r.m.chunk(attempt, r.agent.chunks()[0], 0, r.now)
	r.want(fleet.Syncing, true)
}

func TestTooManyHeldDeltasStartOver(t *testing.T) {
	r := newRig(t, 1)
	r.agent.delta()
	r.heartbeat()
	r.later(time.Second)
	r.m.ask(r.now)
	for range maxHeld + 1 {
		r.delta()
	}
	if r.m.asked || len(r.m.waiting) != 0 || r.count.overflows.Load() != 1 {
		t.Errorf("asked %v, %d waiting, %d overflows", r.m.asked, len(r.m.waiting), r.count.overflows.Load())
	}
	r.m.ask(r.now)
	r.m.delta(r.agent.delta(), maxHeldBytes+1, r.now)
	if r.m.asked {
		t.Error("holds more bytes than it may")
	}
}

func TestAgentsWordLimitsTrust(t *testing.T) {
	r := newRig(t, 1)
	h := r.agent.heartbeat()
	for said, want := range map[pb.Trust]fleet.Trust{
		pb.Trust_TRUST_UNKNOWN: fleet.Unknown, pb.Trust_TRUST_APPROXIMATE: fleet.Approximate,
		pb.Trust_TRUST_SYNCING: fleet.Syncing, pb.Trust_TRUST_EXACT: fleet.Exact,
	} {
		h.Trust, h.Reason = said, "because"
		r.m.heartbeat(h, r.now)
		if p := r.m.cacheState(); p.Trust != want || (p.Reason == "because") != (want != fleet.Exact) {
			t.Errorf("%v became %v (%s)", said, p.Trust, p.Reason)
		}
	}
}

func TestTwoAgentsOfOneMemberAskSeldom(t *testing.T) {
	r := newRig(t, 1)
	other := newSimAgent(name, rand.New(rand.NewPCG(9, 9)), 300)
	r.heartbeat()
	asked := 0
	for range 600 { // a minute in steps of 100 ms
		r.later(100 * time.Millisecond)
		r.delta()
		r.m.delta(other.delta(), 0, r.now)
		if r.m.wants(r.now) {
			asked++
			attempt := r.m.ask(r.now)
			for _, c := range append(r.agent.chunks(), other.chunks()...) {
				r.m.chunk(attempt, c, 0, r.now)
			}
		}
	}
	if asked > 40 {
		t.Errorf("asked %d times in a minute", asked)
	}
	if r.count.epochsBack.Load() == 0 {
		t.Error("not counted")
	}
}

// message is one message under way, as bytes.
type message struct {
	kind    kind
	attempt uint64
	data    []byte
}

// TestBusThatLosesDoublesReordersAndDamages is the promise as a whole: on a
// wire that does everything wrong, EXACT is never said of a wrong cache state, and
// once the wire behaves the cache states become equal.
func TestBusThatLosesDoublesReordersAndDamages(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newRig(t, rapid.Uint64().Draw(t, "seed"))
		var bus []message
		send := func(k kind, attempt uint64, m proto.Message) {
			data, err := proto.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			bus = append(bus, message{k, attempt, data})
		}
		deliver := func(m message) {
			var err error
			switch m.kind {
			case isDelta:
				var d *pb.Delta
				if d, err = protocol.ReadDelta(m.data, name); err == nil {
					r.m.delta(d, len(m.data), r.now)
				}
			case isHeartbeat:
				var h *pb.Heartbeat
				if h, err = protocol.ReadHeartbeat(m.data, name); err == nil {
					r.m.heartbeat(h, r.now)
				}
			case isChunk:
				var c *pb.SnapshotChunk
				if c, err = protocol.ReadChunk(m.data, name); err == nil {
					r.m.chunk(m.attempt, c, len(m.data), r.now)
				}
			}
			if err != nil {
				r.m.malformed(m.kind, r.now)
			}
			r.check()
		}
		look := func() {
			r.m.expire(r.now)
			if r.m.wants(r.now) {
				attempt := r.m.ask(r.now)
				for _, c := range r.agent.chunks() {
					send(isChunk, attempt, c)
				}
			}
			r.check()
		}
		index := func() int { return rapid.IntRange(0, len(bus)-1).Draw(t, "at") }
		need := func(n int) {
			if len(bus) < n {
				t.Skip("bus too empty")
			}
		}
		send(isHeartbeat, 0, r.agent.heartbeat())
		t.Repeat(map[string]func(*rapid.T){
			"":          func(*rapid.T) { r.check() },
			"delta":     func(*rapid.T) { send(isDelta, 0, r.agent.delta()) },
			"delta 2":   func(*rapid.T) { send(isDelta, 0, r.agent.delta()) },
			"heartbeat": func(*rapid.T) { send(isHeartbeat, 0, r.agent.heartbeat()) },
			"split": func(*rapid.T) {
				first, second := r.agent.split()
				send(isDelta, 0, first)
				send(isDelta, 0, second)
			},
			"restart": func(t *rapid.T) {
				// Mostly forwards; a clock that was set back is possible. The
				// number is never used twice.
				epoch := r.agent.epoch + uint64(rapid.IntRange(-30, 100).Draw(t, "by"))
				for {
					if _, used := r.agent.past[[2]uint64{epoch, 0}]; !used && epoch > 0 {
						break
					}
					epoch++
				}
				r.agent.restart(epoch)
				send(isHeartbeat, 0, r.agent.heartbeat())
			},
			"deliver": func(*rapid.T) {
				need(1)
				m := bus[0]
				bus = bus[1:]
				deliver(m)
			},
			"deliver all": func(*rapid.T) {
				need(1)
				for _, m := range bus {
					deliver(m)
				}
				bus = nil
			},
			"lose":    func(*rapid.T) { need(1); i := index(); bus = append(bus[:i:i], bus[i+1:]...) },
			"double":  func(*rapid.T) { need(1); bus = append(bus, bus[index()]) },
			"reorder": func(*rapid.T) { need(2); i, j := index(), index(); bus[i], bus[j] = bus[j], bus[i] },
			"damage": func(t *rapid.T) {
				need(1)
				i := index()
				bus[i].data = damage(bus[i], r.agent.rng)
			},
			"doubt": func(*rapid.T) { r.m.suspect(r.now) },
			"time": func(t *rapid.T) {
				r.later(time.Duration(rapid.IntRange(1, 4000).Draw(t, "ms")) * time.Millisecond)
				look()
			},
			"look": func(*rapid.T) { look() },
		})
		if rapid.Bool().Draw(t, "last delta lost") {
			r.agent.delta()
		}
		for range 20 { // the wire behaves
			send(isHeartbeat, 0, r.agent.heartbeat())
			for len(bus) > 0 {
				m := bus[0]
				bus = bus[1:]
				deliver(m)
			}
			r.later(maxBackoff)
			look()
		}
		if p := r.m.cacheState(); p.Trust != fleet.Exact || p.Epoch != r.agent.epoch || p.Sequence != r.agent.sequence {
			t.Fatalf("ends as %+v, the agent is at %d %d", p, r.agent.epoch, r.agent.sequence)
		}
		r.equals(r.agent.now)
	})
}

// damage changes what the digest must catch: keys, lanes, counts, digests, or
// cuts the bytes.
func damage(m message, rng *rand.Rand) []byte {
	if rng.IntN(4) == 0 {
		return m.data[:rng.IntN(len(m.data)+1)]
	}
	var out proto.Message
	switch m.kind {
	case isDelta:
		d := new(pb.Delta)
		if proto.Unmarshal(m.data, d) != nil || len(d.Changes) == 0 {
			return nil
		}
		c := d.Changes[rng.IntN(len(d.Changes))]
		switch {
		case rng.IntN(3) == 0:
			d.Changes = d.Changes[1:]
		case c.GetStored() != nil:
			c.GetStored().Keys[0] ^= 1 << rng.IntN(64)
		default:
			c.GetRemoved().Keys[0] ^= 1 << rng.IntN(64)
		}
		out = d
	case isHeartbeat:
		h := new(pb.Heartbeat)
		if proto.Unmarshal(m.data, h) != nil || len(h.Lanes) == 0 {
			return nil
		}
		h.Lanes[rng.IntN(len(h.Lanes))].Digest ^= 1 << rng.IntN(64)
		out = h
	default:
		c := new(pb.SnapshotChunk)
		if proto.Unmarshal(m.data, c) != nil || len(c.Stored) == 0 {
			return nil
		}
		c.Stored[rng.IntN(len(c.Stored))].Keys[0] ^= 1 << rng.IntN(64)
		out = c
	}
	data, err := proto.Marshal(out)
	if err != nil {
		panic(fmt.Sprint("marshal ", err))
	}
	return data
}

func BenchmarkApply(b *testing.B) {
	const run = 64
	x := index.New(index.Config{})
	var c counters
	m := newMember(name, id, x, rand.New(rand.NewPCG(1, 1)), &c, start)
	m.begin(1, start)
	var store, remove pb.Delta
	var held protocol.Held
	keys := make([]uint64, run)
	for i := range keys {
		keys[i] = uint64(i)*0x9E3779B97F4A7C15 + 1
	}
	for l := range protocol.Lanes {
		held[l].Count, held[l].Digest = run, digestOf(keys)
	}
	store.Changes = []*pb.Change{{Change: &pb.Change_Stored{Stored: &pb.Stored{Lane: 1, Through: 3, Keys: keys}}}}
	remove.Changes = []*pb.Change{{Change: &pb.Change_Removed{Removed: &pb.Removed{Lane: 1, Through: 3, Keys: keys}}}}
	store.Header = &pb.Header{Version: 1, Member: name, Epoch: 1, Sequence: 1}
	remove.Header = &pb.Header{Version: 1, Member: name, Epoch: 1, Sequence: 1}
	store.Lanes, remove.Lanes = lanesOf(held), lanesOf(protocol.Held{})
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		d := &store
		if i%2 == 1 {
			d = &remove
		}
		d.Header.Sequence = m.sequence + 1
		data, err := proto.Marshal(d)
		if err != nil {
			b.Fatal(err)
		}
		read, err := protocol.ReadDelta(data, name)
		if err != nil {
			b.Fatal(err)
		}
		m.delta(read, len(data), start)
	}
	if !m.synced {
		b.Fatal(m.why)
	}
	b.ReportMetric(float64(b.N)*run/b.Elapsed().Seconds(), "blocks/s")
}

// TestAwaitedBytesAreBoundedOverAllMembers lets many members answer at once
// with snapshots of tiny runs, which take many times their bytes in memory.
func TestAwaitedBytesAreBoundedOverAllMembers(t *testing.T) {
	const members, runs = 4, 20_000
	x := index.New(index.Config{})
	var c counters
	before := heap()
	var asking []*member
	for n := range members {
		m := newMember(name, fleet.ID(n), x, rand.New(rand.NewPCG(1, uint64(n))), &c, start)
		attempt := m.ask(start)
		asking = append(asking, m)
		for i := uint32(0); i < 30 && m.asked; i++ {
			chunk := &pb.SnapshotChunk{Header: &pb.Header{Version: 1, Member: name, Epoch: 1, Sequence: 1}, Index: i}
			for j := range runs {
				chunk.Stored = append(chunk.Stored, &pb.Stored{Lane: 1, Position: uint32(j), Keys: []uint64{uint64(j) + 1}})
			}
			m.chunk(attempt, chunk, 13*runs, start)
		}
		if n := c.awaited.Load(); n > maxAwaited {
			t.Fatalf("%d bytes awaited", n)
		}
	}
	if grown := heap() - before; grown > 3*maxAwaited/2 {
		t.Errorf("%d members hold %d MB", members, grown>>20)
	} else {
		t.Logf("%d members hold %d MB", members, grown>>20)
	}
	if c.overflows.Load() == 0 {
		t.Error("nothing was refused")
	}
	for _, m := range asking {
		m.abandon()
	}
	if n := c.awaited.Load(); n != 0 {
		t.Errorf("%d bytes are left over", n)
	}
}

// heap is what lives on it.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestQueueIsBounded(t *testing.T) {
	w := newWorker(&Ingest{})
	large := item{kind: isDelta, name: name, data: make([]byte, protocol.MaxMessage)}
	n := 0
	for ; w.put(large); n++ {
	}
	if n != queueBytes/protocol.MaxMessage {
		t.Errorf("%d messages of %d bytes", n, protocol.MaxMessage)
	}
	w = newWorker(&Ingest{})
	for n = 0; w.put(item{kind: isDelta, name: name}); n++ {
	}
	if n != queueLength {
		t.Errorf("%d empty messages", n)
	}
}

// TestRefusedStrangersAreBounded is a bus on which ever new names send rubbish.
func TestRefusedStrangersAreBounded(t *testing.T) {
	w := newWorker(&Ingest{cfg: Config{Log: slog.New(slog.DiscardHandler)}})
	for i := range 5 * maxStrangers {
		w.refuse(nil, item{name: fmt.Sprint("default_", i, "_0")}, nil, protocol.ErrGarbage, time.Now())
		if len(w.strangers) > maxStrangers {
			t.Fatalf("%d names are remembered", len(w.strangers))
		}
	}
	if got := w.in.count.malformed.Load(); got != 5*maxStrangers {
		t.Errorf("%d messages counted", got)
	}
}
