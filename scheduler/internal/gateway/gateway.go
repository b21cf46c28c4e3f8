// Package gateway is a small front for OpenAI requests, for whoever has no proxy:
// each is sent to the member that the scheduler picks, as the client library does
// it, and the answer passes as it comes. It is what a proxy does around a request
// and no more: no routes, no limits of users, no rewriting.
package gateway

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httputil"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvscout/kvscout/protocol/client"
	"github.com/kvscout/kvscout/protocol/completion"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/edge"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

const (
	// MaxOpen requests at a time.
	MaxOpen = 32768
	// attempts bounds the members that are tried for a request.
	attempts = 3
	// connectWait bounds the wait for an engine to take a connection.
	connectWait = time.Second
	// bodyWait bounds the time in which a client sends the next piece of a body.
	bodyWait = 30 * time.Second
	// piece of a body that is read at a time.
	piece = 64 << 10
	// modelsWait bounds the wait for one engine's list of models.
	modelsWait = 2 * time.Second
	// maxModels bytes of such a list.
	maxModels = 1 << 20
)

// Config of a Gateway. All must be set.
type Config struct {
	// Scheduler is the API, in this process.
	Scheduler api.SchedulerClient
	// Fleet says who listens where.
	Fleet *fleet.Fleet
	// Ready tells whether requests are to be sent here.
	Ready func() bool
	// Objectives are the priorities of requests by the objective that they name.
	Objectives map[string]int32
	// Priority: the engines serve by the priority in the body of a request, and get
	// it where the client gives none.
	Priority bool
	// TLS says whom to believe at engines that speak it; nil: the system's
	// authorities.
	TLS *tls.Config
	Log *slog.Logger
}

// Gateway is an http.Handler. Its requests end before Close.
type Gateway struct {
	cfg       Config
	client    *client.Client
	transport *http.Transport
	tally     edge.Tally
}

// New returns a Gateway.
func New(cfg Config) (*Gateway, error) {
	// The scheduler bounds its calls itself.
	c, err := client.New(client.Config{Local: cfg.Scheduler, Timeout: -1, Attempts: attempts})
	if err != nil {
		return nil, err
	}
	return &Gateway{cfg: cfg, client: c, transport: &http.Transport{
		DialContext:         (&net.Dialer{Timeout: connectWait}).DialContext,
		TLSClientConfig:     cfg.TLS,
		MaxIdleConnsPerHost: 1024,
		IdleConnTimeout:     time.Minute,
		DisableCompression:  true, // answers pass as they are
	}}, nil
}

// Close tells the scheduler what it has not been told yet, and hangs up.
func (g *Gateway) Close() error {
	g.transport.CloseIdleConnections()
	return g.client.Close()
}

// Stats returns the counts.
func (g *Gateway) Stats() edge.Stats { return g.tally.Stats() }

// ServeHTTP serves one request.
func (g *Gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/health" {
		if !g.cfg.Ready() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		return
	}
	defer g.tally.Open.Add(-1)
	err := error(edge.TooManyOpen)
	if g.tally.Open.Add(1) <= MaxOpen {
		err = g.serve(w, r)
	}
	var broken *brokenError
	switch {
	case err == nil:
		g.tally.End(edge.Forwarded)
	case r.Context().Err() != nil:
		g.tally.End(edge.Abandoned)
		panic(http.ErrAbortHandler)
	case errors.As(err, &broken):
		// All that can be said of an answer that has begun is that it does not end.
		g.tally.End(edge.Broken)
		panic(http.ErrAbortHandler)
	default:
		g.tally.End(edge.Refused)
		g.refuse(w, r, err)
	}
}

// brokenError is of an answer that has begun.
type brokenError struct{ error }

func (e *brokenError) Unwrap() error { return e.error }

// unreachedError is of an engine that did not begin to answer, or wants another
// one to be asked.
type unreachedError struct{ error }

func (e *unreachedError) Unwrap() error { return e.error }

// refuse answers in the engine's place.
func (g *Gateway) refuse(w http.ResponseWriter, r *http.Request, err error) {
	var unreached *unreachedError
	why := edge.Of(err)
	if errors.As(err, &unreached) {
		g.cfg.Log.Warn("no engine answered", "path", r.URL.Path, "error", err)
		why = edge.Refusal{Status: http.StatusBadGateway, Text: "no engine that could serve the request was reached", Wait: time.Second}
	}
	for _, h := range why.Headers() {
		w.Header().Set(h[0], h[1])
	}
	w.WriteHeader(why.Status)
	_, _ = w.Write(why.Body()) // the client may be gone
}

// serve sends the request where it belongs. An error is the answer, unless it is
// a brokenError.
func (g *Gateway) serve(w http.ResponseWriter, r *http.Request) error {
	if !public(r.URL.Path) {
		return edge.Refusal{Status: http.StatusNotFound, Text: fmt.Sprintf("%.100q is not served here", r.URL.Path)}
	}
	if r.URL.Path == "/v1/models" && r.Method == http.MethodGet {
		return g.models(w, r)
	}
	x := &exchange{Gateway: g, w: w, in: r}
	defer x.release()
	if err := x.read(); err != nil {
		return err
	}
	headers := headersOf(r.Header)
	request := client.Request(headers)
	request.RequestId = edge.Name(headers)
	request.Priority = g.cfg.Objectives[client.Objective(headers)]
	known := strings.HasSuffix(r.URL.Path, "/completions") && r.Method == http.MethodPost
	if len(x.body) > 0 || known {
		request.Prompt = &api.Prompt{Form: &api.Prompt_OpenaiBody{OpenaiBody: x.body}}
	}
	x.known, x.hides = known, known && x.asked.HidesUsage()
	var err error
	if request.Prompt != nil {
		err = g.client.Do(r.Context(), request, nil, x.send)
	}
	if request.Prompt == nil || !known && status.Code(err) == codes.InvalidArgument {
		err = x.anywhere() // nothing is to be understood of it
	}
	if unreached := (*unreachedError)(nil); errors.As(err, &unreached) && x.busy != nil {
		x.busy.answer(w)
		return nil
	}
	return err
}

// public tells whether a path is one that clients of an engine need: those that
// change an engine, or tell of it, are not.
func public(p string) bool {
	if path.Clean(p) != p || !strings.HasPrefix(p, "/v1/") {
		return false
	}
	return !strings.HasSuffix(p, "_lora_adapter")
}

// headersOf a request by their names in lower case; of equal names the first.
func headersOf(h http.Header) map[string]string {
	headers := make(map[string]string, len(h))
	for name, values := range h {
		if len(values) > 0 {
			headers[strings.ToLower(name)] = values[0]
		}
	}
	return headers
}

// exchange is one request and its answer.
type exchange struct {
	*Gateway
	w     http.ResponseWriter
	in    *http.Request
	body  []byte
	held  int64
	asked completion.Request
	known bool  // it is one for a completion
	hides bool  // usage, which the client did not ask for
	busy  *busy // an engine said so, and nobody else has answered
}

// busy is an engine's answer that it cannot serve at the moment.
type busy struct {
	header http.Header
	body   []byte
}

func (b *busy) answer(w http.ResponseWriter) {
	for name, values := range b.header {
		w.Header()[name] = values
	}
	w.WriteHeader(http.StatusServiceUnavailable)
	_, _ = w.Write(b.body) // the client may be gone
}

// read takes the whole body, in bounded memory.
func (x *exchange) read() error {
	if e := x.in.Header.Get("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") {
		return edge.Encoded(e)
	}
	length := x.in.ContentLength
	if length > edge.MaxBody {
		return edge.TooLong
	}
	control := http.NewResponseController(x.w)
	for {
		if len(x.body) == cap(x.body) && !x.grow(length) {
			return edge.TooMany
		}
		_ = control.SetReadDeadline(time.Now().Add(bodyWait)) // what cannot is a test's
		n, err := x.in.Body.Read(x.body[len(x.body):cap(x.body)])
		x.asked.Take(x.body[len(x.body) : len(x.body)+n])
		if x.body = x.body[:len(x.body)+n]; len(x.body) > edge.MaxBody {
			return edge.TooLong
		}
		if errors.Is(err, io.EOF) {
			_ = control.SetReadDeadline(time.Time{})
			return nil
		}
		if err != nil {
			return edge.Refusal{Status: http.StatusBadRequest, Text: "the body did not come whole"}
		}
	}
}

// grow makes room for the rest of the body, if its length is known, or for as much
// again. It counts twice: the body that goes on may be another one.
func (x *exchange) grow(length int64) bool {
	room := int64(max(piece, 2*cap(x.body)))
	if length >= 0 {
		room = length + 1 // and to see the end
	}
	if !x.tally.Bodies.Take(2 * (room - int64(cap(x.body)))) {
		return false
	}
	x.held = 2 * room
	x.body = append(make([]byte, 0, room), x.body...)
	return true
}

// release forgets the body.
func (x *exchange) release() {
	x.tally.Bodies.Give(x.held)
	x.held, x.body = 0, nil
}

// send is one attempt, as client.Do wants it.
func (x *exchange) send(ctx context.Context, place *client.Placement) (*api.Report, error) {
	if place.Address == "" {
		return nil, edge.Nobody
	}
	a := &attempt{exchange: x, place: place}
	err := a.run(ctx)
	var report *api.Report
	if a.answer != nil {
		report = a.answer.Report()
	}
	if a.gone {
		report.Outcome = api.Outcome_OUTCOME_CANCELLED
	}
	return report, err
}

// anywhere is for requests that name no model: the address with the fewest requests
// gets it, and the next if that is not reached.
func (x *exchange) anywhere() error {
	var err error = edge.Nobody
	for _, m := range leastLoaded(x.cfg.Fleet.View(), time.Now()) {
		a := &attempt{exchange: x, place: &client.Placement{Address: m.Info.Address, TLS: m.Info.TLS}}
		var unreached *unreachedError
		if err = a.run(x.in.Context()); !errors.As(err, &unreached) || x.in.Context().Err() != nil {
			return err
		}
	}
	return err
}

// leastLoaded are the members to try, each at another address, at most attempts: by
// the requests there, those that may not answer last, and equals in any order.
func leastLoaded(view *fleet.View, now time.Time) []*fleet.Member {
	type place struct {
		member   *fleet.Member
		away     bool
		requests int
	}
	places := make([]place, 0, len(view.Rows))
	for i := range view.Rows {
		r := &view.Rows[i]
		if r.Member.Info.Address != "" {
			places = append(places, place{r.Member, view.Barred(r, now), r.Requests(r.Member.Reserved())})
		}
	}
	rand.Shuffle(len(places), func(i, j int) { places[i], places[j] = places[j], places[i] })
	slices.SortStableFunc(places, func(a, b place) int {
		if a.away != b.away {
			if a.away {
				return 1
			}
			return -1
		}
		return cmp.Compare(a.requests, b.requests)
	})
	var members []*fleet.Member
	for _, p := range places {
		there := func(m *fleet.Member) bool { return m.Info.Address == p.member.Info.Address }
		if len(members) < attempts && !slices.ContainsFunc(members, there) {
			members = append(members, p.member)
		}
	}
	return members
}

// attempt of one member.
type attempt struct {
	*exchange
	place  *client.Placement
	answer *client.Answer
	failed error // before the answer began
	broke  error // while it came
	gone   bool  // the client, while it came
}

// run sends the request to the member and passes its answer on. An error that
// another member may mend is marked so.
func (a *attempt) run(ctx context.Context) error {
	a.pass(ctx)
	switch {
	case a.broke != nil:
		return &brokenError{a.broke}
	case a.failed != nil:
		return client.Another(&unreachedError{fmt.Errorf("%s: %w", a.place.Address, a.failed)})
	}
	return nil
}

// pass is ReverseProxy's part. It panics where an answer breaks off.
func (a *attempt) pass(ctx context.Context) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case error:
			if !errors.Is(r, http.ErrAbortHandler) {
				panic(r)
			}
			if a.broke == nil {
				a.gone, a.broke = true, errors.New("the client is gone")
			}
		default:
			panic(r)
		}
	}()
	body := a.forwarded()
	proxy := &httputil.ReverseProxy{
		Transport:     a.transport,
		FlushInterval: -1, // each event at once
		BufferPool:    &buffers,
		ErrorLog:      log.New(io.Discard, "", 0), // errors are passed on
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", a.place.Address, ""
			if a.place.TLS {
				r.Out.URL.Scheme = "https"
			}
			r.SetXForwarded()
			for _, name := range slices.Concat(client.ControlHeaders, ours) {
				r.Out.Header.Del(name)
			}
			for name, value := range a.place.Headers {
				r.Out.Header.Set(name, value)
			}
			if len(a.body) > 0 {
				r.Out.Body, r.Out.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
				r.Out.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
				r.Out.TransferEncoding = nil
			} else {
				r.Out.Body = http.NoBody
			}
		},
		ModifyResponse: a.begin,
		ErrorHandler:   func(_ http.ResponseWriter, _ *http.Request, err error) { a.failed = err },
	}
	proxy.ServeHTTP(a.w, a.in.WithContext(ctx))
}

// buffers through which answers pass: small, as thousands may be open.
var buffers pool

type pool struct{ sync.Pool }

func (p *pool) Get() []byte {
	if b, ok := p.Pool.Get().(*[]byte); ok {
		return *b
	}
	return make([]byte, 8<<10)
}

func (p *pool) Put(b []byte) { p.Pool.Put(&b) }

// ours are headers that only the scheduler may send to engines.
var ours = []string{client.RankHeader, client.PrefillHeader, client.PullHeader, edge.ExplainHeader, "x-gateway-destination-endpoint"}

// forwarded is the body as the engine gets it.
func (a *attempt) forwarded() []byte {
	body := a.body
	if a.hides {
		body = completion.With(body, completion.WantsUsage)
	}
	if a.cfg.Priority && a.known && a.place.Decision != nil && !a.asked.NamesPriority() {
		body = completion.With(body, `"priority":`+strconv.FormatInt(a.place.Decision.GetRanking().GetEnginePriority(), 10))
	}
	return body
}

// errBusy is an engine that wants another one to be asked.
var errBusy = errors.New("the engine says 503")

// begin takes the head of the answer.
func (a *attempt) begin(r *http.Response) error {
	a.answer = a.place.Answer(r.StatusCode, r.Header.Get("Content-Type"))
	if r.StatusCode == http.StatusServiceUnavailable {
		body, err := io.ReadAll(io.LimitReader(r.Body, piece))
		a.busy = &busy{header: r.Header, body: body}
		return errors.Join(errBusy, err)
	}
	if id := a.place.Decision.GetDecisionId(); id != "" {
		r.Header.Set(edge.DecisionHeader, id)
		if a.in.Header.Get(edge.ExplainHeader) != "" {
			c := a.place.Candidate().GetCachedTokens()
			r.Header.Set(edge.CachedHeader, strconv.FormatUint(uint64(c.GetGpu()+c.GetHost()+c.GetDisk()+c.GetPredicted()), 10))
		}
	}
	passing := &passing{ReadCloser: r.Body, attempt: a, hides: a.hides && a.answer.Events()}
	if passing.hides {
		r.Header.Del("Content-Length")
		r.ContentLength = -1
	}
	r.Body = passing
	a.release() // there is no other attempt any more
	return nil
}

// passing is the body of an answer.
type passing struct {
	io.ReadCloser
	attempt *attempt
	hides   bool
	ready   []byte // for the client, of what was read
	end     error
}

// Read reads what is for the client.
func (p *passing) Read(b []byte) (int, error) {
	for len(p.ready) == 0 && p.end == nil {
		n, err := p.ReadCloser.Read(b)
		p.end = err
		if err != nil && !errors.Is(err, io.EOF) {
			p.attempt.broke = err
		}
		if !p.hides {
			p.attempt.answer.Take(b[:n])
			return n, err
		}
		p.ready = p.attempt.answer.Pass(b[:n])
		if errors.Is(err, io.EOF) {
			p.ready = append(p.ready, p.attempt.answer.Rest()...)
		}
	}
	n := copy(b, p.ready)
	if p.ready = p.ready[n:]; len(p.ready) > 0 {
		return n, nil
	}
	return n, p.end
}
