package rpc

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/line"
	"github.com/kvscout/kvscout/scheduler/internal/queue"
)

// waitingRoom is a service in which a member takes one request at a time.
func waitingRoom(t *testing.T, l line.Rules) *house {
	t.Helper()
	l.BudgetMS = 1e-6
	if l.Wait == 0 {
		l.Wait = time.Minute
	}
	h := build(t, func(c *Config) { c.Line = l })
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := h.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() { stop(); <-done })
	return h
}

// on asks for member a alone.
func on(r *pb.Request) *pb.PickRequest {
	r.Model = "m"
	r.Prompt = &pb.Request_Tokens{Tokens: &pb.Tokens{Ids: prompt}}
	r.Candidates = []*pb.MemberRef{{Ref: &pb.MemberRef_Member{Member: name("a")}}}
	return &pb.PickRequest{Request: r}
}

func (h *house) untilWaiting(t *testing.T, n int) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); h.Stats().Queue.Waiting != n; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%+v, want %d waiting", h.Stats().Queue, n)
		}
	}
}

func (h *house) finish(t *testing.T, decision string) {
	t.Helper()
	if _, err := h.client.Report(t.Context(), &pb.ReportRequest{Decision: decision, Outcome: pb.Outcome_OUTCOME_FINISHED}); err != nil {
		t.Error(err)
	}
}

func TestQueuedPicksAreAnsweredInSlackOrder(t *testing.T) {
	h := waitingRoom(t, line.Rules{Queue: queue.Config{Length: 10}})
	first, err := h.client.Pick(t.Context(), on(&pb.Request{}))
	if err != nil || first.GetRanking().GetQueuedMs() != 0 {
		t.Fatalf("%v, %v", first, err)
	}
	var mu sync.Mutex
	var order []string
	var g sync.WaitGroup
	for i, r := range []*pb.Request{
		{Id: "none"}, {Id: "relaxed", Slo: &pb.Slo{TtftMs: 8000}}, {Id: "urgent", Slo: &pb.Slo{TtftMs: 1}}, {Id: "important", Priority: 2},
	} {
		g.Go(func() {
			id := r.GetId()
			answer, err := h.client.Pick(t.Context(), on(r))
			if err != nil {
				t.Errorf("%s: %v", id, err)
				return
			}
			if answer.GetRanking().GetQueuedMs() <= 0 {
				t.Errorf("%s did not wait: %v", id, answer)
			}
			mu.Lock()
			order = append(order, id)
			mu.Unlock()
			h.finish(t, answer.GetDecision())
		})
		h.untilWaiting(t, i+1)
	}
	h.finish(t, first.GetDecision())
	g.Wait()
	if want := []string{"important", "urgent", "relaxed", "none"}; !cmp.Equal(order, want) {
		t.Errorf("%v, want %v", order, want)
	}
	if st := h.Stats().Queue; st.Waiting != 0 || st.Admitted != 4 {
		t.Errorf("%+v", st)
	}
}

func TestOneThatIsCancelledLeavesItsPlace(t *testing.T) {
	h := waitingRoom(t, line.Rules{Queue: queue.Config{Length: 1}})
	first, err := h.client.Pick(t.Context(), on(&pb.Request{}))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := h.client.Pick(ctx, on(&pb.Request{}))
		left <- err
	}()
	h.untilWaiting(t, 1)
	_, err = h.client.Pick(t.Context(), on(&pb.Request{}))
	if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "-queue-length") {
		t.Errorf("a full queue: %v", err)
	}
	cancel()
	if err := <-left; status.Code(err) != codes.Canceled {
		t.Errorf("the one that was cancelled: %v", err)
	}
	h.untilWaiting(t, 0)
	h.finish(t, first.GetDecision())
	// Its place is free: nothing is charged any more.
	second, err := h.client.Pick(t.Context(), on(&pb.Request{}))
	if err != nil || second.GetRanking().GetQueuedMs() > 0 {
		t.Errorf("%v, %v", second, err)
	}
}

func TestADeadlineEndsTheWait(t *testing.T) {
	h := waitingRoom(t, line.Rules{Queue: queue.Config{Length: 10}, Wait: 30 * time.Millisecond})
	if _, err := h.client.Pick(t.Context(), on(&pb.Request{})); err != nil {
		t.Fatal(err)
	}
	for name, wait := range map[string]time.Duration{"the caller's": 10 * time.Millisecond, "the longest": 0} {
		ctx := t.Context()
		if wait > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, wait)
			defer cancel()
		}
		_, err := h.client.Pick(ctx, on(&pb.Request{}))
		if status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("%s: %v", name, err)
		}
		if wait == 0 && !strings.Contains(err.Error(), "no member had room") {
			t.Errorf("%s: %v", name, err)
		}
	}
	h.untilWaiting(t, 0)
}

func TestCloseEndsTheWait(t *testing.T) {
	h := waitingRoom(t, line.Rules{Queue: queue.Config{Length: 10}})
	if _, err := h.client.Pick(t.Context(), on(&pb.Request{})); err != nil {
		t.Fatal(err)
	}
	errs := make(chan error, 5)
	for range cap(errs) {
		go func() {
			_, err := h.client.Pick(t.Context(), on(&pb.Request{}))
			errs <- err
		}()
	}
	h.untilWaiting(t, cap(errs))
	h.Close()
	for range cap(errs) {
		if err := <-errs; status.Code(err) != codes.Unavailable {
			t.Error(err)
		}
	}
}

// Many come and go at once: nobody is lost, and nothing stays charged.
func TestManyComeAndGo(t *testing.T) {
	h := waitingRoom(t, line.Rules{Queue: queue.Config{Length: 1000}})
	var g sync.WaitGroup
	for i := range 100 {
		g.Go(func() {
			ctx := t.Context()
			if i%3 == 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, time.Duration(i)*time.Millisecond)
				defer cancel()
			}
			answer, err := h.client.Pick(ctx, on(&pb.Request{Tenant: fmt.Sprint(i % 4), Priority: int32(i % 2)}))
			switch code := status.Code(err); {
			case code == codes.OK:
				h.finish(t, answer.GetDecision())
			case code == codes.DeadlineExceeded && i%3 == 0:
			default:
				t.Errorf("%d: %v", i, err)
			}
		})
	}
	g.Wait()
	h.untilWaiting(t, 0)
	st := h.Stats().Queue
	if st.Pushed != st.Admitted+st.Cancelled || st.Bytes != 0 {
		t.Errorf("%+v", st)
	}
	members := h.fleet.View().Members
	at := slices.IndexFunc(members, func(m *fleet.Member) bool { return m.Info.Name == name("a") })
	for end := time.Now().Add(20 * time.Second); members[at].Reserved().Open != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%+v stays charged", members[at].Reserved())
		}
	}
}

// How requests wait can change while some do.
func TestTheLineChangesWhileRequestsWait(t *testing.T) {
	h := waitingRoom(t, line.Rules{})
	rules := func(length int) line.Rules {
		return line.Rules{Queue: queue.Config{Length: length}, BudgetMS: 1e-6, Wait: time.Minute}
	}
	pick := func() string {
		t.Helper()
		answer, err := h.client.Pick(t.Context(), on(&pb.Request{}))
		if err != nil {
			t.Fatal(err)
		}
		return answer.GetDecision()
	}
	open := []string{pick(), pick()} // without a line nobody waits
	h.SetLine(rules(1))
	waited := make(chan string, 1)
	go func() {
		answer, err := h.client.Pick(t.Context(), on(&pb.Request{}))
		if err != nil {
			t.Error(err)
		}
		waited <- answer.GetDecision()
	}()
	h.untilWaiting(t, 1)
	if _, err := h.client.Pick(t.Context(), on(&pb.Request{})); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("beyond the length: %v", err)
	}
	h.SetLine(rules(0))
	open = append(open, pick())
	if n := h.Stats().Queue.Waiting; n != 1 {
		t.Errorf("%d wait after the line was closed, want 1", n)
	}
	for _, d := range open {
		h.finish(t, d)
	}
	h.finish(t, <-waited)
	h.untilWaiting(t, 0)
}
