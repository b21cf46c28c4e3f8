// Package extproc is an endpoint picker for gateways: Envoy's external processing,
// as the Gateway API Inference Extension uses it. A data plane shows each
// request on a stream of its own, sends it where it is told, and shows the answer
// on the same stream: so what became of a decision is reported without anybody's
// work.
//
// What is decided, and how, is the API's: here are only the messages. exchange is
// the state of one stream and pure; this file is the shell that receives, asks
// and sends.
package extproc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"time"

	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvscout/kvscout/protocol/client"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/edge"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// ServiceName is what data planes ask the health of.
const ServiceName = "envoy.service.ext_proc.v3.ExternalProcessor"

// maxExchanges at a time: each takes a stream and two goroutines at most.
const maxExchanges = 32768

// Config of a Server. All must be set.
type Config struct {
	// Pick, Score and Report are the API's, with its errors, deadlines and limits.
	Pick   func(context.Context, *api.PickRequest) (*api.PickResponse, error)
	Score  func(context.Context, *api.ScoreRequest) (*api.ScoreResponse, error)
	Report func(context.Context, *api.ReportRequest) (*api.ReportResponse, error)
	// Trace is a context that continues the trace that headers tell of, until it is
	// ended.
	Trace func(ctx context.Context, headers map[string]string) (context.Context, func())
	// Fleet says who listens where.
	Fleet *fleet.Fleet
	Options
	Log *slog.Logger
}

// Options are what an operator may choose.
type Options struct {
	// Endpoints are named at most for each request, in the order in which they are to
	// be tried; at least 1.
	Endpoints int
	// Objectives are the priorities of requests by the objective that they name.
	Objectives map[string]int32
	// Priority: the engines serve by the priority in the body of a request, and get
	// it where the client gives none.
	Priority bool
	// ModeOverride: data planes that are set to show no bodies allow that to be
	// overridden, and show those of completions.
	ModeOverride bool
}

// nobodyIn is a subset without members.
var nobodyIn = edge.Refusal{Status: 503, Reason: edge.NoEndpoints, Text: "no member is among the endpoints that the gateway allows", Wait: time.Second}

// Server implements Envoy's service.
type Server struct {
	extproc.UnimplementedExternalProcessorServer
	cfg   Config
	tally edge.Tally
}

// New returns a Server.
func New(cfg Config) *Server { return &Server{cfg: cfg} }

// Stats returns the counts.
func (s *Server) Stats() edge.Stats { return s.tally.Stats() }

// Register makes a gRPC server serve it.
func (s *Server) Register(to grpc.ServiceRegistrar) { extproc.RegisterExternalProcessorServer(to, s) }

// stream is the shell of one exchange. Its messages are taken where they are
// received; what is asked for comes on a goroutine of its own, so that the end of
// a request that waits is heard at once.
type stream struct {
	*Server
	wire   extproc.ExternalProcessor_ProcessServer
	ctx    context.Context
	cancel context.CancelFunc // of what is asked for
	asking sync.WaitGroup

	mu       sync.Mutex // guards exchange, and is held while its answers are sent
	exchange exchange
}

// Process serves one exchange.
func (s *Server) Process(wire extproc.ExternalProcessor_ProcessServer) error {
	defer s.tally.Open.Add(-1)
	if s.tally.Open.Add(1) > maxExchanges {
		return wire.Send(refusal(edge.TooManyOpen))
	}
	st := &stream{Server: s, wire: wire, exchange: exchange{bodies: &s.tally.Bodies, overrides: s.cfg.ModeOverride}}
	st.ctx, st.cancel = context.WithCancel(wire.Context())
	defer st.asking.Wait()
	defer st.cancel()
	err := st.receive()
	st.mu.Lock()
	outcome := edge.Abandoned
	switch x := &st.exchange; {
	case errors.Is(err, errProtocol):
		outcome = edge.Broken
		s.cfg.Log.Warn("data plane does not keep to the protocol", "error", err, "do", "see docs/PROXIES.md")
		err = status.Error(codes.InvalidArgument, err.Error())
	case x.refusal != 0:
		outcome = edge.Refused
	case !x.forwarded.IsZero():
		outcome = edge.Forwarded
	}
	last := st.exchange.end()
	st.mu.Unlock()
	s.tally.End(outcome)
	st.do(last)
	return err
}

func (st *stream) receive() error {
	for {
		m, err := st.wire.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := st.step(func(x *exchange) (step, error) { return x.receive(m, time.Now()) }); err != nil {
			return err
		}
	}
}

// step lets the exchange take something and does what it says.
func (st *stream) step(take func(*exchange) (step, error)) error {
	next, err := func() (step, error) {
		st.mu.Lock()
		defer st.mu.Unlock()
		next, err := take(&st.exchange)
		for _, a := range next.answers {
			if err == nil {
				err = st.wire.Send(a)
			}
		}
		return next, err
	}()
	st.do(next)
	return err
}

func (st *stream) do(next step) {
	if next.giveUp {
		st.cancel()
	}
	if next.report != nil {
		st.report(next.report)
	}
	if next.ask != nil {
		st.asking.Go(func() { st.ask(next.ask) })
	}
}

func (st *stream) ask(a *ask) {
	defer func() {
		if r := recover(); r != nil {
			st.cfg.Log.Error("exchange panicked", "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
			st.cancel()
		}
	}()
	ctx, end := st.cfg.Trace(st.ctx, a.request.GetHeaders())
	defer end()
	c, err := st.decide(ctx, a)
	// Where sending fails the stream is over, and receive hears so.
	_ = st.step(func(x *exchange) (step, error) {
		if err == nil {
			return x.picked(c, time.Now()), nil
		}
		return x.failed(edge.Of(err)), nil
	})
}

// report tells what became of a decision. Who answered is named by its address:
// one that no member has stays as it is, so that nobody is charged.
func (st *stream) report(r *api.Report) {
	if r.GetMemberId() != "" {
		for _, m := range st.cfg.Fleet.View().Members {
			if m.Info.Address == r.GetMemberId() {
				r.MemberId = m.Info.Name
				break
			}
		}
	}
	// The stream may be over, and the report is due all the same.
	if _, err := st.cfg.Report(context.WithoutCancel(st.ctx), &api.ReportRequest{Reports: []*api.Report{r}}); err != nil {
		st.cfg.Log.Warn("report failed", "decision", r.GetDecisionId(), "error", err, "do", "see the code in docs/OPERATIONS.md")
	}
}

// decide asks the API.
func (s *Server) decide(ctx context.Context, a *ask) (*choice, error) {
	view := s.cfg.Fleet.View()
	if a.subset.given {
		var addresses []string
		for _, m := range view.Members {
			addresses = append(addresses, m.Info.Address)
		}
		slices.Sort(addresses)
		for _, address := range slices.Compact(a.subset.among(addresses)) {
			a.request.Candidates = append(a.request.Candidates, &api.MemberRef{Ref: &api.MemberRef_Address{Address: address}})
		}
		if len(a.request.GetCandidates()) == 0 {
			return nil, nobodyIn
		}
	}
	a.request.RequestId = edge.Name(a.request.GetHeaders())
	a.request.Priority = s.cfg.Objectives[client.Objective(a.request.GetHeaders())]
	a.request.MaxCandidates = uint32(max(s.cfg.Endpoints, 3))
	if a.request.GetPrompt() != nil {
		p, err := s.cfg.Pick(ctx, &api.PickRequest{Request: a.request})
		if err == nil {
			return s.choose(ctx, view, p.GetDecisionId(), p.GetRanking())
		}
		if !a.lax || status.Code(err) != codes.InvalidArgument {
			return nil, err
		}
	}
	return s.anywhere(ctx, view, a)
}

// anywhere is for requests that name no model, such as those that list the
// models: any member that is there will do, of the first model that has one.
func (s *Server) anywhere(ctx context.Context, view *fleet.View, a *ask) (*choice, error) {
	var err error = edge.Nobody
	var models []string
	for _, m := range view.Members {
		if len(m.Info.Models) == 0 || slices.Contains(models, m.Info.Models[0]) {
			continue
		}
		models = append(models, m.Info.Models[0])
		r := &api.Request{Model: m.Info.Models[0], Candidates: a.request.GetCandidates(), MaxCandidates: a.request.GetMaxCandidates()}
		var answer *api.ScoreResponse
		if answer, err = s.cfg.Score(ctx, &api.ScoreRequest{Request: r}); err == nil {
			return s.choose(ctx, view, "", answer.GetRanking())
		}
	}
	return nil, err
}

// choose makes a choice of a ranking.
func (s *Server) choose(ctx context.Context, view *fleet.View, decision string, r *api.Ranking) (*choice, error) {
	candidates := r.GetCandidates()
	best := candidates[0]
	cached := best.GetCachedTokens()
	c := &choice{decision: decision, cached: cached.GetGpu() + cached.GetHost() + cached.GetDisk() + cached.GetPredicted()}
	if s.cfg.Priority {
		c.priority = &r.EnginePriority
	}
	set := func(name, value string) {
		if c.headers == nil {
			c.headers = make(map[string]string)
		}
		c.headers[name] = value
	}
	if pull := best.GetPull().GetFrom().GetAddress(); pull != "" {
		set(client.PullHeader, pull)
	}
	if decode := r.GetDecode(); decode != nil {
		// Who decodes is asked, and has the prompt computed by the other one.
		set(client.PrefillHeader, best.GetMember().GetAddress())
		candidates = []*api.Candidate{decode}
	}
	first := candidates[0].GetMember()
	if first.GetAddress() == "" || best.GetMember().GetAddress() == "" {
		return nil, errors.Join(edge.Nobody, s.withdraw(ctx, decision))
	}
	sharing := 0
	for _, m := range view.Members {
		if m.Info.Address == first.GetAddress() {
			sharing++
		}
	}
	if sharing > 1 {
		// One address stands for several ranks, which the engine tells apart; those
		// of another one are others.
		candidates = candidates[:1]
		set(client.RankHeader, strconv.FormatUint(uint64(first.GetRank()), 10))
	}
	for _, candidate := range candidates {
		if address := candidate.GetMember().GetAddress(); address != "" && !slices.Contains(c.endpoints, address) && len(c.endpoints) < s.cfg.Endpoints {
			c.endpoints = append(c.endpoints, address)
		}
	}
	return c, nil
}

// withdraw a decision that nobody can be sent to.
func (s *Server) withdraw(ctx context.Context, decision string) error {
	if decision == "" {
		return nil
	}
	_, err := s.cfg.Report(context.WithoutCancel(ctx), &api.ReportRequest{Reports: []*api.Report{{DecisionId: decision, Outcome: api.Outcome_OUTCOME_CANCELLED}}})
	return err
}
