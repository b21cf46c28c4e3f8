package extproc

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	modepb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/protocol/client"
	"github.com/kvscout/kvscout/protocol/completion"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/edge"
)

// MaxMessage has room for a whole body: data planes may send it as one.
const MaxMessage = edge.MaxBody + 1<<20

// Modes in which a body comes.
const (
	none     = modepb.ProcessingMode_NONE
	streamed = modepb.ProcessingMode_STREAMED
	buffered = modepb.ProcessingMode_BUFFERED
	partial  = modepb.ProcessingMode_BUFFERED_PARTIAL
	duplex   = modepb.ProcessingMode_FULL_DUPLEX_STREAMED
)

// errProtocol is a data plane that does not keep to the protocol, or wants a
// mode of it in which nothing can be picked.
var errProtocol = errors.New("protocol of the data plane")

// exchange is one HTTP request and its answer, as the messages of one stream
// tell of them: pure, a message or a decision in, a step out. It is for one
// caller at a time.
//
// Whatever comes, each decision is closed once: by the step that tells the end
// of the answer, or by end. Only where the data plane does not show the answer it
// is left to expire.
type exchange struct {
	bodies *edge.Budget
	// overrides: a data plane that shows no bodies can be told to show this one.
	overrides bool

	state      state
	configured bool // the modes are known
	request    modepb.ProcessingMode_BodySendMode
	response   modepb.ProcessingMode_BodySendMode
	observes   bool // the data plane takes no answers
	headers    map[string]string
	headless   bool // the request has no body
	chunks     [][]byte
	pieces     int // in which the body came
	size       int // of the body
	held       int64
	trailers   bool // the request's, to be answered
	subset     subset
	decision   string
	endpoint   string // that was picked
	cached     uint32 // tokens that are predicted there
	open       bool   // the decision, and nobody has said what became of it
	forwarded  time.Time
	asked      completion.Request
	known      bool // the request is one for a completion
	answer     *completion.Answer
	hides      bool   // usage, which the client did not ask for
	model      string // as the client names it, where the engine has another name
	rename     *completion.Rename
	begun      bool   // the first token was reported
	served     string // the endpoint that answered, if it is another one
	answering  bool   // the response has begun
	refusal    int    // the status of our own answer
}

type state uint8

const (
	collecting state = iota // the request
	asking                  // for a decision
	passed                  // the request went on, or is answered by the data plane itself
	refused                 // by us
	over                    // the stream
)

// step is what is to be done after a message: first the answers are sent, in
// their order, then the rest.
type step struct {
	answers []*extproc.ProcessingResponse
	// ask for a decision, and tell picked or failed.
	ask *ask
	// giveUp what was asked for.
	giveUp bool
	// report what became of the decision. Its member is the endpoint that answered, if
	// that is another one than was picked.
	report *api.Report
}

// ask is what there is to decide.
type ask struct {
	request *api.Request
	// only the endpoints in the subset, if there is one.
	subset subset
	// lax: a request of which nothing can be understood goes anywhere.
	lax bool
}

// choice is what was decided.
type choice struct {
	// decision to report on; empty: there is nothing to report.
	decision string
	// endpoints in the order in which they are to be tried, at least one.
	endpoints []string
	// headers for the engine.
	headers map[string]string
	// priority for the engine, if it serves by it and the client names none.
	priority *int64
	// cached tokens that are predicted at the first of them.
	cached uint32
}

// receive takes the next message.
func (x *exchange) receive(m *extproc.ProcessingRequest, now time.Time) (step, error) {
	if x.state == over || x.state == refused {
		return step{}, nil
	}
	x.observes = x.observes || m.GetObservabilityMode()
	if x.observes {
		return step{}, nil
	}
	if !x.configured {
		x.configured = true
		if err := x.modes(m.GetProtocolConfig()); err != nil {
			return step{}, err
		}
	}
	switch r := m.GetRequest().(type) {
	case *extproc.ProcessingRequest_RequestHeaders:
		return x.requestHeaders(m, r.RequestHeaders)
	case *extproc.ProcessingRequest_RequestBody:
		return x.requestBody(r.RequestBody)
	case *extproc.ProcessingRequest_RequestTrailers:
		return x.requestTrailers()
	case *extproc.ProcessingRequest_ResponseHeaders:
		return x.responseHeaders(m, r.ResponseHeaders)
	case *extproc.ProcessingRequest_ResponseBody:
		return x.responseBody(r.ResponseBody, now)
	case *extproc.ProcessingRequest_ResponseTrailers:
		return x.responseTrailers()
	}
	return step{}, fmt.Errorf("a message of a kind that is not known: %w", errProtocol)
}

func (x *exchange) requestHeaders(m *extproc.ProcessingRequest, h *extproc.HttpHeaders) (step, error) {
	if x.headers != nil || x.state != collecting {
		return step{}, fmt.Errorf("request headers come twice: %w", errProtocol)
	}
	x.headers = headersOf(h.GetHeaders())
	x.subset = subsetOf(m.GetMetadataContext())
	x.headless = h.GetEndOfStream()
	var answers []*extproc.ProcessingResponse
	if x.request == none && !x.headless && x.overrides {
		x.request, x.response = duplex, duplex
		answers = []*extproc.ProcessingResponse{showBodies()}
	}
	if x.headless || x.request == none {
		return x.complete()
	}
	if e := x.headers["content-encoding"]; e != "" && !strings.EqualFold(e, "identity") {
		return x.refuse(edge.Encoded(e)), nil
	}
	if n, err := strconv.ParseInt(x.headers["content-length"], 10, 64); err == nil && n > edge.MaxBody {
		return x.refuse(edge.TooLong), nil
	}
	if x.request == buffered || x.request == partial {
		answers = []*extproc.ProcessingResponse{requestHeaders(nil)}
	}
	return step{answers: answers}, nil
}

// modes notes how the bodies will come; a data plane that does not say is taken
// to stream both.
func (x *exchange) modes(c *extproc.ProtocolConfiguration) error {
	x.request, x.response = duplex, duplex
	if c != nil {
		x.request, x.response = c.GetRequestBodyMode(), c.GetResponseBodyMode()
	}
	switch {
	case x.request == none, x.request == buffered, x.request == partial, x.request == duplex:
	case x.request == streamed && c.GetSendBodyWithoutWaitingForHeaderResponse():
	default:
		return fmt.Errorf("request_body_mode %v would send the request on before there is a decision: set FULL_DUPLEX_STREAMED or BUFFERED: %w", x.request, errProtocol)
	}
	switch x.response {
	case none, streamed, buffered, partial, duplex:
		return nil
	}
	return fmt.Errorf("response_body_mode %v is not known: %w", x.response, errProtocol)
}

func (x *exchange) requestBody(b *extproc.HttpBody) (step, error) {
	switch {
	case x.headers == nil || x.headless || x.request == none:
		return step{}, fmt.Errorf("a request body where there is none: %w", errProtocol)
	case x.state != collecting:
		// Envoy may send the last piece twice.
		return step{}, nil
	case x.size+len(b.GetBody()) > edge.MaxBody:
		return x.refuse(edge.TooLong), nil
	case !x.hold(2 * len(b.GetBody())): // in pieces, and as a whole
		return x.refuse(edge.TooMany), nil
	}
	x.pieces++
	x.asked.Take(b.GetBody())
	if len(b.GetBody()) > 0 {
		x.chunks = append(x.chunks, b.GetBody())
		x.size += len(b.GetBody())
	}
	if !b.GetEndOfStream() && (x.request == duplex || x.request == streamed) {
		return step{}, nil
	}
	return x.complete()
}

func (x *exchange) requestTrailers() (step, error) {
	switch {
	case x.headers == nil || x.headless || x.trailers:
		return step{}, fmt.Errorf("request trailers where there are none: %w", errProtocol)
	case x.state == passed && x.forwarded.IsZero():
		return step{}, nil // nothing of the request goes on
	case x.state == passed:
		return step{answers: []*extproc.ProcessingResponse{requestTrailers()}}, nil
	}
	x.trailers = true
	if x.state == asking {
		return step{}, nil
	}
	if x.request != duplex && x.request != streamed {
		return x.refuse(edge.Refusal{Status: 400, Text: "the request has trailers and no body"}), nil
	}
	return x.complete()
}

// complete asks for a decision: all of the request is there that will be seen.
func (x *exchange) complete() (step, error) {
	x.state = asking
	if len(x.chunks) > 1 {
		x.chunks = [][]byte{bytes.Join(x.chunks, nil)}
	}
	a := &ask{request: client.Request(x.headers), subset: x.subset}
	x.known = !x.headless && x.request != none && pathOf(x.headers) != ""
	a.lax = !x.known
	x.hides = x.known && x.request == duplex && x.response == duplex && x.asked.HidesUsage()
	if !x.headless && x.request != none {
		body := []byte{}
		if x.size > 0 {
			body = x.chunks[0]
		}
		if to := first(x.headers, rewriteHeaders...); to != "" && x.known && x.size > 0 {
			if x.request != duplex || x.response != duplex {
				return x.refuse(edge.Refusal{Status: 400, Text: fmt.Sprintf("%s needs FULL_DUPLEX_STREAMED bodies, both of the request and of the response", rewriteHeaders[0])}), nil
			}
			// Whatever is decided is decided for that model: its blocks are others.
			body = completion.With(body, completion.ForModel(to))
			x.chunks, x.model = [][]byte{body}, x.asked.Model()
		}
		a.request.Prompt = &api.Prompt{Form: &api.Prompt_OpenaiBody{OpenaiBody: body}}
	}
	return step{ask: a}, nil
}

// picked takes the decision that was asked for.
func (x *exchange) picked(c *choice, now time.Time) step {
	x.decision, x.endpoint, x.cached, x.open = c.decision, c.endpoints[0], c.cached, c.decision != ""
	if x.state != asking {
		// Nobody waits for it any more.
		return step{report: x.close(api.Outcome_OUTCOME_CANCELLED)}
	}
	x.state, x.forwarded = passed, now
	defer x.release()
	mutation := destination(c)
	switch {
	case x.headless || x.request == none:
		return step{answers: []*extproc.ProcessingResponse{chosen(requestHeaders(mutation), c)}}
	case x.request == streamed:
		answers := []*extproc.ProcessingResponse{chosen(requestHeaders(mutation), c)}
		for range x.pieces {
			answers = append(answers, bufferedBody(nil))
		}
		if x.trailers {
			answers = append(answers, requestTrailers())
		}
		return step{answers: answers}
	case x.request != duplex:
		answers := []*extproc.ProcessingResponse{chosen(bufferedBody(mutation), c)}
		if x.trailers {
			answers = append(answers, requestTrailers())
		}
		return step{answers: answers}
	}
	var body []byte
	if x.size > 0 {
		body = x.chunks[0]
	}
	if x.hides {
		body = completion.With(body, completion.WantsUsage)
	}
	if c.priority != nil && x.known && !x.asked.NamesPriority() {
		body = completion.With(body, `"priority":`+strconv.FormatInt(*c.priority, 10))
	}
	if len(body) != x.size && x.headers["content-length"] != "" {
		mutation.HeaderMutation.SetHeaders = append(mutation.HeaderMutation.SetHeaders, header("content-length", strconv.Itoa(len(body))))
	}
	answers := append(make([]*extproc.ProcessingResponse, 0, 3+len(body)/maxChunk), chosen(requestHeaders(mutation), c))
	for {
		n := min(len(body), maxChunk)
		answers = append(answers, requestChunk(body[:n], n == len(body) && !x.trailers))
		if body = body[n:]; len(body) == 0 {
			break
		}
	}
	if x.trailers {
		answers = append(answers, requestTrailers())
	}
	return step{answers: answers}
}

// failed takes the news that there is no decision.
func (x *exchange) failed(why edge.Refusal) step {
	if x.state != asking {
		return step{}
	}
	return x.refuse(why)
}

func (x *exchange) refuse(why edge.Refusal) step {
	x.state, x.refusal = refused, why.Status
	x.release()
	return step{answers: []*extproc.ProcessingResponse{refusal(why)}}
}

func (x *exchange) responseHeaders(m *extproc.ProcessingRequest, h *extproc.HttpHeaders) (step, error) {
	if x.answering {
		return step{}, fmt.Errorf("response headers come twice: %w", errProtocol)
	}
	x.answering = true
	s := step{answers: []*extproc.ProcessingResponse{responseHeaders(x.told())}}
	if x.state != passed {
		// The data plane has answered by itself and waits no longer.
		s.giveUp = x.state == asking
		x.state = passed
		x.release()
		return s, nil
	}
	headers := headersOf(h.GetHeaders())
	if served := servedBy(m); numeric(x.endpoint) && served != x.endpoint {
		x.served = served
	}
	x.answer = completion.New(headers["content-type"])
	x.hides = x.hides && x.answer.Events()
	if x.model != "" && headers["content-encoding"] == "" {
		x.rename = completion.NewRename(headers["content-type"], x.model)
	}
	if x.hides || x.rename != nil {
		s.answers[0] = shortened(s.answers[0])
	}
	status, _ := strconv.Atoi(headers[":status"])
	switch {
	case status >= 500 && gaveUp(m):
		s.report = x.close(api.Outcome_OUTCOME_CANCELLED)
	case status >= 500:
		s.report = x.close(api.Outcome_OUTCOME_FAILED)
	case status >= 400:
		// The engine did not do what it was sent for.
		s.report = x.close(api.Outcome_OUTCOME_CANCELLED)
	case h.GetEndOfStream():
		s.report = x.close(api.Outcome_OUTCOME_FINISHED)
	}
	return s, nil
}

// told are headers for the client: the decision, and what it stands on if the
// client asked.
func (x *exchange) told() map[string]string {
	switch {
	case x.decision == "":
		return nil
	case x.headers[edge.ExplainHeader] == "":
		return map[string]string{edge.DecisionHeader: x.decision}
	}
	return map[string]string{edge.DecisionHeader: x.decision, edge.CachedHeader: strconv.FormatUint(uint64(x.cached), 10)}
}

func (x *exchange) responseBody(b *extproc.HttpBody, now time.Time) (step, error) {
	if !x.answering || x.response == none {
		return step{}, fmt.Errorf("a response body where there is none: %w", errProtocol)
	}
	body := b.GetBody()
	switch {
	case x.answer == nil:
	case x.hides:
		if body = x.answer.Pass(body); b.GetEndOfStream() {
			body = append(body, x.answer.Rest()...)
		}
	default:
		x.answer.Take(body)
	}
	if x.rename != nil {
		body = x.rename.Pass(body)
	}
	var s step
	if len(body) > 0 || len(b.GetBody()) == 0 || b.GetEndOfStream() {
		s.answers = []*extproc.ProcessingResponse{responseChunk(body, b.GetEndOfStream(), x.response == duplex)}
	}
	if x.answer == nil {
		return s, nil
	}
	switch {
	case b.GetEndOfStream():
		s.report = x.finish()
	case x.open && !x.begun && x.answer.Begun():
		x.begun = true
		s.report = &api.Report{DecisionId: x.decision, Outcome: api.Outcome_OUTCOME_FIRST_TOKEN, MemberId: x.served,
			TtftMs: proto.Float64(float64(now.Sub(x.forwarded)) / float64(time.Millisecond))}
	}
	return s, nil
}

func (x *exchange) responseTrailers() (step, error) {
	if !x.answering {
		return step{}, fmt.Errorf("response trailers where there is no response: %w", errProtocol)
	}
	s := step{answers: []*extproc.ProcessingResponse{responseTrailers()}}
	if x.answer != nil {
		if rest := x.answer.Rest(); len(rest) > 0 {
			if x.rename != nil {
				rest = x.rename.Pass(rest)
			}
			s.answers = slices.Insert(s.answers, 0, responseChunk(rest, false, true))
		}
		s.report = x.finish()
	}
	return s, nil
}

// finish closes the decision at the end of the answer.
func (x *exchange) finish() *api.Report {
	if x.answer.Failed() {
		return x.close(api.Outcome_OUTCOME_FAILED)
	}
	r := x.close(api.Outcome_OUTCOME_FINISHED)
	if u := x.answer.Usage(); r != nil && u != nil {
		r.PromptTokens, r.OutputTokens = &u.PromptTokens, &u.OutputTokens
		if u.CachedTokens != nil {
			r.CachedTokens = u.CachedTokens
		}
	}
	return r
}

// close says what became of the decision; nil: that is known, or nobody wants to
// know.
func (x *exchange) close(o api.Outcome) *api.Report {
	if !x.open {
		return nil
	}
	x.open = false
	return &api.Report{DecisionId: x.decision, Outcome: o, MemberId: x.served}
}

// end takes the end of the stream, however it came. Every stream of Envoy's ends
// by a reset, so that only what was seen before tells success.
func (x *exchange) end() step {
	asks := x.state == asking
	x.state = over
	x.release()
	if x.open && x.response == none {
		// The answer is not shown: the reservation ends as the member's load says.
		x.open = false
	}
	return step{giveUp: asks, report: x.close(api.Outcome_OUTCOME_CANCELLED)}
}

// hold takes memory for the body out of the budget.
func (x *exchange) hold(n int) bool {
	if !x.bodies.Take(int64(n)) {
		return false
	}
	x.held += int64(n)
	return true
}

// release forgets the body.
func (x *exchange) release() {
	x.bodies.Give(x.held)
	x.held, x.chunks = 0, nil
}

// pathOf is where the request goes, as the client wrote it.
func pathOf(headers map[string]string) string {
	for _, name := range []string{":path", "x-original-path", "x-forwarded-path"} {
		if path, _, _ := strings.Cut(headers[name], "?"); strings.HasSuffix(path, "/completions") {
			return path
		}
	}
	return ""
}

// rewriteHeaders name the model as the engine is to be asked for it.
var rewriteHeaders = []string{"x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"}

func first(headers map[string]string, names ...string) string {
	for _, name := range names {
		if headers[name] != "" {
			return headers[name]
		}
	}
	return ""
}
