package stage

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/protobuf/proto"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// Served is a request of a burst: how many of its tokens the scheduler said
// were held when it was asked, how many it expected to be cached when the
// request starts, and how many the engine then found.
type Served struct {
	Prompt, Held, Expected, Cached int
	Exact                          bool
	Why                            string // of what is not EXACT
}

// Off is by how many tokens what was expected is wrong.
func (s Served) Off() int { return max(s.Expected-s.Cached, s.Cached-s.Expected) }

// Burst asks for each prompt in turn, sends it without waiting for those before,
// and reports what the engine counted, which send gives. sent is called with the
// number of those that were sent.
func (s *Stage) Burst(ctx context.Context, model string, prompts [][]uint32,
	send func(ctx context.Context, tokens []uint32) (cached int, err error), sent func(n int),
) ([]Served, error) {
	list, errs := make([]Served, len(prompts)), make([]error, len(prompts))
	var group sync.WaitGroup
	for i, tokens := range prompts {
		answer, err := s.Client.Pick(ctx, &api.PickRequest{Request: &api.Request{Model: model, Prompt: api.TokenIDs(tokens)}})
		if err != nil {
			errs[i] = err
			continue
		}
		first := answer.GetRanking().GetCandidates()[0]
		has := first.GetCachedTokens()
		list[i] = Served{Prompt: len(tokens), Held: int(has.GetGpu() + has.GetHost() + has.GetDisk()), Exact: Trusted(first)}
		if !list[i].Exact {
			list[i].Why = first.GetCacheState().GetExplanation()
		}
		list[i].Expected = list[i].Held + int(has.GetPredicted())
		group.Go(func() {
			if list[i].Cached, errs[i] = send(ctx, tokens); errs[i] != nil {
				return
			}
			_, errs[i] = s.Client.Report(ctx, &api.ReportRequest{Reports: []*api.Report{{
				DecisionId: answer.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FINISHED,
				PromptTokens: proto.Uint32(uint32(len(tokens))), CachedTokens: proto.Uint32(uint32(list[i].Cached)),
			}}})
		})
		sent(i + 1)
	}
	group.Wait()
	return list, errors.Join(errs...)
}
