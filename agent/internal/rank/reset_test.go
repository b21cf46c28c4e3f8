package rank

import (
	"testing"
	"time"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/publish"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
)

type publishLanes = protocol.Held

var now = time.Now

// TestResetOfAnIdleEngine tells looks at an engine: the counter of reset
// requests, how much its stream has moved when the look began and when it was
// weighed, and whether it was idle.
func TestResetOfAnIdleEngine(t *testing.T) {
	type look struct {
		resets, sleeps float64
		idle, asleep   bool
		at, now        Position
		clear, certain bool
	}
	still := Position{batches: 5, clears: 1}
	moved := Position{batches: 6, clears: 1}
	cleared := Position{batches: 6, clears: 2}
	for _, c := range []struct {
		name  string
		looks []look
	}{
		{"nothing happens", []look{{resets: 3, idle: true, at: still, now: still}, {resets: 3, idle: true, at: still, now: still}}},
		{"reset while idle", []look{{resets: 3, idle: true, at: still, now: still}, {resets: 4, idle: true, at: still, now: still, clear: true, certain: true},
			{resets: 4, idle: true, at: still, now: still}}},
		{"announced with the next request", []look{{resets: 3, idle: true, at: still, now: still}, {resets: 4, idle: true, at: cleared, now: cleared}, {resets: 4, idle: true, at: cleared, now: cleared}}},
		{"announced between page and weighing", []look{{resets: 3, idle: true, at: still, now: cleared}, {resets: 4, idle: true, at: cleared, now: cleared}, {resets: 4, idle: true, at: cleared, now: cleared}}},
		{"after a request, then idle", []look{{resets: 3, idle: true, at: still, now: still}, {resets: 4, idle: true, at: moved, now: moved}, {resets: 4, idle: true, at: moved, now: moved, clear: true}}},
		{"refused while busy", []look{{resets: 3, at: still, now: still}, {resets: 4, at: still, now: still}, {resets: 4, idle: true, at: moved, now: moved}, {resets: 4, idle: true, at: moved, now: moved}}},
		{"announced after the suspicion", []look{{resets: 3, at: still, now: still}, {resets: 4, at: still, now: still}, {resets: 4, idle: true, at: cleared, now: cleared}}},
		{"two at once, one announced", []look{{resets: 3, idle: true, at: still, now: still}, {resets: 5, idle: true, at: cleared, now: cleared}, {resets: 5, idle: true, at: cleared, now: cleared, clear: true}}},
		{"reset again behind a late announcement", []look{{resets: 3, idle: true, at: still, now: still}, {resets: 4, idle: true, at: still, now: still, clear: true, certain: true},
			{resets: 5, idle: true, at: cleared, now: cleared}, {resets: 5, idle: true, at: cleared, now: cleared, clear: true}}},
		{"announced while a poll ran, and reset again", []look{{resets: 3, idle: true, at: still, now: still}, {resets: 4, idle: true, at: still, now: cleared},
			{resets: 5, idle: true, at: cleared, now: cleared}, {resets: 5, idle: true, at: cleared, now: cleared, clear: true}}},
		{"reset again and announced", []look{{resets: 3, idle: true, at: still, now: still}, {resets: 4, idle: true, at: still, now: still, clear: true, certain: true},
			{resets: 5, idle: true, at: Position{batches: 6, clears: 3}, now: Position{batches: 6, clears: 3}}, {resets: 5, idle: true, at: Position{batches: 6, clears: 3}, now: Position{batches: 6, clears: 3}}}},
		{"asleep and awake between two looks", []look{{sleeps: 1, idle: true, at: still, now: still}, {sleeps: 2, idle: true, at: still, now: still, clear: true}, {sleeps: 2, idle: true, at: still, now: still}}},
		{"asleep", []look{{idle: true, at: still, now: still}, {sleeps: 1, idle: true, asleep: true, at: still, now: still, clear: true, certain: true}, {sleeps: 1, idle: true, at: still, now: still}}},
		{"asleep, awake and announced with the next request", []look{{idle: true, at: still, now: still}, {sleeps: 1, idle: true, at: cleared, now: cleared}, {sleeps: 1, idle: true, at: cleared, now: cleared}}},
		{"counter of a new process", []look{{resets: 3, idle: true, at: still, now: still}, {resets: 0, idle: true, at: still, now: still}, {resets: 0, idle: true, at: still, now: still}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var w resetWatch
			for i, l := range c.looks {
				clear, certain := w.judge(Emptied{Known: true, Resets: l.resets, Sleeps: l.sleeps}, l.idle, l.asleep, l.at, l.now)
				if clear != l.clear || certain != l.certain {
					t.Errorf("look %d: clear %v, certain %v", i, clear, certain)
				}
			}
		})
	}
}

// TestResetBeforeTheFirstLookOfAnEpoch is an engine that is reset when its agent
// has only just begun, or begun anew.
func TestResetBeforeTheFirstPollOfAnEpoch(t *testing.T) {
	w := resetWatch{counted: Emptied{Known: true, Resets: 3}, idle: true, before: Position{batches: 9, clears: 2}, pending: true}.anew()
	still := Position{epoch: 2, batches: 4}
	for i, want := range []bool{false, true, false} {
		clear, certain := w.judge(Emptied{Known: true, Resets: 4}, true, false, still, still)
		if clear != want || certain {
			t.Errorf("look %d: clear %v, certain %v", i, clear, certain)
		}
	}
	w = w.anew()
	for i := range 3 { // the counter of another process
		if clear, _ := w.judge(Emptied{Known: true}, true, false, still, still); clear {
			t.Errorf("look %d took a new process for a reset", i)
		}
	}
}

func ptr[T any](v T) *T { return &v }

func held(t *testing.T, r *Rank) (uint64, publish.State) {
	t.Helper()
	_, st := r.Drain(nil)
	return st.Lanes[0].Count, st
}

func TestWeighClears(t *testing.T) {
	idle := &vllm.Load{Running: ptr(0.0), Waiting: ptr(0.0)}
	t.Run("asleep", func(t *testing.T) {
		r := testRank(t, Identity{Model: "m", Reported: 2})
		r.State(vllm.Exact, "")
		r.Apply(vllm.Mark{Sequence: 0}, chain(3))
		before := r.Position()
		r.Apply(vllm.Mark{Sequence: 1}, vllm.Batch{})
		r.weigh(&vllm.Load{Sleeping: ptr(true)}, Emptied{}, before, now())
		if n, _ := held(t, r); n != 3 {
			t.Errorf("%d blocks: metrics older than the events were believed", n)
		}
		r.weigh(&vllm.Load{Sleeping: ptr(true)}, Emptied{}, r.Position(), now())
		if n, st := held(t, r); n != 0 || st.Trust != pb.Trust_TRUST_EXACT {
			t.Errorf("%d blocks, %v", n, st)
		}
	})
	t.Run("reset", func(t *testing.T) {
		r := testRank(t, Identity{Model: "m", Reported: 2})
		r.State(vllm.Exact, "")
		r.Apply(vllm.Mark{Sequence: 0}, chain(3))
		r.weigh(idle, Emptied{Known: true, Resets: 0}, r.Position(), now())
		r.weigh(idle, Emptied{Known: true, Resets: 1}, r.Position(), now())
		if n, st := held(t, r); n != 0 || st.Trust != pb.Trust_TRUST_EXACT {
			t.Errorf("%d blocks, %v", n, st)
		}
	})
	t.Run("reset, perhaps", func(t *testing.T) {
		r := testRank(t, Identity{Model: "m", Reported: 2})
		r.State(vllm.Exact, "")
		r.weigh(idle, Emptied{Known: true, Resets: 0}, r.Position(), now())
		r.Apply(vllm.Mark{Sequence: 0}, chain(3))
		r.weigh(idle, Emptied{Known: true, Resets: 1}, r.Position(), now())
		r.weigh(idle, Emptied{Known: true, Resets: 1}, r.Position(), now())
		if n, st := held(t, r); n != 0 || st.Trust != pb.Trust_TRUST_APPROXIMATE {
			t.Errorf("%d blocks, %v", n, st)
		}
	})
}

// TestCacheThatWasKeptIsHeardAgain lets an engine publish after its cache may have
// been emptied: it would have begun with saying so. What was published before
// shows nothing.
func TestCacheThatWasKeptIsHeardAgain(t *testing.T) {
	for name, c := range map[string]struct {
		at      time.Duration // since the doubt
		cleared bool
		again   bool
	}{
		"kept":             {time.Hour, false, true},
		"emptied":          {time.Hour, true, false},
		"published before": {-time.Hour, false, false},
	} {
		r := testRank(t, Identity{Model: "m", Reported: 2})
		r.State(vllm.Exact, "")
		r.Apply(vllm.Mark{Sequence: 0, Live: true}, chain(3))
		idle := &vllm.Load{Running: ptr(0.0), Waiting: ptr(0.0)}
		r.weigh(idle, Emptied{Known: true}, r.Position(), now())
		r.weigh(idle, Emptied{Known: true, Sleeps: 1}, r.Position(), now()) // it may only have been paused
		epoch := r.Position().epoch
		b := chain(1)
		b.Time = float64(now().Add(c.at).Unix())
		if c.cleared {
			b.Events = append([]vllm.Event{{Kind: vllm.Cleared}}, b.Events...)
		}
		r.Apply(vllm.Mark{Sequence: 1, Live: true}, b)
		if again := r.Position().epoch != epoch; again != c.again {
			t.Errorf("%s: heard again: %v", name, again)
		}
		want := pb.Trust_TRUST_APPROXIMATE
		switch {
		case c.again:
			want = pb.Trust_TRUST_SYNCING
		case c.cleared:
			want = pb.Trust_TRUST_EXACT
		}
		if _, st := r.Drain(nil); st.Trust != want {
			t.Errorf("%s: %+v", name, st)
		}
	}
}

// TestClearedTiersAreForgotten empties an engine that keeps blocks in host memory,
// too: no event says whether they are still there. What the batch itself tells of
// them was stored before.
func TestClearedTiersAreForgotten(t *testing.T) {
	below := func(hashes ...uint64) vllm.Event {
		return vllm.Event{Kind: vllm.Stored, Store: mirror.Store{Tier: mirror.Host, Hashes: hashes, BlockSize: 2}}
	}
	for name, clear := range map[string]func(r *Rank){
		"announced": func(r *Rank) {
			b := chain(1)
			b.Events = append([]vllm.Event{{Kind: vllm.Cleared}}, append(b.Events, below(1), below(2))...)
			r.Apply(vllm.Mark{Sequence: 2}, b)
		},
		"by metrics": func(r *Rank) {
			idle := &vllm.Load{Running: ptr(0.0), Waiting: ptr(0.0)}
			r.weigh(idle, Emptied{Known: true}, r.Position(), now())
			r.weigh(idle, Emptied{Known: true, Resets: 1}, r.Position(), now())
		},
	} {
		r := testRank(t, Identity{Model: "m", Reported: 2})
		r.State(vllm.Exact, "")
		r.Apply(vllm.Mark{Sequence: 0}, chain(3))
		r.Apply(vllm.Mark{Sequence: 1}, vllm.Batch{Events: []vllm.Event{below(1), below(2), below(3)}})
		clear(r)
		_, st := r.Drain(nil)
		if st.Lanes[mirror.LaneDisk].Count != st.Lanes[mirror.LaneGPU].Count || st.Trust != pb.Trust_TRUST_APPROXIMATE {
			t.Errorf("%s: %+v", name, st)
		}
		r.Apply(vllm.Mark{Sequence: 3}, vllm.Batch{Events: append(chain(3).Events, below(1), below(2), vllm.Event{Kind: vllm.Removed, Remove: mirror.Remove{Hashes: []uint64{1, 2, 3}}})})
		if name == "announced" {
			r.Apply(vllm.Mark{Sequence: 4}, vllm.Batch{Events: []vllm.Event{{Kind: vllm.Removed, Remove: mirror.Remove{Hashes: []uint64{1}}}}})
		}
		if _, st := r.Drain(nil); st.Lanes[mirror.LaneGPU].Count != 0 || st.Lanes[mirror.LaneHost].Count != 2 {
			t.Errorf("%s: what was stored later: %+v", name, st)
		}
	}
}

// TestWhatNoEventTellsIsSaid: what a connector brings is found in no cache that
// events tell of.
func TestWhatNoEventTellsIsSaid(t *testing.T) {
	for name, c := range map[string]struct {
		external *float64
		want     pb.Trust
	}{
		"no connector": {nil, pb.Trust_TRUST_EXACT},
		"no hit":       {ptr(0.0), pb.Trust_TRUST_EXACT},
		"a hit":        {ptr(96.0), pb.Trust_TRUST_APPROXIMATE},
	} {
		r := testRank(t, Identity{Model: "m", Reported: 2})
		r.State(vllm.Exact, "")
		r.Apply(vllm.Mark{}, chain(3))
		r.weigh(&vllm.Load{ExternalTokens: c.external}, Emptied{}, r.Position(), now())
		if n, st := held(t, r); n != 3 || st.Trust != c.want {
			t.Errorf("%s: %d blocks, %v (%s)", name, n, st.Trust, st.Reason)
		}
	}
}
