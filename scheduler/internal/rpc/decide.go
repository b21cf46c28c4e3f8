package rpc

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// Pick chooses and reserves; a repeat of a request gets what was chosen for it.
func (s *Service) Pick(ctx context.Context, req *api.PickRequest) (*api.PickResponse, error) {
	if req.GetRequest().GetRequestId() == "" {
		return s.pick(ctx, req)
	}
	return s.repeats.once(ctx, req, s.pick)
}

// Place is Pick for the proxies of this process, whose clients name requests as
// they like: a name is remembered, and the next request of that name is another.
func (s *Service) Place(ctx context.Context, req *api.PickRequest) (*api.PickResponse, error) {
	resp, err := s.pick(ctx, req)
	if err == nil && req.GetRequest().GetRequestId() != "" {
		s.placed.last(req, resp)
	}
	return resp, err
}

func (s *Service) pick(ctx context.Context, req *api.PickRequest) (*api.PickResponse, error) {
	if id := req.GetReplacesDecisionId(); id != "" {
		if s.cfg.Picker.Report(pick.Report{Decision: id, Outcome: fleet.Cancelled}, time.Now()) {
			s.waits.Wake()
		}
	}
	d, ranking, err := s.decide(ctx, req.GetRequest(), true)
	if err != nil {
		return nil, err
	}
	s.keep(req.GetRequest(), d, ranking, time.Now())
	return &api.PickResponse{DecisionId: d.ID, Ranking: ranking, ExpiresInMs: s.expiry(d.ID)}, nil
}

// expiry is in how many ms a decision is forgotten.
func (s *Service) expiry(id string) float64 {
	n, err := strconv.ParseUint(id, 16, 64)
	if err != nil {
		return 0
	}
	now := time.Now()
	return milliseconds(s.cfg.Fleet.Expires(fleet.Decision(n)).Sub(now))
}

// Score ranks, and changes nothing.
func (s *Service) Score(ctx context.Context, req *api.ScoreRequest) (*api.ScoreResponse, error) {
	_, ranking, err := s.decide(ctx, req.GetRequest(), false)
	if err != nil {
		return nil, err
	}
	return &api.ScoreResponse{Ranking: ranking}, nil
}

func (s *Service) decide(ctx context.Context, in *api.Request, reserve bool) (*pick.Decision, *api.Ranking, error) {
	start := time.Now()
	req, prompt, err := s.request(ctx, in)
	if err != nil {
		return nil, nil, err
	}
	// Nobody waits any more: do not reserve anything for it.
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	req.Reserve = reserve
	now := time.Now()
	came := now
	decided := Decided{Method: "score", Request: in, Session: req.Session, Start: start, Intake: came.Sub(start)}
	if reserve {
		decided.Method = "pick"
	}
	var d *pick.Decision
	decided.Queues = reserve && s.waits.Rules().Open()
	if decided.Queues {
		d, now, err = s.waits.Pick(ctx, &req, int(in.GetPriority()), func() int64 { return heldBytes(in) }, s.closed, now)
	} else {
		d, err = s.cfg.Picker.Pick(&req, now)
	}
	if err != nil {
		decided.Queued = time.Since(came)
		s.count(ctx, decided)
		return nil, nil, s.unready(err)
	}
	ranking := s.rankingOf(d, now)
	queued := now.Sub(came)
	ranking.QueuedMs = float64(queued) / float64(time.Millisecond)
	if prompt.Note != "" {
		ranking.Explanation += " (" + prompt.Note + ")"
	}
	decided.Decision, decided.Took, decided.Queued = d, time.Since(start)-queued, queued
	s.count(ctx, decided)
	return d, ranking, nil
}

func (s *Service) count(ctx context.Context, d Decided) {
	if s.cfg.Decided != nil {
		s.cfg.Decided(ctx, d)
	}
}

// callBytes is what a call takes while it waits, its request apart: stack,
// stream and what the queue keeps.
const callBytes = 16 << 10

// heldBytes is what a call takes while it waits, apart from the prompt.
func heldBytes(in *api.Request) int64 { return callBytes + int64(proto.Size(in)) }

// Explain ranks by two policies, and changes nothing.
func (s *Service) Explain(ctx context.Context, in *api.ExplainRequest) (*api.ExplainResponse, error) {
	req, prompt, err := s.request(ctx, in.GetRequest())
	if err != nil {
		return nil, err
	}
	now := time.Now()
	d, shadow, err := s.cfg.Picker.Explain(&req, in.GetShadowPolicy(), now)
	if err != nil {
		return nil, s.unready(err)
	}
	resp := &api.ExplainResponse{Ranking: s.rankingOf(d, now)}
	if prompt.Note != "" {
		resp.Ranking.Explanation += " (" + prompt.Note + ")"
	}
	if shadow == nil {
		return resp, nil
	}
	resp.ShadowRanking = s.rankingOf(shadow, now)
	resp.Counterfactual = counterfactual(&d.Shadow)
	return resp, nil
}

// counterfactual is nil where no other policy was asked.
func counterfactual(c *pick.Counterfactual) *api.Counterfactual {
	if c.Policy == "" {
		return nil
	}
	to := &api.Counterfactual{
		Policy: c.Policy, Member: &api.Member{}, Same: c.Same,
		FirstTokenMs: c.FirstTokenMS, TotalMs: c.TotalMS, CachedTokens: int32(c.CachedTokens),
	}
	setMember(to.Member, c.Member)
	return to
}

// FindDecision gives what was answered to the request of a name.
func (s *Service) FindDecision(_ context.Context, in *api.FindDecisionRequest) (*api.FindDecisionResponse, error) {
	name, now := nameOf(&api.Request{Tenant: in.GetTenant(), RequestId: in.GetRequestId()}), time.Now()
	decision, age := s.repeats.find(name, now)
	if decision == nil {
		decision, age = s.placed.find(name, now)
	}
	if decision == nil {
		return nil, fmt.Errorf("request_id %.128q of tenant %.256q: %w", in.GetRequestId(), in.GetTenant(), errForgotten)
	}
	return &api.FindDecisionResponse{Decision: decision, AgeMs: milliseconds(age)}, nil
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
	candidate api.Candidate
	member    api.Member
	cached    api.CachedTokens
	cost      api.Cost
	state     api.CacheState
	loadAge   float64
}

func (s *Service) rankingOf(d *pick.Decision, now time.Time) *api.Ranking {
	slots := make([]slot, len(d.Candidates))
	list := make([]*api.Candidate, len(d.Candidates))
	for i := range d.Candidates {
		c, to := &d.Candidates[i], &slots[i]
		list[i] = &to.candidate
		setMember(&to.member, c.Member)
		setState(&to.state, c.Member, c.Belief, now)
		to.cached.Gpu, to.cached.Host = uint32(c.Cached.GPU), uint32(c.Cached.Host)
		to.cached.Disk, to.cached.Predicted = uint32(c.Cached.Disk), uint32(c.Cached.Predicted)
		to.cost.TotalMs, to.cost.WaitMs, to.cost.LoadMs = c.Cost.Total, c.Cost.Wait, c.Cost.Load
		to.cost.PrefillMs, to.cost.MissMs = c.Cost.Prefill, c.Cost.Miss
		to.cost.EvictMs, to.cost.DecodeMs = c.Cost.Evict, c.Cost.Decode
		to.candidate.Member, to.candidate.CachedTokens = &to.member, &to.cached
		to.candidate.Cost, to.candidate.CacheState = &to.cost, &to.state
		to.candidate.UncachedTokens = uint32(c.Uncached)
		to.candidate.RunningRequests, to.candidate.WaitingRequests = uint32(max(0, c.Running)), uint32(max(0, c.Waiting))
		if age, ok := loadAge(c.Member, now); ok {
			to.loadAge = age
			to.candidate.LoadAgeMs = &to.loadAge
		}
		if c.Pull.Member != nil {
			to.candidate.Pull = pullOf(&c.Pull)
		}
	}
	explanation := d.Reason
	if len(d.Candidates) > 0 {
		if warning := s.warn(d.Candidates[0].Member.Info.Name); warning != "" {
			explanation += " (" + warning + ")"
		}
	}
	r := &api.Ranking{
		Candidates:           list,
		Reason:               reasons[d.Why],
		Explanation:          explanation,
		Policy:               d.Policy,
		PromptTokens:         uint32(d.PromptTokens),
		EnginePriority:       d.EnginePriority,
		ExpectedOutputTokens: float64(d.ExpectedOutput),
		EligibleMembers:      uint32(d.Number),
	}
	for _, f := range d.Fallbacks {
		r.Fallbacks = append(r.Fallbacks, &api.Fallback{Reason: fallbacks[f.Kind], Explanation: f.Text})
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

var reasons = [...]api.Reason{
	pick.WhyCost:    api.Reason_REASON_LOWEST_COST,
	pick.WhyNear:    api.Reason_REASON_NEAR_TIE,
	pick.WhySession: api.Reason_REASON_SESSION,
	pick.WhyOnly:    api.Reason_REASON_ONLY_CANDIDATE,
	pick.WhyPolicy:  api.Reason_REASON_POLICY,
}

var fallbacks = [...]api.FallbackReason{
	pick.NoTokens:       api.FallbackReason_FALLBACK_REASON_NO_TOKENS,
	pick.NoBlockSize:    api.FallbackReason_FALLBACK_REASON_BLOCK_SIZE_UNKNOWN,
	pick.OtherBlockSize: api.FallbackReason_FALLBACK_REASON_BLOCK_SIZE_MISMATCH,
	pick.NotExact:       api.FallbackReason_FALLBACK_REASON_CACHE_STATE_NOT_EXACT,
	pick.Assumed:        api.FallbackReason_FALLBACK_REASON_CACHE_STATE_PREDICTED,
	pick.NoState:        api.FallbackReason_FALLBACK_REASON_NO_CACHE_STATE,
	pick.AllFailing:     api.FallbackReason_FALLBACK_REASON_ALL_FAILING,
	pick.AllWithdrawn:   api.FallbackReason_FALLBACK_REASON_ALL_WITHDRAWN,
	pick.AllLost:        api.FallbackReason_FALLBACK_REASON_ALL_SILENT,
	pick.NoHeartbeats:   api.FallbackReason_FALLBACK_REASON_STALE,
}

func pullOf(p *pick.Pull) *api.Pull {
	pull := &api.Pull{From: &api.Member{}, Tokens: uint32(p.Tokens), TransferMs: p.TransferMS, PrefillMs: p.PrefillMS}
	setMember(pull.From, p.Member)
	return pull
}
