package scheduler

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/authority"
	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/protocol"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
)

func serving(t testing.TB, s *Scheduler) bool {
	t.Helper()
	h, err := healthpb.NewHealthClient(dial(t, s)).Check(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return h.GetStatus() == healthpb.HealthCheckResponse_SERVING
}

// gauge is a metric without labels, as the page has it.
func gauge(t testing.TB, s *Scheduler, name string) string {
	t.Helper()
	_, page := get(t, s, "/metrics")
	for line := range strings.Lines(page) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	return "absent"
}

// TestNotReadyWithoutNATS: however short the wait is, it does not begin before
// there is a connection that lets this scheduler hear its members.
func TestNotReadyWithoutNATS(t *testing.T) {
	_, stranger := authority.User(t)
	known, _ := authority.User(t)
	deaf, deafSeed := authority.User(t)
	strict := broker.New(t, &server.Options{Nkeys: []*server.NkeyUser{{Nkey: known},
		{Nkey: deaf, Permissions: &server.Permissions{Subscribe: &server.SubjectPermission{Allow: []string{"elsewhere"}}}}}})
	for name, c := range map[string]struct {
		cfg Config
		why string
	}{
		"nobody there":           {Config{NATSURL: broker.Absent(t, nil).URL()}, "cannot connect to NATS"},
		"wrong key":              {Config{NATSURL: strict.URL(), NATSSeed: stranger}, "uthorization"},
		"no key":                 {Config{NATSURL: strict.URL()}, "cannot connect to NATS"},
		"a key for other things": {Config{NATSURL: strict.URL(), NATSSeed: deafSeed}, "NATS denies"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.cfg.ReadyWait = time.Millisecond
			s, stop := start(t, c.cfg)
			for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
				if s.ready() {
					t.Fatalf("ready after %v", 3*time.Second-time.Until(end))
				}
			}
			await.True(t, "/readyz says 503 and "+c.why, func() bool {
				code, text := get(t, s, "/readyz")
				return code == 503 && strings.Contains(text, c.why)
			})
			if serving(t, s) {
				t.Error("the health service says SERVING")
			}
			// What the alert stands on.
			if v := gauge(t, s, "kvscout_scheduler_ready"); v != "0" {
				t.Errorf("kvscout_scheduler_ready is %s", v)
			}
			if err := stop(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestReadyWaitCountsFromTheConnection, for a member of which no cache state comes.
func TestReadyWaitCountsFromTheConnection(t *testing.T) {
	ns := broker.Absent(t, nil)
	const wait = 2500 * time.Millisecond
	s, stop := start(t, Config{NATSURL: ns.URL(), ReadyWait: wait})
	time.Sleep(wait) // without a connection it counts for nothing
	if s.ready() {
		t.Fatal("ready without NATS")
	}
	connected := time.Now()
	ns.Start()
	mute(t, ns)
	await.True(t, "the member is known", func() bool { return s.fleet.Stats().Members == 1 })
	await.True(t, "ready", s.ready)
	if took := time.Since(connected); took < wait {
		t.Errorf("ready %v after the connection, with a member that has no cache state; want %v at least", took, wait)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// TestReadyStaysWhenNATSIsLost: every replica loses the same server at the same
// time, and the last known state is better than no answer at all.
func TestReadyStaysWhenNATSIsLost(t *testing.T) {
	ns := broker.New(t, nil)
	s, stop := start(t, Config{NATSURL: ns.URL()})
	agent(t, ns.URL(), 3)
	client := api.NewSchedulerClient(dial(t, s))
	exact(t, client)
	await.True(t, "ready", func() bool { return serving(t, s) })
	if v := gauge(t, s, "kvscout_scheduler_connected"); v != "1" {
		t.Errorf("kvscout_scheduler_connected is %s", v)
	}
	ns.Stop()
	await.True(t, "the loss is measured", func() bool { return gauge(t, s, "kvscout_scheduler_connected") == "0" })
	code, text := get(t, s, "/readyz")
	if code != 200 || !strings.Contains(text, "NATS") || !strings.Contains(text, "last known") {
		t.Errorf("/readyz says %d %q", code, text)
	}
	if !serving(t, s) {
		t.Error("the health service says NOT_SERVING")
	}
	r, err := client.Score(t.Context(), &api.ScoreRequest{Request: &api.Request{
		Model: "m", Prompt: api.TokenIDs(tokens)}})
	if err != nil || r.GetRanking().GetCandidates()[0].GetCacheState().GetTrust() != api.Trust_TRUST_SYNCING {
		t.Errorf("without NATS: %v, %v", r, err)
	}
	ns.Start()
	await.True(t, "the connection is back", func() bool { return gauge(t, s, "kvscout_scheduler_connected") == "1" })
	if code, text := get(t, s, "/readyz"); code != 200 || strings.TrimSpace(text) != "ready" {
		t.Errorf("/readyz says %d %q", code, text)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// mute announces a member that never answers.
func mute(t testing.TB, ns *broker.Broker) {
	t.Helper()
	conn := mustJoin(t, ns.Address(), "")
	subjects, err := protocol.NewSubjects("default")
	if err != nil {
		t.Fatal(err)
	}
	var lanes []*pb.LaneState
	for lane := pb.Lane_LANE_GPU; lane <= pb.Lane_LANE_DISK; lane++ {
		lanes = append(lanes, &pb.LaneState{Lane: lane, Count: 1, Digest: 1})
	}
	beat, err := proto.Marshal(&pb.Heartbeat{
		Header: &pb.Header{Version: protocol.Version, Member: member, Epoch: 1, Sequence: 1}, Trust: pb.Trust_TRUST_EXACT, Lanes: lanes, IntervalMs: 1000,
		Info: &pb.MemberInfo{Namespace: "ns", Pod: "pod", PodUid: "uid", Address: "127.0.0.1:1", Engine: "vllm", Models: []string{"m"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	beats(t, conn, subjects.Load(member), beat, 50*time.Millisecond)
}

// beats publishes a heartbeat again and again, until it is stopped or the test ends.
func beats(t testing.TB, conn *nats.Conn, subject string, beat []byte, every time.Duration) (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			_ = conn.Publish(subject, beat)
			select {
			case <-quit:
				return
			case <-time.After(every):
			}
		}
	}()
	stop = sync.OnceFunc(func() { close(quit); <-done })
	t.Cleanup(stop)
	return stop
}
