package agent

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/broker"
)

// TestOneSlowLookTakesNobodyOut is a busy engine that once does not answer in
// time, and one that is away for good.
func TestOneSlowPollTakesNobodyOut(t *testing.T) {
	e := newEngineStub(t)
	target, err := url.Parse(e.URL)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	var slow atomic.Int64 // answers that come too late
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if slow.Add(-1) >= 0 {
			<-r.Context().Done()
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(front.Close)
	natsURL := broker.New(t, nil).URL()
	h := listen(t, natsURL)
	a, _ := runAgent(t, Config{NATSURL: natsURL, Engine: front.URL, ProbeTimeout: 300 * time.Millisecond, ProbeFailures: 3})
	await.True(t, "member", func() bool { return h.of("default_p_0").GetLoad() != nil })
	failed := func() uint64 { return a.watch.Polls().Failed }
	for _, looks := range []int64{1, 2} {
		before := failed()
		slow.Store(2 * looks) // models and metrics
		await.True(t, "failed looks", func() bool { return slow.Load() < 0 && failed() >= before+1 })
		if h.of("default_p_0").GetLoad().GetUnreachable() {
			t.Errorf("out of rotation after %d slow looks", looks)
		}
	}
	slow.Store(1 << 40)
	await.True(t, "engine out of reach", func() bool { return h.of("default_p_0").GetLoad().GetUnreachable() })
	slow.Store(0)
	await.True(t, "engine in reach", func() bool { l := h.of("default_p_0").GetLoad(); return l != nil && !l.GetUnreachable() })
}

// TestHeartbeatsNameTheEnginesProcess is an engine that says when it began, or
// not, and ends and begins again at its address.
func TestHeartbeatsNameTheEnginesProcess(t *testing.T) {
	natsURL := broker.New(t, nil).URL()
	for name, said := range map[string]string{"as it says": "process_start_time_seconds 1.7e9\n", "as it was met": ""} {
		t.Run(name, func(t *testing.T) {
			e := newEngineStub(t)
			e.set("/metrics", ranksPage(0)+said)
			h := listen(t, natsURL)
			a, stop := runAgent(t, Config{NATSURL: natsURL, Engine: e.URL})
			defer stop()
			process := func() uint64 { return h.of("default_p_0").GetLoad().GetProcessStartMs() }
			await.True(t, "a process", func() bool { return process() != 0 })
			first := process()
			if said != "" && first != 1.7e12 {
				t.Errorf("process %d", first)
			}
			polls := func() uint64 { return a.watch.Polls().All }
			e.set("/metrics", "<html>") // it lives
			e.set("/v1/models", "<html>")
			await.True(t, "engine out of reach", func() bool { return h.of("default_p_0").GetLoad().GetUnreachable() })
			e.set("/metrics", ranksPage(0)+said)
			await.True(t, "the same process", func() bool { return process() == first })
			for n := polls(); polls() < n+3; {
				if got := process(); got != first {
					t.Fatalf("another process, %d, without a reason", got)
				}
			}
			// Another one at its address.
			address := e.Listener.Addr().String()
			e.Close()
			await.True(t, "engine out of reach", func() bool { return h.of("default_p_0").GetLoad().GetUnreachable() })
			next := newEngineStub(t)
			if said != "" {
				said = "process_start_time_seconds 1.7000001e9\n"
			}
			next.set("/metrics", ranksPage(0)+said)
			listener, err := net.Listen("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			server := &http.Server{Handler: next.Config.Handler}
			go func() { _ = server.Serve(listener) }()
			defer server.Close()
			await.True(t, "another process", func() bool { return process() != 0 && process() != first })
		})
	}
}

// TestRanksStayBoundedOverTime is an engine that names other ranks with every
// look.
func TestRanksStayBoundedOverTime(t *testing.T) {
	natsURL := broker.New(t, nil).URL()
	e := newEngineStub(t)
	e.set("/kv_event_sources", `{}`)
	a, _ := runAgent(t, Config{NATSURL: natsURL, Engine: e.URL, Probe: 10 * time.Millisecond})
	most := 0
	for round := range 30 {
		var page strings.Builder
		for n := range vllm.MaxRanks {
			fmt.Fprintf(&page, "vllm:num_requests_running{engine=\"%d\"} 1\n", (round*vllm.MaxRanks+n)%4000)
		}
		e.set("/metrics", page.String())
		polls := a.watch.Polls().All
		await.True(t, "polls", func() bool { return a.watch.Polls().All > polls+1 })
		most = max(most, len(a.watch.Ranks()))
	}
	if most != vllm.MaxRanks {
		t.Errorf("%d ranks at a time, want %d", most, vllm.MaxRanks)
	}
	e.set("/metrics", ranksPage(0))
	await.True(t, "one rank", func() bool { return len(a.watch.Ranks()) == 1 })
}
