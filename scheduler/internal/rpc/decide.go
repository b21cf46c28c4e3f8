package rpc

import (
	"context"
	"fmt"
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// Pick chooses and reserves.
func (s *Service) Pick(ctx context.Context, req *pb.PickRequest) (*pb.PickResponse, error) {
	d, ranking, err := s.decide(ctx, req.GetRequest(), true)
	if err != nil {
		return nil, err
	}
	return &pb.PickResponse{Decision: d.ID, Ranking: ranking}, nil
}

// Score ranks, and changes nothing.
func (s *Service) Score(ctx context.Context, req *pb.ScoreRequest) (*pb.ScoreResponse, error) {
	_, ranking, err := s.decide(ctx, req.GetRequest(), false)
	if err != nil {
		return nil, err
	}
	return &pb.ScoreResponse{Ranking: ranking}, nil
}

func (s *Service) decide(ctx context.Context, in *pb.Request, reserve bool) (*pick.Decision, *pb.Ranking, error) {
	start := time.Now()
	req, prompt, err := s.request(ctx, in)
	if err != nil {
		return nil, nil, err
	}
	// Nobody waits any more: do not charge a member for it.
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	req.Reserve = reserve
	now := time.Now()
	came := now
	told := Decided{Method: "score", Request: in, Session: req.Session, Start: start, Intake: came.Sub(start)}
	if reserve {
		told.Method = "pick"
	}
	var d *pick.Decision
	told.Queues = reserve && s.waits.Rules().Open()
	if told.Queues {
		d, now, err = s.waits.Pick(ctx, &req, int(in.GetPriority()), func() int64 { return heldBytes(in) }, s.closed, now)
	} else {
		d, err = s.cfg.Picker.Pick(&req, now)
	}
	if err != nil {
		told.Queued = time.Since(came)
		s.tell(ctx, told)
		return nil, nil, s.unready(err)
	}
	ranking := s.rankingOf(d, now)
	queued := now.Sub(came)
	ranking.QueuedMs = float64(queued) / float64(time.Millisecond)
	if prompt.Note != "" {
		ranking.Reason += " (" + prompt.Note + ")"
	}
	told.Decision, told.Took, told.Queued = d, time.Since(start)-queued, queued
	s.tell(ctx, told)
	return d, ranking, nil
}

func (s *Service) tell(ctx context.Context, d Decided) {
	if s.cfg.Decided != nil {
		s.cfg.Decided(ctx, d)
	}
}

// callBytes is what a call takes while it waits, its request apart: stack,
// stream and what the queue keeps.
const callBytes = 16 << 10

// heldBytes is what a call takes while it waits, apart from the prompt.
func heldBytes(in *pb.Request) int64 { return callBytes + int64(proto.Size(in)) }

// Explain ranks by two policies, and changes nothing.
func (s *Service) Explain(ctx context.Context, in *pb.ExplainRequest) (*pb.ExplainResponse, error) {
	req, prompt, err := s.request(ctx, in.GetRequest())
	if err != nil {
		return nil, err
	}
	now := time.Now()
	d, shadow, err := s.cfg.Picker.Explain(&req, in.GetShadow(), now)
	if err != nil {
		return nil, s.unready(err)
	}
	resp := &pb.ExplainResponse{Ranking: s.rankingOf(d, now)}
	if prompt.Note != "" {
		resp.Ranking.Reason += " (" + prompt.Note + ")"
	}
	if shadow == nil {
		return resp, nil
	}
	resp.Shadow = s.rankingOf(shadow, now)
	c := &d.Shadow
	resp.Counterfactual = &pb.Counterfactual{
		Policy: c.Policy, Member: &pb.Member{}, Same: c.Same,
		FirstTokenMs: c.FirstTokenMS, TotalMs: c.TotalMS, CachedTokens: int64(c.CachedTokens),
	}
	setMember(resp.Counterfactual.Member, c.Member)
	return resp, nil
}

// unready says of an error that who could serve the request may not have been
// heard yet.
func (s *Service) unready(err error) error {
	if s.cfg.Ready() {
		return err
	}
	return fmt.Errorf("%w: %w", errUnready, err)
}

// slot holds the messages of one candidate, so that a ranking costs two
// allocations whatever its length.
type slot struct {
	candidate pb.Candidate
	member    pb.Member
	cached    pb.CachedTokens
	cost      pb.Cost
	picture   pb.Picture
}

func (s *Service) rankingOf(d *pick.Decision, now time.Time) *pb.Ranking {
	slots := make([]slot, len(d.Candidates))
	list := make([]*pb.Candidate, len(d.Candidates))
	for i := range d.Candidates {
		c, to := &d.Candidates[i], &slots[i]
		list[i] = &to.candidate
		setMember(&to.member, c.Member)
		setPicture(&to.picture, c.Member, c.Belief, now)
		to.cached.Gpu, to.cached.Host = uint64(c.Cached.GPU), uint64(c.Cached.Host)
		to.cached.Disk, to.cached.Predicted = uint64(c.Cached.Disk), uint64(c.Cached.Predicted)
		to.cost.TotalMs, to.cost.WaitMs, to.cost.LoadMs = c.Cost.Total, c.Cost.Wait, c.Cost.Load
		to.cost.PrefillMs, to.cost.MissMs = c.Cost.Prefill, c.Cost.Miss
		to.cost.EvictMs, to.cost.DecodeMs = c.Cost.Evict, c.Cost.Decode
		to.candidate.Member, to.candidate.Cached = &to.member, &to.cached
		to.candidate.Cost, to.candidate.Picture = &to.cost, &to.picture
		to.candidate.UncachedTokens = uint64(c.Uncached)
		to.candidate.Running, to.candidate.Waiting = uint32(max(0, c.Running)), uint32(max(0, c.Waiting))
		to.candidate.LoadAgeMs = loadAge(c.Member, now)
		if c.Pull.Member != nil {
			to.candidate.PullFrom = peerOf(&c.Pull)
		}
	}
	reason := d.Reason
	if len(d.Candidates) > 0 {
		if warning := s.warn(d.Candidates[0].Member.Info.Name); warning != "" {
			reason += " (" + warning + ")"
		}
	}
	r := &pb.Ranking{
		Candidates:           list,
		Reason:               reason,
		Policy:               d.Policy,
		Fallback:             d.Fallback,
		PromptTokens:         uint64(d.PromptTokens),
		EnginePriority:       d.EnginePriority,
		ExpectedOutputTokens: float64(d.ExpectedOutput),
	}
	if d.Decode != nil {
		other := s.rankingOf(&pick.Decision{Candidates: []pick.Candidate{*d.Decode}, SlackMS: math.NaN()}, now)
		r.Decode = other.Candidates[0]
	}
	if !math.IsNaN(d.SlackMS) {
		r.SlackMs = &d.SlackMS
	}
	return r
}

func peerOf(p *pick.Pull) *pb.Peer {
	peer := &pb.Peer{Member: &pb.Member{}, Tokens: uint64(p.Tokens), TransferMs: p.TransferMS, PrefillMs: p.PrefillMS}
	setMember(peer.Member, p.Member)
	return peer
}

// outcomes of the wire.
var outcomes = map[pb.Outcome]fleet.Outcome{
	pb.Outcome_OUTCOME_FIRST_TOKEN: fleet.FirstToken,
	pb.Outcome_OUTCOME_FINISHED:    fleet.Finished,
	pb.Outcome_OUTCOME_FAILED:      fleet.Failed,
	pb.Outcome_OUTCOME_CANCELLED:   fleet.Cancelled,
}

// Report closes a decision, or tells how far it came.
func (s *Service) Report(_ context.Context, req *pb.ReportRequest) (*pb.ReportResponse, error) {
	outcome, ok := outcomes[req.GetOutcome()]
	switch {
	case req.GetDecision() == "":
		return nil, fmt.Errorf("the report names no decision: %w", intake.ErrInvalid)
	case !ok:
		return nil, fmt.Errorf("outcome %d: %w", req.GetOutcome(), intake.ErrInvalid)
	case req.PromptTokens != nil && req.GetCachedTokens() > req.GetPromptTokens():
		return nil, fmt.Errorf("%d of %d prompt tokens cached: %w", req.GetCachedTokens(), req.GetPromptTokens(), intake.ErrInvalid)
	}
	known := s.cfg.Picker.Report(pick.Report{
		Decision:     req.GetDecision(),
		Outcome:      outcome,
		Member:       req.GetMember(),
		PromptTokens: req.PromptTokens,
		CachedTokens: req.CachedTokens,
		OutputTokens: req.GetOutputTokens(),
		TTFTMS:       req.GetTtftMs(),
	}, time.Now())
	s.waits.Wake()
	if s.cfg.Reported != nil {
		s.cfg.Reported(req.GetOutcome())
	}
	resp := &pb.ReportResponse{Known: known}
	if name := req.GetMember(); name != "" && s.cfg.Fleet.View().Named(name) == nil {
		resp.Note = fmt.Sprintf("there is no member %.200q: nobody is charged or blamed for what it served", name)
	}
	return resp, nil
}
