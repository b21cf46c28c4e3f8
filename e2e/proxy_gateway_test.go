package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/authority"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler"
)

// throughGateway is the scheduler's own gateway. What it is compared with are
// clients that go to an engine themselves, as there is no proxy then.
func throughGateway(t *testing.T) reverseProxy {
	address := net.JoinHostPort(loopback.Host(t), "28080")
	return reverseProxy{
		name:      "-gateway",
		configure: func(c *scheduler.Config) { c.GatewayAddress = address },
		start: func(_ *testing.T, s *site) served {
			if s.plain {
				return served{url: "http://" + s.engines[0]}
			}
			return served{url: "http://" + address, http2: "http://" + address}
		},
		lacks: map[feature]string{fallsBack: "where the scheduler is away, so is its gateway"},
	}
}

func TestProxyGateway(t *testing.T) { runProxyCases(t, throughGateway(t)) }

func TestProxyLatencyGateway(t *testing.T) { measureProxy(t, throughGateway(t)) }

// answered is what a request was answered.
func (x *proxied) answered(method, path, body string, header ...string) (*http.Response, string) {
	x.t.Helper()
	req, err := http.NewRequestWithContext(x.t.Context(), method, x.url+path, strings.NewReader(body))
	if err != nil {
		x.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	answer, err := x.client.Do(req)
	if err != nil {
		x.t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		x.t.Fatal(err)
	}
	return answer, string(text)
}

// Clients see all models, what was decided, and why they are refused; they do not
// see what engines offer to their operators, and send engines nothing that is the
// scheduler's to say.
func TestOwnGatewaySpeaksForTheFleet(t *testing.T) {
	r := throughGateway(t)
	s := r.site(t)
	came := make(chan http.Header, 1)
	address := standIn(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			came <- r.Header
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[]}`)
	})
	x := r.before(t, s, nil, fakevllm.Config{Model: "small", Adapters: []fakevllm.Adapter{{Name: "tuned", Path: "/tuned"}}}, fakevllm.Config{Model: "large"})
	s.announce("mute", address) // serves "fake", and has no list of models

	_, text := x.answered("GET", "/v1/models", "")
	var page struct {
		Object string
		Data   []struct {
			ID     string
			Length *int `json:"max_model_len"`
		}
	}
	if err := json.Unmarshal([]byte(text), &page); err != nil || page.Object != "list" || len(page.Data) != 4 {
		t.Fatalf("%v %s", err, text)
	}
	for _, m := range page.Data {
		if known := m.ID == "small" || m.ID == "large"; known != (m.Length != nil) {
			t.Errorf("%s has the length %v", m.ID, m.Length)
		}
	}

	answer, _ := x.answered("POST", "/v1/completions", `{"model":"fake","prompt":[1,2]}`, "X-Kvscout-Explain", "1", "X-Prefiller-Host-Port", "10.0.0.1:1",
		"X-Kv-Cache-Source-Host-Port", "10.0.0.1:1", "X-Data-Parallel-Rank", "7", "X-Llm-D-Slo-Ttft-Ms", "100", "X-Mine", "yes")
	if answer.StatusCode != http.StatusOK || answer.Header.Get("X-Kvscout-Decision") == "" || answer.Header.Get("X-Kvscout-Cached-Tokens") != "0" {
		t.Errorf("%v", answer)
	}
	sent := <-came
	for _, name := range []string{"X-Kvscout-Explain", "X-Prefiller-Host-Port", "X-Kv-Cache-Source-Host-Port", "X-Data-Parallel-Rank", "X-Llm-D-Slo-Ttft-Ms"} {
		if sent.Get(name) != "" {
			t.Errorf("the engine got %s: %s", name, sent.Get(name))
		}
	}
	if sent.Get("X-Mine") != "yes" || sent.Get("X-Forwarded-For") == "" {
		t.Errorf("the engine got %v", sent)
	}

	for path, want := range map[string]int{
		"/sleep": 404, "/metrics": 404, "/v1/../sleep": 404, "/v1/load_lora_adapter": 404, "//v1/completions": 404, "/reset_prefix_cache": 404,
	} {
		if answer, text := x.answered("POST", path, `{}`); answer.StatusCode != want || !strings.Contains(text, `"error"`) {
			t.Errorf("%s: %d %s", path, answer.StatusCode, text)
		}
	}
	if answer, _ := x.answered("GET", "/health", ""); answer.StatusCode != http.StatusOK {
		t.Errorf("health: %d", answer.StatusCode)
	}
	if answer, text := x.answered("POST", "/v1/completions", `{"model":"nobody's","prompt":[1]}`); answer.StatusCode != 404 || !strings.Contains(text, `"NotFoundError"`) {
		t.Errorf("unknown model: %d %s", answer.StatusCode, text)
	}
	if answer, text := x.answered("POST", "/v1/embeddings", `{"model":"large","input":"x"}`); answer.StatusCode != 404 || !strings.Contains(text, "Not Found") {
		t.Errorf("another path of the engine: %d %s", answer.StatusCode, text)
	}
}

// An engine that has no room lets another one be asked; where nobody else is, its
// answer is the client's.
func TestOwnGatewayTriesTheNext(t *testing.T) {
	r := throughGateway(t)
	s := r.site(t)
	q := random(1, 20_000)
	full := standIn(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "3")
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.WriteString(w, "full")
	})
	m := s.announce("full", full, q)
	x := r.before(t, s, nil)
	if answer, text := x.answered("POST", "/v1/completions", string(q.completion(""))); answer.StatusCode != 503 || text != "full" || answer.Header.Get("Retry-After") != "3" {
		t.Errorf("alone: %v %s", answer, text)
	}
	e := s.engine(fakevllm.Config{}).watched("pod")
	x.engines = append(x.engines, e)
	x.complete(q, "", 0)
	x.free()
	x.untilMember(m.id, "hold nothing back", idleAgain)
}

// A client waits as it would at the endpoint picker, and is told the same.
func TestOwnGatewayLetsRequestsWait(t *testing.T) {
	r := throughGateway(t)
	configure := r.configure
	r.configure = func(c *scheduler.Config) {
		configure(c)
		c.QueueLength, c.QueueBudget, c.QueueWait = 1, time.Nanosecond, patience
	}
	s := r.site(t)
	m := s.announce("full", standIn(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "served") }))
	x := r.before(t, s, nil)
	m.loaded(busy(1))
	x.untilMember(m.id, "be busy", func(m *api.MemberState) bool { return m.GetRunningRequests() == 1 })
	body := string(random(1, 100).completion(""))
	waited := make(chan string, 1)
	go func() {
		_, text, err := x.try(t.Context(), strings.NewReader(body))
		if err != nil {
			text = []byte(err.Error())
		}
		waited <- string(text)
	}()
	x.untilQueued(1)
	answer, text := x.answered("POST", "/v1/completions", body)
	if answer.StatusCode != http.StatusTooManyRequests || answer.Header.Get("X-Llm-D-Request-Dropped-Reason") != "rejected-saturated" ||
		answer.Header.Get("Retry-After") == "" || !strings.Contains(text, `"TooManyRequestsError"`) {
		t.Errorf("%v %s", answer, text)
	}
	m.loaded(busy(0))
	if text := <-waited; text != "served" {
		t.Error(text)
	}
}

// Thousands of streams that are begun and given up leave nothing behind.
func TestOwnGatewayAbandonsThousands(t *testing.T) {
	r := throughGateway(t)
	x := r.before(t, r.site(t), nil, fakevllm.Config{Speedup: 100, MaxSequences: 1000})
	body := string(bytes.Replace(random(1, 100).completion(`,"stream":true`), []byte(`"max_tokens":3`), []byte(`"max_tokens":100000`), 1))
	const many, at = 10_000, 100
	before := runtime.NumGoroutine()
	var begun atomic.Int64
	var all sync.WaitGroup
	for client := range at {
		all.Go(func() {
			for i := range many / at {
				// Some are given up at once, others when they have begun.
				ctx, cancel := context.WithCancel(t.Context())
				if i%2 == 0 {
					time.AfterFunc(time.Duration(client%20)*time.Millisecond, cancel)
				}
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, x.url+"/v1/completions", strings.NewReader(body))
				if err == nil {
					var answer *http.Response
					if answer, err = x.client.Do(req); err == nil {
						_, _ = answer.Body.Read(make([]byte, 100))
						answer.Body.Close()
						begun.Add(1)
					}
				}
				if err != nil && i%2 == 1 {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	all.Wait()
	if n := begun.Load(); n < many/2 {
		t.Errorf("only %d streams were begun", n)
	}
	x.client.CloseIdleConnections()
	x.until("no request is open", func() bool { return x.counted(x.Admin, "kvscout_scheduler_gateway_open", "") == 0 })
	if held := x.counted(x.Admin, "kvscout_scheduler_gateway_memory_bytes", ""); held != 0 {
		t.Errorf("%v bytes are held", held)
	}
	x.free()
	x.until("no goroutine is left over", func() bool { return runtime.NumGoroutine() < before+50 })
	if n := x.counted(x.Admin, "kvscout_scheduler_gateway_requests_total", `outcome="abandoned"`); n < many/2 {
		t.Errorf("%v abandoned", n)
	}
	x.complete(random(2, 100), "", 0)
}

// While it stops, streams that are under way come to their end, and new requests
// are served until health checks have seen it.
func TestOwnGatewayStopsInGoodOrder(t *testing.T) {
	r := throughGateway(t)
	configure := r.configure
	r.configure = func(c *scheduler.Config) { configure(c); c.StopWait = patience }
	x := r.before(t, r.site(t), nil, fakevllm.Config{Speedup: 1})
	e := x.engines[0]
	long := bytes.Replace(random(1, 100).completion(`,"stream":true`), []byte(`"max_tokens":3`), []byte(`"max_tokens":60`), 1)
	done := make(chan string, 1)
	go func() {
		_, text, err := x.try(t.Context(), bytes.NewReader(long))
		if err != nil {
			text = []byte(err.Error())
		}
		done <- string(text)
	}()
	e.untilMember(e.id(), "be asked", func(m *api.MemberState) bool { return m.GetReservedRequests() > 0 })
	stopped := make(chan struct{})
	go func() { defer close(stopped); x.StopScheduler() }()
	x.until("it is not healthy", func() bool {
		answer, err := x.client.Get(x.url + "/health")
		if err == nil {
			answer.Body.Close()
		}
		return err == nil && answer.StatusCode == http.StatusServiceUnavailable
	})
	x.complete(random(2, 100), "", 0)
	if text := <-done; !strings.HasSuffix(text, "data: [DONE]\n\n") {
		t.Errorf("the stream ends with %.300s", text)
	}
	<-stopped
}

// A request that names no model goes where the fewest requests are; of members with
// as many to any, and to one that may not answer when nobody else is left.
func TestOwnGatewayBalancesWhatNamesNoModel(t *testing.T) {
	r := throughGateway(t)
	s := r.site(t)
	var members []*speaker
	for _, name := range []string{"first", "second"} {
		members = append(members, s.announce(name, standIn(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, name) })))
	}
	x := r.before(t, s, nil)
	load := func(requests ...uint32) {
		for i, m := range members {
			m.loaded(busy(requests[i]))
			x.untilMember(m.id, "have its load", func(m *api.MemberState) bool { return m.GetRunningRequests() == requests[i] })
		}
	}
	served := func() map[string]int {
		by := make(map[string]int)
		for range 40 {
			_, text := x.answered("GET", "/v1/files", "")
			by[text]++
		}
		return by
	}
	load(5, 4)
	if by := served(); by["second"] != 40 {
		t.Errorf("5 and 4 requests: %v", by)
	}
	load(3, 4)
	if by := served(); by["first"] != 40 {
		t.Errorf("3 and 4 requests: %v", by)
	}
	load(4, 4)
	if by := served(); by["first"] == 0 || by["second"] == 0 || len(by) != 2 {
		t.Errorf("4 and 4 requests: %v", by)
	}
	asleep := busy(0)
	asleep.Sleeping = proto.Bool(true)
	members[0].loaded(asleep)
	x.untilMember(members[0].id, "sleep", func(m *api.MemberState) bool { return m.GetRunningRequests() == 0 })
	if by := served(); by["second"] != 40 {
		t.Errorf("the first sleeps: %v", by)
	}
}

// With certificates the gateway speaks TLS alone, in both versions of HTTP, to
// clients that have one, too, where an authority for theirs is named.
func TestOwnGatewayTLS(t *testing.T) {
	s := &secured{t: t, ca: authority.New(t)}
	public, seed := authority.User(t)
	users := filepath.Join(t.TempDir(), "users")
	write(t, users, "agent "+public+" prod/pod\n")
	address := net.JoinHostPort(loopback.Host(t), "28080")
	s.schedule(scheduler.Config{NATSUsers: users, GatewayAddress: address})
	engine := s.engine(1)
	s.agent(engine, "prod", "pod", key{seed: seed})
	s.until("the engine is a member", func() bool { return proven(s.members()["prod_pod_0"]) })

	get := func(url string, config *tls.Config, second bool) (*http.Response, string, error) {
		protocols := new(http.Protocols)
		protocols.SetHTTP1(!second)
		protocols.SetHTTP2(second)
		transport := &http.Transport{TLSClientConfig: config, Protocols: protocols}
		defer transport.CloseIdleConnections()
		client := &http.Client{Transport: transport, Timeout: patience}
		answer, err := client.Post(url+"/v1/completions", "application/json", bytes.NewReader(several(1, 1)[0].completion("")))
		if err != nil {
			return nil, "", err
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		return answer, string(text), err
	}
	for _, second := range []bool{false, true} {
		answer, text, err := get("https://"+address, s.ca.Client(t, s.tls()), second)
		if err != nil || answer.StatusCode != http.StatusOK || !strings.Contains(text, `"usage"`) || (answer.ProtoMajor == 2) != second {
			t.Errorf("HTTP/2 %v: %v %s %v", second, answer, text, err)
		}
	}
	if answer, text, err := get("https://"+address, s.ca.Client(t, authority.Pair{}), false); err == nil {
		t.Errorf("without a certificate: %v %s", answer, text)
	}
	if answer, text, err := get("https://"+address, authority.New(t).Client(t, s.tls()), false); err == nil {
		t.Errorf("a server that another authority signed for is believed: %v %s", answer, text)
	}
	if answer, text, err := get("http://"+address, nil, false); err == nil && answer.StatusCode != http.StatusBadRequest {
		t.Errorf("without TLS: %v %s", answer, text)
	}
}
