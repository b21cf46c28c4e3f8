package ingest

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// While messages pile up no snapshot is asked for, and when they are gone it is.
func TestNoSnapshotIsAskedForWhileMessagesPileUp(t *testing.T) {
	s := broker.New(t, nil)
	in, err := New(Config{Conn: connect(t, s), Pool: "test", Index: index.New(index.Config{}), Fleet: fleet.New(fleet.Config{}), Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	w, now := in.workers[0], time.Now()
	m := newMember("ns_uid_0", 0, in.cfg.Index, w.rng, &in.count, now.Add(-time.Second))
	w.members[m.name], w.unsynced[m.name] = m, m
	for range behind + 1 {
		w.put(item{kind: isSilence, name: m.name})
	}
	w.poll(now)
	if m.asked || in.Stats().InFlight != 0 {
		t.Fatal("asked with a full queue")
	}
	<-w.queue
	w.poll(now)
	if !m.asked || in.Stats().InFlight != 1 {
		t.Error("not asked")
	}
}

// As many requests are under way as may be, others wait for their turn, and one
// that got no answer in time is given up with the next look.
func TestHungRequestsAreGivenUpAtTheInFlightLimit(t *testing.T) {
	s := broker.New(t, nil)
	in, err := New(Config{Conn: connect(t, s), Pool: "test", Index: index.New(index.Config{}), Fleet: fleet.New(fleet.Config{}), Workers: 1, Snapshots: 3})
	if err != nil {
		t.Fatal(err)
	}
	w, now := in.workers[0], time.Now()
	for i := range 1000 {
		m := newMember(fmt.Sprintf("ns_uid-%d_0", i), fleet.ID(i), in.cfg.Index, w.rng, &in.count, now.Add(-time.Second))
		w.members[m.name], w.unsynced[m.name] = m, m
	}
	w.poll(now)
	if n := in.Stats().InFlight; n != 3 {
		t.Fatalf("%d requests under way", n)
	}
	w.poll(now.Add(patience + time.Millisecond))
	if n := in.Stats().FailedSnapshots; n != 3 {
		t.Errorf("%d of 3 hung requests were given up after %v", n, patience+time.Millisecond)
	}
	if n := in.Stats().InFlight; n > 3 {
		t.Errorf("%d requests under way", n)
	}
}
