package rest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvscout/kvscout/e2e/await"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// TestMain lets net/http linger: after a body that it did not read to its end
// it keeps the connection for half a second, also in a closed server.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*conn).closeWriteAndWait"))
}

const maxBody = 1 << 20

// service answers what it is told to, and remembers what it was asked.
type service struct {
	api.UnimplementedSchedulerServer
	api.UnimplementedAdminServer
	pick  func(context.Context, *api.PickRequest) (*api.PickResponse, error)
	watch func(grpc.ServerStreamingServer[api.WatchMembersResponse]) error
}

func (s *service) Pick(ctx context.Context, r *api.PickRequest) (*api.PickResponse, error) {
	return s.pick(ctx, r)
}

func (s *service) Report(context.Context, *api.ReportRequest) (*api.ReportResponse, error) {
	return &api.ReportResponse{}, nil
}

func (s *service) ListMembers(_ context.Context, r *api.ListMembersRequest) (*api.ListMembersResponse, error) {
	return &api.ListMembersResponse{Ready: r.GetModel() == "m", Decisions: 1 << 60}, nil
}

func (s *service) WatchMembers(_ *api.WatchMembersRequest, to grpc.ServerStreamingServer[api.WatchMembersResponse]) error {
	return s.watch(to)
}

// page is a server on a real socket.
type page struct {
	*service
	local   *Local
	health  *health.Server
	address string

	mu    sync.Mutex // guards what follows
	calls []string   // as interceptors saw them
	codes []string   // as Served was told
}

func serve(t *testing.T) *page {
	t.Helper()
	p := &page{service: &service{}, health: health.NewServer()}
	seen := func(who, method string) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.calls = append(p.calls, who+" "+method)
	}
	unary := func(who string) grpc.UnaryServerInterceptor {
		return func(ctx context.Context, r any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			seen(who, info.FullMethod)
			return handle(ctx, r)
		}
	}
	p.local = &Local{
		Unary: []grpc.UnaryServerInterceptor{unary("outer"), unary("inner")},
		Streams: []grpc.StreamServerInterceptor{func(by any, s grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
			seen("stream", info.FullMethod)
			return handle(by, s)
		}},
	}
	api.RegisterSchedulerServer(p.local, p.service)
	api.RegisterAdminServer(p.local, p.service)
	healthpb.RegisterHealthServer(p.local, p.health)
	server, err := Server(Config{Services: p.local, MaxBody: maxBody, Longest: time.Minute, Log: slog.New(slog.DiscardHandler),
		Served: func(_ context.Context, method string, code int, _ time.Duration) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.codes = append(p.codes, fmt.Sprint(method, " ", code))
		}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p.address = l.Addr().String()
	done := make(chan struct{})
	go func() { defer close(done); server.Serve(l) }()
	t.Cleanup(func() { server.Close(); <-done; p.local.Wait(); http.DefaultClient.CloseIdleConnections() })
	return p
}

// ask sends a request and gives the whole answer.
func (p *page) ask(t *testing.T, method, path, body string, headers ...string) (*http.Response, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+p.address+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer, string(text)
}

func TestPickIsTheSameCall(t *testing.T) {
	p := serve(t)
	var got *api.PickRequest
	var trace []string
	var from string
	p.pick = func(ctx context.Context, r *api.PickRequest) (*api.PickResponse, error) {
		got = r
		md, _ := metadata.FromIncomingContext(ctx)
		trace = append(md.Get("traceparent"), md.Get("cookie")...)
		if caller, ok := peer.FromContext(ctx); ok {
			from, _, _ = net.SplitHostPort(caller.Addr.String())
		}
		return &api.PickResponse{DecisionId: "d", Ranking: &api.Ranking{Candidates: []*api.Candidate{{Member: &api.Member{Id: "x"}}}}}, nil
	}
	answer, text := p.ask(t, "POST", "/v1/pick",
		`{"request": {"request_id": "r", "model": "m", "prompt": {"block_keys": {"keys": ["18446744073709551615", 7], "blockSizeTokens": 16}}}, "replaces_decision_id": "old"}`,
		"Traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "Cookie", "secret")
	want := &api.PickRequest{Request: &api.Request{RequestId: "r", Model: "m", Prompt: api.Keys([]uint64{1<<64 - 1, 7}, 16)}, ReplacesDecisionId: "old"}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	if answer.StatusCode != 200 || answer.Header.Get("Content-Type") != "application/json" ||
		!strings.Contains(strings.ReplaceAll(text, " ", ""), `"decision_id":"d"`) {
		t.Errorf("%d %v %s", answer.StatusCode, answer.Header, text)
	}
	if len(trace) != 1 || from != "127.0.0.1" {
		t.Errorf("trace %q, from %q", trace, from)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Equal(p.calls, []string{"outer /kvscout.scheduler.v1.Scheduler/Pick", "inner /kvscout.scheduler.v1.Scheduler/Pick"}) {
		t.Error(p.calls)
	}
}

// told is an error as callers read it.
type told struct {
	Code    int
	Message string
	Details []struct {
		Type   string `json:"@type"`
		Reason string
		Domain string
	}
}

func TestErrorsSayWhatAndWhenAgain(t *testing.T) {
	p := serve(t)
	st, err := status.New(codes.Unavailable, "the last member left").WithDetails(
		&errdetails.ErrorInfo{Reason: "MODEL_GONE", Domain: "kvscout"}, &errdetails.RetryInfo{RetryDelay: durationpb.New(1200 * time.Millisecond)})
	if err != nil {
		t.Fatal(err)
	}
	p.pick = func(context.Context, *api.PickRequest) (*api.PickResponse, error) { return nil, st.Err() }
	answer, text := p.ask(t, "POST", "/v1/pick", `{}`)
	var e told
	if err := json.Unmarshal([]byte(text), &e); err != nil {
		t.Fatal(err)
	}
	if answer.StatusCode != 503 || answer.Header.Get("Retry-After") != "2" || e.Code != int(codes.Unavailable) || len(e.Details) != 2 || e.Details[0].Reason != "MODEL_GONE" {
		t.Errorf("%d %v %s", answer.StatusCode, answer.Header, text)
	}
}

func TestBadRequestsAreRefused(t *testing.T) {
	p := serve(t)
	p.pick = func(context.Context, *api.PickRequest) (*api.PickResponse, error) { return &api.PickResponse{}, nil }
	for name, c := range map[string]struct {
		method, path, body string
		headers            []string
		code               int
		says               string
	}{
		"not JSON":            {"POST", "/v1/pick", "hello", nil, 400, "syntax error"},
		"empty":               {"POST", "/v1/pick", "", nil, 400, "unexpected token"},
		"cut off":             {"POST", "/v1/pick", `{"request": {"model": "m"`, nil, 400, "unexpected EOF"},
		"more than one":       {"POST", "/v1/pick", `{}{}`, nil, 400, "unexpected token"},
		"an unknown field":    {"POST", "/v1/pick", `{"request": {"modell": "m"}}`, nil, 400, "modell"},
		"a wrong type":        {"POST", "/v1/pick", `{"request": {"priority": "high"}}`, nil, 400, "high"},
		"a key beyond 64 bit": {"POST", "/v1/pick", `{"request":{"prompt":{"block_keys":{"keys":["18446744073709551616"]}}}}`, nil, 400, "18446744073709551616"},
		"two prompts":         {"POST", "/v1/pick", `{"request":{"prompt":{"tokens":{},"openai_body":""}}}`, nil, 400, "oneof"},
		"deep":                {"POST", "/v1/pick", strings.Repeat("[", 100_000), nil, 400, ""},
		"too large":           {"POST", "/v1/pick", strings.Repeat(" ", maxBody+1), nil, 413, "larger than 1048576 bytes"},
		"a form":              {"POST", "/v1/pick", `{}`, []string{"Content-Type", "text/plain"}, 415, "want application/json"},
		"compressed":          {"POST", "/v1/pick", `{}`, []string{"Content-Encoding", "gzip"}, 415, "gzip"},
		"another method":      {"GET", "/v1/pick", "", nil, 405, "openapi.json"},
		"an override":         {"POST", "/v1/members", "{}", []string{"X-HTTP-Method-Override", "GET"}, 405, "openapi.json"},
		"another path":        {"POST", "/v2/pick", "{}", nil, 404, "openapi.json"},
		"a made-up method":    {"BREW", "/v1/pick", "", nil, 405, "openapi.json"},
		"a made-up parameter": {"GET", "/v1/members?modell=m", "", nil, 400, `unknown parameter \"modell\"`},
		"a wrong deadline":    {"POST", "/v1/pick", "{}", []string{"Grpc-Timeout", "soon"}, 400, "grpc-timeout"},
	} {
		t.Run(name, func(t *testing.T) {
			p.mu.Lock()
			p.codes = nil
			p.mu.Unlock()
			answer, text := p.ask(t, c.method, c.path, c.body, c.headers...)
			var e told
			if err := json.Unmarshal([]byte(text), &e); err != nil {
				t.Fatalf("%v: %s", err, text)
			}
			if answer.StatusCode != c.code || !strings.Contains(text, c.says) || strings.Contains(text, "\u00a0") {
				t.Errorf("%d %s, want %d %s", answer.StatusCode, text, c.code, c.says)
			}
			if len(e.Details) != 1 || e.Details[0].Reason != "INVALID_REQUEST" || e.Details[0].Domain != "kvscout" {
				t.Errorf("reason: %s", text)
			}
			await.True(t, "it is counted", func() bool {
				p.mu.Lock()
				defer p.mu.Unlock()
				return len(p.codes) == 1 && strings.HasSuffix(p.codes[0], fmt.Sprint(" ", c.code))
			})
		})
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.calls) != 0 {
		t.Errorf("the service was called: %v", p.calls)
	}
}

// What a client announces and does not send is waited for alone: others are served.
func TestOneThatSendsNothingHoldsNobodyUp(t *testing.T) {
	p := serve(t)
	slow, err := net.Dial("tcp", p.address)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(slow, "POST /v1/pick HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n{")
	if answer, text := p.ask(t, "POST", "/v1/report", `{}`); answer.StatusCode != 200 {
		t.Errorf("%d %s", answer.StatusCode, text)
	}
	slow.Close()
	await.True(t, "its end is seen", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return slices.Contains(p.codes, "POST 400")
	})
}

// A client that goes away, and one that set a deadline, end their calls.
func TestCallsEndWithTheirCallers(t *testing.T) {
	p := serve(t)
	began, ended := make(chan struct{}), make(chan error, 1)
	p.pick = func(ctx context.Context, _ *api.PickRequest) (*api.PickResponse, error) {
		began <- struct{}{}
		<-ctx.Done()
		ended <- ctx.Err()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	ctx, cancel := context.WithCancel(t.Context())
	r, _ := http.NewRequestWithContext(ctx, "POST", "http://"+p.address+"/v1/pick", strings.NewReader("{}"))
	r.Header.Set("Content-Type", "application/json")
	go func() { <-began; cancel() }()
	if _, err := http.DefaultClient.Do(r); err == nil {
		t.Error("answered")
	}
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	go func() { <-began }()
	if answer, text := p.ask(t, "POST", "/v1/pick", "{}", "Grpc-Timeout", "20m"); answer.StatusCode != 504 {
		t.Errorf("%d %s", answer.StatusCode, text)
	}
	if err := <-ended; !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

func TestWatchIsALineEach(t *testing.T) {
	p := serve(t)
	next, ended := make(chan uint64), make(chan struct{})
	p.watch = func(to grpc.ServerStreamingServer[api.WatchMembersResponse]) error {
		defer close(ended)
		m := &api.WatchMembersResponse{Fleet: &api.ListMembersResponse{}}
		for {
			select {
			case m.Fleet.Decisions = <-next: // the same message again
			case <-to.Context().Done():
				return to.Context().Err()
			}
			if err := to.Send(m); err != nil {
				return err
			}
		}
	}
	go func() { next <- 1 }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, _ := http.NewRequestWithContext(ctx, "GET", "http://"+p.address+"/v1/members:watch?interval_ms=100", nil)
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if kind := answer.Header.Get("Content-Type"); kind != "application/x-ndjson" {
		t.Error(kind)
	}
	lines := bufio.NewScanner(answer.Body)
	for i := uint64(1); i <= 3; i++ {
		if i > 1 {
			next <- i
		}
		if !lines.Scan() || !strings.Contains(strings.ReplaceAll(lines.Text(), " ", ""), fmt.Sprintf(`"decisions":"%d"`, i)) {
			t.Fatalf("line %d: %s %v", i, lines.Text(), lines.Err())
		}
	}
	cancel()
	<-ended
}

func TestWatchThatIsRefusedSaysWhy(t *testing.T) {
	p := serve(t)
	p.watch = func(grpc.ServerStreamingServer[api.WatchMembersResponse]) error {
		return status.Error(codes.ResourceExhausted, "too many")
	}
	if answer, text := p.ask(t, "GET", "/v1/members:watch", ""); answer.StatusCode != 429 || !strings.Contains(text, "too many") {
		t.Errorf("%d %s", answer.StatusCode, text)
	}
}

func TestQueriesAndHealth(t *testing.T) {
	p := serve(t)
	answer, text := p.ask(t, "GET", "/v1/members?model=m", "")
	if text = strings.ReplaceAll(text, " ", ""); answer.StatusCode != 200 || !strings.Contains(text, `"ready":true,"decisions":"1152921504606846976"`) {
		t.Errorf("%d %s", answer.StatusCode, text)
	}
	for state, code := range map[healthpb.HealthCheckResponse_ServingStatus]int{healthpb.HealthCheckResponse_SERVING: 200, healthpb.HealthCheckResponse_NOT_SERVING: 503} {
		p.health.SetServingStatus("", state)
		if answer, text := p.ask(t, "GET", "/healthz", ""); answer.StatusCode != code {
			t.Errorf("%v: %d %s", state, answer.StatusCode, text)
		}
	}
}

// The document names every path that is served, and each of its references leads
// somewhere.
func TestOpenAPIDocument(t *testing.T) {
	p := serve(t)
	answer, text := p.ask(t, "GET", "/openapi.json", "")
	if answer.StatusCode != 200 || !bytes.Equal([]byte(text), document) {
		t.Errorf("%d, %d bytes", answer.StatusCode, len(text))
	}
	var doc struct {
		Swagger     string
		Paths       map[string]map[string]any
		Definitions map[string]any
	}
	if err := json.Unmarshal(document, &doc); err != nil {
		t.Fatal(err)
	}
	if doc.Swagger != "2.0" || len(doc.Paths) != 12 {
		t.Errorf("%s, %d paths", doc.Swagger, len(doc.Paths))
	}
	p.pick = func(context.Context, *api.PickRequest) (*api.PickResponse, error) { return &api.PickResponse{}, nil }
	p.watch = func(grpc.ServerStreamingServer[api.WatchMembersResponse]) error { return nil }
	for path, methods := range doc.Paths {
		for method := range methods {
			if answer, text := p.ask(t, strings.ToUpper(method), path, "{}"); answer.StatusCode == 404 || answer.StatusCode == 405 {
				t.Errorf("%s %s: %d %s", method, path, answer.StatusCode, text)
			}
		}
	}
	for _, part := range strings.Split(text, `"#/definitions/`)[1:] {
		if name, _, _ := strings.Cut(part, `"`); doc.Definitions[name] == nil {
			t.Errorf("no definition of %s", name)
		}
	}
}
