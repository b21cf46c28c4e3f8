package rpc

import (
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// detailsOf are the reason of an error and whether waiting helps.
func detailsOf(t *testing.T, err error) (reason string, wait bool) {
	t.Helper()
	for _, d := range status.Convert(err).Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			if d.GetDomain() != domain || api.ErrorReason_value["ERROR_REASON_"+d.GetReason()] == 0 {
				t.Errorf("%v", d)
			}
			reason = d.GetReason()
		case *errdetails.RetryInfo:
			wait = d.GetRetryDelay().AsDuration() > 0
		}
	}
	return reason, wait
}

func TestErrorsSayWhyAndWhetherWaitingHelps(t *testing.T) {
	h := build(t, nil)
	everyone := []*api.MemberRef{}
	for _, m := range []string{"a", "b", "c"} {
		everyone = append(everyone, &api.MemberRef{Ref: &api.MemberRef_Pod{Pod: "pod-" + m}})
	}
	want := func(name string, r *api.Request, code codes.Code, reason string, waits bool) {
		t.Helper()
		_, err := h.client.Pick(t.Context(), &api.PickRequest{Request: r})
		got, wait := detailsOf(t, err)
		if status.Code(err) != code || got != reason || wait != waits {
			t.Errorf("%s: %v, %q, waiting helps: %v", name, err, got, wait)
		}
	}
	want("no model", &api.Request{}, codes.InvalidArgument, "INVALID_REQUEST", false)
	want("a long name", &api.Request{Model: "m", RequestId: strings.Repeat("x", maxRequestID+1)}, codes.InvalidArgument, "INVALID_REQUEST", false)
	want("no time", &api.Request{Model: "m", Slo: &api.Slo{TtftMs: -1}}, codes.InvalidArgument, "INVALID_REQUEST", false)
	want("no tokens", &api.Request{Model: "m", Prompt: api.TokenIDs(nil)}, codes.InvalidArgument, "INVALID_PROMPT", false)
	want("no body", &api.Request{Model: "m", Prompt: api.Body("{")}, codes.InvalidArgument, "INVALID_PROMPT", false)
	want("no such policy", &api.Request{Model: "m", Policy: "luck"}, codes.InvalidArgument, "UNKNOWN_POLICY", false)
	want("no such model", &api.Request{Model: "x"}, codes.NotFound, "UNKNOWN_MODEL", false)
	want("no such adapter", &api.Request{Model: "m", Adapter: "x"}, codes.NotFound, "UNKNOWN_ADAPTER", false)
	want("own excludes", &api.Request{Model: "m", Exclude: everyone}, codes.FailedPrecondition, "EXCLUDED", false)
	want("nobody listed", &api.Request{Model: "m", Candidates: []*api.MemberRef{{Ref: &api.MemberRef_Pod{Pod: "x"}}}}, codes.FailedPrecondition, "EXCLUDED", false)

	// The last member of a model leaves while there are others.
	id := join(t, h.fleet, fleetOf("other"))
	want("served", &api.Request{Model: "other"}, codes.OK, "", false)
	h.fleet.Leave(id)
	want("a moment ago", &api.Request{Model: "other"}, codes.Unavailable, "MODEL_GONE", true)
	for _, m := range h.fleet.View().Members {
		h.fleet.Leave(m.ID)
	}
	want("an empty fleet", &api.Request{Model: "m"}, codes.Unavailable, "NO_MEMBERS", true)
}
