package client

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvscout/kvscout/e2e/await"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a scheduler that gives its members in turn, without those excluded.
type fake struct {
	api.UnimplementedSchedulerServer
	members []string
	fails   error         // of Pick
	hangs   chan struct{} // Pick waits for it, if there is one

	mu      sync.Mutex // guards what follows
	asked   []*api.Request
	reports []*api.Report
}

func (f *fake) Pick(ctx context.Context, r *api.PickRequest) (*api.PickResponse, error) {
	f.mu.Lock()
	f.asked = append(f.asked, r.GetRequest())
	f.mu.Unlock()
	if f.hangs != nil {
		select {
		case <-f.hangs:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	if f.fails != nil {
		return nil, f.fails
	}
	excluded := make(map[string]bool)
	for _, e := range r.GetRequest().GetExclude() {
		excluded[e.GetAddress()] = true
	}
	for _, m := range f.members {
		if !excluded[m] {
			return &api.PickResponse{DecisionId: "of " + m, Ranking: &api.Ranking{Candidates: []*api.Candidate{{Member: &api.Member{Address: m}}}}}, nil
		}
	}
	return nil, status.Error(codes.FailedPrecondition, "all are excluded")
}

func (f *fake) Report(_ context.Context, r *api.ReportRequest) (*api.ReportResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reports = append(f.reports, r.GetReports()...)
	return &api.ReportResponse{}, nil
}

func (f *fake) picks() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.asked)
}

// told are the decisions that were reported, with what.
func (f *fake) told() (list []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.reports {
		list = append(list, r.GetDecisionId()+": "+r.GetOutcome().String())
	}
	return list
}

func (f *fake) serve(t testing.TB) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	api.RegisterSchedulerServer(server, f)
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(l) }()
	t.Cleanup(func() { server.Stop(); <-done })
	return l.Addr().String()
}

// nowhere is an address at which nobody listens.
func nowhere(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func caller(t *testing.T, cfg Config) *Client {
	t.Helper()
	if cfg.Timeout == 0 {
		cfg.Timeout = await.Patience // where no time is meant to run out
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

var errRefused = errors.New("connection refused")

func TestDoReportsWhatCame(t *testing.T) {
	f := &fake{members: []string{"a"}}
	c := caller(t, Config{Schedulers: []string{f.serve(t)}})
	err := c.Do(t.Context(), &api.Request{Model: "m"}, nil, func(_ context.Context, p *Placement) (*api.Report, error) {
		if p.Address != "a" || p.Why != nil || p.Candidate() == nil {
			t.Errorf("%+v", p)
		}
		p.FirstToken()
		p.FirstToken()
		tokens := uint32(100)
		return &api.Report{PromptTokens: &tokens}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	await.True(t, "both reports come", func() bool { return len(f.told()) == 2 })
	if diff := cmp.Diff([]string{"of a: OUTCOME_FIRST_TOKEN", "of a: OUTCOME_FINISHED"}, f.told()); diff != "" {
		t.Error(diff)
	}
	if last := f.reports[1]; last.GetPromptTokens() != 100 || last.GetTtftMs() <= 0 {
		t.Errorf("%v", last)
	}
	await.True(t, "it is counted", func() bool { return c.Stats() == Stats{Picked: 1, Reported: 2} })
}

func TestDoTriesAnotherMember(t *testing.T) {
	f := &fake{members: []string{"a", "b", "c", "d"}}
	c := caller(t, Config{Schedulers: []string{f.serve(t)}})
	for name, one := range map[string]struct {
		works string
		tried []string
		err   error
	}{
		"the third works": {"c", []string{"a", "b", "c"}, nil},
		"none of three":   {"d", []string{"a", "b", "c"}, errRefused},
	} {
		var tried []string
		err := c.Do(t.Context(), &api.Request{RequestId: name}, nil, func(_ context.Context, p *Placement) (*api.Report, error) {
			tried = append(tried, p.Address)
			if p.Address == one.works {
				return nil, nil
			}
			return nil, Another(errRefused)
		})
		if diff := cmp.Diff(one.tried, tried); diff != "" || !errors.Is(err, one.err) {
			t.Errorf("%s: %v %s", name, err, diff)
		}
	}
	// Each try is a request with a name of its own.
	if names := []string{f.asked[0].GetRequestId(), f.asked[1].GetRequestId()}; names[0] == names[1] {
		t.Error(names)
	}
	await.True(t, "failures are told", func() bool { return len(f.told()) == 6 })
}

func TestDoEndsWhereTheAnswerHasBegun(t *testing.T) {
	f := &fake{members: []string{"a", "b"}}
	c := caller(t, Config{Schedulers: []string{f.serve(t)}})
	n := 0
	err := c.Do(t.Context(), &api.Request{}, nil, func(context.Context, *Placement) (*api.Report, error) { n++; return nil, errRefused })
	if n != 1 || !errors.Is(err, errRefused) {
		t.Errorf("%d tries, %v", n, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	n = 0
	err = c.Do(ctx, &api.Request{}, nil, func(context.Context, *Placement) (*api.Report, error) {
		n++
		cancel()
		return nil, Another(errRefused)
	})
	if n != 1 || !errors.Is(err, errRefused) {
		t.Errorf("client gone: %d tries, %v", n, err)
	}
	await.True(t, "both are told", func() bool { return len(f.told()) == 2 })
	if diff := cmp.Diff([]string{"of a: OUTCOME_FAILED", "of a: OUTCOME_CANCELLED"}, f.told()); diff != "" {
		t.Error(diff)
	}
}

func TestAnotherSchedulerStandsBy(t *testing.T) {
	stopping, good := &fake{fails: status.Error(codes.Unavailable, "stopping")}, &fake{members: []string{"a"}}
	c := caller(t, Config{Schedulers: []string{nowhere(t), stopping.serve(t), good.serve(t)}})
	p, err := c.Pick(t.Context(), &api.Request{})
	if err != nil || p.Address != "a" {
		t.Errorf("%v %v", p, err)
	}
	if stopping.picks() != 1 {
		t.Errorf("%d questions to the one that stops", stopping.picks())
	}
	// What is wrong with the request is so everywhere.
	wrong, other := &fake{fails: status.Error(codes.InvalidArgument, "wrong")}, &fake{members: []string{"a"}}
	c = caller(t, Config{Schedulers: []string{wrong.serve(t), other.serve(t)}})
	if _, err := c.Pick(t.Context(), &api.Request{}); status.Code(err) != codes.InvalidArgument || other.picks() != 0 {
		t.Errorf("%v, %d questions to another", err, other.picks())
	}
}

// A scheduler that hangs costs its timeout once, not each request.
func TestOneThatHangsIsLeftAlone(t *testing.T) {
	hangs, good := &fake{hangs: make(chan struct{})}, &fake{members: []string{"a"}}
	defer close(hangs.hangs)
	c := caller(t, Config{Schedulers: []string{hangs.serve(t), good.serve(t)}, Timeout: time.Second})
	for range 10 {
		if p, err := c.Pick(t.Context(), &api.Request{}); err != nil || p.Address != "a" {
			t.Fatalf("%v %v", p, err)
		}
	}
	if n := hangs.picks(); n > 5 { // it is asked again after a second
		t.Errorf("asked %d times", n)
	}
}

// A scheduler that is away is tried often: with gRPC's own pauses the seventh time
// would come after 26 seconds, and others minutes later.
func TestOneThatIsAwayIsTriedOften(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := caller(t, Config{Schedulers: []string{l.Addr().String()}, Timeout: time.Second})
	ctx, cancel := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	defer asking.Wait()
	defer cancel()
	asking.Go(func() {
		for ctx.Err() == nil {
			_, _ = c.Pick(ctx, &api.Request{})
			time.Sleep(10 * time.Millisecond)
		}
	})
	defer l.Close()
	start := time.Now()
	for range 7 {
		conn, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
	}
	if took := time.Since(start); took > 13*time.Second {
		t.Errorf("tried for the seventh time after %v", took)
	}
}

func TestTheProxysOwnChoiceStandsIn(t *testing.T) {
	c := caller(t, Config{Schedulers: []string{nowhere(t)}})
	var sent []string
	send := func(_ context.Context, p *Placement) (*api.Report, error) {
		if p.Decision != nil || p.Candidate() != nil || status.Code(p.Why) != codes.Unavailable {
			t.Errorf("%+v", p)
		}
		p.FirstToken() // nobody is told
		sent = append(sent, p.Address)
		if len(sent) == 1 {
			return nil, Another(errRefused)
		}
		return nil, nil
	}
	own := func(tried []string) string { return []string{"x", "y"}[len(tried)] }
	if err := c.Do(t.Context(), &api.Request{}, own, send); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"x", "y"}, sent); diff != "" {
		t.Error(diff)
	}
	if err := c.Do(t.Context(), &api.Request{}, nil, send); status.Code(err) != codes.Unavailable {
		t.Error(err)
	}
	stubborn := func([]string) string { return "x" }
	sent = nil
	if err := c.Do(t.Context(), &api.Request{}, stubborn, send); !errors.Is(err, errRefused) || len(sent) != 1 {
		t.Errorf("%v after %v", err, sent)
	}
}

func TestNothingIsSentForAClientThatIsGone(t *testing.T) {
	f := &fake{hangs: make(chan struct{})}
	defer close(f.hangs)
	c := caller(t, Config{Schedulers: []string{f.serve(t)}})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		for f.picks() == 0 {
			time.Sleep(time.Millisecond)
		}
	}()
	err := c.Do(ctx, &api.Request{}, func([]string) string { return "x" }, func(context.Context, *Placement) (*api.Report, error) {
		t.Error("sent")
		return nil, nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestASendMayKnowWhoIsToBlame(t *testing.T) {
	f := &fake{members: []string{"a"}}
	c := caller(t, Config{Schedulers: []string{f.serve(t)}})
	err := c.Do(t.Context(), &api.Request{}, nil, func(context.Context, *Placement) (*api.Report, error) {
		return &api.Report{Outcome: api.Outcome_OUTCOME_CANCELLED}, errRefused
	})
	await.True(t, "it is told", func() bool { return len(f.told()) == 1 })
	if f.told()[0] != "of a: OUTCOME_CANCELLED" || !errors.Is(err, errRefused) {
		t.Error(f.told(), err)
	}
}

func TestReportsAreBounded(t *testing.T) {
	f := &fake{members: []string{"a"}}
	c := caller(t, Config{Schedulers: []string{f.serve(t)}})
	s := c.schedulers[0]
	s.sending = true // by nobody: all wait
	for range maxWaiting + 5 {
		s.report(&api.Report{DecisionId: "d"})
	}
	if lost := c.Stats().Lost; lost != 5 {
		t.Errorf("%d lost", lost)
	}
	s.flush()
	if n := c.Stats().Reported; n != maxWaiting {
		t.Errorf("%d reported", n)
	}
}

func TestNewNamesWhatIsWrong(t *testing.T) {
	if _, err := New(Config{}); err == nil {
		t.Error("without a scheduler")
	}
	if _, err := New(Config{Schedulers: []string{"127.0.0.1:1", "\x7f://"}}); err == nil {
		t.Error("a wrong address")
	}
}
