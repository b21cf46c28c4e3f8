package fleet

import (
	"testing"
	"time"
)

// While the wire answers, who is silent is silent himself, though nobody else is
// there to be heard.
func TestTheLastSilentMemberIsForgottenWhileTheWireAnswers(t *testing.T) {
	f, ids := fleetOf(t, Config{Grace: 10 * time.Second}, 1)
	for at := time.Duration(0); at <= 11*time.Second; at += 250 * time.Millisecond {
		f.Answered(after(at))
		v, gone := f.View(), f.Sweep(after(at))
		if v.Stale(after(at)) || v.Silent(v.Member(ids[0]), after(at)) != (at > 3*time.Second) {
			t.Fatalf("after %v: stale %v, silent %v", at, v.Stale(after(at)), v.Silent(v.Member(ids[0]), after(at)))
		}
		if (len(gone) == 1) != (at > 10*time.Second) {
			t.Fatalf("after %v: to forget %v", at, gone)
		}
	}
}

// Silence counts from when the link came back, however short it was away, and
// what comes from before it was lost verifies nothing.
func TestSilenceCountsFromWhenTheLinkCameBack(t *testing.T) {
	f, ids := fleetOf(t, Config{Grace: 10 * time.Second}, 2)
	f.Link(false, after(time.Second))
	f.Answered(after(1100 * time.Millisecond)) // of before
	f.Link(false, after(2*time.Second))
	if v := f.View(); !v.Stale(after(5 * time.Second)) {
		t.Error("nothing comes through a link that is lost")
	}
	if gone := f.Sweep(after(time.Minute)); gone != nil {
		t.Errorf("forgotten without a link: %v", gone)
	}
	back := after(2500 * time.Millisecond)
	f.Link(true, back)
	f.Receive(ids[0], Info{Models: []string{"model"}}, nil, back.Add(time.Second))
	v := f.View()
	if late := v.Member(ids[1]); v.Silent(late, back.Add(2900*time.Millisecond)) {
		t.Error("m1 had no time to speak again")
	}
	f.Answered(back.Add(3 * time.Second))
	v = f.View()
	if late := v.Member(ids[1]); !v.Silent(late, back.Add(3100*time.Millisecond)) || v.Silent(v.Member(ids[0]), back.Add(3100*time.Millisecond)) {
		t.Error("m1 stays silent, m0 is heard")
	}
}

func TestCacheStatesCountWhileSomebodyCouldObject(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	f.Receive(ids[0], Info{Heartbeat: 300 * time.Millisecond}, nil, t0)
	f.SetCacheState(ids[0], CacheState{Trust: Exact, Epoch: 1})
	believe := func(at time.Duration) Belief { v := f.View(); return v.Believe(v.Member(ids[0]), after(at)) }
	if b := believe(900 * time.Millisecond); b.Trust != Exact || b.Credit != Credited || b.Reason != "" {
		t.Errorf("after three heartbeats: %+v", b)
	}
	if b := believe(901 * time.Millisecond); b.Trust != Syncing || b.Credit != Predicted || b.Reason == "" {
		t.Errorf("without a sign for longer: %+v", b)
	}
	f.Link(false, t0)
	if b := believe(0); b.Trust != Syncing || b.Credit != Predicted || b.Reason == "" {
		t.Errorf("without the link: %+v", b)
	}
	f.Link(true, t0)
	if b := believe(0); b.Trust != Exact {
		t.Errorf("with it: %+v", b)
	}
	f.SetCacheState(ids[0], CacheState{Trust: Syncing, Reason: "why", Epoch: 1})
	if b := believe(0); b != (Belief{Syncing, "why", Uncredited}) {
		t.Errorf("while it is rebuilt: %+v", b)
	}
}
