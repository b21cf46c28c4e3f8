package extproc

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	modepb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/structpb"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/edge"
)

const prompt = `{"model":"m","prompt":"x"}`

// Messages of a data plane.

func headerMap(pairs ...string) *corepb.HeaderMap {
	h := &corepb.HeaderMap{}
	for i := 0; i < len(pairs); i += 2 {
		h.Headers = append(h.Headers, &corepb.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])})
	}
	return h
}

func configured(request, response modepb.ProcessingMode_BodySendMode) *extproc.ProtocolConfiguration {
	return &extproc.ProtocolConfiguration{RequestBodyMode: request, ResponseBodyMode: response}
}

func requested(mode modepb.ProcessingMode_BodySendMode, end bool, pairs ...string) *extproc.ProcessingRequest {
	pairs = append(pairs, ":method", "POST", ":path", "/v1/completions?x=1") // the first of a name counts
	return &extproc.ProcessingRequest{
		ProtocolConfig: configured(mode, duplex),
		Request:        &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{Headers: headerMap(pairs...), EndOfStream: end}},
	}
}

func sent(body string, end bool) *extproc.ProcessingRequest {
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: []byte(body), EndOfStream: end}}}
}

func sentTrailers() *extproc.ProcessingRequest {
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestTrailers{RequestTrailers: &extproc.HttpTrailers{}}}
}

func responded(status, kind string, end bool) *extproc.ProcessingRequest {
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extproc.HttpHeaders{
		Headers: headerMap(":status", status, "content-type", kind), EndOfStream: end,
	}}}
}

func answered(body string, end bool) *extproc.ProcessingRequest {
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{Body: []byte(body), EndOfStream: end}}}
}

func answeredTrailers() *extproc.ProcessingRequest {
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extproc.HttpTrailers{}}}
}

// atOnce sends the body before the headers are answered.
func atOnce(m *extproc.ProcessingRequest) *extproc.ProcessingRequest {
	m.ProtocolConfig.SendBodyWithoutWaitingForHeaderResponse = true
	return m
}

// with puts a value into a message's metadata.
func with(m *extproc.ProcessingRequest, namespace, key string, value any) *extproc.ProcessingRequest {
	v, err := structpb.NewValue(value)
	if err != nil {
		panic(err)
	}
	m.MetadataContext = &corepb.Metadata{FilterMetadata: map[string]*structpb.Struct{namespace: {Fields: map[string]*structpb.Value{key: v}}}}
	return m
}

func detailed(m *extproc.ProcessingRequest, key, value string) *extproc.ProcessingRequest {
	m.Attributes = map[string]*structpb.Struct{attributes: {Fields: map[string]*structpb.Value{key: structpb.NewStringValue(value)}}}
	return m
}

// script plays events against an exchange and writes down what is to be done.
type script struct {
	*exchange
	now  time.Time
	said []string
	body bytes.Buffer // as it is passed on to the engine
}

func newScript() *script {
	return &script{exchange: &exchange{bodies: &edge.Budget{}}, now: time.Unix(1_800_000_000, 0)}
}

func (s *script) note(next step, err error) {
	for _, a := range next.answers {
		s.said = append(s.said, s.describe(a))
	}
	if next.ask != nil {
		s.said = append(s.said, fmt.Sprintf("ask lax=%t %s", next.ask.lax, next.ask.request.GetPrompt().GetOpenaiBody()))
	}
	if next.giveUp {
		s.said = append(s.said, "give up")
	}
	if r := next.report; r != nil {
		line := fmt.Sprintf("report %s %s", r.GetDecisionId(), strings.TrimPrefix(r.GetOutcome().String(), "OUTCOME_"))
		if r.GetMemberId() != "" {
			line += " by " + r.GetMemberId()
		}
		if r.TtftMs != nil {
			line += fmt.Sprintf(" %v ms", r.GetTtftMs())
		}
		if r.CachedTokens != nil {
			line += fmt.Sprintf(" %d/%d/%d", r.GetCachedTokens(), r.GetPromptTokens(), r.GetOutputTokens())
		}
		s.said = append(s.said, line)
	}
	if err != nil {
		s.said = append(s.said, "error")
	}
}

func (s *script) describe(m *extproc.ProcessingResponse) string {
	text := ""
	mutation := func(c *extproc.CommonResponse) {
		for _, h := range c.GetHeaderMutation().GetSetHeaders() {
			text += fmt.Sprintf(" %s=%s", h.GetHeader().GetKey(), h.GetHeader().GetRawValue())
		}
		if slices.Contains(c.GetHeaderMutation().GetRemoveHeaders(), "content-length") {
			text += " -content-length"
		}
		if c.GetClearRouteCache() {
			text += " clear"
		}
		if st := c.GetBodyMutation().GetStreamedResponse(); st != nil {
			text += fmt.Sprintf(" %d bytes", len(st.GetBody()))
			if st.GetEndOfStream() {
				text += " end"
			}
		}
	}
	switch r := m.GetResponse().(type) {
	case *extproc.ProcessingResponse_RequestHeaders:
		text = "> headers"
		mutation(r.RequestHeaders.GetResponse())
	case *extproc.ProcessingResponse_RequestBody:
		text = "> body"
		mutation(r.RequestBody.GetResponse())
		s.body.Write(r.RequestBody.GetResponse().GetBodyMutation().GetStreamedResponse().GetBody())
	case *extproc.ProcessingResponse_RequestTrailers:
		text = "> trailers"
	case *extproc.ProcessingResponse_ResponseHeaders:
		text = "< headers"
		mutation(r.ResponseHeaders.GetResponse())
	case *extproc.ProcessingResponse_ResponseBody:
		text = "< body"
		mutation(r.ResponseBody.GetResponse())
	case *extproc.ProcessingResponse_ResponseTrailers:
		text = "< trailers"
	case *extproc.ProcessingResponse_ImmediateResponse:
		text = fmt.Sprintf("refuse %d", r.ImmediateResponse.GetStatus().GetCode())
		for _, h := range r.ImmediateResponse.GetHeaders().GetSetHeaders() {
			if h.GetHeader().GetKey() != "content-type" {
				text += fmt.Sprintf(" %s=%s", h.GetHeader().GetKey(), h.GetHeader().GetRawValue())
			}
		}
	}
	if m.GetModeOverride() != nil {
		text = fmt.Sprint("show ", m.GetModeOverride().GetRequestBodyMode(), " ", m.GetModeOverride().GetResponseBodyMode())
	}
	if v := m.GetDynamicMetadata().GetFields()[namespace].GetStructValue().GetFields()[endpointKey].GetStringValue(); v != "" {
		text += " metadata=" + v
	}
	return text
}

// play takes messages, and strings that stand for what else happens.
func (s *script) play(events ...any) {
	for _, e := range events {
		s.now = s.now.Add(10 * time.Millisecond)
		switch e := e.(type) {
		case *extproc.ProcessingRequest:
			s.note(s.receive(e, s.now))
		case *choice:
			s.note(s.picked(e, s.now), nil)
		case edge.Refusal:
			s.note(s.failed(e), nil)
		case string:
			s.note(s.end(), nil)
		}
	}
}

func chosenA() *choice { return &choice{decision: "d1", endpoints: []string{"10.0.0.1:8000"}} }

const to = " x-gateway-destination-endpoint=10.0.0.1:8000 clear"

func TestExchanges(t *testing.T) {
	const (
		meta   = " metadata=10.0.0.1:8000"
		ask    = "ask lax=false " + prompt
		usage  = `"usage":{"prompt_tokens":100,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":96}}`
		named  = "< headers x-kvscout-decision=d1"
		events = "text/event-stream"
		token  = `data: {"choices":[{"text":"x"}]}` + "\n\n"
	)
	picked := []any{requested(duplex, false), sent(prompt, true), chosenA()}
	ranked := chosenA()
	ranked.priority = new(int64)
	onward := []string{ask, "> headers" + to + meta, "> body 26 bytes end"}
	for name, c := range map[string]struct {
		events []any
		want   []string
	}{
		"body in pieces": {
			[]any{requested(duplex, false), sent(prompt[:9], false), sent(prompt[9:], false), sent("", true), chosenA(), "end"},
			append(onward, "report d1 CANCELLED"),
		},
		"last piece twice": {
			[]any{requested(duplex, false), sent(prompt, true), sent(prompt, true), chosenA(), sent(prompt, true)},
			onward,
		},
		"empty body": {
			[]any{requested(duplex, false), sent("", true), chosenA()},
			[]string{"ask lax=false ", "> headers" + to + meta, "> body 0 bytes end"},
		},
		"ended by trailers": {
			[]any{requested(duplex, false), sent(prompt, false), sentTrailers(), chosenA()},
			[]string{ask, "> headers" + to + meta, "> body 26 bytes", "> trailers"},
		},
		"trailers after the answer": {
			append(picked[:3:3], sentTrailers()),
			append(onward[:3:3], "> trailers"),
		},
		"no body": {
			[]any{requested(duplex, true, ":path", "/v1/models"), &choice{endpoints: []string{"10.0.0.1:8000"}}, responded("200", "application/json", false), answered("{}", true), "end"},
			[]string{"ask lax=true ", "> headers" + to + meta, "< headers", "< body 2 bytes end"},
		},
		"another path": {
			[]any{requested(duplex, false, ":path", "/v1/embeddings"), sent(prompt, true)},
			[]string{"ask lax=true " + prompt},
		},
		"a path that was rewritten": {
			[]any{requested(duplex, false, ":path", "/x", "x-original-path", "/a/v1/chat/completions?b"), sent(prompt, true)},
			[]string{ask},
		},
		"list of endpoints, headers for the engine": {
			[]any{requested(duplex, true), &choice{decision: "d1", endpoints: []string{"a:1", "b:2"}, headers: map[string]string{"x-data-parallel-rank": "1"}}},
			[]string{"ask lax=true ", "> headers x-gateway-destination-endpoint=a:1,b:2 x-data-parallel-rank=1 clear metadata=a:1,b:2"},
		},
		"streamed at once": {
			[]any{atOnce(requested(streamed, false)), sent(prompt[:9], false), sent(prompt[9:], false), sent("", true), chosenA()},
			[]string{ask, "> headers" + to + meta, "> body", "> body", "> body"},
		},
		"streamed at once, ended by trailers": {
			[]any{atOnce(requested(streamed, false)), sent(prompt, false), sentTrailers(), chosenA()},
			[]string{ask, "> headers" + to + meta, "> body", "> trailers"},
		},
		"another name of the model": {
			[]any{requested(duplex, false, "x-llm-d-model-name-rewrite", "lora", "content-length", "26"), sent(prompt, true), chosenA(), responded("200", "application/json", false), answered(`{"model":"lora"}`, true)},
			[]string{`ask lax=false {"model":"m","prompt":"x","model":"lora"}`, "> headers x-gateway-destination-endpoint=10.0.0.1:8000 content-length=41 clear" + meta, "> body 41 bytes end",
				named + " -content-length", "< body 13 bytes end", "report d1 FINISHED"},
		},
		"another name of the model, of a body that cannot be changed": {
			[]any{requested(buffered, false, "x-gateway-model-name-rewrite", "lora"), sent(prompt, true)},
			[]string{"> headers", "refuse 400"},
		},
		"buffered": {
			[]any{requested(buffered, false), sent(prompt, true), chosenA()},
			[]string{"> headers", ask, "> body" + to + meta},
		},
		"buffered, trailers": {
			[]any{requested(buffered, false), sent(prompt, false), sentTrailers(), chosenA()},
			[]string{"> headers", ask, "> body" + to + meta, "> trailers"},
		},
		"buffered, trailers alone": {
			[]any{requested(buffered, false), sentTrailers()},
			[]string{"> headers", "refuse 400"},
		},
		"headers alone are shown": {
			[]any{requested(none, false), chosenA()},
			[]string{"ask lax=true ", "> headers" + to + meta},
		},
		"streamed": {
			[]any{requested(streamed, false)},
			[]string{"error"},
		},
		"too long, as announced": {
			[]any{requested(duplex, false, "content-length", "100000000"), sent("x", false)},
			[]string{"refuse 413"},
		},
		"too long": {
			[]any{requested(duplex, false), sent(strings.Repeat("x", edge.MaxBody), false), sent("x", false), sent("x", true), "end"},
			[]string{"refuse 413"},
		},
		"compressed": {
			[]any{requested(duplex, false, "content-encoding", "gzip"), sent("x", true)},
			[]string{"refuse 415"},
		},
		"refused": {
			[]any{requested(duplex, false), sent(prompt, true), edge.Nobody, "end"},
			[]string{ask, "refuse 503 x-llm-d-request-dropped-reason=rejected-no-endpoints retry-after=1"},
		},
		"client gone while it waits": {
			[]any{requested(duplex, false), sent(prompt, true), "end", chosenA()},
			[]string{ask, "give up", "report d1 CANCELLED"},
		},
		"answered by the data plane while it waits": {
			[]any{requested(duplex, false), sent(prompt, true), responded("504", "text/plain", false), answered("timeout", true), chosenA(), "end"},
			[]string{ask, "< headers", "give up", "< body 7 bytes end", "report d1 CANCELLED"},
		},
		"answered by the data plane before that": {
			[]any{requested(buffered, false), responded("413", "text/plain", true), "end"},
			[]string{"> headers", "< headers"},
		},
		"json": {
			append(picked[:3:3], responded("200", "application/json", false), answered("{"+usage[:20], false), answered(usage[20:]+"}", false), answered("", true), "end"),
			append(onward[:3:3], named, "< body 21 bytes", fmt.Sprintf("< body %d bytes", len(usage)-19), "< body 0 bytes end", "report d1 FINISHED 96/100/5"),
		},
		"events": {
			append(picked[:3:3], responded("200", events, false), answered(token, false), answered(token, false), answered("data: {"+usage+"}\n\n", true), "end"),
			append(onward[:3:3], named, "< body 34 bytes", "report d1 FIRST_TOKEN 20 ms", "< body 34 bytes", fmt.Sprintf("< body %d bytes end", len(usage)+10), "report d1 FINISHED 96/100/5"),
		},
		"events without usage": {
			[]any{requested(duplex, false, "content-length", "29"), sent(`{"model":"m",`, false), sent(` "stream": true}`, true), chosenA(),
				responded("200", events, false), answered(token+"data: {\"choices\":[],", false), answered(usage[:20], false), answered(usage[20:]+"}\n\ndata: [D", false), answered("ONE]", true), "end"},
			[]string{`ask lax=false {"model":"m", "stream": true}`, "> headers x-gateway-destination-endpoint=10.0.0.1:8000 content-length=69 clear" + meta, "> body 69 bytes end",
				named + " -content-length", "< body 34 bytes", "report d1 FIRST_TOKEN 20 ms", "< body 12 bytes end", "report d1 FINISHED 96/100/5"},
		},
		"priority": {
			[]any{requested(duplex, false, "content-length", "26"), sent(prompt, true), ranked},
			[]string{ask, "> headers x-gateway-destination-endpoint=10.0.0.1:8000 content-length=39 clear" + meta, "> body 39 bytes end"},
		},
		"a priority of its own": {
			[]any{requested(duplex, false), sent(`{"priority":1}`, true), ranked},
			[]string{`ask lax=false {"priority":1}`, "> headers" + to + meta, "> body 14 bytes end"},
		},
		"priority on another path": {
			[]any{requested(duplex, false, ":path", "/v1/embeddings"), sent(prompt, true), ranked},
			[]string{"ask lax=true " + prompt, "> headers" + to + meta, "> body 26 bytes end"},
		},
		"gRPC ends with trailers": {
			append(picked[:3:3], responded("200", "application/grpc", false), answered("x", false), answeredTrailers(), "end"),
			append(onward[:3:3], named, "< body 1 bytes", "< trailers", "report d1 FINISHED"),
		},
		"client gone in the middle": {
			append(picked[:3:3], responded("200", events, false), answered(token, false), "end"),
			append(onward[:3:3], named, "< body 34 bytes", "report d1 FIRST_TOKEN 20 ms", "report d1 CANCELLED"),
		},
		"engine gives up in the middle": {
			append(picked[:3:3], responded("200", events, false), answered(`data: {"error":{}}`+"\n\n", true), "end"),
			append(onward[:3:3], named, "< body 20 bytes end", "report d1 FAILED"),
		},
		"engine fails": {
			append(picked[:3:3], responded("500", "application/json", false), answered("{}", true), "end"),
			append(onward[:3:3], named, "report d1 FAILED", "< body 2 bytes end"),
		},
		"engine refuses": {
			append(picked[:3:3], responded("400", "application/json", true), "end"),
			append(onward[:3:3], named, "report d1 CANCELLED"),
		},
		"time is over": {
			append(picked[:3:3], detailed(responded("504", "text/plain", true), "response.code_details", "max_duration_timeout"), "end"),
			append(onward[:3:3], named, "report d1 CANCELLED"),
		},
		"served by another one": {
			append(picked[:3:3], with(responded("200", "", true), namespace, servedKey, "10.0.0.2:8000"), "end"),
			append(onward[:3:3], named, "report d1 FINISHED by 10.0.0.2:8000"),
		},
		"served by another one, by attribute": {
			append(picked[:3:3], detailed(responded("200", "", true), "upstream.address", "10.0.0.2:8000"), "end"),
			append(onward[:3:3], named, "report d1 FINISHED by 10.0.0.2:8000"),
		},
		"served by the one that was picked": {
			append(picked[:3:3], with(responded("200", "", true), namespace, servedKey, "10.0.0.1:8000"), "end"),
			append(onward[:3:3], named, "report d1 FINISHED"),
		},
		"body before headers":       {[]any{sent("x", true)}, []string{"error"}},
		"headers twice":             {[]any{requested(duplex, false), requested(duplex, false)}, []string{"error"}},
		"body after the end":        {[]any{requested(duplex, true), sent("x", true)}, []string{"ask lax=true ", "error"}},
		"response body of nothing":  {[]any{requested(duplex, false), answered("x", true)}, []string{"error"}},
		"response headers twice":    {append(picked[:3:3], responded("200", "", false), responded("200", "", false)), append(onward[:3:3], named, "error")},
		"no message":                {[]any{&extproc.ProcessingRequest{}}, []string{"error"}},
		"response without requests": {[]any{responded("503", "", false), answered("x", true), "end"}, []string{"< headers", "< body 1 bytes end"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScript()
			s.play(c.events...)
			if d := cmp.Diff(c.want, s.said); d != "" {
				t.Error(d)
			}
			s.end()
			if held := s.bodies.Held(); held != 0 {
				t.Errorf("%d bytes are held", held)
			}
		})
	}
}

// Where the data plane does not show the answer, the end of the stream says
// nothing of the request's.
func TestHiddenAnswersCloseNothing(t *testing.T) {
	for name, mode := range map[string]modepb.ProcessingMode_BodySendMode{"hidden": none, "shown": streamed} {
		m := requested(duplex, false)
		m.ProtocolConfig = configured(duplex, mode)
		s := newScript()
		s.play(m, sent(prompt, true), chosenA(), responded("200", "application/json", false))
		if s.said = nil; mode == streamed {
			s.play(answered("{}", false))
		}
		s.play("end")
		want := map[string][]string{"shown": {"< body", "report d1 CANCELLED"}}[name]
		if d := cmp.Diff(want, s.said); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}

// A data plane that shows no bodies is told to, where that is allowed.
func TestModesAreOverridden(t *testing.T) {
	for name, c := range map[string]struct {
		overrides bool
		events    []any
		want      []string
	}{
		"a body": {true, []any{requested(none, false), sent(prompt, true), chosenA(), responded("200", "application/json", false), answered("{}", true)}, []string{
			"show FULL_DUPLEX_STREAMED FULL_DUPLEX_STREAMED", "ask lax=false " + prompt, "> headers" + to + " metadata=10.0.0.1:8000", "> body 26 bytes end",
			"< headers x-kvscout-decision=d1", "< body 2 bytes end", "report d1 FINISHED"}},
		"no body":     {true, []any{requested(none, true)}, []string{"ask lax=true "}},
		"not allowed": {false, []any{requested(none, false)}, []string{"ask lax=true "}},
		"too long":    {true, []any{requested(none, false, "content-length", "104857600")}, []string{"refuse 413"}},
		"shown as is": {true, []any{requested(duplex, false)}, nil},
	} {
		s := newScript()
		s.overrides = c.overrides
		if s.play(c.events...); !cmp.Equal(c.want, s.said) {
			t.Errorf("%s: %s", name, cmp.Diff(c.want, s.said))
		}
	}
}

func TestObserversAreNotAnswered(t *testing.T) {
	s := newScript()
	m := requested(duplex, false)
	m.ObservabilityMode = true
	s.play(m, sent(prompt, true), responded("200", "", false), answered("x", true), "end")
	if len(s.said) > 0 {
		t.Error(s.said)
	}
}

// What is passed on is what came, whatever its length.
func TestBodiesArePassedOnWhole(t *testing.T) {
	for _, size := range []int{1, maxChunk - 1, maxChunk, maxChunk + 1, 5 * maxChunk, 20 << 20} {
		body := strings.Repeat("0123456789abcdef", size/16+1)[:size]
		s := newScript()
		s.play(requested(duplex, false))
		for rest := body; rest != ""; {
			n := min(len(rest), 1<<20)
			s.play(sent(rest[:n], false))
			rest = rest[n:]
		}
		s.said = nil
		s.note(s.receive(sent("", true), s.now))
		s.said = nil
		s.play(chosenA())
		if s.body.String() != body {
			t.Errorf("%d bytes came as %d", size, s.body.Len())
		}
		if want := 1 + max(1, (size+maxChunk-1)/maxChunk); len(s.said) != want || !strings.HasSuffix(s.said[want-1], "end") {
			t.Errorf("%d bytes: %d answers, want %d, the last %q", size, len(s.said), want, s.said[len(s.said)-1])
		}
	}
}

func TestBodiesAreBoundedTogether(t *testing.T) {
	shared := &edge.Budget{}
	var open []*exchange
	for refused := false; !refused; {
		s := newScript()
		s.bodies = shared
		s.play(requested(duplex, false), sent(strings.Repeat("x", edge.MaxBody), false))
		refused = len(s.said) == 1 && strings.HasPrefix(s.said[0], "refuse 429")
		if open = append(open, s.exchange); len(open) > 100 {
			t.Fatal("nobody is refused")
		}
	}
	if held := shared.Held(); held > edge.MaxBodies {
		t.Errorf("%d bytes are held", held)
	}
	for _, x := range open {
		x.end()
	}
	if held := shared.Held(); held != 0 {
		t.Errorf("%d bytes are held at the end", held)
	}
}

func TestSubsets(t *testing.T) {
	members := []string{"10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "[fd00::1]:8000", "engine.svc:8000"}
	for name, c := range map[string]struct {
		hint any
		want []string
	}{
		"list":               {[]any{"10.0.0.1:8000", "10.0.0.9:8000"}, members[:1]},
		"text":               {"10.0.0.1:8001, 10.0.0.2:8000", members[1:3]},
		"list of texts":      {[]any{"10.0.0.1:8000,10.0.0.1:8001", "engine.svc:8000"}, []string{members[0], members[1], members[4]}},
		"host":               {[]any{"10.0.0.1"}, members[:2]},
		"IPv6":               {"[fd00::1]:8000", members[3:4]},
		"IPv6 host":          {"fd00::1", members[3:4]},
		"nobody":             {[]any{"10.0.0.9:8000"}, nil},
		"empty list":         {[]any{}, nil},
		"empty text":         {"", nil},
		"neither":            {3.0, nil},
		"lists in lists":     {[]any{[]any{[]any{"10.0.0.1:8000"}}}, nil},
		"a text that begins": {"10.0.0.", nil},
	} {
		m := with(&extproc.ProcessingRequest{}, subsetNamespace, subsetKey, c.hint)
		s := subsetOf(m.GetMetadataContext())
		if d := cmp.Diff(c.want, s.among(members)); d != "" || !s.given {
			t.Errorf("%s: given %t %s", name, s.given, d)
		}
	}
	if s := subsetOf(with(&extproc.ProcessingRequest{}, subsetNamespace, "other", "x").GetMetadataContext()); s.given {
		t.Error("a subset where none is given")
	}
}

// FuzzExchange plays messages in any order. Each decision is closed once, or not
// where nobody shows what became of it, no memory is kept, and answers come in an
// order that data planes take.
func FuzzExchange(f *testing.F) {
	f.Add([]byte{0, 5, 1, 6, 12, 7, 9, 11})
	f.Add([]byte{2, 5, 12, 7, 8, 9, 10})
	f.Add([]byte{0, 4, 6, 12, 7, 9})
	f.Add([]byte{0, 5, 7, 12, 11})
	f.Add([]byte{0, 7, 6})
	f.Fuzz(func(t *testing.T, events []byte) {
		s := newScript()
		asked, picks, closed, headers := false, 0, 0, false
		for _, e := range events {
			var next step
			var err error
			switch e % 14 {
			case 0, 1, 2, 3:
				m := requested([]modepb.ProcessingMode_BodySendMode{duplex, buffered, none, streamed}[e%14], e >= 128)
				if e >= 64 {
					m.ProtocolConfig.ResponseBodyMode = none
				}
				next, err = s.receive(m, s.now)
			case 4, 5:
				body := prompt
				if e >= 128 {
					body = `{"stream":true}`
				}
				next, err = s.receive(sent(body, e%14 == 5), s.now)
			case 6:
				next, err = s.receive(sentTrailers(), s.now)
			case 7:
				next, err = s.receive(responded([]string{"200", "500", "404", "x"}[e/64], "text/event-stream", e/14%2 == 1), s.now)
			case 8, 9:
				body := "data: {\"choices\":[{\"text\":\"x\"}]}\n\ndata: {\"choices\":[],\"usage\":{}}\n\n"
				next, err = s.receive(answered(body[:int(e)%len(body)], e%14 == 9), s.now)
			case 10:
				next, err = s.receive(answeredTrailers(), s.now)
			case 11:
				next = s.end()
			case 12:
				if asked {
					asked = false
					picks++
					next = s.picked(chosenA(), s.now)
				}
			case 13:
				if asked {
					asked = false
					next = s.failed(edge.Nobody)
				}
			}
			if err != nil && !errors.Is(err, errProtocol) {
				t.Fatal(err)
			}
			if next.ask != nil {
				if asked || picks > 0 {
					t.Fatal("asks twice")
				}
				asked = true
			}
			if r := next.report; r != nil && r.GetOutcome() != api.Outcome_OUTCOME_FIRST_TOKEN {
				closed++
			}
			for _, a := range next.answers {
				switch r := a.GetResponse().(type) {
				case *extproc.ProcessingResponse_RequestHeaders:
					headers = true
				case *extproc.ProcessingResponse_RequestBody, *extproc.ProcessingResponse_RequestTrailers:
					if !headers {
						t.Fatalf("%T before headers", r)
					}
				}
			}
		}
		hidden := s.response == none
		if r := s.end().report; r != nil {
			closed++
		}
		if asked {
			picks++
			if s.picked(chosenA(), s.now).report != nil {
				closed++
			}
		}
		if closed > picks || closed < picks && !hidden {
			t.Errorf("%d decisions, %d closed", picks, closed)
		}
		if held := s.bodies.Held(); held != 0 {
			t.Errorf("%d bytes are held", held)
		}
	})
}
