package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler"
)

// busy is a member that says how many requests it runs.
func busy(requests uint32) *pb.Load {
	return &pb.Load{Running: proto.Uint32(requests), Waiting: proto.Uint32(0), KvUsage: proto.Float64(0.5)}
}

// queueing is a stage on which so many requests may wait, and a member takes
// one at a time.
func queueing(t *testing.T, length int) *play {
	return open(t, stage.Options{Change: func(c *scheduler.Config) {
		c.QueueLength, c.QueueBudget = length, time.Nanosecond
	}})
}

func (p *play) untilQueued(n int) {
	p.t.Helper()
	p.until(fmt.Sprint(n, " requests wait"), func() bool {
		return p.counted(p.Admin, "kvscout_scheduler_queue_waiting", "") == float64(n)
	})
}

// TestAFullFleetAnswersInSlackOrder: two members are full by their engines' own
// word. Who waits is answered in order of slack as requests end, a client that
// gives up leaves, and so does one whose deadline has come.
func TestAFullFleetAnswersInSlackOrder(t *testing.T) {
	t.Parallel()
	p := queueing(t, 6)
	conn := p.bus()
	a, b := p.speaker(conn, "pod-a"), p.speaker(conn, "pod-b")
	for _, s := range []*speaker{a, b} {
		s.loaded(busy(1))
		p.untilMember(s.id, "be busy", func(m *api.MemberState) bool { return m.GetRunningRequests() == 1 })
	}
	ask := func(ctx context.Context, r *api.Request) (*api.PickResponse, error) {
		q := random(1, 64).request()
		r.Model, r.Prompt = model, q.Prompt
		return p.Client.Pick(ctx, &api.PickRequest{Request: r})
	}
	var mu sync.Mutex
	var order []string
	var g sync.WaitGroup
	waiting := 0
	for _, r := range []*api.Request{
		{RequestId: "none"}, {RequestId: "relaxed", Slo: &api.Slo{E2EMs: 8000}}, {RequestId: "urgent", Slo: &api.Slo{TtftMs: 50}}, {RequestId: "important", Priority: 1, Slo: &api.Slo{TtftMs: 50}},
	} {
		g.Go(func() {
			answer, err := ask(t.Context(), r)
			if err != nil {
				t.Errorf("%s: %v", r.GetRequestId(), err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			order = append(order, r.GetRequestId())
			if answer.GetRanking().GetQueuedMs() <= 0 {
				t.Errorf("%s did not wait", r.GetRequestId())
			}
		})
		waiting++
		p.untilQueued(waiting)
	}

	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := ask(ctx, &api.Request{})
		left <- err
	}()
	p.untilQueued(waiting + 1)
	short, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	if _, err := ask(short, &api.Request{}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a deadline: %v", err)
	}
	p.untilQueued(waiting + 1)
	go func() { _, _ = ask(ctx, &api.Request{}) }()
	p.untilQueued(waiting + 2)
	_, err := ask(t.Context(), &api.Request{})
	if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "try again later") || !strings.Contains(err.Error(), "-queue-length") {
		t.Errorf("a full queue: %v", err)
	}
	cancel()
	if err := <-left; status.Code(err) != codes.Canceled {
		t.Errorf("a client that gave up: %v", err)
	}
	p.untilQueued(waiting)

	// One place becomes free at a time: the member says that it is idle, the
	// next request fills it, and it says so.
	for n := waiting; n > 0; n-- {
		s := []*speaker{a, b}[n%2]
		s.loaded(idle())
		p.until("the next is answered", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(order) > waiting-n
		})
		s.loaded(busy(1))
		p.untilMember(s.id, "be busy", func(m *api.MemberState) bool { return m.GetRunningRequests() == 1 })
	}
	g.Wait()
	if want := []string{"important", "urgent", "relaxed", "none"}; !cmp.Equal(order, want) {
		t.Errorf("%v, want %v", order, want)
	}
}

// TestProfilesAreReadAgain: a changed file is used, a wrong one is refused and
// the last good one stays.
func TestProfilesAreReadAgain(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	file := filepath.Join(folder, "fake.yaml")
	write := func(text string) {
		t.Helper()
		next := filepath.Join(folder, ".next")
		if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, file); err != nil {
			t.Fatal(err)
		}
	}
	entry := func(rps string) string {
		return fmt.Sprintf("{model: %s, indexes: [[100], [100]], tputs: [[%s]], e2e: [[1]], slos: {ttft: 2}}", model, rps)
	}
	write("profiles: [" + entry("4") + "]")
	p := open(t, stage.Options{Change: func(c *scheduler.Config) { c.Profiles = folder }})
	p.speaker(p.bus(), "pod-a")
	if got := p.counted(p.Admin, "kvscout_scheduler_profiles", ""); got != 1 {
		t.Errorf("%v profiles", got)
	}
	r := random(1, 64).request()
	r.Policy = "slo"
	if slack := p.score(r).SlackMs; slack == nil || *slack <= 0 || *slack >= 2000 {
		t.Errorf("slack %v of a target of 2 s", slack)
	}
	write("profiles: [" + entry(".nan") + ", {model: other, indexes: [[1], [1]]}]")
	p.until("the new profiles are used", func() bool { return p.counted(p.Admin, "kvscout_scheduler_profiles", "") == 2 })
	before := p.counted(p.Admin, "kvscout_scheduler_profiles_unmeasured_total", "")
	p.pick(r) // answered all the same
	if after := p.counted(p.Admin, "kvscout_scheduler_profiles_unmeasured_total", ""); after <= before {
		t.Errorf("%v requests of which the profile says nothing, before it %v", after, before)
	}
	write("profiles: [{model: fake, indices: []}]")
	p.until("the wrong profiles are refused", func() bool { return p.counted(p.Admin, "kvscout_scheduler_profiles_loads_total", "refused") == 1 })
	if got := p.counted(p.Admin, "kvscout_scheduler_profiles", ""); got != 2 {
		t.Errorf("%v profiles after a wrong file, want the last good ones", got)
	}
	if _, err := scheduler.New(scheduler.Config{Profiles: filepath.Join(folder, "none")}); err == nil || !strings.Contains(err.Error(), "none") {
		t.Errorf("a file that is not there: %v", err)
	}
}
