package realvllm_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/realvllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// TestNeighboursSocketIsNotBelieved is an agent between two real engines whose
// event endpoint is told to be the neighbour's.
func TestNeighboursSocketIsNotBelieved(t *testing.T) {
	t.Parallel()
	r := open(t, "", realvllm.Config{})
	other := open(t, "", realvllm.Config{})
	front := front(t, r.engine, other.engine)
	other.complete(realvllm.Request{Tokens: other.prompt(), MaxTokens: 40})
	var err error
	if r.agent, err = r.stage.Agent(stage.AgentOptions{Engine: front, Pod: pod}); err != nil {
		t.Fatal(err)
	}
	r.until("be known", func(m *api.MemberState) bool { return len(m.GetModels()) > 0 })
	began := time.Now()
	for range 3 { // about 2,000 tokens
		r.complete(realvllm.Request{Tokens: r.tokens(700), MaxTokens: 4})
	}
	r.until("be disowned", func(m *api.MemberState) bool {
		return m.GetCacheState().GetTrust() == api.Trust_TRUST_UNKNOWN && m.GetHeldGpuBlocks() == 0 &&
			strings.Contains(m.GetCacheState().GetExplanation(), front) && strings.Contains(m.GetCacheState().GetExplanation(), other.engine.Events())
	})
	t.Logf("disowned after %v", time.Since(began).Round(time.Millisecond))
	r.agent.Stop()
	r.startAgent()
	r.until("be exact by its own socket", stage.Exact)
	r.requests(5, realvllm.Request{})
}

// front passes an engine's HTTP on, and tells another's event endpoints as its
// own; with none, it tells nothing, as releases before 0.31 do.
func front(t *testing.T, engine, events *realvllm.Engine) string {
	t.Helper()
	target, err := url.Parse(engine.URL())
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		switch {
		case q.URL.Path != "/kv_event_sources":
			proxy.ServeHTTP(w, q)
		case events == nil:
			http.NotFound(w, q)
		default:
			_ = json.NewEncoder(w).Encode(map[string]any{"0": map[string]string{"endpoint": "tcp://" + events.Events(), "replay_endpoint": "tcp://" + events.Replay()}})
		}
	}))
	t.Cleanup(server.Close)
	return server.URL
}
