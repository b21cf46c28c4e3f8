package rpc

import (
	"context"
	"testing"
	"time"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// What was picked lately is shown as it was answered, with what was reported of it.
func TestDecisionsAreShownWithTheirReports(t *testing.T) {
	h := build(t, nil)
	ask := &api.PickRequest{Request: &api.Request{RequestId: "mine", Tenant: "one", Model: "m", Prompt: &api.Prompt{Form: &api.Prompt_Tokens{Tokens: &api.Tokens{Ids: prompt}}}}}
	d, err := h.client.Pick(t.Context(), ask)
	if err != nil {
		t.Fatal(err)
	}
	n, cached := uint32(len(prompt)), uint32(64)
	if _, err := h.client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{DecisionId: d.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FINISHED, PromptTokens: &n, CachedTokens: &cached}}}); err != nil {
		t.Fatal(err)
	}
	got, err := h.admin.ListDecisions(t.Context(), &api.ListDecisionsRequest{Model: "m"})
	if err != nil || len(got.GetDecisions()) != 1 {
		t.Fatalf("%v %v", got, err)
	}
	x := got.GetDecisions()[0]
	if x.GetDecisionId() != d.GetDecisionId() || x.GetRequestId() != "mine" || x.GetTenant() != "one" || x.GetModel() != "m" ||
		time.Since(time.UnixMilli(int64(x.GetTimeMs()))) > time.Minute || x.GetRanking().GetExplanation() != d.GetRanking().GetExplanation() ||
		len(x.GetRanking().GetCandidates()) != len(d.GetRanking().GetCandidates()) || x.GetReport().GetCachedTokens() != 64 || x.GetReport().GetOutcome() != api.Outcome_OUTCOME_FINISHED {
		t.Errorf("%v", x)
	}
	if got, err := h.admin.ListDecisions(t.Context(), &api.ListDecisionsRequest{Model: "other"}); err != nil || len(got.GetDecisions()) != 0 {
		t.Errorf("of another model: %v %v", got, err)
	}
}

// The service follows the members while it runs.
func TestChangesAndHistoryAreKeptWhileItRuns(t *testing.T) {
	h := build(t, nil)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	joined := map[string]bool{}
	for end := time.Now().Add(30 * time.Second); len(joined) < 3; time.Sleep(5 * time.Millisecond) {
		got, err := h.admin.ListChanges(t.Context(), &api.ListChangesRequest{})
		if err != nil || time.Now().After(end) {
			t.Fatalf("%v %v", got, err)
		}
		for _, c := range got.GetChanges() {
			if c.GetWhat() == "joined" {
				joined[c.GetMemberId()] = true
			}
		}
	}
	h.Changed("-policy", "default", "random")
	if got, err := h.admin.ListChanges(t.Context(), &api.ListChangesRequest{MaxChanges: 1}); err != nil || len(got.GetChanges()) != 1 || got.GetChanges()[0].GetWhat() != "-policy" {
		t.Errorf("%v %v", got, err)
	}
	history, err := h.admin.GetHistory(t.Context(), &api.GetHistoryRequest{})
	if err != nil || len(history.GetPoints()) == 0 || history.GetPoints()[0].GetUnknownMembers()+history.GetPoints()[0].GetExactMembers()+history.GetPoints()[0].GetSyncingMembers()+history.GetPoints()[0].GetApproximateMembers() != 3 {
		t.Errorf("%v %v", history, err)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
