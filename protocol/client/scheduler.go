package client

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// maxWaiting reports wait for a scheduler: what comes beyond is lost. So many go
// with one call.
const maxWaiting = 4096

// scheduler is one of those that are asked.
type scheduler struct {
	conn    *grpc.ClientConn // nil: it is asked without one
	ask     api.SchedulerClient
	timeout time.Duration // negative: none
	stats   *counters
	until   atomic.Int64 // it rests, in ns since 1970

	mu       sync.Mutex // guards what follows
	waiting  []*api.Report
	sending  bool
	flushing sync.WaitGroup // of what sends
}

func (s *scheduler) rests(now time.Time) bool { return now.UnixNano() < s.until.Load() }

// pick asks once. A scheduler that does not answer in time rests: callers would
// wait for it one after the other.
func (s *scheduler) pick(ctx context.Context, request *api.Request) (*api.PickResponse, error) {
	patience, cancel := ctx, context.CancelFunc(func() {})
	if s.timeout > 0 {
		patience, cancel = context.WithTimeout(ctx, s.timeout)
	}
	defer cancel()
	answer, err := s.ask.Pick(patience, &api.PickRequest{Request: request})
	switch {
	case err == nil && len(answer.GetRanking().GetCandidates()) == 0:
		return nil, status.Error(codes.Internal, "a decision without a candidate")
	case errors.Is(patience.Err(), context.DeadlineExceeded) && ctx.Err() == nil:
		s.until.Store(time.Now().Add(rest).UnixNano())
	}
	return answer, err
}

// report leaves it to whoever sends, or to a goroutine that sends until nothing
// waits any more.
func (s *scheduler) report(r *api.Report) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.waiting) >= maxWaiting {
		s.stats.lost.Add(1)
		return
	}
	s.waiting = append(s.waiting, r)
	if !s.sending {
		s.sending = true
		s.flushing.Go(s.flush)
	}
}

func (s *scheduler) flush() {
	for {
		s.mu.Lock()
		batch := s.waiting
		s.waiting = nil
		s.sending = len(batch) > 0
		s.mu.Unlock()
		if len(batch) == 0 {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), max(s.timeout, rest))
		_, err := s.ask.Report(ctx, &api.ReportRequest{Reports: batch})
		cancel()
		if err != nil {
			s.stats.lost.Add(uint64(len(batch)))
		} else {
			s.stats.reported.Add(uint64(len(batch)))
		}
	}
}
