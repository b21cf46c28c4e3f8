package rpc

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
)

// A session is one session whether the caller names it, a header does or the
// body: all its requests have one member.
func TestHeaderAndBodyKeyAgree(t *testing.T) {
	h := build(t, nil)
	s, err := intake.NewSessions("x-session-id", "extra_body.decode_id")
	if err != nil {
		t.Fatal(err)
	}
	place := func(r *api.Request) string {
		t.Helper()
		r.Model, r.Policy = "m", "session"
		answer, err := h.client.Score(t.Context(), &api.ScoreRequest{Request: r})
		if err != nil {
			t.Fatal(err)
		}
		return answer.GetRanking().GetCandidates()[0].GetMember().GetId()
	}
	body := func(id int) *api.Prompt {
		return api.Body(fmt.Sprintf(`{"prompt":[1,2,3,%d],"extra_body":{"decode_id":"s%d"}}`, id, id))
	}
	members, strays := make(map[string]bool), 0
	for i := range 40 {
		id := fmt.Sprintf("s%d", i)
		want := place(&api.Request{SessionId: id})
		members[want] = true
		if place(&api.Request{Headers: map[string]string{"X-Session-Id": id}}) == want {
			strays++ // until the scheduler is told of the header
		}
	}
	if len(members) != 3 || strays == 40 {
		t.Errorf("%d members, %d of 40 met before the headers count: nothing is shown", len(members), strays)
	}
	h.cfg.Intake.SetSessions(s)
	for i := range 40 {
		id := fmt.Sprintf("s%d", i)
		want := place(&api.Request{SessionId: id})
		for form, r := range map[string]*api.Request{
			"header":      {Headers: map[string]string{"X-Session-Id": id, "other": "x"}},
			"body":        {Prompt: body(i)},
			"chat":        {Prompt: api.Body(fmt.Sprintf(`{"messages":[],"extra_body":{"decode_id":%q}}`, id))},
			"own wins":    {SessionId: id, Headers: map[string]string{"x-session-id": "another"}, Prompt: body(i + 1)},
			"header wins": {Headers: map[string]string{"x-session-id": id}, Prompt: body(i + 1)},
		} {
			if got := place(r); got != want {
				t.Errorf("%s of %s: %s, want %s", form, id, got, want)
			}
		}
	}
	headers := make(map[string]string)
	for i := range intake.MaxHeaders + 1 {
		headers[fmt.Sprint(i)] = ""
	}
	_, err = h.client.Score(t.Context(), &api.ScoreRequest{Request: &api.Request{Model: "m", Headers: headers}})
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "257 headers") {
		t.Errorf("too many headers: %v", err)
	}
}
