package rpc

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// Member b holds 64 tokens of the prompt of 100, and its engine finds 48 of them.
func TestBooksSayWhatBecameOfEachToken(t *testing.T) {
	h := build(t, nil)
	d, err := h.client.Pick(t.Context(), &api.PickRequest{Request: &api.Request{Model: "m", Prompt: &api.Prompt{Form: &api.Prompt_Tokens{Tokens: &api.Tokens{Ids: prompt}}}, Candidates: []*api.MemberRef{{Ref: &api.MemberRef_MemberId{MemberId: name("b")}}}}})
	if err != nil {
		t.Fatal(err)
	}
	report := &api.ReportRequest{Reports: []*api.Report{{DecisionId: d.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FINISHED, PromptTokens: proto.Uint32(100), CachedTokens: proto.Uint32(48)}}}
	if _, err := h.client.Report(t.Context(), report); err != nil {
		t.Fatal(err)
	}
	got, err := h.admin.GetBooks(t.Context(), &api.GetBooksRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := &api.GetBooksResponse{
		Picked:         &api.HitTokens{PromptTokens: 100, IdealTokens: 64, FeasibleTokens: 64, RoutedTokens: 64, LeastLoadTokens: 64},
		BookedRequests: 1, BookedPromptTokens: 100, UsedTokens: 48,
		Lost: []*api.LostTokens{
			{Cause: api.Loss_LOSS_UNSEEN, Tokens: 32, Explanation: losses[1].text},
			{Cause: api.Loss_LOSS_MISPREDICTED, Tokens: 16, Explanation: losses[10].text},
			{Cause: api.Loss_LOSS_UNCACHEABLE, Tokens: 4, Explanation: losses[11].text},
		},
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
}

// Every cause has its number on the wire, the same as here, and a meaning.
func TestEveryLossHasItsNumberAndMeaning(t *testing.T) {
	for cause, l := range losses {
		if cause > 0 && (int(l.cause) != cause || l.text == "") {
			t.Errorf("cause %d is %v: %q", cause, l.cause, l.text)
		}
	}
	if len(api.Loss_name) != len(losses) {
		t.Errorf("%d causes on the wire, %d in the books", len(api.Loss_name), len(losses))
	}
}
