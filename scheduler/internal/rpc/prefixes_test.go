package rpc

import (
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// Prompts that share the 64 tokens that member b holds, and go on differently.
func TestPrefixesNameWhatPromptsShare(t *testing.T) {
	h := build(t, nil)
	for i := range uint32(4) {
		ids := append([]uint32(nil), prompt...)
		for k := 64; k < len(ids); k++ {
			ids[k] += 1000 * (i + 1)
		}
		if _, err := h.client.Pick(t.Context(), &api.PickRequest{Request: &api.Request{Model: "m", Prompt: &api.Prompt{Form: &api.Prompt_Tokens{Tokens: &api.Tokens{Ids: ids}}}}}); err != nil {
			t.Fatal(err)
		}
	}
	got, err := h.admin.ListPrefixes(t.Context(), &api.ListPrefixesRequest{})
	if err != nil || len(got.GetPrefixes()) != 1 {
		t.Fatalf("%v, %v", got, err)
	}
	p := got.GetPrefixes()[0]
	if p.GetModel() != "m" || p.GetTokens() != 64 || p.GetHits() != 3 || p.GetParted() != 3 || p.GetKey() == 0 || p.GetHolderCount() != 1 ||
		len(p.GetHolders()) != 1 || p.GetHolders()[0].GetMember().GetId() != name("b") || p.GetHolders()[0].GetCachedTokens().GetGpu() != 64 {
		t.Errorf("%v", p)
	}
	if got, err := h.admin.ListPrefixes(t.Context(), &api.ListPrefixesRequest{Model: "other"}); err != nil || len(got.GetPrefixes()) != 0 {
		t.Errorf("of another model: %v, %v", got, err)
	}
	if _, err := h.admin.ListPrefixes(t.Context(), &api.ListPrefixesRequest{MaxPrefixes: 65}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("too many: %v", err)
	}
}
