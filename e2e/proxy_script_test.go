package e2e

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// runScriptCases is what is asked of proxies whose own script asks kvscout over
// HTTP/JSON: nothing that a scheduler answers, or does not, stops them or leads them
// astray. ranked is the same proxy, for engines of several data-parallel ranks.
func runScriptCases(t *testing.T, r, ranked reverseProxy) {
	r.need(t)
	t.Run("tells ranks apart", ranked.testRanks)
	for _, c := range []struct {
		name string
		run  func(reverseProxy, *testing.T)
	}{
		{"asks with the body and the session", (reverseProxy).testAsks},
		{"goes to its own engines only", (reverseProxy).testLyingScheduler},
		{"does not wait for long", (reverseProxy).testHangingScheduler},
		{"passes on that too many wait", (reverseProxy).testFullScheduler},
		{"passes events as they come", (reverseProxy).testEvents},
		{"picks by bodies of 5 MB", (reverseProxy).testFiveMegabytes},
		{"goes by itself with larger bodies", (reverseProxy).testTooLarge},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(r, t) })
	}
}

// askedOf puts the proxy in front of an engine, where it asks a scheduler that
// answers like this.
func (r reverseProxy) askedOf(t *testing.T, pick http.HandlerFunc) *proxied {
	t.Helper()
	s := r.site(t)
	s.HTTP = standIn(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // whose end shows when the caller is gone
		r.Body = io.NopCloser(bytes.NewReader(body))
		if r.URL.Path == "/v1/pick" {
			pick(w, r)
		}
	})
	return r.before(t, s, nil, fakevllm.Config{})
}

// The scheduler is shown the body as it came, the session and the trace, and no
// other header of the client.
func (r reverseProxy) testAsks(t *testing.T) {
	asked := make(chan *api.PickRequest, 1)
	traces := make(chan string, 1)
	x := r.askedOf(t, func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		m := new(api.PickRequest)
		if err := protojson.Unmarshal(text, m); err != nil {
			t.Errorf("%.300s: %v", text, err)
		}
		asked <- m
		traces <- r.Header.Get("Traceparent")
	})
	const session, trace = `a "b"\c /` + "\t" + `é`, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	body := random(1, 100).completion(`,"user":"é\u0000\n"`)
	status, text, err := x.try(t.Context(), bytes.NewReader(body), "X-Session-Id", session, "Traceparent", trace, "Authorization", "Bearer of news", "Cookie", "x=y")
	if err != nil || status != http.StatusOK {
		t.Fatalf("%d %s %v", status, text, err)
	}
	want := &api.PickRequest{Request: &api.Request{
		MaxCandidates: 3, Headers: map[string]string{"x-session-id": session},
		Prompt: &api.Prompt{Form: &api.Prompt_OpenaiBody{OpenaiBody: body}},
	}}
	if d := cmp.Diff(want, <-asked, protocmp.Transform()); d != "" {
		t.Error(d)
	}
	if got := <-traces; got != trace {
		t.Errorf("trace %q", got)
	}
}

// A scheduler in the wrong hands makes no open relay of the proxy, and nonsense
// does not stop it.
func (r reverseProxy) testLyingScheduler(t *testing.T) {
	var misled atomic.Int64
	liar := standIn(t, func(http.ResponseWriter, *http.Request) { misled.Add(1) })
	candidate := func(address string) string {
		return fmt.Sprintf(`{"member":{"id":"m","address":%q,"rank":0}}`, address)
	}
	ranking := func(candidates ...string) string {
		return `{"decision_id":"d","ranking":{"candidates":[` + strings.Join(candidates, ",") + `]}}`
	}
	answers := []string{
		ranking(candidate(liar)), ranking(candidate(liar), candidate(liar)), ranking(candidate("engine0")), ranking(candidate("")),
		ranking(candidate(liar + "\r\nx: y")), ranking(candidate("http://" + liar)), ranking(), ranking("{}"), ranking(`{"member":7}`), ranking(`null`),
		`{"decision_id":"d"}`, `{"decision_id":7,"ranking":7}`, `{"decision_id":"\"\\\u0000\r\n"}`, `{}`, `null`, `[]`, ``, `{"decision_id":"d","ranking":`, "\x00\xff",
		`{"decision_id":"` + strings.Repeat("d", 1<<17) + `"}`, strings.Repeat("[", 1<<16),
	}
	var next atomic.Int64
	x := r.askedOf(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, answers[next.Load()])
	})
	for i, text := range answers {
		next.Store(int64(i))
		q := random(uint64(i), 100)
		if status, answer, err := x.try(t.Context(), bytes.NewReader(q.completion(""))); err != nil || status != http.StatusOK {
			t.Errorf("%.200q: %d %.200s %v", text, status, answer, err)
		}
	}
	if n := misled.Load(); n > 0 {
		t.Errorf("%d requests went where no engine is", n)
	}
	// One that is no server of the proxy is passed over for one that is.
	answers, next = []string{ranking(candidate(liar), candidate(x.engines[0].Addr()))}, atomic.Int64{}
	x.complete(random(99, 100), "", 0)
}

// What a scheduler that takes requests and answers none costs is bounded.
func (r reverseProxy) testHangingScheduler(t *testing.T) {
	x := r.askedOf(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	for seed := range uint64(3) {
		start := time.Now()
		x.complete(random(seed, 100), "", 0)
		if took := time.Since(start); took > patience/4 {
			t.Errorf("a request took %v", took)
		}
	}
}

func (r reverseProxy) testFullScheduler(t *testing.T) {
	for code, c := range map[int]struct {
		reason string
		want   int
	}{
		429: {"QUEUE_FULL", 429}, 504: {"QUEUE_TIMEOUT", 503}, 503: {"NO_MEMBERS", 200}, 500: {"INTERNAL", 200}, 404: {"UNKNOWN_MODEL", 200},
	} {
		x := r.askedOf(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "3")
			w.WriteHeader(code)
			fmt.Fprintf(w, `{"code":8,"message":"all \"places\" are taken","details":[{"reason":%q}]}`, c.reason)
		})
		answer, err := x.client.Post(x.url+"/v1/completions", "application/json", bytes.NewReader(random(1, 100).completion("")))
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(answer.Body)
		answer.Body.Close()
		if answer.StatusCode != c.want {
			t.Errorf("%d %s: %d %s, want %d", code, c.reason, answer.StatusCode, text, c.want)
		}
		if want := `"message":"all \"places\" are taken"`; c.want != 200 && (answer.Header.Get("Retry-After") != "3" || !bytes.Contains(text, []byte(want))) {
			t.Errorf("%d %s: %v %s", code, c.reason, answer.Header, text)
		}
	}
}

// Events come every 5 ms and are not held back: not even half of them by the time of
// four.
func (r reverseProxy) testEvents(t *testing.T) {
	const events = 100
	s := r.site(t)
	address := ticking(t, events)
	s.announce("ticking", address)
	x := r.before(t, s, []string{address})
	m := &measured{served: x.served}
	m.request(t, x.client, random(1, 100).completion(`,"stream":true`), events)
	slices.Sort(m.each)
	if half := m.each[events/2]; half > 20*time.Millisecond {
		t.Errorf("half of the events took more than %v", half)
	}
}

func (r reverseProxy) testFiveMegabytes(t *testing.T) {
	large := fakevllm.Config{MaxModelLen: 1 << 20, Blocks: 100_000}
	x := r.before(t, r.site(t), nil, large, large)
	q := random(1, 860_000)
	if n := len(q.completion("")); n < 5_000_000 {
		t.Fatalf("only %d bytes", n)
	}
	start := time.Now()
	x.call("/v1/score", nil, object{"request": object{"prompt": object{"openai_body": base64.StdEncoding.EncodeToString(q.completion(""))}}}, new(api.ScoreResponse))
	if took := time.Since(start); took > time.Second/2 {
		t.Skipf("skipped: the scheduler itself takes %v here, and a proxy waits for 1 s", took)
	}
	for round := range 2 {
		x.complete(q, "", round*q.cacheable())
		for _, e := range x.engines {
			e.truth(patience, q)
		}
	}
}

// An engine with two caches at one address is told which of them a request is for.
func (r reverseProxy) testRanks(t *testing.T) {
	x := r.before(t, r.site(t), nil, fakevllm.Config{Ranks: 2})
	e := x.engines[0]
	for rank := range e.agent.Members {
		q := random(uint64(rank), 1000)
		q.rank = rank
		e.serve("/v1/completions", rank, map[string]any{"model": model, "prompt": q.tokens, "max_tokens": 1})
		e.truth(patience, q)
		for range 3 {
			x.complete(q, "", q.cacheable())
		}
	}
}

// A body that is larger than the proxy reads reaches an engine all the same.
func (r reverseProxy) testTooLarge(t *testing.T) {
	asked := false
	x := r.askedOf(t, func(w http.ResponseWriter, _ *http.Request) { asked = true })
	body := random(1, 100).completion(`,"user":"` + strings.Repeat("x", 12<<20) + `"`)
	status, text, err := x.try(t.Context(), bytes.NewReader(body))
	if err != nil || status != http.StatusOK || !bytes.Contains(text, []byte(`"prompt_tokens":100,`)) || asked {
		t.Errorf("%d %s %v, asked: %t", status, text, err, asked)
	}
}
