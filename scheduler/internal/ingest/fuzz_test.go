package ingest

import (
	"math/rand/v2"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// holdsNoMoreThanClaimed is what must be true after any message.
func holdsNoMoreThanClaimed(t *testing.T, r *rig) {
	t.Helper()
	p := r.m.cacheState()
	for l := range p.Held {
		n := uint64(r.index.Count(index.Member(id), index.Lane(l)))
		if p.Trust == fleet.Exact && n != r.m.held[l].Count || !r.m.synced && n != 0 || n > r.m.held[l].Count {
			t.Fatalf("%+v with %d blocks on lane %d, %d claimed", p, n, l, r.m.held[l].Count)
		}
	}
}

func seed(f *testing.F, m proto.Message) []byte {
	data, err := proto.Marshal(m)
	if err != nil {
		f.Fatal(err)
	}
	return data
}

// FuzzDelta holds that no delta that passes the checks, however wrong, leaves
// the index with more than the count that is claimed for it, or panics.
func FuzzDelta(f *testing.F) {
	a := newSimAgent(name, rand.New(rand.NewPCG(1, 1)), 100)
	for range 3 {
		f.Add(seed(f, a.delta()))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		d, err := protocol.ReadDelta(data, name)
		if err != nil {
			return
		}
		r := newRig(t, 1)
		r.heartbeat()
		d.Header.Epoch, d.Header.Sequence = 100, 1
		r.m.delta(d, len(data), r.now)
		holdsNoMoreThanClaimed(t, r)
	})
}

// FuzzSnapshot holds the same of two chunks that answer one request.
func FuzzSnapshot(f *testing.F) {
	a := newSimAgent(name, rand.New(rand.NewPCG(1, 1)), 100)
	for range 20 {
		a.delta()
	}
	chunks := a.chunks()
	for i := range chunks {
		f.Add(seed(f, chunks[i]), seed(f, chunks[(i+1)%len(chunks)]))
	}
	f.Add(seed(f, chunks[len(chunks)-1]), []byte{})
	f.Fuzz(func(t *testing.T, first, second []byte) {
		r := newRig(t, 1)
		attempt := r.m.ask(r.now)
		for i, data := range [][]byte{first, second} {
			c, err := protocol.ReadChunk(data, name)
			if err != nil {
				return
			}
			c.Index = uint32(i)
			r.m.chunk(attempt, c, len(data), r.now)
			holdsNoMoreThanClaimed(t, r)
		}
	})
}

// FuzzHeartbeat holds the same of a heartbeat on top of a good cache state, and
// that what it says of the member can be kept.
func FuzzHeartbeat(f *testing.F) {
	a := newSimAgent(name, rand.New(rand.NewPCG(1, 1)), 100)
	f.Add(seed(f, a.heartbeat()))
	a.delta()
	f.Add(seed(f, a.heartbeat()))
	f.Fuzz(func(t *testing.T, data []byte) {
		h, err := protocol.ReadHeartbeat(data, name)
		if err != nil || h.GetLeaving() {
			return
		}
		r := newRig(t, 1)
		r.heartbeat()
		r.delta()
		members := fleet.New(fleet.Config{})
		n, err := members.Join(name, r.now)
		if err != nil {
			t.Fatal(err)
		}
		members.Receive(n, infoOf(h), loadOf(h.GetLoad(), r.now), r.now)
		if m := members.View().Member(n); m.Info.Name != name || m.Load.Running < -1 || m.Load.At.After(r.now) {
			t.Fatalf("%+v", m)
		}
		r.m.heartbeat(h, r.now)
		holdsNoMoreThanClaimed(t, r)
	})
}
