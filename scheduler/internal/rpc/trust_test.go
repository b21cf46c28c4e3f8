package rpc

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

func ask(model string) *api.ScoreRequest {
	return &api.ScoreRequest{Request: &api.Request{Model: model, Prompt: api.TokenIDs(prompt), MaxCandidates: 100}}
}

// trusts says what the answers call each member's cache state.
func (h *house) trusts(t *testing.T) map[string]api.Trust {
	t.Helper()
	resp, err := h.client.Score(t.Context(), ask("m"))
	if err != nil {
		t.Fatal(err)
	}
	list := make(map[string]api.Trust)
	for _, c := range resp.GetRanking().GetCandidates() {
		list[c.GetMember().GetId()] = c.GetCacheState().GetTrust()
	}
	state, err := h.admin.ListMembers(t.Context(), &api.ListMembersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range state.GetMembers() {
		if got, want := list[m.GetMember().GetId()], m.GetCacheState().GetTrust(); got != want {
			t.Errorf("%s: %v in the ranking, %v in the fleet", m.GetMember().GetId(), got, want)
		}
		if (m.GetCacheState().GetExplanation() == "") != (m.GetCacheState().GetTrust() == api.Trust_TRUST_EXACT) {
			t.Errorf("%v", m.GetCacheState())
		}
	}
	return list
}

func TestSilentMembersAreNotExact(t *testing.T) {
	h := build(t, nil)
	before := time.Now().Add(-2 * time.Second)
	id, err := h.fleet.Join(name("quiet"), before)
	if err != nil {
		t.Fatal(err)
	}
	h.fleet.Receive(id, fleet.Info{Models: []string{"m"}, BlockSize: size, Heartbeat: time.Second / 2}, nil, before)
	h.fleet.SetCacheState(id, fleet.CacheState{Trust: fleet.Exact, Epoch: 1})
	slow, err := h.fleet.Join(name("slow"), before)
	if err != nil {
		t.Fatal(err)
	}
	h.fleet.Receive(slow, fleet.Info{Models: []string{"m"}, BlockSize: size, Heartbeat: 10 * time.Second}, nil, before)
	h.fleet.SetCacheState(slow, fleet.CacheState{Trust: fleet.Exact, Epoch: 1})
	list := h.trusts(t)
	if list[name("slow")] != api.Trust_TRUST_EXACT {
		t.Error("a member was suspected before its next heartbeat was due")
	}
	if list[name("quiet")] != api.Trust_TRUST_SYNCING || list[name("a")] != api.Trust_TRUST_EXACT {
		t.Error(list)
	}
}

func TestNothingIsExactWithoutTheBus(t *testing.T) {
	linked := true
	h := build(t, nil)
	for _, want := range []api.Trust{api.Trust_TRUST_EXACT, api.Trust_TRUST_SYNCING, api.Trust_TRUST_EXACT} {
		for id, got := range h.trusts(t) {
			if got != want {
				t.Errorf("%s is %v with linked %v", id, got, linked)
			}
		}
		linked = !linked
		h.fleet.Link(linked, time.Now())
	}
}

func TestUnknownModelsAreNotRefusedBeforeAllAnnounced(t *testing.T) {
	ready := false
	h := build(t, func(c *Config) { c.Ready = func() bool { return ready } })
	for _, want := range []codes.Code{codes.Unavailable, codes.NotFound} {
		if _, err := h.client.Score(t.Context(), ask("other")); status.Code(err) != want {
			t.Errorf("ready %v: %v", ready, err)
		}
		ready = true
	}
}

// A cache state that is suspect is no promise, and the answer says so.
func TestNoAnswerPromisesWhatIsSuspect(t *testing.T) {
	h := build(t, nil)
	m := h.fleet.View().Named(name("b")) // holds 4 blocks of the prompt
	info := *m.Info
	info.Heartbeat = time.Millisecond
	h.fleet.Receive(m.ID, info, nil, time.Now())
	req := ask("m")
	req.Request.Candidates = []*api.MemberRef{{Ref: &api.MemberRef_MemberId{MemberId: name("b")}}}
	time.Sleep(10 * time.Millisecond) // three heartbeats are missing
	resp, err := h.client.Score(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	r := resp.GetRanking()
	c := r.GetCandidates()[0]
	if c.GetCacheState().GetTrust() != api.Trust_TRUST_SYNCING || c.GetCachedTokens().GetGpu() != 0 || c.GetCachedTokens().GetPredicted() != 4*size || r.Lacks() == "" {
		t.Errorf("%v, %v, fallback %q", c.GetCacheState(), c.GetCachedTokens(), r.Lacks())
	}
}

func TestTrustIsTheSameInTheAPI(t *testing.T) {
	for _, trust := range []fleet.Trust{fleet.Unknown, fleet.Approximate, fleet.Syncing, fleet.Exact} {
		if got := api.Trust(trust.Wire()).String(); got != "TRUST_"+trust.String() {
			t.Errorf("%v is %s", trust, got)
		}
	}
}
