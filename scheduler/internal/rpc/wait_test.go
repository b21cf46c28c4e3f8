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

	"github.com/kvscout/kvscout/e2e/await"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/admission"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// waitingRoom is a service in which a member takes one request at a time.
func waitingRoom(t *testing.T, r admission.Rules, change ...func(*Config)) *house {
	t.Helper()
	r.BudgetMS = 1e-6
	h := build(t, func(c *Config) {
		c.Admission, c.Decided = r, nil // many calls at a time
		for _, f := range change {
			f(c)
		}
	})
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
func on(r *api.Request) *api.PickRequest {
	r.Model = "m"
	r.Prompt = api.TokenIDs(prompt)
	r.Candidates = []*api.MemberRef{{Ref: &api.MemberRef_MemberId{MemberId: name("a")}}}
	return &api.PickRequest{Request: r}
}

func (h *house) untilWaiting(t *testing.T, n int) {
	t.Helper()
	await.True(t, fmt.Sprint(n, " are waiting"), func() bool { return h.Stats().Queue.Waiting == n })
}

func (h *house) finish(t *testing.T, decision string) {
	t.Helper()
	if _, err := h.client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{DecisionId: decision, Outcome: api.Outcome_OUTCOME_FINISHED}}}); err != nil {
		t.Error(err)
	}
}

func TestQueuedPicksAreAnsweredInSlackOrder(t *testing.T) {
	h := waitingRoom(t, admission.Rules{Length: 10})
	first := h.occupy(t)
	var mu sync.Mutex
	var order []string
	var g sync.WaitGroup
	for i, r := range []*api.Request{
		{RequestId: "none"}, {RequestId: "relaxed", Slo: &api.Slo{TtftMs: 8000}}, {RequestId: "urgent", Slo: &api.Slo{TtftMs: 1}}, {RequestId: "important", Priority: 2},
	} {
		g.Go(func() {
			id := r.GetRequestId()
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
			h.finish(t, answer.GetDecisionId())
		})
		h.untilWaiting(t, i+1)
	}
	h.finish(t, first)
	g.Wait()
	if want := []string{"important", "urgent", "relaxed", "none"}; !cmp.Equal(order, want) {
		t.Errorf("%v, want %v", order, want)
	}
	if st := h.Stats().Queue; st.Waiting != 0 || st.Admitted != 4 {
		t.Errorf("%+v", st)
	}
}

func TestOneThatIsCancelledLeavesItsPlace(t *testing.T) {
	h := waitingRoom(t, admission.Rules{Length: 1})
	first := h.occupy(t)
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := h.client.Pick(ctx, on(&api.Request{}))
		left <- err
	}()
	h.untilWaiting(t, 1)
	_, err := h.client.Pick(t.Context(), on(&api.Request{}))
	if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "-queue-length") {
		t.Errorf("a full queue: %v", err)
	}
	cancel()
	if err := <-left; status.Code(err) != codes.Canceled {
		t.Errorf("the one that was cancelled: %v", err)
	}
	h.untilWaiting(t, 0)
	h.finish(t, first)
	// Its place is free: nothing is reserved any more.
	second, err := h.client.Pick(t.Context(), on(&api.Request{}))
	if err != nil || second.GetRanking().GetQueuedMs() > 0 {
		t.Errorf("%v, %v", second, err)
	}
}

func TestADeadlineEndsTheWait(t *testing.T) {
	h := waitingRoom(t, admission.Rules{Length: 10, Wait: 30 * time.Millisecond})
	h.occupy(t)
	for name, wait := range map[string]time.Duration{"the caller's": 10 * time.Millisecond, "the longest": 0} {
		ctx := t.Context()
		if wait > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, wait)
			defer cancel()
		}
		_, err := h.client.Pick(ctx, on(&api.Request{}))
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
	h := waitingRoom(t, admission.Rules{Length: 10})
	h.occupy(t)
	errs := make(chan error, 5)
	for range cap(errs) {
		go func() {
			_, err := h.client.Pick(t.Context(), on(&api.Request{}))
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

// Many come and go at once: nobody is lost, and nothing stays reserved.
func TestManyComeAndGo(t *testing.T) {
	h := waitingRoom(t, admission.Rules{Length: 1000})
	var g sync.WaitGroup
	for i := range 100 {
		g.Go(func() {
			ctx := t.Context()
			if i%3 == 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, time.Duration(i)*time.Millisecond)
				defer cancel()
			}
			answer, err := h.client.Pick(ctx, on(&api.Request{Tenant: fmt.Sprint(i % 4), Priority: int32(i % 2)}))
			switch code := status.Code(err); {
			case code == codes.OK:
				h.finish(t, answer.GetDecisionId())
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
	await.True(t, "nothing stays reserved", func() bool { return members[at].Reserved().Open == 0 })
}

// How requests wait can change while some do. With a length of 0 nobody waits any more.
func TestTheRulesChangeWhileRequestsWait(t *testing.T) {
	h := waitingRoom(t, admission.Rules{})
	rules := func(length int) admission.Rules {
		return admission.Rules{Length: length, BudgetMS: 1e-6, Wait: time.Minute}
	}
	pick := func() string {
		t.Helper()
		answer, err := h.client.Pick(t.Context(), on(&api.Request{}))
		if err != nil {
			t.Fatal(err)
		}
		return answer.GetDecisionId()
	}
	open := []string{pick(), pick()} // without a queue nobody waits
	h.SetAdmission(rules(1))
	waited := make(chan string, 1)
	go func() {
		answer, err := h.client.Pick(t.Context(), on(&api.Request{}))
		if err != nil {
			t.Error(err)
		}
		waited <- answer.GetDecisionId()
	}()
	h.untilWaiting(t, 1)
	if _, err := h.client.Pick(t.Context(), on(&api.Request{})); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("beyond the length: %v", err)
	}
	h.SetAdmission(rules(0))
	open = append(open, pick(), <-waited) // whoever waited is let go
	h.untilWaiting(t, 0)
	for _, d := range open {
		h.finish(t, d)
	}
}

// occupy keeps member a busy for as long as the test takes.
func (h *house) occupy(t *testing.T) (decision string) {
	t.Helper()
	first, err := h.client.Pick(t.Context(), on(&api.Request{}))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{DecisionId: first.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FIRST_TOKEN}}}); err != nil {
		t.Fatal(err)
	}
	if queued := first.GetRanking().GetQueuedMs(); queued != 0 {
		t.Errorf("the first waited for %v ms", queued)
	}
	return first.GetDecisionId()
}

// pick asks for a member of a model.
func (h *house) pick(ctx context.Context, model string) (*api.PickResponse, error) {
	return h.client.Pick(ctx, &api.PickRequest{Request: &api.Request{Model: model, Prompt: api.TokenIDs(prompt)}})
}

// The queue of one model is full: another model answers at once, with calls left
// for it however many wait.
func TestAFullQueueIsItsModelsOwn(t *testing.T) {
	const waiting = 150 // more than calls may be under way
	h := waitingRoom(t, admission.Rules{Length: waiting})
	join(t, h.fleet, fleet.Info{Heartbeat: time.Minute, Namespace: "ns", Pod: "pod-idle", PodUID: "uid-idle", Address: "10.0.1.1:8000", Models: []string{"idle"}, BlockSize: size})
	h.occupy(t)
	ctx, cancel := context.WithCancel(t.Context())
	var g sync.WaitGroup
	for i := range waiting {
		g.Go(func() { _, _ = h.client.Pick(ctx, on(&api.Request{})) })
		if i%50 == 49 {
			h.untilWaiting(t, i+1)
		}
	}
	if _, err := h.client.Pick(t.Context(), on(&api.Request{})); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "the queue is full") {
		t.Errorf("one more for the busy model: %v", err)
	}
	answer, err := h.pick(t.Context(), "idle")
	if err != nil || answer.GetRanking().GetQueuedMs() != 0 {
		t.Errorf("the idle model: %v, %v", answer, err)
	}
	cancel()
	g.Wait()
	h.untilWaiting(t, 0)
}

// Those who wait for one busy member are not in the way of one that can use an
// idle one.
func TestPinnedPicksDoNotHoldOthers(t *testing.T) {
	h := waitingRoom(t, admission.Rules{Length: 100})
	h.occupy(t)
	ctx, cancel := context.WithCancel(t.Context())
	var g sync.WaitGroup
	for range 64 {
		g.Go(func() { _, _ = h.client.Pick(ctx, on(&api.Request{})) })
	}
	h.untilWaiting(t, 64)
	// The other members are idle; what this takes is the machine's.
	deadline, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	answer, err := h.pick(deadline, "m")
	if err != nil || answer.GetRanking().GetCandidates()[0].GetMember().GetId() == name("a") {
		t.Errorf("%v, %v", answer, err)
	}
	cancel()
	g.Wait()
}

// What panics on behalf of a request that waits ends its call, and no other.
func TestAPanicInAWaitingPickEndsItAlone(t *testing.T) {
	// The picker has no index, which it asks for the blocks of a prompt when the
	// block size of a member is known.
	broken := fleet.New(fleet.Config{})
	blocks := func(size int) {
		join(t, broken, fleet.Info{Heartbeat: time.Minute, Namespace: "ns", Pod: "pod-a", PodUID: "uid-a", Models: []string{"m"}, BlockSize: size})
	}
	blocks(0)
	picker, err := pick.New(pick.Config{Fleet: broken})
	if err != nil {
		t.Fatal(err)
	}
	h := waitingRoom(t, admission.Rules{Length: 10}, func(c *Config) { c.Fleet, c.Picker = broken, picker })
	first, err := h.pick(t.Context(), "m")
	if err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 1)
	go func() {
		_, err := h.pick(t.Context(), "m")
		waited <- err
	}()
	h.untilWaiting(t, 1)
	blocks(size)
	if err := <-waited; status.Code(err) != codes.Internal || h.Stats().Panics != 1 {
		t.Errorf("%v, %d panics", err, h.Stats().Panics)
	}
	blocks(0)
	picker.Report(pick.Report{Decision: first.GetDecisionId(), Outcome: fleet.Finished}, time.Now())
	if _, err := h.pick(t.Context(), "m"); err != nil {
		t.Errorf("the next one: %v", err)
	}
}
