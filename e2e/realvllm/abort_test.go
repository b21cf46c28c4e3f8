package realvllm_test

import (
	"context"
	"time"

	"github.com/kvscout/kvscout/e2e/realvllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// aborts gives up requests in the middle of their prompts and sends the same
// prompt at once. What a step computes is found by whoever comes during it and
// is announced when it ends, so the answer may be below the engine by what the
// steps under way compute. It is never above.
func (r *run) aborts() {
	var below, most int
	const n = 12
	for i := range short(n) {
		r.settle()
		tokens := r.tokens(3900)
		ask := &api.PickRequest{Request: &api.Request{Model: realvllm.Model, Prompt: api.TokenIDs(tokens)}}
		picked, err := r.stage.Client.Pick(r.t.Context(), ask)
		if err != nil {
			r.t.Fatal(err)
		}
		ctx, giveUp := context.WithTimeout(r.t.Context(), time.Duration(5+15*i)*time.Millisecond)
		_, err = r.engine.Complete(ctx, realvllm.Request{Tokens: tokens})
		giveUp()
		outcome := api.Outcome_OUTCOME_CANCELLED
		if err == nil {
			outcome = api.Outcome_OUTCOME_FINISHED
		}
		if _, err := r.stage.Client.Report(r.t.Context(), &api.ReportRequest{Reports: []*api.Report{{DecisionId: picked.GetDecisionId(), Outcome: outcome}}}); err != nil {
			r.t.Fatal(err)
		}
		held, candidate := r.predict(realvllm.Request{Tokens: tokens})
		expected := held + int(candidate.GetCachedTokens().GetPredicted())
		found := r.complete(realvllm.Request{Tokens: tokens}).CachedTokens
		// Where what was sent stands for the cache state, an answer says so.
		wrong := expected > found && outcome == api.Outcome_OUTCOME_CANCELLED && stage.Trusted(candidate)
		if held > found || wrong {
			r.t.Errorf("OVER: given up, then sent again: held %d, expected %d, engine %d; %v", held, expected, found, candidate.GetCacheState())
		}
		if held < found {
			below++
			most = max(most, found-held)
		}
		r.t.Logf("%v: held %d, expected %d, engine %d", outcome, held, expected, found)
	}
	r.t.Logf("given up and sent again: %d of %d answers below the engine, by %d tokens at most; none above", below, short(n), most)
	r.requests(5, realvllm.Request{})
}
