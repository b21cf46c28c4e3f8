package rpc

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/admission"
)

func pickCall(id uint64, r *api.Request) *api.PickStreamRequest {
	return &api.PickStreamRequest{Id: id, Call: &api.PickStreamRequest_Pick{Pick: &api.PickRequest{Request: r}}}
}

func cancelCall(id uint64) *api.PickStreamRequest {
	return &api.PickStreamRequest{Id: id, Call: &api.PickStreamRequest_Cancel{Cancel: &api.Cancel{}}}
}

// talk opens a stream: say sends, hear takes one answer.
func (h *house) talk(t *testing.T) (stream api.Scheduler_PickStreamClient, say func(...*api.PickStreamRequest), hear func() *api.PickStreamResponse) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	stream, err := h.client.PickStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	say = func(calls ...*api.PickStreamRequest) {
		t.Helper()
		for _, c := range calls {
			if err := stream.Send(c); err != nil {
				t.Fatal(err)
			}
		}
	}
	hear = func() *api.PickStreamResponse {
		t.Helper()
		answer, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return answer
	}
	return stream, say, hear
}

func TestStreamAnswersEachCallByItsID(t *testing.T) {
	h := build(t, func(c *Config) { c.Decided, c.MaxCalls = nil, 1<<20 })
	stream, say, hear := h.talk(t)
	const calls = 500
	go func() {
		for i := range uint64(calls) {
			r := ask("m").GetRequest()
			if i%3 == 0 {
				r = &api.Request{Model: "m", Prompt: api.Body(`{"prompt":"x"}`)}
			}
			if i%5 == 0 {
				r = &api.Request{Model: "nobody's"}
			}
			if err := stream.Send(pickCall(i, r)); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	answers := make(map[uint64]*api.PickStreamResponse)
	for range calls {
		a := hear()
		if answers[a.GetId()] != nil {
			t.Fatalf("%d is answered twice", a.GetId())
		}
		answers[a.GetId()] = a
	}
	var reports []*api.Report
	for id, a := range answers {
		switch {
		case id%5 == 0:
			err := status.ErrorProto(a.GetError())
			if reason, _ := detailsOf(t, err); status.Code(err) != codes.NotFound || reason != "UNKNOWN_MODEL" {
				t.Fatalf("%d: %v", id, err)
			}
		case a.GetPick().GetDecisionId() == "" || a.GetPick().GetRanking().GetCandidates()[0].GetMember().GetId() == "":
			t.Fatalf("%d: %v", id, a)
		default:
			reports = append(reports, &api.Report{DecisionId: a.GetPick().GetDecisionId(), Outcome: api.Outcome_OUTCOME_FINISHED})
		}
	}
	say(&api.PickStreamRequest{Id: 1, Call: &api.PickStreamRequest_Report{Report: &api.ReportRequest{Reports: reports}}})
	for i, r := range hear().GetReport().GetResults() {
		if r.GetStatus() != api.ReportStatus_REPORT_STATUS_RECORDED {
			t.Errorf("report %d: %v", i, r)
		}
	}
	say(&api.PickStreamRequest{Id: 2, Call: &api.PickStreamRequest_Score{Score: ask("m")}})
	if a := hear(); a.GetId() != 2 || len(a.GetScore().GetRanking().GetCandidates()) != 3 {
		t.Errorf("%v", a)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("the end: %v", err)
	}
}

// Who waits for room does not hold up the others, and can be cancelled.
func TestStreamCancelsOneCallThatWaits(t *testing.T) {
	h := waitingRoom(t, admission.Rules{Length: 10, Wait: time.Minute})
	first := h.occupy(t)
	stream, say, hear := h.talk(t)
	say(pickCall(1, on(&api.Request{}).GetRequest()))
	h.untilWaiting(t, 1)
	say(pickCall(2, on(&api.Request{}).GetRequest()))
	h.untilWaiting(t, 2)
	say(&api.PickStreamRequest{Id: 3, Call: &api.PickStreamRequest_Score{Score: ask("m")}})
	if a := hear(); a.GetId() != 3 || a.GetScore() == nil {
		t.Fatalf("%v", a)
	}
	say(cancelCall(77), cancelCall(1))
	if a := hear(); a.GetId() != 1 || codes.Code(a.GetError().GetCode()) != codes.Canceled {
		t.Fatalf("%v", a)
	}
	h.untilWaiting(t, 1)
	h.finish(t, first)
	if a := hear(); a.GetId() != 2 || a.GetPick().GetDecisionId() == "" {
		t.Fatalf("%v", a)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
}

func TestStreamBearsBadCalls(t *testing.T) {
	h := waitingRoom(t, admission.Rules{Length: 2 * maxStreamCalls, Wait: time.Minute}, func(c *Config) { c.MaxCalls = 1 << 20 })
	h.occupy(t)
	stream, say, hear := h.talk(t)
	for i, bad := range []*api.PickStreamRequest{
		{},
		{Call: &api.PickStreamRequest_Pick{}},
		{Call: &api.PickStreamRequest_Score{}},
		{Call: &api.PickStreamRequest_Report{Report: &api.ReportRequest{Reports: make([]*api.Report, maxReports+1)}}},
	} {
		bad.Id = uint64(i)
		say(bad)
		if a := hear(); a.GetId() != uint64(i) || codes.Code(a.GetError().GetCode()) != codes.InvalidArgument {
			t.Errorf("%d: %v", i, a)
		}
	}
	// One stream has so many calls under way and no more.
	for i := range uint64(maxStreamCalls) {
		say(pickCall(1000+i, on(&api.Request{}).GetRequest()))
	}
	h.untilWaiting(t, maxStreamCalls)
	say(pickCall(5, on(&api.Request{}).GetRequest()))
	for {
		a := hear()
		if codes.Code(a.GetError().GetCode()) != codes.ResourceExhausted {
			t.Fatalf("%v", a)
		}
		if a.GetId() == 5 {
			break
		}
	}
	// An id that is under way ends the stream, and what waits on it.
	say(pickCall(1000, on(&api.Request{}).GetRequest()))
	for {
		if _, err := stream.Recv(); err != nil {
			if status.Code(err) != codes.InvalidArgument {
				t.Errorf("%v", err)
			}
			break
		}
	}
	h.untilWaiting(t, 0)
}

func TestStreamEndsWithItsCallerAndWithTheService(t *testing.T) {
	h := waitingRoom(t, admission.Rules{Length: 10, Wait: time.Minute})
	h.occupy(t)
	ctx, gone := context.WithCancel(t.Context())
	left, err := h.client.PickStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := left.Send(pickCall(1, on(&api.Request{}).GetRequest())); err != nil {
		t.Fatal(err)
	}
	h.untilWaiting(t, 1)
	gone()
	h.untilWaiting(t, 0)
	stream, say, _ := h.talk(t)
	say(pickCall(1, on(&api.Request{}).GetRequest()))
	h.untilWaiting(t, 1)
	h.Close()
	for {
		a, err := stream.Recv()
		if err == nil && a.GetError() != nil {
			continue // its call may be told first
		}
		if status.Code(err) != codes.Unavailable {
			t.Errorf("%v, %v", a, err)
		}
		break
	}
}
