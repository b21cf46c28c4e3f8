// Package rpc is the scheduler's gRPC service: protobuf to prompt and choice,
// and back. It is the only place where errors become status codes. It has no
// defaults of its own and scores nothing.
package rpc

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/admission"
	"github.com/kvscout/kvscout/scheduler/internal/books"
	"github.com/kvscout/kvscout/scheduler/internal/chronicle"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// Config of a Service. All but the observers must be set.
type Config struct {
	Intake *intake.Intake
	Picker *pick.Picker
	Fleet  *fleet.Fleet
	Books  *books.Books
	// Ready tells whether the cache states are complete.
	Ready func() bool
	// Self says what operators are told of this scheduler, all but the time of its
	// clock; nil: nothing.
	Self func() *api.SchedulerState
	// CallTimeout of unary calls whose caller names no deadline.
	CallTimeout time.Duration
	// MaxWatchers bounds the open WatchMembers streams, MaxCalls the unary calls under
	// way besides those that wait for room.
	MaxWatchers, MaxCalls int
	// Operator tells whether the caller may use the service Admin; nil: everybody.
	Operator func(context.Context) bool
	// Admission says how requests wait for room.
	Admission admission.Rules
	// Warn says what is wrong with a member beside its cache state; empty: nothing.
	// Nil: never anything.
	Warn func(name string) string
	// Decided is told of every request of Pick and Score that was understood,
	// Reported of every Report, on the caller's goroutine; nil: nobody is.
	Decided  func(context.Context, Decided)
	Reported func(api.Outcome)
	Log      *slog.Logger
}

// Decided is one request of Pick or Score, for whoever counts.
type Decided struct {
	// Method: pick or score.
	Method string
	// Request as it came, and the Session that was found in it; not to be kept.
	Request *api.Request
	Session string
	// Decision; nil: none was made. Not to be changed, nor kept.
	Decision *pick.Decision
	// Start is when the request was decoded, Took the time from there to the
	// decision. Intake is its first part: reading the prompt, for which engines may
	// be asked.
	Start        time.Time
	Took, Intake time.Duration
	// Queued is how long it waited for room besides; Queues: it might have to.
	Queued time.Duration
	Queues bool
}

// Service implements api.SchedulerServer and api.AdminServer. Its Unary and Stream interceptors
// must be installed: they map errors, set deadlines and stop panics.
type Service struct {
	api.UnimplementedSchedulerServer
	api.UnimplementedAdminServer
	cfg      Config
	waits    *admission.Waits
	closed   chan struct{}
	closing  atomic.Bool
	patience atomic.Int64 // CallTimeout
	repeats  *repeats     // of Pick
	placed   *repeats     // of Place
	lately   *chronicle.Chronicle
	watchers atomic.Int64
	streams  atomic.Int64
	calls    atomic.Int64
	refused  atomic.Uint64
	panics   atomic.Uint64
}

// New returns a Service.
func New(cfg Config) *Service {
	s := &Service{cfg: cfg, closed: make(chan struct{}), repeats: newRepeats(), placed: newRepeats(), lately: chronicle.New(), waits: admission.NewWaits(cfg.Admission, cfg.Fleet, cfg.Picker)}
	s.SetCallTimeout(cfg.CallTimeout)
	return s
}

// Run serves those who wait for room, and follows the members, until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	var group sync.WaitGroup
	group.Go(func() { s.follow(ctx) })
	s.waits.Run(ctx)
	group.Wait()
	return nil
}

// SetAdmission changes Config.Admission. Those that wait go on waiting as long
// as they were told, unless nobody may wait any more.
func (s *Service) SetAdmission(r admission.Rules) { s.waits.Set(r) }

// warn is Config.Warn.
func (s *Service) warn(name string) string {
	if s.cfg.Warn == nil {
		return ""
	}
	return s.cfg.Warn(name)
}

// SetCallTimeout changes Config.CallTimeout for calls that come from now on.
func (s *Service) SetCallTimeout(d time.Duration) { s.patience.Store(int64(d)) }

func (s *Service) callTimeout() time.Duration { return time.Duration(s.patience.Load()) }

// Close ends the WatchMembers streams and whatever waits for room, so that a server can stop gracefully.
func (s *Service) Close() {
	if s.closing.CompareAndSwap(false, true) {
		close(s.closed)
	}
}

// Stats of a Service.
type Stats struct {
	Watchers int64
	// Calls under way, and those that were Refused because there were too many.
	Calls   int64
	Refused uint64
	// Panics that were turned into errors.
	Panics uint64
	// Queue of those who wait for room.
	Queue admission.Stats
}

// Stats returns the counts.
func (s *Service) Stats() Stats {
	return Stats{
		Watchers: s.watchers.Load(), Calls: s.calls.Load(), Refused: s.refused.Load(), Panics: s.panics.Load(),
		Queue: s.waits.Stats(),
	}
}

// Unary is the interceptor of unary calls.
func (s *Service) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (resp any, err error) {
	defer func() { err = statusOf(err) }()
	defer s.recover(info.FullMethod, &err)
	if err := s.allow(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	defer s.calls.Add(-1)
	if s.calls.Add(1) > int64(s.cfg.MaxCalls+s.waits.Waiting()) {
		s.refused.Add(1)
		return nil, fmt.Errorf("%d calls are under way: %w", s.cfg.MaxCalls, errCalls)
	}
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.timeout(info.FullMethod))
		defer cancel()
	}
	return handle(ctx, req)
}

// timeout of a call whose caller names no deadline. Where requests wait, a
// Pick may take that long besides.
func (s *Service) timeout(method string) time.Duration {
	if r := s.waits.Rules(); r.Open() && method == api.Scheduler_Pick_FullMethodName {
		return s.callTimeout() + r.Wait
	}
	return s.callTimeout()
}

// Stream is the interceptor of streams.
func (s *Service) Stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) (err error) {
	defer func() { err = statusOf(err) }()
	defer s.recover(info.FullMethod, &err)
	if err := s.allow(stream.Context(), info.FullMethod); err != nil {
		return err
	}
	return handle(srv, stream)
}

// allow refuses operators' methods to those who are none.
func (s *Service) allow(ctx context.Context, method string) error {
	if s.cfg.Operator == nil || !strings.HasPrefix(method, "/"+api.Admin_ServiceDesc.ServiceName+"/") || s.cfg.Operator(ctx) {
		return nil
	}
	return errOperator
}

func (s *Service) recover(method string, err *error) {
	if r := recover(); r != nil {
		s.panics.Add(1)
		s.cfg.Log.Error("call panicked", "method", method, "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
		*err = errPanic
	}
}
