package kvscout

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"

	"github.com/kvscout/kvscout/protocol/client"
	"github.com/kvscout/kvscout/protocol/completion"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	// decisionHeader of the answer names the decision, cachedHeader the prompt tokens
	// that were predicted to be cached, for clients that send explainHeader.
	decisionHeader = "X-Kvscout-Decision"
	cachedHeader   = "X-Kvscout-Cached-Tokens"
	explainHeader  = "X-Kvscout-Explain"
)

// exchange is one request and its answer.
type exchange struct {
	w     http.ResponseWriter
	r     *http.Request
	next  caddyhttp.Handler
	asked []byte // the body
	sent  []byte // with what the engine is asked for besides
	hides bool   // usage, which the client did not ask for

	tries    int
	unused   bool // the reverse proxy has another policy
	panicked any
}

func newExchange(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler, body []byte) *exchange {
	x := &exchange{w: w, r: r, next: next, asked: body, sent: body}
	var asked completion.Request
	asked.Take(body)
	if x.hides = asked.HidesUsage(); x.hides {
		x.sent = completion.With(body, completion.WantsUsage)
	}
	return x
}

// request for the scheduler. Credentials are none of its business.
func (x *exchange) request() *api.Request {
	headers := make(map[string]string, len(x.r.Header))
	for name, values := range x.r.Header {
		switch name {
		case "Authorization", "Proxy-Authorization", "Cookie":
		default:
			headers[strings.ToLower(name)] = values[0]
		}
	}
	q := client.Request(headers)
	q.Prompt = &api.Prompt{Form: &api.Prompt_OpenaiBody{OpenaiBody: x.asked}}
	return q
}

// again is the request as it came, to be sent by somebody else.
func (x *exchange) again(ctx context.Context) *http.Request { return x.with(ctx, x.asked) }

func (x *exchange) with(ctx context.Context, body []byte) *http.Request {
	r := x.r.Clone(ctx)
	r.Body, r.ContentLength, r.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
	r.Header.Set("Content-Length", strconv.Itoa(len(body)))
	// Who computes and who pulls is not the client's to say.
	for _, name := range append([]string{client.RankHeader, client.PrefillHeader, client.PullHeader}, client.ControlHeaders...) {
		r.Header.Del(name)
	}
	return r
}

var errCut = errors.New("the answer is cut off")

// send lets the reverse proxy send the request to the member that was picked.
// Until an answer has begun another one may be tried: what an engine did not answer
// it can be asked again.
func (x *exchange) send(ctx context.Context, picked *client.Placement) (*api.Report, error) {
	x.tries++
	p := &place{Placement: picked}
	r := x.with(context.WithValue(ctx, placeKey{}, p), x.sent)
	for name, value := range picked.Headers {
		r.Header.Set(name, value)
	}
	if repl, ok := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		repl.Set("http.kvscout.decision", picked.Decision.GetDecisionId())
		repl.Set("http.kvscout.cached_tokens", cachedTokens(picked))
	}
	a := &answer{ResponseWriter: x.w, exchange: x, place: p}
	err := x.proxy(a, r)
	if err == nil {
		err = a.end()
	}
	x.unused = !p.taken.Load() && !p.left.Load()
	report := a.report()
	if err != nil && !a.begun && x.panicked == nil && !x.unused && upstreams(err) {
		return report, client.Another(err)
	}
	return report, err
}

// proxy lets the reverse proxy serve. It panics where an answer breaks off, which
// is to be reported first.
func (x *exchange) proxy(w http.ResponseWriter, r *http.Request) (err error) {
	defer func() {
		if x.panicked = recover(); x.panicked != nil {
			err = errCut
		}
	}()
	return x.next.ServeHTTP(w, r)
}

// upstreams tells whether an error of the reverse proxy's is about the upstream.
func upstreams(err error) bool {
	var handler caddyhttp.HandlerError
	return errors.As(err, &handler) && handler.StatusCode >= http.StatusBadGateway && handler.StatusCode <= http.StatusGatewayTimeout
}

func cachedTokens(p *client.Placement) string {
	c := p.Candidate().GetCachedTokens()
	return strconv.FormatUint(uint64(c.GetGpu()+c.GetHost()+c.GetDisk()+c.GetPredicted()), 10)
}

// answer reads what the engine answers on its way to the client.
type answer struct {
	http.ResponseWriter
	*exchange
	place *place

	begun bool // something has gone to the client
	hides bool
	read  *client.Answer // nil: it cannot be read
}

// Unwrap is for http.ResponseController.
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// WriteHeader begins the answer.
func (a *answer) WriteHeader(code int) {
	if code >= 200 && !a.begun {
		a.begun = true
		h := a.Header()
		if !a.place.left.Load() {
			h.Set(decisionHeader, a.place.Decision.GetDecisionId())
			if a.r.Header.Get(explainHeader) != "" {
				h.Set(cachedHeader, cachedTokens(a.place.Placement))
			}
		}
		media := h.Get("Content-Type")
		if h.Get("Content-Encoding") != "" {
			media = "" // what is compressed is not read
		}
		a.read = a.place.Answer(code, media)
		if a.hides = a.exchange.hides && a.read.Events(); a.hides {
			h.Del("Content-Length")
		}
	}
	a.ResponseWriter.WriteHeader(code)
}

// Write passes a piece on.
func (a *answer) Write(piece []byte) (int, error) {
	if !a.begun {
		a.WriteHeader(http.StatusOK)
	}
	if !a.hides {
		a.read.Take(piece)
		return a.ResponseWriter.Write(piece)
	}
	if passed := a.read.Pass(piece); len(passed) > 0 {
		if _, err := a.ResponseWriter.Write(passed); err != nil {
			return 0, err
		}
	}
	return len(piece), nil
}

// end passes on what was held back.
func (a *answer) end() error {
	if !a.hides {
		return nil
	}
	rest := a.read.Rest()
	if len(rest) == 0 {
		return nil
	}
	_, err := a.ResponseWriter.Write(rest)
	return err
}

// report what is known of the member that was picked: where the request went on to
// another one by the reverse proxy's own rules, that it failed.
func (a *answer) report() *api.Report {
	switch {
	case a.unused:
		return &api.Report{Outcome: api.Outcome_OUTCOME_CANCELLED}
	case a.place.left.Load():
		return &api.Report{Outcome: api.Outcome_OUTCOME_FAILED}
	case a.read == nil:
		return nil
	}
	return a.read.Report()
}

// refusal of a scheduler that has no room for the request now.
type refusal struct {
	status int
	text   string
	wait   time.Duration
}

// refusalOf an error of Pick; all others mean that nobody says where a request
// goes, and the reverse proxy may choose.
func refusalOf(err error) (r refusal, ok bool) {
	s, _ := status.FromError(errors.Unwrap(err))
	r.text = s.Message()
	for _, d := range s.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			switch d.GetReason() {
			case "QUEUE_FULL":
				r.status = http.StatusTooManyRequests
			case "QUEUE_TIMEOUT":
				r.status = http.StatusServiceUnavailable
			}
		case *errdetails.RetryInfo:
			r.wait = d.GetRetryDelay().AsDuration()
		}
	}
	return r, r.status != 0
}

// write the refusal as vLLM writes errors.
func (r refusal) write(w http.ResponseWriter) error {
	kind := map[int]string{http.StatusTooManyRequests: "TooManyRequestsError", http.StatusServiceUnavailable: "ServiceUnavailableError"}[r.status]
	body, err := json.Marshal(map[string]any{"error": map[string]any{"message": r.text, "type": kind, "param": nil, "code": r.status}})
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	if r.wait > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int((r.wait+time.Second-1)/time.Second)))
	}
	w.WriteHeader(r.status)
	_, err = w.Write(body)
	return err
}
