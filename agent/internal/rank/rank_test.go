package rank

import (
	"log/slog"
	"testing"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
)

var quiet = slog.New(slog.DiscardHandler)

// testRank has a tail that is never run.
func testRank(t *testing.T, id Identity) *Rank {
	t.Helper()
	r := newRank(Config{Member: "default_x_0", Identity: id, Log: quiet})
	tail, err := vllm.NewTail(vllm.TailConfig{Endpoint: "tcp://127.0.0.1:1", Sink: r, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	r.tail = tail
	return r
}

// chain stores n blocks of 2 tokens from the root.
func chain(n int) vllm.Batch {
	s := mirror.Store{BlockSize: 2, Physical: true}
	for i := range n {
		s.Hashes = append(s.Hashes, uint64(i+1))
		s.Tokens = append(s.Tokens, uint32(2*i), uint32(2*i+1))
	}
	return vllm.Batch{Events: []vllm.Event{{Kind: vllm.Stored, Store: s}}}
}

func TestRankPublishesKeysOfItsModel(t *testing.T) {
	r := testRank(t, Identity{Model: "m", Reported: 2})
	r.State(vllm.Exact, "")
	r.Apply(vllm.Mark{Sequence: 0}, chain(3))
	ops, st := r.Drain(nil)
	root := blockkey.Scope{Model: "m", BlockSize: 2}.Root()
	want := blockkey.AppendTokens(nil, root, []uint32{0, 1, 2, 3, 4, 5}, 2, nil)
	var got []blockkey.Key
	for _, op := range ops {
		if op.Remove {
			t.Errorf("removes %v", op)
		}
		got = op.Keys
	}
	if len(got) != 3 || got[2] != want[2] || st.Trust != pb.Trust_TRUST_EXACT || st.Lanes[0].Count != 3 || st.EngineBatches != 1 {
		t.Errorf("keys %x, want %x; %+v", got, want, st)
	}
	snapshot, again := r.Snapshot()
	if len(snapshot) == 0 || again != st {
		t.Errorf("snapshot %v at %+v", snapshot, again)
	}
}

func TestNewIncarnationStartsALaterEpochFromNothing(t *testing.T) {
	r := testRank(t, Identity{Model: "m"})
	r.Apply(vllm.Mark{Sequence: 7}, chain(3))
	_, before := r.Drain(nil)
	r.mu.Lock()
	r.epoch += 1 << 50 // the clock was set back
	before.Epoch = r.epoch
	r.mu.Unlock()
	r.NewIncarnation("test")
	ops, after := r.Drain(nil)
	if after.Epoch <= before.Epoch || after.Lanes != (publishLanes{}) || len(ops) != 0 || after.EngineBatches != 0 {
		t.Errorf("epoch %d after %d, %+v, ops %v", after.Epoch, before.Epoch, after, ops)
	}
}

func TestTrustIsTheWeakestOfAll(t *testing.T) {
	unknown, syncing, approximate, exact := pb.Trust_TRUST_UNKNOWN, pb.Trust_TRUST_SYNCING, pb.Trust_TRUST_APPROXIMATE, pb.Trust_TRUST_EXACT
	for _, c := range []struct {
		name  string
		setup func(*Rank)
		want  pb.Trust
	}{
		{"at the start", func(*Rank) {}, syncing},
		{"block size unknown", func(r *Rank) { r.id.Reported = 0; r.State(vllm.Exact, "") }, syncing},
		{"all is well", func(r *Rank) { r.State(vllm.Exact, "") }, exact},
		{"lost events", func(r *Rank) { r.State(vllm.Approximate, "lost") }, approximate},
		{"no events at all", func(r *Rank) { r.State(vllm.Exact, ""); r.Describe(&pb.MemberInfo{}, "off") }, unknown},
		{"another block size", func(r *Rank) {
			r.State(vllm.Exact, "")
			r.Apply(vllm.Mark{Sequence: 0}, chain(2))
			b := chain(1)
			b.Events[0].Store.BlockSize, b.Events[0].Store.Tokens = 1, []uint32{1}
			r.Apply(vllm.Mark{Sequence: 1}, b)
		}, approximate},
		{"and a new incarnation after it", func(r *Rank) {
			r.State(vllm.Exact, "")
			b := chain(1)
			b.Events[0].Store.Tokens = nil
			b.Events[0].Store.Refs = make([][]blockkey.Ref, 3)
			r.Apply(vllm.Mark{Sequence: 0}, b)
			r.NewIncarnation("test")
		}, exact},
		{"unknown parents", func(r *Rank) {
			r.State(vllm.Exact, "")
			for i := range 40 {
				b := chain(1)
				s := &b.Events[0].Store
				s.Hashes, s.HasParent, s.Parent = []uint64{uint64(1000 + i)}, true, uint64(5000+i)
				r.Apply(vllm.Mark{Sequence: uint64(i)}, b)
			}
			r.Drain(nil)
		}, approximate},
		{"more blocks than the engine has", func(r *Rank) {
			r.State(vllm.Exact, "")
			r.become(Identity{Model: "m", Reported: 2, Blocks: 10})
			r.Apply(vllm.Mark{Sequence: 0}, chain(11))
		}, approximate},
		{"and cleared since", func(r *Rank) {
			r.State(vllm.Exact, "")
			r.become(Identity{Model: "m", Reported: 2, Blocks: 10})
			r.Apply(vllm.Mark{Sequence: 0}, chain(11))
			r.Apply(vllm.Mark{Sequence: 1}, vllm.Batch{Events: []vllm.Event{{Kind: vllm.Cleared}}})
		}, exact},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := testRank(t, Identity{Model: "m", Reported: 2})
			c.setup(r)
			_, st := r.Drain(nil)
			if st.Trust != c.want || (st.Reason == "") != (c.want == exact) {
				t.Errorf("%v (%q), want %v", st.Trust, st.Reason, c.want)
			}
		})
	}
}

func TestAnotherModelIsAnotherIncarnation(t *testing.T) {
	r := testRank(t, Identity{Model: "a", Reported: 2})
	r.State(vllm.Exact, "")
	r.Apply(vllm.Mark{Sequence: 0}, chain(2))
	_, before := r.Drain(nil)
	r.become(Identity{Model: "a", Reported: 2, Blocks: 100}) // learned, not changed
	if _, st := r.Drain(nil); st.Epoch != before.Epoch || st.Lanes[0].Count != 2 {
		t.Errorf("learning the capacity began epoch %d", st.Epoch)
	}
	for _, id := range []Identity{{Model: "b", Reported: 2, Blocks: 100}, {Model: "b", Reported: 4, Blocks: 100}, {Model: "b", Reported: 4, Blocks: 90}} {
		r.become(id)
		ops, st := r.Drain(nil)
		if st.Epoch <= before.Epoch || len(ops) != 0 || st.Trust != pb.Trust_TRUST_SYNCING {
			t.Errorf("%+v: %v, %+v", id, ops, st)
		}
		before = st
	}
}

func TestHeartbeat(t *testing.T) {
	r := testRank(t, Identity{Model: "m", Reported: 16})
	r.Describe(&pb.MemberInfo{Namespace: "n"}, "")
	info, load := r.Heartbeat()
	if info.GetBlockSize() != 16 || load != nil {
		t.Errorf("%v, %v", info, load)
	}
	r.Apply(vllm.Mark{Sequence: 0}, chain(1)) // says 2 tokens a block
	running := 3.0
	r.sample(&vllm.Load{Running: &running}, now(), r.loadAt)
	if _, load := r.Heartbeat(); load != nil {
		t.Errorf("a sample of long ago: %v", load)
	}
	r.sample(&vllm.Load{Running: &running}, now(), now())
	again, load := r.Heartbeat()
	if again.GetBlockSize() != 2 || info.GetBlockSize() != 16 || load.GetRunning() != 3 || load.Waiting != nil {
		t.Errorf("%v (before: %v), %v", again, info, load)
	}
}

func TestPurgeForgetsOneAdapter(t *testing.T) {
	r := testRank(t, Identity{Model: "m"})
	r.State(vllm.Exact, "")
	r.Apply(vllm.Mark{Sequence: 0}, chain(2))
	b := chain(2)
	b.Events[0].Store.Hashes, b.Events[0].Store.Adapter = []uint64{101, 102}, "sql"
	r.Apply(vllm.Mark{Sequence: 1}, b)
	r.Drain(nil)
	r.Purge("sql")
	if _, st := r.Drain(nil); st.Lanes[mirror.LaneGPU].Count != 2 {
		t.Errorf("%d blocks left, want 2", st.Lanes[0].Count)
	}
}
