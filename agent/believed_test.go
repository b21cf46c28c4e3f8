package agent

import (
	"net/http"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/journal"
	"github.com/kvscout/kvscout/protocol/pb"
)

// says has a scheduler say what it makes of a member, until stop is called or
// the test ends.
func says(t *testing.T, conn *nats.Conn, member string, v *pb.Verdict) {
	t.Helper()
	v.Version, v.Member, v.IntervalMs = 1, member, 60_000
	data, err := proto.Marshal(v)
	if err == nil {
		err = conn.Publish("kvscout.v1.blue.verdict."+strings.ReplaceAll(member, "_", "."), data)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func dial(t *testing.T, url string) *nats.Conn {
	t.Helper()
	closed := make(chan struct{})
	conn, err := nats.Connect(url, nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); <-closed })
	return conn
}

// TestReadinessDoesNotDependOnSchedulers: without NATS, and refused by all, an
// agent must not take its engine out of rotation; it says so elsewhere.
func TestReadinessDoesNotDependOnSchedulers(t *testing.T) {
	e := newEngineStub(t)
	e.set("/kv_event_sources", `{}`)
	s := broker.New(t, nil)
	url := s.URL()
	conn := dial(t, url)
	var log journal.Journal
	a, _ := runAgent(t, Config{NATSURL: url, Engine: e.URL, Log: log.Logger()})
	code := func(path string) func() int {
		return func() int { status, _ := fetch(t, a, path); return status }
	}
	ready, believed := code("/readyz"), code("/believed")
	reason := func(want string) func() bool {
		return func() bool {
			return believed() == http.StatusServiceUnavailable && strings.Contains(a.Status().Reason, want)
		}
	}
	await.True(t, "nobody has said anything", reason("no scheduler"))
	first, second := &pb.Verdict{Sender: 1, Scheduler: "one", Trust: pb.Trust_TRUST_SYNCING, Reason: "gap"}, &pb.Verdict{Sender: 2, Scheduler: "two", Trust: pb.Trust_TRUST_UNKNOWN, Refused: "model not allowed"}
	// Said again, because the agent's subscription may come after the verdict.
	await.True(t, "not yet believed", func() bool {
		says(t, conn, "default_p_0", first)
		return reason("one: gap")()
	})
	says(t, conn, "default_p_0", second)
	await.True(t, "refused", reason("two: model not allowed"))
	if !strings.Contains(log.String(), "model not allowed") {
		t.Error("the log does not say it")
	}
	_, page := fetch(t, a, "/metrics")
	for _, want := range []string{
		`kvscout_agent_believed{rank="0"} 0`,
		`kvscout_agent_schedulers{rank="0",trust="refused"} 1`, `kvscout_agent_schedulers{rank="0",trust="syncing"} 1`,
	} {
		if !strings.Contains(page, want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
	first.Trust, first.Reason = pb.Trust_TRUST_UNKNOWN, "as the agent says"
	says(t, conn, "default_p_0", first)
	await.True(t, "one believes it", func() bool { return believed() == http.StatusOK && a.Status().Believed })
	s.Stop()
	await.True(t, "NATS is gone", reason("NATS"))
	e.set("/v1/models", "<html>")
	e.set("/metrics", "<html>")
	await.True(t, "the engine is gone", func() bool { return a.Status().Engine.Error != "" })
	if ready() != http.StatusOK {
		t.Error("/readyz fails although the engine has its own")
	}
}

func TestReadyWhenTheEngineHasAnswered(t *testing.T) {
	e := newEngineStub(t)
	for _, page := range []string{"/v1/models", "/metrics"} {
		e.set(page, "<html>")
	}
	a, _ := runAgent(t, Config{NATSURL: broker.New(t, nil).URL(), Engine: e.URL})
	await.True(t, "an answer that is none", func() bool { return a.Status().Engine.Error != "" })
	if status, text := fetch(t, a, "/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(text, "has not answered") {
		t.Errorf("%d %s", status, text)
	}
}

// TestOneIdentityEverywhere: what a host is called is cleaned once, and every
// message, subject and file says the same.
func TestOneIdentityEverywhere(t *testing.T) {
	e := newEngineStub(t)
	url := broker.New(t, nil).URL()
	h := listen(t, url)
	var log journal.Journal
	a, _ := runAgent(t, Config{NATSURL: url, Engine: e.URL, Namespace: "my_team", PodUID: "ip-10-0-0-1.ec2.internal", Log: log.Logger()})
	await.True(t, "rank", func() bool { return len(a.Status().Ranks) == 1 })
	member := a.Status().Ranks[0].Member
	await.True(t, "heartbeat", func() bool { return h.of(member) != nil })
	info := h.of(member).GetInfo()
	if member != info.GetNamespace()+"_"+info.GetPodUid()+"_0" {
		t.Errorf("member %s says it is %s, %s", member, info.GetNamespace(), info.GetPodUid())
	}
	if !strings.HasPrefix(info.GetPodUid(), "ip-10-0-0-1-ec2-internal-") || !strings.HasPrefix(info.GetNamespace(), "my-team-") {
		t.Errorf("%v", info)
	}
	if !strings.Contains(log.String(), info.GetPodUid()) || !strings.Contains(log.String(), "ip-10-0-0-1.ec2.internal") {
		t.Error("the log does not say what became of the name")
	}
}
