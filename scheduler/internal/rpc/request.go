package rpc

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/kvscout/kvscout/protocol/blockkey"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// maxRefs bounds the lists of candidates and of excluded members: each is
// compared with every member.
const maxRefs = 4096

// maxTenant and maxRequestID bound names in bytes: they are kept for a while.
const maxTenant, maxRequestID = 256, 128

// unreadable is what is wrong with a prompt; it is an errPrompt besides.
type unreadable struct{ error }

func (u unreadable) Unwrap() error        { return u.error }
func (u unreadable) Is(target error) bool { return target == errPrompt }

// request turns a call into a request for the picker. What it says of the
// prompt beyond that is in the intake's own prompt.
func (s *Service) request(ctx context.Context, r *api.Request) (pick.Request, intake.Prompt, error) {
	if r == nil {
		return pick.Request{}, intake.Prompt{}, fmt.Errorf("the call has no request: %w", intake.ErrInvalid)
	}
	if n := len(r.GetTenant()); n > maxTenant {
		return pick.Request{}, intake.Prompt{}, fmt.Errorf("tenant of %d bytes, at most %d: %w", n, maxTenant, intake.ErrInvalid)
	}
	if n := len(r.GetRequestId()); n > maxRequestID {
		return pick.Request{}, intake.Prompt{}, fmt.Errorf("request_id of %d bytes, at most %d: %w", n, maxRequestID, intake.ErrInvalid)
	}
	if n := len(r.GetHeaders()); n > intake.MaxHeaders {
		return pick.Request{}, intake.Prompt{}, fmt.Errorf("%d headers, at most %d: %w", n, intake.MaxHeaders, intake.ErrInvalid)
	}
	candidates, err := refs("candidates", r.GetCandidates())
	if err != nil {
		return pick.Request{}, intake.Prompt{}, err
	}
	exclude, err := refs("exclude", r.GetExclude())
	if err != nil {
		return pick.Request{}, intake.Prompt{}, err
	}
	targets, err := targetsOf(r.GetSlo())
	if err != nil {
		return pick.Request{}, intake.Prompt{}, err
	}
	p, err := s.prompt(ctx, r)
	if err != nil {
		if errors.Is(err, intake.ErrInvalid) {
			err = unreadable{err}
		}
		return pick.Request{}, intake.Prompt{}, err
	}
	if p.Model == "" {
		return pick.Request{}, intake.Prompt{}, fmt.Errorf("no model is named: %w", intake.ErrInvalid)
	}
	return pick.Request{
		Model:      p.Model,
		Adapter:    p.Adapter,
		Salt:       p.Salt,
		SkipsCache: p.SkipsCache,
		Items:      p.Items,
		Prompt: pick.Prompt{
			Tokens:    p.Tokens,
			Keys:      p.Keys,
			BlockSize: p.BlockSize,
			Length:    p.Length,
			Fallback:  p.Fallback,

			Beginnings: pick.Beginnings(nil, p.Beginning),
		},
		Session:        s.session(r),
		Candidates:     candidates,
		Exclude:        exclude,
		Policy:         r.GetPolicy(),
		ExpectedOutput: int(r.GetExpectedOutputTokens()),
		Top:            int(min(r.GetMaxCandidates(), math.MaxInt32)),
		Tenant:         r.GetTenant(),
		Targets:        targets,
	}, p, nil
}

// targetsOf checks a request's own targets.
func targetsOf(slo *api.Slo) (policy.Targets, error) {
	t := policy.Targets{TTFT: slo.GetTtftMs(), TPOT: slo.GetTpotMs(), E2E: slo.GetE2EMs()}
	for _, ms := range []float64{t.TTFT, t.TPOT, t.E2E} {
		if !(ms >= 0) || math.IsInf(ms, 0) {
			return policy.Targets{}, fmt.Errorf("slo: a target of %v ms: %w", ms, intake.ErrInvalid)
		}
	}
	return t, nil
}

// session of a request whose prompt was understood.
func (s *Service) session(r *api.Request) string {
	if r.GetSessionId() != "" {
		return r.GetSessionId()
	}
	return s.cfg.Intake.Session(r.GetHeaders(), r.GetPrompt().GetOpenaiBody())
}

func (s *Service) prompt(ctx context.Context, r *api.Request) (intake.Prompt, error) {
	in := intake.Request{Model: r.GetModel(), Adapter: r.GetAdapter(), SkipsCache: r.GetSkipsPrefixCache()}
	switch p := r.GetPrompt().GetForm().(type) {
	case *api.Prompt_Tokens:
		in.Salt = p.Tokens.GetCacheSalt()
		for _, it := range p.Tokens.GetMultimodalItems() {
			in.Items = append(in.Items, blockkey.Item{ID: it.GetHash(), Offset: int(it.GetOffsetTokens()), Length: int(it.GetLengthTokens())})
		}
		return s.cfg.Intake.Tokens(in, p.Tokens.GetIds())
	case *api.Prompt_BlockKeys:
		return s.cfg.Intake.Keys(in, p.BlockKeys.GetKeys(), p.BlockKeys.GetBlockSizeTokens(), uint64(p.BlockKeys.GetPromptTokens()))
	case *api.Prompt_OpenaiBody:
		return s.cfg.Intake.Body(ctx, in, p.OpenaiBody)
	}
	return s.cfg.Intake.None(in), nil
}

func refs(field string, list []*api.MemberRef) ([]pick.Ref, error) {
	if len(list) == 0 {
		return nil, nil
	}
	if len(list) > maxRefs {
		return nil, fmt.Errorf("%s: %d entries, the limit is %d: %w", field, len(list), maxRefs, intake.ErrInvalid)
	}
	out := make([]pick.Ref, 0, len(list))
	for _, m := range list {
		var r pick.Ref
		switch ref := m.GetRef().(type) {
		case *api.MemberRef_MemberId:
			r.Member = ref.MemberId
		case *api.MemberRef_Pod:
			r.Pod = ref.Pod
		case *api.MemberRef_Address:
			r.Address = ref.Address
		}
		if r == (pick.Ref{}) {
			return nil, fmt.Errorf("%s: an entry names nobody: %w", field, intake.ErrInvalid)
		}
		out = append(out, r)
	}
	return out, nil
}
