package scheduler

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/journal"
	"github.com/kvscout/kvscout/protocol"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
)

// announcer is an agent without an engine: it says what it is told to say.
type announcer struct {
	mu      sync.Mutex // guards what follows
	verdict *pb.Verdict
	info    *pb.MemberInfo
}

func (a *announcer) refused() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.verdict.GetRefused()
}

func (a *announcer) told() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.verdict.GetReason()
}

// announce lets somebody connect to a NATS server and announce a member.
func announce(t *testing.T, server string, info *pb.MemberInfo) (a *announcer, stop func()) {
	t.Helper()
	a = &announcer{info: info}
	name, err := protocol.Member{Namespace: info.Namespace, PodUID: info.PodUid, Rank: info.Rank}.Name()
	if err != nil {
		t.Fatal(err)
	}
	subjects, err := protocol.NewSubjects("default")
	if err != nil {
		t.Fatal(err)
	}
	conn := mustJoin(t, server, "")
	for subject, take := range map[string]nats.MsgHandler{
		subjects.Snapshot(name): func(*nats.Msg) {},
		subjects.Verdict(name): func(m *nats.Msg) {
			if v, err := protocol.ReadVerdict(m.Data, name); err == nil {
				a.mu.Lock()
				a.verdict = v
				a.mu.Unlock()
			}
		},
	} {
		if _, err := conn.Subscribe(subject, take); err != nil {
			t.Fatal(err)
		}
	}
	beat, err := proto.Marshal(&pb.Heartbeat{
		Header: &pb.Header{Version: protocol.Version, Member: name, Epoch: 1}, Info: info, Trust: pb.Trust_TRUST_EXACT, IntervalMs: 300,
		Lanes: []*pb.LaneState{{Lane: pb.Lane_LANE_GPU}, {Lane: pb.Lane_LANE_HOST}, {Lane: pb.Lane_LANE_DISK}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return a, beats(t, conn, subjects.Load(name), beat, 20*time.Millisecond)
}

func memberInfo(namespace, pod, address, model string) *pb.MemberInfo {
	return &pb.MemberInfo{Namespace: namespace, Pod: pod, PodUid: pod, Address: address, Models: []string{model}, BlockSize: blockSize}
}

// elsewhere is an address of this machine that is not loopback.
func elsewhere(t *testing.T) netip.Addr {
	t.Helper()
	list, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range list {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() {
			return p.Addr()
		}
	}
	t.Skip("this machine has only loopback addresses")
	return netip.Addr{}
}

// engineSpy is an engine that notes what it is sent.
type engineSpy struct {
	address string
	mu      sync.Mutex // guards got
	got     []string
}

func spyOn(t *testing.T, ip netip.Addr) *engineSpy {
	t.Helper()
	l, err := net.Listen("tcp", netip.AddrPortFrom(ip, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	s := &engineSpy{address: l.Addr().String()}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		s.mu.Lock()
		s.got = append(s.got, r.Header.Get("Authorization")+" "+string(body))
		s.mu.Unlock()
		_, _ = io.WriteString(w, `{"request_id":"r","token_ids":[7,8,9]}`)
	}))
	server.Listener.Close()
	server.Listener = l
	server.Start()
	t.Cleanup(server.Close)
	return s
}

func (s *engineSpy) saw() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.got...)
}

func members(t *testing.T, s *Scheduler) string {
	t.Helper()
	var names []string
	for _, m := range s.fleet.View().Members {
		names = append(names, m.Info.Name)
	}
	return strings.Join(names, " ")
}

func ask(t *testing.T, s *Scheduler, model, text string) *api.Ranking {
	t.Helper()
	answer, err := api.NewSchedulerClient(dial(t, s)).Score(t.Context(), &api.ScoreRequest{Request: &api.Request{Model: model, Prompt: api.Body(fmt.Sprintf(`{"prompt":%q}`, text))}})
	if err != nil {
		t.Fatal(err)
	}
	return answer.GetRanking()
}

// A rogue agent names the address of somebody else, who must not get the
// engines' key, nor prompts.
func TestKeyAndPromptsGoOnlyWhereMembersConnectFrom(t *testing.T) {
	thief := spyOn(t, elsewhere(t))
	honest := spyOn(t, netip.MustParseAddr("127.0.0.1"))
	var log journal.Journal
	s, _ := start(t, Config{EngineAPIKey: "the-key", Log: log.Logger()})
	announce(t, s.Addrs().NATS, memberInfo("dev", "rogue", thief.address, "m"))
	await.True(t, "the rogue is there", func() bool { return members(t, s) == "dev_rogue_0" })
	for n := range 3 {
		if r := ask(t, s, "m", fmt.Sprintf("a secret %d", n)); r.GetPromptTokens() != 0 || !strings.Contains(r.Lacks(), "-engine-addresses") {
			t.Errorf("%v", r)
		}
	}
	await.True(t, "said", func() bool { return strings.Contains(log.String(), "is not where its agent connects from") })
	announce(t, s.Addrs().NATS, memberInfo("prod", "honest", honest.address, "m"))
	await.True(t, "both are there", func() bool { return members(t, s) == "dev_rogue_0 prod_honest_0" })
	await.True(t, "the honest one is asked", func() bool { return ask(t, s, "m", "another secret").GetPromptTokens() == 3 })
	for n := range 7 {
		if r := ask(t, s, "m", fmt.Sprintf("another secret %d", n)); r.GetPromptTokens() != 3 {
			t.Errorf("%v", r)
		}
	}
	if got := thief.saw(); len(got) != 0 {
		t.Errorf("the thief got %q", got)
	}
	if got := honest.saw(); len(got) != 8 || !strings.HasPrefix(got[0], "Bearer the-key ") {
		t.Errorf("the engine got %q", got)
	}
}

// What the operator lists decides alone: who is outside gets nothing at all,
// and is told so.
func TestAddressesOutsideTheListAreRefused(t *testing.T) {
	s, _ := start(t, Config{EngineAddresses: "127.0.0.1, .prod.svc"})
	for name, info := range map[string]*pb.MemberInfo{
		"another network": memberInfo("a", "pod", "169.254.169.254:80", "m"),
		"another zone":    memberInfo("b", "pod", "evilprod.svc:80", "m"),
		"no address":      memberInfo("c", "pod", "", "m"),
	} {
		a, _ := announce(t, s.Addrs().NATS, info)
		await.True(t, name+" is told", func() bool { return strings.Contains(a.refused(), "-engine-addresses") })
	}
	bad, _ := announce(t, s.Addrs().NATS, memberInfo("d", "pod", "user@127.0.0.1:80", "m"))
	await.True(t, "nonsense is told", func() bool { return strings.Contains(bad.refused(), "host") })
	announce(t, s.Addrs().NATS, memberInfo("e", "pod", "127.0.0.1:80", "m"))
	announce(t, s.Addrs().NATS, memberInfo("f", "pod", "x.prod.svc:80", "m"))
	await.True(t, "the others are members", func() bool { return members(t, s) == "e_pod_0 f_pod_0" })
}

// An agent of namespace dev that announces a model of prod gets neither
// traffic nor keys, whenever that is forbidden.
func TestNamespacesServeOnlyTheirModels(t *testing.T) {
	file := filepath.Join(t.TempDir(), "namespaces")
	write(t, file, "prod prod-model,tools-* default\ndev dev-* # and nothing else\n")
	spy := spyOn(t, netip.MustParseAddr("127.0.0.1"))
	var log journal.Journal
	s, _ := start(t, Config{Namespaces: file, EngineAPIKey: "the-key", Log: log.Logger()})
	rogue, _ := announce(t, s.Addrs().NATS, memberInfo("dev", "rogue", spy.address, "prod-model"))
	await.True(t, "the rogue is told", func() bool { return strings.Contains(rogue.refused(), `"dev" may not serve model "prod-model"`) })
	lora := memberInfo("dev", "lora", spy.address, "dev-model")
	lora.Adapters = []*pb.Adapter{{Name: "prod-model"}}
	adapter, _ := announce(t, s.Addrs().NATS, lora)
	await.True(t, "the adapter is refused", func() bool { return strings.Contains(adapter.refused(), `adapter "prod-model"`) })
	stranger, _ := announce(t, s.Addrs().NATS, memberInfo("other", "pod", spy.address, "dev-model"))
	await.True(t, "a namespace without a line is refused", func() bool { return strings.Contains(stranger.refused(), `"other" has no line`) })
	announce(t, s.Addrs().NATS, memberInfo("prod", "pod", "127.0.0.1:1", "prod-model"))
	await.True(t, "the right one is a member", func() bool { return members(t, s) == "prod_pod_0" })
	if strings.Contains(strings.Join(spy.saw(), " "), "the-key") {
		t.Error("the rogue got the key")
	}

	write(t, file, "* *\nprod other\n")
	await.True(t, "the file is followed", func() bool { return members(t, s) == "dev_lora_0 dev_rogue_0 other_pod_0" })
	write(t, file, "prod\n")
	await.True(t, "a bad file is said", func() bool { return strings.Contains(log.String(), "line 1: must be: <namespace> <models>") })
	if got := members(t, s); got != "dev_lora_0 dev_rogue_0 other_pod_0" {
		t.Errorf("after a bad file: %s", got)
	}
}

func TestWrongListsAreRefused(t *testing.T) {
	if _, err := New(Config{Namespaces: "/nowhere"}); err == nil || !strings.Contains(err.Error(), "-namespaces") {
		t.Error(err)
	}
	if err := (Config{EngineAddresses: "10.0.0.1/8"}).Validate(); err == nil || !strings.Contains(err.Error(), "-engine-addresses") {
		t.Error(err)
	}
}

func TestWhetherNATSIsHere(t *testing.T) {
	for url, want := range map[string]bool{
		"": false, "nats://nats:4222": false, "nats://127.0.0.1:4222,nats://nats:4222": false, "nats://127.0.0.1:4222, nats://localhost:422": true,
	} {
		if cfg := (Config{NATSURL: url}); cfg.natsHere() != want {
			t.Errorf("%q: %v", url, !want)
		}
	}
}

func TestMembersWithOneAddressAreNoticed(t *testing.T) {
	var log journal.Journal
	s, _ := start(t, Config{Log: log.Logger()})
	one := memberInfo("ns", "one", "127.0.0.1:8000", "m")
	rank := memberInfo("ns", "one", "127.0.0.1:8000", "m")
	rank.Rank = 1
	announce(t, s.Addrs().NATS, one)
	announce(t, s.Addrs().NATS, rank)
	await.True(t, "two ranks", func() bool { return members(t, s) == "ns_one_0 ns_one_1" })
	time.Sleep(1200 * time.Millisecond) // addresses are compared every second
	if strings.Contains(log.String(), "is announced by") {
		t.Fatal("ranks of one pod share an address rightly")
	}
	two, stop := announce(t, s.Addrs().NATS, memberInfo("ns", "two", "127.0.0.1:8000", "m"))
	const said = "address 127.0.0.1:8000 is announced by"
	await.True(t, "it is logged", func() bool { return strings.Contains(log.String(), said) })
	await.True(t, "its agent is told", func() bool { return strings.Contains(two.told(), said) })
	if r := ask(t, s, "m", "x"); !strings.Contains(r.GetExplanation(), said) {
		t.Errorf("the answer does not say it: %s", r.GetExplanation())
	}
	if _, text := get(t, s, "/v1/members"); !strings.Contains(text, said) {
		t.Error("/v1/members does not say it")
	}
	if _, text := get(t, s, "/metrics"); !strings.Contains(text, `kvscout_scheduler_addresses{problem="shared"`) {
		t.Error("no metric")
	}
	lines := strings.Count(log.String(), said)
	stop()
	await.True(t, "it is over when the other is silent", func() bool { return strings.Contains(log.String(), "fine again") })
	if n := strings.Count(log.String(), said); n > lines {
		t.Errorf("said %d times more", n-lines)
	}
}

// An agent that connects from elsewhere and announces 127.0.0.1 sends requests
// to whoever listens beside the proxy.
func TestLoopbackFromElsewhereIsNoticed(t *testing.T) {
	from := elsewhere(t)
	var log journal.Journal
	s, _ := start(t, Config{NATSAddress: "0.0.0.0:0", Insecure: true, Log: log.Logger()})
	_, port, err := net.SplitHostPort(s.Addrs().NATS)
	if err != nil {
		t.Fatal(err)
	}
	a, _ := announce(t, net.JoinHostPort(from.String(), port), memberInfo("ns", "pod", "127.0.0.1:8000", "m"))
	const said = "reaches the engine from its own machine only"
	await.True(t, "it is logged", func() bool { return strings.Contains(log.String(), said) })
	await.True(t, "its agent is told", func() bool { return strings.Contains(a.told(), said) })
	if r := ask(t, s, "m", "x"); !strings.Contains(r.GetExplanation(), said) || !strings.Contains(r.Lacks(), "-engine-addresses") {
		t.Errorf("%v", r)
	}
}
