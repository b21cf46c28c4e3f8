package rpc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/admission"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

func named(id string) *api.PickRequest {
	r := ask("m").GetRequest()
	r.RequestId = id
	return &api.PickRequest{Request: r}
}

func (h *house) reserved() (n int) {
	for _, m := range h.fleet.View().Members {
		n += m.Reserved().Open
	}
	return n
}

func TestARepeatedRequestGetsTheSameDecision(t *testing.T) {
	h := build(t, func(c *Config) { c.Decided = nil })
	var mu sync.Mutex
	ids := make(map[string]bool)
	var g sync.WaitGroup
	for range 20 {
		g.Go(func() {
			d, err := h.client.Pick(t.Context(), named("one"))
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			ids[d.GetDecisionId()] = true
		})
	}
	g.Wait()
	if len(ids) != 1 || h.reserved() != 1 {
		t.Errorf("decisions %v, %d reservations", ids, h.reserved())
	}
	other := named("one")
	other.Request.Model = "lora"
	_, err := h.client.Pick(t.Context(), other)
	if reason, _ := detailsOf(t, err); status.Code(err) != codes.AlreadyExists || reason != "REQUEST_ID_REUSED" {
		t.Errorf("another request of that name: %v", err)
	}
	other.Request.Tenant = "somebody else"
	if _, err := h.client.Pick(t.Context(), other); err != nil {
		t.Errorf("another tenant's name: %v", err)
	}
	if d, err := h.client.Pick(t.Context(), named("two")); err != nil || ids[d.GetDecisionId()] {
		t.Errorf("another name: %v, %v", d, err)
	}
}

func TestADecisionIsFoundByItsRequest(t *testing.T) {
	h := build(t, func(c *Config) {
		c.Decided = nil
		c.Operator = func(ctx context.Context) bool { return ctx.Err() == nil }
	})
	request := named("one")
	request.Request.Tenant = "tenant"
	want, err := h.client.Pick(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	got, err := h.admin.FindDecision(t.Context(), &api.FindDecisionRequest{RequestId: "one", Tenant: "tenant"})
	if err != nil || !proto.Equal(got.GetDecision(), want) || got.GetAgeMs() < 0 || got.GetAgeMs() > float64(repeatFor.Milliseconds()) {
		t.Errorf("%v, %v; was %v", got, err, want)
	}
	for _, unknown := range []*api.FindDecisionRequest{{RequestId: "one"}, {RequestId: "two", Tenant: "tenant"}, {}} {
		_, err := h.admin.FindDecision(t.Context(), unknown)
		if reason, _ := detailsOf(t, err); status.Code(err) != codes.NotFound || reason != "UNKNOWN_REQUEST" {
			t.Errorf("%v: %v", unknown, err)
		}
	}
	// What is older than repeats are remembered is not told either.
	if d, _ := h.repeats.find(nameOf(request.GetRequest()), time.Now().Add(repeatFor)); d != nil {
		t.Error("an old decision is remembered")
	}
}

// What clients of the proxies of this process call their requests is found, and is
// no promise that two of a name are one.
func TestAPlacedRequestIsFoundByItsLastName(t *testing.T) {
	h := build(t, func(c *Config) {
		c.Decided = nil
		c.Operator = func(ctx context.Context) bool { return ctx.Err() == nil }
	})
	var last *api.PickResponse
	for i := range 3 {
		d, err := h.Place(t.Context(), named("one"))
		if err != nil || d.GetDecisionId() == last.GetDecisionId() || h.reserved() != i+1 {
			t.Fatalf("%v, %v, %d reservations", d, err, h.reserved())
		}
		last = d
	}
	got, err := h.admin.FindDecision(t.Context(), &api.FindDecisionRequest{RequestId: "one"})
	if err != nil || got.GetDecision().GetDecisionId() != last.GetDecisionId() {
		t.Errorf("%v, %v; want %v", got, err, last)
	}
	picked, err := h.client.Pick(t.Context(), named("one"))
	if err != nil || picked.GetDecisionId() == last.GetDecisionId() {
		t.Errorf("a caller of Pick got another's decision: %v, %v", picked, err)
	}
	for i := range maxRepeats + 10 {
		h.placed.last(named(fmt.Sprint(i)), last)
	}
	if n := len(h.placed.byName); n != maxRepeats {
		t.Errorf("%d names are remembered", n)
	}
}

// Whoever repeats a request that waits waits with it; if the first gives up, the
// next one takes its place, and a failure is not remembered.
func TestARepeatWaitsForItsTwin(t *testing.T) {
	h := waitingRoom(t, admission.Rules{Length: 10, Wait: time.Minute})
	first := h.occupy(t)
	request := func() *api.PickRequest {
		r := on(&api.Request{RequestId: "twin"})
		return r
	}
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() {
		_, err := h.client.Pick(ctx, request())
		gone <- err
	}()
	h.untilWaiting(t, 1)
	got := make(chan string, 2)
	for range 2 {
		go func() {
			d, err := h.client.Pick(t.Context(), request())
			if err != nil {
				t.Error(err)
			}
			got <- d.GetDecisionId()
		}()
	}
	cancel()
	if err := <-gone; status.Code(err) != codes.Canceled {
		t.Errorf("%v", err)
	}
	h.untilWaiting(t, 1)
	h.finish(t, first)
	if a, b := <-got, <-got; a == "" || a != b {
		t.Errorf("decisions %q and %q", a, b)
	}
}

func TestRepeatsAreBounded(t *testing.T) {
	r := newRepeats()
	decide := func(context.Context, *api.PickRequest) (*api.PickResponse, error) { return &api.PickResponse{}, nil }
	for i := range 2*maxRepeats + 1 {
		if _, err := r.once(t.Context(), named(fmt.Sprint(i)), decide); err != nil {
			t.Fatal(err)
		}
	}
	if len(r.byName) != maxRepeats || len(r.order) != maxRepeats {
		t.Errorf("%d names, %d in order", len(r.byName), len(r.order))
	}
	fails := func(context.Context, *api.PickRequest) (*api.PickResponse, error) { return nil, errors.New("no") }
	for range 2 {
		if _, err := r.once(t.Context(), named("failing"), fails); err == nil {
			t.Error("a failure is forgotten")
		}
	}
	d, mine := r.join("\x00old", 1, time.Now().Add(-repeatFor))
	if !mine {
		t.Fatal("known")
	}
	d.resp = &api.PickResponse{}
	r.land(d)
	if _, mine := r.join("\x00old", 1, time.Now()); !mine {
		t.Error("a name is remembered for longer than it should")
	}
}

func TestARetryEndsTheReservationThatItReplaces(t *testing.T) {
	h := build(t, nil)
	d, err := h.client.Pick(t.Context(), ask2("m"))
	if err != nil {
		t.Fatal(err)
	}
	if ms := d.GetExpiresInMs(); ms <= 0 || ms > 600_000 {
		t.Errorf("expires in %v ms", ms)
	}
	again := ask2("m")
	again.ReplacesDecisionId = d.GetDecisionId()
	again.Request.Exclude = []*api.MemberRef{{Ref: &api.MemberRef_MemberId{MemberId: d.GetRanking().GetCandidates()[0].GetMember().GetId()}}}
	e, err := h.client.Pick(t.Context(), again)
	if err != nil || e.GetDecisionId() == d.GetDecisionId() {
		t.Fatal(e, err)
	}
	if h.reserved() != 1 {
		t.Errorf("%d reservations, want that of the retry alone", h.reserved())
	}
	resp, err := h.client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{
		{DecisionId: d.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FINISHED}, {DecisionId: e.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FINISHED},
	}})
	if err != nil || resp.GetResults()[0].GetStatus() != api.ReportStatus_REPORT_STATUS_UNKNOWN_DECISION || !recorded(&api.ReportResponse{Results: resp.GetResults()[1:]}) {
		t.Errorf("%v, %v", resp, err)
	}
	again.ReplacesDecisionId = "nonsense"
	if _, err := h.client.Pick(t.Context(), again); err != nil {
		t.Errorf("a decision that is not known: %v", err)
	}
}

func ask2(model string) *api.PickRequest { return &api.PickRequest{Request: ask(model).GetRequest()} }

func TestADecisionIsKnownUntilItExpires(t *testing.T) {
	h := build(t, nil)
	d, err := h.client.Pick(t.Context(), ask2("m"))
	if err != nil {
		t.Fatal(err)
	}
	var id fleet.Decision
	if _, err := fmt.Sscanf(d.GetDecisionId(), "%x", &id); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	at := h.fleet.Expires(id)
	h.fleet.Sweep(now.Add(at.Sub(now) - time.Second))
	if h.fleet.Expires(id).IsZero() {
		t.Error("it is forgotten before")
	}
	for range 3 { // each phase has its end
		h.fleet.Sweep(at.Add(time.Second))
	}
	if !h.fleet.Expires(id).IsZero() {
		t.Errorf("it is known beyond, until %v", h.fleet.Expires(id))
	}
}
