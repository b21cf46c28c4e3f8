package agent

import (
	"fmt"
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
	failed := func() uint64 {
		a.watch.mu.Lock()
		defer a.watch.mu.Unlock()
		return a.watch.failed
	}
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
		a.watch.mu.Lock()
		looks := a.watch.polls
		a.watch.mu.Unlock()
		await.True(t, "looks", func() bool {
			a.watch.mu.Lock()
			defer a.watch.mu.Unlock()
			return a.watch.polls > looks+1
		})
		most = max(most, len(a.watch.list()))
	}
	if most != vllm.MaxRanks {
		t.Errorf("%d ranks at a time, want %d", most, vllm.MaxRanks)
	}
	e.set("/metrics", ranksPage(0))
	await.True(t, "one rank", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.watch.list()) == 1 && len(a.active) == 1
	})
}
