package rpc

import (
	"context"
	"fmt"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// maxRefs bounds the lists of candidates and of excluded members: each is
// compared with every member.
const maxRefs = 4096

// maxTenant bounds a tenant's name in bytes: it is kept for a while.
const maxTenant = 256

// request turns a call into a request for the picker. What it says of the
// prompt beyond that is in the intake's own prompt.
func (s *Service) request(ctx context.Context, r *pb.Request) (pick.Request, intake.Prompt, error) {
	if r == nil {
		return pick.Request{}, intake.Prompt{}, fmt.Errorf("the call has no request: %w", intake.ErrInvalid)
	}
	if n := len(r.GetTenant()); n > maxTenant {
		return pick.Request{}, intake.Prompt{}, fmt.Errorf("tenant of %d bytes, at most %d: %w", n, maxTenant, intake.ErrInvalid)
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
	p, err := s.prompt(ctx, r)
	if err != nil {
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
		Top:            int(r.GetTop()),
		Tenant:         r.GetTenant(),
		Targets: policy.Targets{
			TTFT: float64(r.GetSlo().GetTtftMs()),
			TPOT: float64(r.GetSlo().GetTpotMs()),
			E2E:  float64(r.GetSlo().GetE2EMs()),
		},
	}, p, nil
}

// session of a request whose prompt was understood.
func (s *Service) session(r *pb.Request) string {
	if r.GetSession() != "" {
		return r.GetSession()
	}
	body := r.GetOpenaiBody()
	if body == nil {
		body = r.GetChat().GetExtraJson()
	}
	return s.cfg.Intake.Session(r.GetHeaders(), body)
}

func (s *Service) prompt(ctx context.Context, r *pb.Request) (intake.Prompt, error) {
	in := intake.Request{
		Model:      r.GetModel(),
		Adapter:    r.GetAdapter(),
		Salt:       r.GetCacheSalt(),
		SkipsCache: r.GetSkipsPrefixCache(),
	}
	for _, it := range r.GetItems() {
		in.Items = append(in.Items, blockkey.Item{ID: it.GetHash(), Offset: int(it.GetOffset()), Length: int(it.GetLength())})
	}
	switch p := r.GetPrompt().(type) {
	case *pb.Request_Tokens:
		return s.cfg.Intake.Tokens(in, p.Tokens.GetIds())
	case *pb.Request_TokenBytes:
		return s.cfg.Intake.TokenBytes(in, p.TokenBytes)
	case *pb.Request_Keys:
		return s.cfg.Intake.Keys(in, p.Keys.GetKeys(), p.Keys.GetBlockSize(), p.Keys.GetPromptTokens())
	case *pb.Request_Text:
		return s.cfg.Intake.Text(ctx, in, p.Text)
	case *pb.Request_Chat:
		return s.cfg.Intake.Chat(ctx, in, p.Chat.GetMessagesJson(), p.Chat.GetExtraJson())
	case *pb.Request_OpenaiBody:
		return s.cfg.Intake.Body(ctx, in, p.OpenaiBody)
	}
	return s.cfg.Intake.None(in), nil
}

func refs(field string, list []*pb.MemberRef) ([]pick.Ref, error) {
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
		case *pb.MemberRef_Member:
			r.Member = ref.Member
		case *pb.MemberRef_Pod:
			r.Pod = ref.Pod
		case *pb.MemberRef_Address:
			r.Address = ref.Address
		}
		if r == (pick.Ref{}) {
			return nil, fmt.Errorf("%s: an entry names nobody: %w", field, intake.ErrInvalid)
		}
		out = append(out, r)
	}
	return out, nil
}
