package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/protocol/settings"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// engineStub answers for an engine's HTTP server. Nobody listens for its events.
type engineStub struct {
	*httptest.Server
	mu    sync.Mutex // guards pages
	pages map[string]string
}

func newEngineStub(t *testing.T) *engineStub {
	t.Helper()
	e := &engineStub{pages: map[string]string{
		"/version":          `{"version":"0.32.0"}`,
		"/v1/models":        `{"data":[{"id":"llama","root":"/m","max_model_len":4000},{"id":"sql","root":"/a","parent":"llama"}]}`,
		"/metrics":          ranksPage(0),
		"/kv_event_sources": `{"0":{"endpoint":"tcp://127.0.0.1:1"},"1":{"endpoint":"tcp://127.0.0.1:2"}}`,
	}}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.mu.Lock()
		page, ok := e.pages[r.URL.Path]
		e.mu.Unlock()
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = io.WriteString(w, page)
	}))
	t.Cleanup(e.Close)
	return e
}

func (e *engineStub) set(path, page string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pages[path] = page
}

func ranksPage(ranks ...int) string {
	var page strings.Builder
	for _, n := range ranks {
		fmt.Fprintf(&page, "vllm:num_requests_running{engine=\"%d\"} %d\n", n, n+1)
		fmt.Fprintf(&page, "vllm:cache_config_info{engine=\"%d\",block_size=\"16\",num_gpu_blocks=\"100\",enable_prefix_caching=\"True\"} 1\n", n)
	}
	return page.String()
}

// heartbeats collects the newest heartbeat of each member.
type heartbeats struct {
	mu     sync.Mutex // guards newest
	newest map[string]*pb.Heartbeat
}

func listen(t *testing.T, url string) *heartbeats {
	t.Helper()
	closed := make(chan struct{})
	conn, err := nats.Connect(url, nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); <-closed })
	h := &heartbeats{newest: make(map[string]*pb.Heartbeat)}
	if _, err := conn.Subscribe("kvscout.v1.blue.load.*.*.*", func(m *nats.Msg) {
		beat := new(pb.Heartbeat)
		if err := proto.Unmarshal(m.Data, beat); err != nil {
			t.Error(err)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		h.newest[beat.GetHeader().GetMember()] = beat
	}); err != nil {
		t.Fatal(err)
	}
	if err := conn.Flush(); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *heartbeats) of(member string) *pb.Heartbeat {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.newest[member]
}

func runAgent(t *testing.T, cfg Config) (a *Agent, stop func()) {
	t.Helper()
	cfg.Pool, cfg.Pod, cfg.Heartbeat, cfg.Probe, cfg.AdminAddress = "blue", "p", 20*time.Millisecond, 20*time.Millisecond, "127.0.0.1:0"
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(stop)
	return a, stop
}

func fetch(t *testing.T, a *Agent, path string) (int, string) {
	t.Helper()
	await.True(t, "admin server", func() bool { return a.AdminAddr() != "" })
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + a.AdminAddr() + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestAgentAnnouncesEveryRank(t *testing.T) {
	e := newEngineStub(t)
	url := broker.New(t, nil).URL()
	h := listen(t, url)
	a, stop := runAgent(t, Config{NATSURL: url, Engine: e.URL, Address: "10.0.0.1:8000",
		Told: []settings.Setting{{Name: "pod"}, {Name: "probe", Value: "1s"}}})

	await.True(t, "heartbeat with load", func() bool { return h.of("default_p_0").GetLoad().GetRunning() == 1 })
	beat := h.of("default_p_0")
	info := beat.GetInfo()
	if info.GetModels()[0] != "llama" || info.GetRoot() != "/m" || info.GetBlockSize() != 16 || info.GetBlocks() != 100 || info.GetEngineVersion() != "0.32.0" ||
		info.GetAddress() != "10.0.0.1:8000" || len(info.GetAdapters()) != 1 || info.GetMaxModelLen() != 4000 {
		t.Errorf("info %v", info)
	}
	if beat.GetTrust() != pb.Trust_TRUST_SYNCING || beat.GetReason() == "" || beat.GetLoad().Waiting != nil {
		t.Errorf("%v", beat)
	}
	e.set("/metrics", ranksPage(0, 1))
	await.True(t, "second rank", func() bool { return h.of("default_p_1").GetLoad().GetRunning() == 2 })

	status, text := fetch(t, a, "/readyz")
	var s Status
	if err := json.Unmarshal([]byte(text), &s); err != nil || status != http.StatusOK || !s.Ready || s.Believed || s.Reason == "" || len(s.Ranks) != 2 ||
		len(s.Ranks[0].Facts) == 0 || s.Ranks[0].Facts[0].Source == "" {
		t.Errorf("%d %s, %v", status, text, err)
	}
	if status, text := fetch(t, a, "/config"); status != http.StatusOK || !strings.Contains(text, "pod: "+a.cfg.Pod+"\n") || !strings.Contains(text, "probe: 1s\n") {
		t.Errorf("/config says %d\n%s", status, text)
	}
	if status, _ := fetch(t, a, "/healthz"); status != http.StatusOK {
		t.Errorf("/healthz: %d", status)
	}
	_, page := fetch(t, a, "/metrics")
	for _, want := range []string{
		`kvscout_agent_trust{rank="1",trust="syncing"} 1`, `kvscout_agent_blocks{lane="gpu",rank="0"} 0`,
		`kvscout_agent_event_gaps_total{rank="0"} 0`, `kvscout_agent_engine_polls_total{outcome="ok"}`,
	} {
		if !strings.Contains(page, want) {
			t.Errorf("/metrics lacks %s in\n%s", want, page)
		}
	}

	// A rank that metrics do not name any more takes its leave.
	e.set("/metrics", ranksPage(0))
	await.True(t, "leave of rank 1", func() bool { return h.of("default_p_1").GetLeaving() })
	// An engine that does not answer stays a member that says so.
	e.set("/metrics", "<html>")
	e.set("/v1/models", "<html>")
	await.True(t, "engine out of reach", func() bool { return h.of("default_p_0").GetLoad().GetUnreachable() })
	if _, text := fetch(t, a, "/readyz"); !strings.Contains(text, `"error"`) {
		t.Errorf("/readyz hides that the engine is gone: %s", text)
	}
	stop()
	await.True(t, "leave of rank 0", func() bool { return h.of("default_p_0").GetLeaving() })
}

func TestAgentWithoutEvents(t *testing.T) {
	e := newEngineStub(t)
	e.set("/kv_event_sources", `{}`)
	url := broker.New(t, nil).URL()
	h := listen(t, url)
	a, _ := runAgent(t, Config{NATSURL: url, Engine: e.URL})
	await.True(t, "honest heartbeat", func() bool {
		return h.of("default_p_0").GetTrust() == pb.Trust_TRUST_UNKNOWN && strings.Contains(h.of("default_p_0").GetReason(), "no KV events")
	})
	await.True(t, "ready without events", func() bool { status, _ := fetch(t, a, "/readyz"); return status == http.StatusOK })
	e.set("/metrics", strings.ReplaceAll(ranksPage(0), `"True"`, `"False"`))
	await.True(t, "prefix caching is off", func() bool { return strings.Contains(h.of("default_p_0").GetReason(), "prefix caching") })
}

func TestAgentOutlivesNATS(t *testing.T) {
	e := newEngineStub(t)
	s := broker.Absent(t, nil)
	a, _ := runAgent(t, Config{NATSURL: s.URL(), Engine: e.URL})
	await.True(t, "rank without NATS", func() bool { return len(a.Status().Ranks) == 1 })
	if s := a.Status(); s.Believed || !strings.Contains(s.Reason, "NATS") {
		t.Errorf("%+v", s)
	}
	for range 2 {
		s.Start()
		h := listen(t, s.URL())
		await.True(t, "heartbeat", func() bool { return h.of("default_p_0") != nil })
		s.Stop()
		await.True(t, "disconnect", func() bool { return a.Status().NATS != nats.CONNECTED.String() })
	}
}

func TestReloadedAdapterIsPurged(t *testing.T) {
	e := newEngineStub(t)
	url := broker.New(t, nil).URL()
	a, _ := runAgent(t, Config{NATSURL: url, Engine: e.URL})
	await.True(t, "rank", func() bool { return len(a.watch.Ranks()) == 1 })
	r := a.watch.Ranks()[0]
	store := func(first uint64) {
		b := vllm.Batch{Events: []vllm.Event{{Kind: vllm.Stored, Store: mirror.Store{
			Adapter: "sql", Hashes: []uint64{first, first + 1}, Tokens: make([]uint32, 32), BlockSize: 16, Physical: true,
		}}}}
		r.Apply(vllm.Mark{Sequence: 0}, b)
		await.True(t, "blocks", func() bool { return a.Status().Ranks[0].Held[0] == 2 })
	}
	gone := func() bool { return a.Status().Ranks[0].Held[0] == 0 }
	store(1)
	e.set("/v1/models", `{"data":[{"id":"llama","root":"/m"},{"id":"sql","root":"/b","parent":"llama"}]}`)
	await.True(t, "purge after a reload", gone)
	store(11)
	e.set("/v1/models", `{"data":[{"id":"llama","root":"/m"}]}`)
	await.True(t, "purge after an unload", gone)
	// Another base model under the same address is another incarnation.
	epoch := a.Status().Ranks[0].Epoch
	e.set("/v1/models", `{"data":[{"id":"qwen","root":"/q"}]}`)
	await.True(t, "new epoch", func() bool { return a.Status().Ranks[0].Epoch > epoch })
}
