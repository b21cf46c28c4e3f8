package ingest

import (
	"log/slog"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/journal"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

func TestRivalsAreLoggedOnceAndAgainAfterAPause(t *testing.T) {
	var r rivals
	now := time.Unix(1000, 0)
	told := 0
	beat := func(epoch uint64) {
		now = now.Add(150 * time.Millisecond)
		if r.step(epoch, now) {
			told++
		}
	}
	for epoch := range uint64(20) { // one that restarts, and once with its clock set back
		beat(100 + epoch)
	}
	beat(50)
	for range 1000 {
		beat(51)
	}
	if told != 0 {
		t.Fatal("one agent is taken for two")
	}
	for range 4000 { // ten minutes
		beat(200)
		beat(201)
	}
	if told != 1 {
		t.Errorf("told %d times of a fault that stands", told)
	}
	now = now.Add(time.Minute)
	for range 10 {
		beat(200)
		beat(201)
	}
	if told != 2 {
		t.Errorf("told %d times after a pause", told)
	}
}

// TestEachChangeOfAMemberIsOneLine, at its level and with what to do.
func TestEachChangeOfAMemberIsOneLine(t *testing.T) {
	log := &journal.Journal{}
	w := newWorker(&Ingest{cfg: Config{
		Log: slog.New(slog.NewTextHandler(log, nil)), Index: index.New(index.Config{}), Fleet: fleet.New(fleet.Config{}), Snapshots: 8,
	}})
	now := time.Now()
	begin := now
	w.in.connected.Store(&begin)
	beat := func(epoch, sequence uint64, trust pb.Trust, reason string, load *pb.Load) {
		h := &pb.Heartbeat{
			Header: &pb.Header{Version: protocol.Version, Member: "ns_uid_0", Epoch: epoch, Sequence: sequence}, Trust: trust, Reason: reason,
			Info: &pb.MemberInfo{Namespace: "ns", Pod: "pod-7", PodUid: "uid", Address: "10.0.0.1:8000", Engine: "vllm", Models: []string{"m"}}, Load: load,
		}
		for lane := pb.Lane_LANE_GPU; lane <= pb.Lane_LANE_DISK; lane++ {
			h.Lanes = append(h.Lanes, &pb.LaneState{Lane: lane})
		}
		m := w.members["ns_uid_0"]
		if m == nil {
			id, err := w.in.cfg.Fleet.Join("ns_uid_0", now)
			if err != nil {
				t.Fatal(err)
			}
			m = newMember("ns_uid_0", id, w.in.cfg.Index, w.rng, &w.in.count, now)
			w.members["ns_uid_0"] = m
		}
		w.logHeartbeat(m, h, now)
		w.step(m, func() { m.heartbeat(h, now) })
	}
	wait := func(d time.Duration) {
		for end := now.Add(d); now.Before(end); {
			now = now.Add(10 * time.Millisecond)
			w.logSilent(now)
		}
	}
	said := func(level string, n int, with ...string) {
		t.Helper()
		with = append(with, "level="+level, "member=ns_uid_0", "pod=pod-7")
		if level != "INFO" {
			with = append(with, "do=")
		}
		if got := log.Lines(with...); len(got) != n {
			t.Errorf("%d lines of %q, want %d:\n%s", len(got), with, n, log.String())
		}
	}
	exact := func() { beat(1, 0, pb.Trust_TRUST_EXACT, "", &pb.Load{}) }

	for range 5 {
		exact()
		wait(300 * time.Millisecond)
	}
	said("INFO", 1, "member is EXACT")
	wait(350 * time.Millisecond)
	said("WARN", 0, "not heard")
	wait(900 * time.Millisecond)
	said("WARN", 1, "member missed its heartbeats", "address=10.0.0.1:8000")
	wait(20 * time.Second)
	said("WARN", 1, "member missed its heartbeats")
	exact()
	said("INFO", 1, "member sends heartbeats again", "after=2")

	for range 3 {
		beat(1, 0, pb.Trust_TRUST_SYNCING, "the engine's event socket does not answer", &pb.Load{Unreachable: true})
	}
	said("WARN", 1, "member is SYNCING", "event socket does not answer")
	said("WARN", 1, "engine does not answer its agent")
	beat(1, 0, pb.Trust_TRUST_UNKNOWN, "the engine publishes no KV events", &pb.Load{})
	said("INFO", 1, "engine answers its agent again")
	said("WARN", 1, "member is UNKNOWN", "the engine publishes no KV events")
	beat(1, 0, pb.Trust_TRUST_APPROXIMATE, "older events are lost: blocks may be missing", &pb.Load{Sleeping: proto.Bool(true)})
	said("WARN", 1, "member is APPROXIMATE", "older events are lost")
	said("INFO", 1, "engine sleeps")
	exact()
	said("INFO", 1, "engine is awake")
	said("INFO", 2, "member is EXACT")

	for range 10 {
		beat(1, 0, pb.Trust_TRUST_EXACT, "", nil)
		beat(2, 0, pb.Trust_TRUST_EXACT, "", nil)
	}
	said("ERROR", 1, "two agents publish for one member")

	// Without the connection it is not the member that is silent.
	w.in.connected.Store(nil)
	wait(time.Minute)
	since := now
	w.in.connected.Store(&since)
	wait(500 * time.Millisecond)
	exact()
	said("WARN", 1, "member missed its heartbeats")
}
