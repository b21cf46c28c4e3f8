package scheduler

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvscout/kvscout/e2e/await"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/serve"
)

// waiting is a scheduler with one busy member, whose connections last so long.
func waiting(t *testing.T, age time.Duration, cfg Config) (*Scheduler, api.SchedulerClient, func() error) {
	t.Helper()
	cfg.GRPCAddress, cfg.AdminAddress, cfg.NATSAddress = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.serving.Age = age
	stop := run(t, s)
	agent(t, "nats://"+s.Addrs().NATS, 3)
	client := api.NewSchedulerClient(dial(t, s))
	await.True(t, "the member is there", func() bool {
		_, err := client.Score(t.Context(), &api.ScoreRequest{Request: &api.Request{Model: "m"}})
		return err == nil
	})
	return s, client, stop
}

// waited lets a Pick wait for room for at least so long.
func waited(t *testing.T, s *Scheduler, client api.SchedulerClient, least time.Duration) {
	t.Helper()
	start, done := time.Now(), make(chan error, 1)
	var answer *api.PickResponse
	go func() {
		var err error
		answer, err = client.Pick(t.Context(), &api.PickRequest{Request: &api.Request{Model: "m"}})
		done <- err
	}()
	await.True(t, "the request waits", func() bool { return s.rpc.Stats().Queue.Waiting == 1 && time.Since(start) > least })
	next := *s.live.Load()
	next.QueueBudget = time.Hour
	if err := s.Reload(next); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil || answer.GetRanking().GetQueuedMs() <= 0 {
		t.Fatalf("%v, %v", answer, err)
	}
}

// What waits for room is measured also when it was allowed to while the
// scheduler ran.
func TestWaitsAreMeasuredWhenAllowedLive(t *testing.T) {
	s, client, _ := waiting(t, time.Minute, Config{QueueBudget: time.Nanosecond})
	next := s.cfg
	next.QueueLength = 10
	if err := s.Reload(next); err != nil {
		t.Fatal(err)
	}
	waited(t, s, client, 0)
	if _, page := get(t, s, "/metrics"); !strings.Contains(page, "kvscout_scheduler_queue_duration_seconds_count") {
		t.Error("the metrics page has no durations of waits")
	}
}

// A request may wait as long as -queue-wait says, however long its connection
// has been open: that is told to go, and lasts until its calls are over.
func TestAWaitOutlivesItsConnection(t *testing.T) {
	const age = 20 * time.Millisecond
	s, client, _ := waiting(t, age, Config{QueueLength: 10, QueueBudget: time.Nanosecond})
	waited(t, s, client, 5*age)
	if _, err := New(Config{QueueWait: serve.LongestWait + 1}); err == nil || !strings.Contains(err.Error(), "queue-wait") {
		t.Errorf("a longer wait: %v", err)
	}
}

// Whoever waits for room is told at once that the scheduler stops, and does not
// hold it up.
func TestStopEndsTheWait(t *testing.T) {
	s, client, stop := waiting(t, time.Minute, Config{QueueLength: 10, QueueBudget: time.Nanosecond, StopWait: 10 * await.Patience})
	errs := make(chan error, 5)
	for range cap(errs) {
		go func() {
			_, err := client.Pick(t.Context(), &api.PickRequest{Request: &api.Request{Model: "m"}})
			errs <- err
		}()
	}
	await.True(t, "they wait", func() bool { return s.rpc.Stats().Queue.Waiting == cap(errs) })
	start := time.Now()
	if err := stop(); err != nil {
		t.Error(err)
	}
	for range cap(errs) {
		if err := <-errs; status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "stopping") {
			t.Error(err)
		}
	}
	if took := time.Since(start); took > await.Patience {
		t.Errorf("the stop took %v", took)
	}
}
