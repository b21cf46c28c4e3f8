package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	modepb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler"
)

const endpointHeader = "x-gateway-destination-endpoint"

// gateway plays a data plane: it asks the endpoint picker on a raw stream, sends
// the request to the engine that it is told, and shows the answer.
type gateway struct {
	*play
	address string // of the endpoint picker
	picker  extproc.ExternalProcessorClient
	health  healthpb.HealthClient
	// request and response are how bodies are shown.
	request, response modepb.ProcessingMode_BodySendMode
	// subset of endpoints that it allows; nil: all.
	subset *structpb.Value
}

// picking opens a stage whose scheduler is an endpoint picker, too.
func picking(t *testing.T, opt stage.Options) (*play, *gateway) {
	t.Helper()
	address := net.JoinHostPort(loopback.Host(t), "29002")
	change := opt.Change
	opt.Change = func(c *scheduler.Config) {
		c.ExtProcAddress = address
		if change != nil {
			change(c)
		}
	}
	p := open(t, opt)
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(64<<20)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	duplex := modepb.ProcessingMode_FULL_DUPLEX_STREAMED
	return p, &gateway{play: p, address: address, picker: extproc.NewExternalProcessorClient(conn), health: healthpb.NewHealthClient(conn), request: duplex, response: duplex}
}

// exchange is one request on its stream.
type exchange struct {
	*gateway
	stream extproc.ExternalProcessor_ProcessClient
	cancel context.CancelFunc
	// to is where the request is to go, with the headers that were set.
	to      string
	set     http.Header
	refused *extproc.ImmediateResponse
	told    http.Header // to the client
	body    []byte      // as it is to reach the engine
}

func headers(pairs ...string) *corepb.HeaderMap {
	h := &corepb.HeaderMap{}
	for i := 0; i < len(pairs); i += 2 {
		h.Headers = append(h.Headers, &corepb.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])})
	}
	return h
}

func (g *gateway) begin() *exchange {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), patience)
	stream, err := g.picker.Process(ctx)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(cancel)
	return &exchange{gateway: g, stream: stream, cancel: cancel, set: make(http.Header)}
}

func (x *exchange) send(m *extproc.ProcessingRequest) {
	x.t.Helper()
	if err := x.stream.Send(m); err != nil && !errors.Is(err, io.EOF) {
		x.t.Fatal(err)
	}
}

func (x *exchange) receive() *extproc.ProcessingResponse {
	x.t.Helper()
	m, err := x.stream.Recv()
	if err != nil {
		x.t.Fatal(err)
	}
	return m
}

// ask shows a request and takes the answer: where to, or why not.
func (g *gateway) ask(path string, body []byte, pairs ...string) *exchange {
	g.t.Helper()
	x := g.begin()
	h := &extproc.ProcessingRequest{
		ProtocolConfig: &extproc.ProtocolConfiguration{RequestBodyMode: g.request, ResponseBodyMode: g.response},
		Request: &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{
			Headers: headers(append([]string{":path", path, "content-type", "application/json"}, pairs...)...), EndOfStream: body == nil,
		}},
	}
	if g.subset != nil {
		h.MetadataContext = &corepb.Metadata{FilterMetadata: map[string]*structpb.Struct{
			"envoy.lb.subset_hint": {Fields: map[string]*structpb.Value{"x-gateway-destination-endpoint-subset": g.subset}}}}
	}
	x.send(h)
	if g.request == modepb.ProcessingMode_BUFFERED && body != nil {
		x.receive()
	}
	if body != nil {
		size := len(body) + 1
		if g.request != modepb.ProcessingMode_BUFFERED {
			size = 64 << 10
		}
		for rest := body; ; rest = rest[size:] {
			last := len(rest) <= size
			x.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: rest[:min(size, len(rest))], EndOfStream: last}}})
			if last {
				break
			}
		}
	}
	for done := false; !done; {
		m := x.receive()
		switch r := m.GetResponse().(type) {
		case *extproc.ProcessingResponse_ImmediateResponse:
			x.refused, done = r.ImmediateResponse, true
			continue
		case *extproc.ProcessingResponse_RequestHeaders:
			x.take(m, r.RequestHeaders.GetResponse())
			done = body == nil
		case *extproc.ProcessingResponse_RequestBody:
			if g.request == modepb.ProcessingMode_BUFFERED {
				x.take(m, r.RequestBody.GetResponse())
				x.body, done = body, true
				break
			}
			piece := r.RequestBody.GetResponse().GetBodyMutation().GetStreamedResponse()
			x.body = append(x.body, piece.GetBody()...)
			done = piece.GetEndOfStream()
		}
	}
	return x
}

// take reads where a request is to go, which both carriers say alike.
func (x *exchange) take(m *extproc.ProcessingResponse, c *extproc.CommonResponse) {
	x.t.Helper()
	for _, h := range c.GetHeaderMutation().GetSetHeaders() {
		x.set.Set(h.GetHeader().GetKey(), string(h.GetHeader().GetRawValue()))
	}
	x.to = x.set.Get(endpointHeader)
	if also := m.GetDynamicMetadata().GetFields()["envoy.lb"].GetStructValue().GetFields()[endpointHeader].GetStringValue(); also != x.to || x.to == "" {
		x.t.Errorf("to %q by header, %q by metadata", x.to, also)
	}
}

// serve sends the request on and shows the answer, and returns its body and
// status.
func (x *exchange) serve(path string) (int, []byte) {
	x.t.Helper()
	req, err := http.NewRequestWithContext(x.t.Context(), http.MethodPost, "http://"+x.to+path, bytes.NewReader(x.body))
	if err != nil {
		x.t.Fatal(err)
	}
	req.Header = x.set.Clone()
	answer, err := x.http.Do(req)
	if err != nil {
		x.t.Fatal(err)
	}
	defer answer.Body.Close()
	x.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extproc.HttpHeaders{
		Headers: headers(":status", fmt.Sprint(answer.StatusCode), "content-type", answer.Header.Get("Content-Type")),
	}}})
	h := x.receive().GetResponseHeaders()
	if h == nil {
		x.t.Fatal("no answer to the response's headers")
	}
	x.told = make(http.Header)
	for _, one := range h.GetResponse().GetHeaderMutation().GetSetHeaders() {
		x.told.Set(one.GetHeader().GetKey(), string(one.GetHeader().GetRawValue()))
	}
	var passed []byte
	buf := make([]byte, 100)
	for {
		n, err := answer.Body.Read(buf)
		x.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{Body: bytes.Clone(buf[:n]), EndOfStream: err != nil}}})
		piece := x.receive().GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse()
		passed = append(passed, piece.GetBody()...)
		if err != nil {
			break
		}
	}
	x.cancel() // as Envoy ends every stream
	return answer.StatusCode, passed
}

// completion is a request for an engine.
func (q prompt) completion(more string) []byte {
	ids, err := json.Marshal(q.tokens)
	if err != nil {
		panic(err)
	}
	return fmt.Appendf(nil, `{"model":%q,"prompt":%s,"max_tokens":3%s}`, model, ids, more)
}

func TestGatewayIsToldWhatTheEngineWillCount(t *testing.T) {
	for name, c := range map[string]struct {
		mode modepb.ProcessingMode_BodySendMode
		more string
	}{
		"duplex, json":     {modepb.ProcessingMode_FULL_DUPLEX_STREAMED, ""},
		"duplex, events":   {modepb.ProcessingMode_FULL_DUPLEX_STREAMED, `,"stream":true,"stream_options":{"include_usage":true}`},
		"buffered, json":   {modepb.ProcessingMode_BUFFERED, ""},
		"buffered, events": {modepb.ProcessingMode_BUFFERED, `,"stream":true,"stream_options":{"include_usage":true}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, g := picking(t, stage.Options{})
			g.request = c.mode
			engines := map[string]*engine{}
			for i := range 3 {
				e := p.engine(fakevllm.Config{}).watched(fmt.Sprint("pod-", i))
				engines[e.Addr()] = e
				e.untilMember(e.id(), "be exact", stage.Exact)
			}
			q := random(1, 20_000)
			var home string
			prompts, cached := uint64(0), uint64(0)
			for i := range 5 {
				x := g.ask("/v1/completions", q.completion(c.more), "x-kvscout-explain", "1")
				if x.refused != nil {
					t.Fatal(x.refused)
				}
				e := engines[x.to]
				if e == nil || home != "" && home != x.to {
					t.Fatalf("request %d goes to %q, the first went to %q", i, x.to, home)
				}
				home = x.to
				want := e.held(q)
				status, answer := x.serve("/v1/completions")
				if status != http.StatusOK || !bytes.Contains(answer, fmt.Appendf(nil, `"cached_tokens":%d`, want)) {
					t.Fatalf("request %d: %d %s, want %d cached", i, status, answer, want)
				}
				if told := x.told.Get("X-Kvscout-Cached-Tokens"); told != fmt.Sprint(want) {
					t.Errorf("request %d: %s cached tokens are promised, the engine counts %d", i, told, want)
				}
				prompts, cached = prompts+20_000, cached+uint64(want)
				p.untilMember(e.id(), "be reported, and hold nothing back", func(m *api.MemberState) bool {
					return m.GetReportedRequests() == uint64(i+1) && m.GetReportedPromptTokens() == prompts && m.GetReportedCachedTokens() == cached &&
						m.GetPredictedCachedTokens() == cached && m.GetReservedRequests() == 0 && m.GetReservedTokens() == 0
				})
				e.truth(soon, q)
			}
		})
	}
}

func TestGatewayIsRefused(t *testing.T) {
	t.Parallel()
	p, g := picking(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	e.untilMember(e.id(), "be exact", stage.Exact)
	p.ready()
	list := func(values ...any) *structpb.Value {
		l, err := structpb.NewList(values)
		if err != nil {
			t.Fatal(err)
		}
		return structpb.NewListValue(l)
	}
	for name, c := range map[string]struct {
		path, body string
		subset     *structpb.Value
		status     int
		reason     string
	}{
		"served":                    {"/v1/completions", `{"model":"fake","prompt":[1,2]}`, nil, 0, ""},
		"with a query":              {"/v1/completions?a=b", `{"model":"fake","prompt":[1,2]}`, nil, 0, ""},
		"among others":              {"/v1/completions", `{"model":"fake","prompt":[1,2]}`, list("10.0.0.1:1", e.Addr()), 0, ""},
		"by host":                   {"/v1/completions", `{"model":"fake","prompt":[1,2]}`, list(e.cfg.Host), 0, ""},
		"nobody in the subset":      {"/v1/completions", `{"model":"fake","prompt":[1,2]}`, list("10.0.0.1:1"), 503, "rejected-no-endpoints"},
		"empty subset":              {"/v1/completions", `{"model":"fake","prompt":[1,2]}`, list(), 503, "rejected-no-endpoints"},
		"not JSON":                  {"/v1/completions", `{"model":`, nil, 400, ""},
		"no model":                  {"/v1/chat/completions", `{"messages":[]}`, nil, 400, ""},
		"unknown model":             {"/v1/completions", `{"model":"x","prompt":[1,2]}`, nil, 404, ""},
		"unknown model, other path": {"/v1/embeddings", `{"model":"x","input":"y"}`, nil, 404, ""},
		"other path":                {"/v1/embeddings", `{"model":"fake","input":"y"}`, nil, 0, ""},
		"unknown body":              {"/upload", "\x00\x01", nil, 0, ""},
		"no body":                   {"/v1/models", "", nil, 0, ""},
		"no body, empty subset":     {"/v1/models", "", list(), 503, "rejected-no-endpoints"},
	} {
		body := []byte(c.body)
		if c.body == "" {
			body = nil
		}
		g.subset = c.subset
		x := g.ask(c.path, body)
		x.cancel()
		if c.status == 0 {
			if x.refused != nil || x.to != e.Addr() || !bytes.Equal(x.body, body) {
				t.Errorf("%s: refused %v, to %q with %q", name, x.refused, x.to, x.body)
			}
			continue
		}
		reason := ""
		for _, h := range x.refused.GetHeaders().GetSetHeaders() {
			if h.GetHeader().GetKey() == "x-llm-d-request-dropped-reason" {
				reason = string(h.GetHeader().GetRawValue())
			}
		}
		var told struct{ Error struct{ Message string } }
		if err := json.Unmarshal(x.refused.GetBody(), &told); err != nil || told.Error.Message == "" ||
			int(x.refused.GetStatus().GetCode()) != c.status || reason != c.reason {
			t.Errorf("%s: %v %v", name, x.refused, err)
		}
	}
	p.untilMember(e.id(), "hold nothing back", func(m *api.MemberState) bool { return m.GetReservedRequests() == 0 })
}

// Clients go away at any point: nothing of their requests stays.
func TestGatewayGoesAway(t *testing.T) {
	t.Parallel()
	p, g := picking(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	e.untilMember(e.id(), "be exact", stage.Exact)
	body := random(1, 1000).completion("")
	for name, until := range map[string]func() *exchange{
		"before anything": g.begin,
		"picked":          func() *exchange { return g.ask("/v1/completions", body) },
		"in the answer": func() *exchange {
			x := g.ask("/v1/completions", body)
			x.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extproc.HttpHeaders{Headers: headers(":status", "200")}}})
			x.receive()
			return x
		},
	} {
		for range 5 {
			x := until()
			if name == "picked" {
				p.untilMember(e.id(), "have a reservation", func(m *api.MemberState) bool { return m.GetReservedRequests() > 0 })
			}
			x.cancel()
		}
		p.untilMember(e.id(), "hold nothing back: "+name, func(m *api.MemberState) bool {
			return m.GetReservedRequests() == 0 && m.GetReservedTokens() == 0
		})
	}
}

// Where one address stands for several ranks, the engine is told which is meant.
func TestGatewayNamesTheRank(t *testing.T) {
	t.Parallel()
	p, g := picking(t, stage.Options{})
	e := p.engine(fakevllm.Config{Ranks: 2}).watched("pod")
	for _, id := range e.agent.Members {
		e.untilMember(id, "be exact", stage.Exact)
	}
	q := random(1, 1000)
	q.rank = 1
	e.complete(q)
	e.truth(soon, q)
	x := g.ask("/v1/completions", q.completion(""))
	if rank := x.set.Get("X-Data-Parallel-Rank"); rank != "1" {
		t.Errorf("rank %q", rank)
	}
	if status, answer := x.serve("/v1/completions"); status != http.StatusOK || !bytes.Contains(answer, []byte(`"cached_tokens":992`)) {
		t.Errorf("%d %s", status, answer)
	}
}

func TestGatewayAsksForHealth(t *testing.T) {
	t.Parallel()
	p, g := picking(t, stage.Options{Change: func(c *scheduler.Config) { c.StopWait = patience }})
	check := func(service string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		h, err := g.health.Check(ctx, &healthpb.HealthCheckRequest{Service: service}, grpc.WaitForReady(true))
		if err != nil {
			return err.Error()
		}
		return h.GetStatus().String()
	}
	p.ready()
	for _, service := range []string{"", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"} {
		p.until(service+" is served", func() bool { return check(service) == "SERVING" })
	}
	if got := check("other"); !strings.Contains(got, "NotFound") {
		t.Error(got)
	}
	// While it stops, streams that are open and new ones are served, so that gateways
	// have time to see that they are to ask others.
	e := p.engine(fakevllm.Config{}).watched("pod")
	e.untilMember(e.id(), "be exact", stage.Exact)
	x := g.ask("/v1/completions", random(1, 100).completion(""))
	stopped := make(chan struct{})
	go func() { defer close(stopped); p.StopScheduler() }()
	p.until("it is not ready", func() bool { return check("readiness") == "NOT_SERVING" })
	if got := check("liveness"); got != "SERVING" {
		t.Errorf("liveness: %s", got)
	}
	if late := g.ask("/v1/completions", random(2, 100).completion("")); late.to != e.Addr() {
		t.Errorf("a request that comes while it stops: %v", late.refused)
	} else {
		late.cancel()
	}
	if status, _ := x.serve("/v1/completions"); status != http.StatusOK {
		t.Errorf("a request that was picked before: %d", status)
	}
	<-stopped
}

// A gateway that wants what cannot be is told so, and the others are served.
func TestGatewayInTheWrongMode(t *testing.T) {
	t.Parallel()
	_, g := picking(t, stage.Options{})
	g.request = modepb.ProcessingMode_STREAMED
	x := g.begin()
	x.send(&extproc.ProcessingRequest{
		ProtocolConfig: &extproc.ProtocolConfiguration{RequestBodyMode: g.request},
		Request:        &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{Headers: headers(":path", "/v1/completions")}},
	})
	if _, err := x.stream.Recv(); err == nil || !strings.Contains(err.Error(), "FULL_DUPLEX_STREAMED") {
		t.Error(err)
	}
}

// Thousands that begin and are given up, at any point, leave nothing behind, and
// others are served meanwhile.
func TestGatewayAbandonsThousands(t *testing.T) {
	p, g := picking(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	e.untilMember(e.id(), "be exact", stage.Exact)
	body := random(1, 100).completion("")
	counted := func(name, label string) float64 { return p.counted(p.Admin, "kvscout_scheduler_extproc_"+name, label) }
	const many, at = 10_000, 100
	before := runtime.NumGoroutine()
	for range many / at {
		var open []context.CancelFunc
		for i := range at {
			ctx, cancel := context.WithCancel(t.Context())
			open = append(open, cancel)
			stream, err := g.picker.Process(ctx)
			if err != nil {
				t.Fatal(err)
			}
			m := &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{Headers: headers(":path", "/v1/completions")}}}
			b := &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: body, EndOfStream: i%2 == 0}}}
			for _, one := range []*extproc.ProcessingRequest{m, b}[:i%3] {
				_ = stream.Send(one) // it may be over
			}
		}
		for _, cancel := range open {
			cancel()
		}
	}
	if x := g.ask("/v1/completions", body); x.to != e.Addr() {
		t.Errorf("another request: %v", x.refused)
	} else {
		x.cancel()
	}
	p.until("no request is open", func() bool { return counted("open", "") == 0 })
	if bytes := counted("bytes", ""); bytes != 0 {
		t.Errorf("%v bytes are held", bytes)
	}
	p.untilMember(e.id(), "hold nothing back", func(m *api.MemberState) bool { return m.GetReservedRequests() == 0 && m.GetReservedTokens() == 0 })
	p.until("no goroutine is left over", func() bool { return runtime.NumGoroutine() < before+50 })
}

// What no request should be is refused, whatever its length.
func TestGatewayTakesNoMonsters(t *testing.T) {
	t.Parallel()
	p, g := picking(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	e.untilMember(e.id(), "be exact", stage.Exact)
	p.ready()
	for name, c := range map[string]struct {
		status int
		body   []byte
		pairs  []string
	}{
		"100 MB":           {413, bytes.Repeat([]byte(" "), 100<<20), nil},
		"100 MB announced": {413, []byte("{"), []string{"content-length", "104857600"}},
		"compressed":       {415, []byte("\x1f\x8b"), []string{"content-encoding", "gzip"}},
		"deep":             {400, bytes.Repeat([]byte("["), 1<<20), nil},
		"a lie":            {404, []byte(`{"model":"m","prompt":[1]}`), []string{"x-gateway-destination-endpoint", "10.0.0.1:1"}},
	} {
		if x := g.ask("/v1/completions", c.body, c.pairs...); int(x.refused.GetStatus().GetCode()) != c.status {
			t.Errorf("%s: %v, to %q", name, x.refused, x.to)
		}
	}
	if x := g.ask("/v1/completions", random(1, 100).completion(""), "x-gateway-destination-endpoint", "10.0.0.1:1"); x.to != e.Addr() {
		t.Errorf("%v, to %q", x.refused, x.to)
	}
}
