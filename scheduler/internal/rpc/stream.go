package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/admission"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
)

const (
	// maxStreams open at a time, maxStreamCalls under way on one of them.
	maxStreams     = 4096
	maxStreamCalls = 1024
)

// stream is one PickStream. What cannot wait for anything is answered where it
// is received, everything else on a goroutine of its own.
type stream struct {
	service *Service
	wire    grpc.BidiStreamingServer[api.PickStreamRequest, api.PickStreamResponse]
	group   sync.WaitGroup

	sending sync.Mutex // held while an answer is written

	mu    sync.Mutex // guards what follows
	calls map[uint64]context.CancelFunc
	over  bool // no more calls begin
}

// PickStream serves many calls on one stream. It ends when the caller has no
// more and all are answered, when the caller is gone, or with an error when the
// service closes or the caller uses an id twice at a time.
func (s *Service) PickStream(wire grpc.BidiStreamingServer[api.PickStreamRequest, api.PickStreamResponse]) error {
	defer s.streams.Add(-1)
	if s.streams.Add(1) > maxStreams {
		s.refused.Add(1)
		return fmt.Errorf("%d streams are open: %w", maxStreams, errCalls)
	}
	st := &stream{service: s, wire: wire, calls: make(map[uint64]context.CancelFunc)}
	received := make(chan error, 1)
	go func() {
		var err error
		defer func() { received <- err }()
		defer s.recover(api.Scheduler_PickStream_FullMethodName, &err)
		err = st.receive()
	}()
	var err error
	select {
	case err = <-received:
	case <-s.closed:
		err = admission.ErrClosed
	}
	st.close(err != nil)
	st.group.Wait()
	return err
}

// receive takes calls until there are no more.
func (st *stream) receive() error {
	for {
		req, err := st.wire.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = st.take(req)
		}
		if err != nil {
			return err
		}
	}
}

func (st *stream) take(req *api.PickStreamRequest) error {
	id, s := req.GetId(), st.service
	if _, ok := req.GetCall().(*api.PickStreamRequest_Cancel); ok {
		st.mu.Lock()
		cancel := st.calls[id]
		st.mu.Unlock()
		if cancel != nil {
			cancel()
		}
		return nil
	}
	if s.atOnce(req) {
		if err := st.begin(id, nil); err != nil {
			return err
		}
		defer st.group.Done()
		return st.send(st.respond(st.wire.Context(), req))
	}
	ctx, cancel := context.WithTimeout(st.wire.Context(), s.timeout(api.Scheduler_Pick_FullMethodName))
	switch err := st.begin(id, cancel); {
	case errors.Is(err, errCalls):
		cancel()
		s.refused.Add(1)
		return st.send(failed(id, err))
	case err != nil:
		cancel()
		return err
	case s.calls.Add(1) > int64(s.cfg.MaxCalls+s.waits.Waiting()):
		defer st.group.Done()
		st.end(id)
		s.calls.Add(-1)
		s.refused.Add(1)
		return st.send(failed(id, fmt.Errorf("%d calls are under way: %w", s.cfg.MaxCalls, errCalls)))
	}
	go func() {
		defer st.group.Done()
		defer s.calls.Add(-1)
		resp := st.respond(ctx, req)
		st.end(id)
		_ = st.send(resp) // who does not hear it is gone
	}()
	return nil
}

// begin notes that a call is under way: whoever got no error calls group.Done.
// Only those with a cancel can be cancelled, and are bounded.
func (st *stream) begin(id uint64, cancel context.CancelFunc) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	switch _, twice := st.calls[id]; {
	case st.over:
		return admission.ErrClosed
	case twice:
		return fmt.Errorf("a call with id %d is under way on this stream: %w", id, intake.ErrInvalid)
	case cancel != nil && len(st.calls) >= maxStreamCalls:
		return fmt.Errorf("%d calls are under way on this stream: %w", maxStreamCalls, errCalls)
	}
	if cancel != nil {
		st.calls[id] = cancel
	}
	st.group.Add(1)
	return nil
}

// end forgets a call, so that its id is free before the answer is sent.
func (st *stream) end(id uint64) {
	st.mu.Lock()
	cancel := st.calls[id]
	delete(st.calls, id)
	st.mu.Unlock()
	cancel()
}

// close lets no more calls begin, and cancels those under way if they are not to
// be answered.
func (st *stream) close(cancel bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.over = true
	if !cancel {
		return
	}
	for _, give := range st.calls {
		give()
	}
}

// atOnce tells whether a call waits for nothing: no engine is asked for its
// tokens, it has no place in a queue to wait for, and no twin that may be under way.
func (s *Service) atOnce(req *api.PickStreamRequest) bool {
	switch c := req.GetCall().(type) {
	case *api.PickStreamRequest_Pick:
		r := c.Pick.GetRequest()
		return r.GetPrompt().GetOpenaiBody() == nil && r.GetRequestId() == "" && !s.waits.Rules().Open()
	case *api.PickStreamRequest_Score:
		return c.Score.GetRequest().GetPrompt().GetOpenaiBody() == nil
	}
	return true
}

// respond makes the answer to a call.
func (st *stream) respond(ctx context.Context, req *api.PickStreamRequest) (resp *api.PickStreamResponse) {
	var err error
	resp = &api.PickStreamResponse{Id: req.GetId()}
	defer func() {
		if err != nil {
			resp = failed(req.GetId(), err)
		}
	}()
	defer st.service.recover(api.Scheduler_PickStream_FullMethodName, &err)
	switch c := req.GetCall().(type) {
	case *api.PickStreamRequest_Pick:
		var a *api.PickResponse
		a, err = st.service.Pick(ctx, c.Pick)
		resp.Answer = &api.PickStreamResponse_Pick{Pick: a}
	case *api.PickStreamRequest_Score:
		var a *api.ScoreResponse
		a, err = st.service.Score(ctx, c.Score)
		resp.Answer = &api.PickStreamResponse_Score{Score: a}
	case *api.PickStreamRequest_Report:
		var a *api.ReportResponse
		a, err = st.service.Report(ctx, c.Report)
		resp.Answer = &api.PickStreamResponse_Report{Report: a}
	default:
		err = fmt.Errorf("call %d is none: want pick, score, report or cancel: %w", req.GetId(), intake.ErrInvalid)
	}
	return resp
}

func failed(id uint64, err error) *api.PickStreamResponse {
	return &api.PickStreamResponse{Id: id, Answer: &api.PickStreamResponse_Error{Error: status.Convert(statusOf(err)).Proto()}}
}

func (st *stream) send(resp *api.PickStreamResponse) error {
	st.sending.Lock()
	defer st.sending.Unlock()
	return st.wire.Send(resp)
}
