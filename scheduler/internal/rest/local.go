package rest

import (
	"context"
	"io"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Local joins clients with services in this process: it is a
// grpc.ServiceRegistrar for these and a grpc.ClientConnInterface for those.
// Messages are copied, so that each side owns its own. Of streams it knows those
// on which the service alone sends.
type Local struct {
	// Unary and Streams are the server's interceptors, the outermost first.
	Unary   []grpc.UnaryServerInterceptor
	Streams []grpc.StreamServerInterceptor
	// Stats is told of calls as a server's is; nil: nobody is.
	Stats stats.Handler

	methods map[string]served
	open    sync.WaitGroup // streams
}

// served is one method, in one of two forms.
type served struct {
	by     any
	unary  grpc.MethodHandler
	stream grpc.StreamHandler
}

// RegisterService adds a service, before the first call.
func (l *Local) RegisterService(d *grpc.ServiceDesc, by any) {
	if l.methods == nil {
		l.methods = make(map[string]served)
	}
	for _, m := range d.Methods {
		l.methods["/"+d.ServiceName+"/"+m.MethodName] = served{by: by, unary: m.Handler}
	}
	for _, m := range d.Streams {
		l.methods["/"+d.ServiceName+"/"+m.StreamName] = served{by: by, stream: m.Handler}
	}
}

// Wait until no stream is open. The contexts of their callers end them.
func (l *Local) Wait() { l.open.Wait() }

// Invoke calls a method that is answered once.
func (l *Local) Invoke(ctx context.Context, method string, request, response any, _ ...grpc.CallOption) (err error) {
	m := l.methods[method]
	if m.unary == nil {
		return status.Errorf(codes.Unimplemented, "no method %s", method)
	}
	ctx, done := l.begin(ctx, method)
	defer func() { done(err) }()
	decode := func(into any) error { return hand(into, request) }
	answered, err := m.unary(m.by, ctx, decode, func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		for _, intercept := range slices.Backward(l.Unary) {
			inner := handle
			handle = func(ctx context.Context, request any) (any, error) { return intercept(ctx, request, info, inner) }
		}
		return handle(ctx, request)
	})
	if err != nil {
		return err
	}
	return hand(response, answered)
}

// NewStream calls a method that sends a stream.
func (l *Local) NewStream(ctx context.Context, d *grpc.StreamDesc, method string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	m := l.methods[method]
	if m.stream == nil || d.ClientStreams {
		return nil, status.Errorf(codes.Unimplemented, "no method %s", method)
	}
	info := &grpc.StreamServerInfo{FullMethod: method, IsServerStream: true}
	handle := m.stream
	for _, intercept := range slices.Backward(l.Streams) {
		inner := handle
		handle = func(by any, s grpc.ServerStream) error { return intercept(by, s, info, inner) }
	}
	return &stream{ctx: ctx, sent: make(chan any), run: func(s *stream) {
		l.open.Go(func() {
			defer close(s.sent)
			ctx, done := l.begin(ctx, method)
			s.err = handle(m.by, &serverStream{client: s, ctx: ctx})
			done(s.err)
		})
	}}, nil
}

// begin is what a server does before it calls a service: what the client sends
// along is what the service gets.
func (l *Local) begin(ctx context.Context, method string) (context.Context, func(error)) {
	sent, _ := metadata.FromOutgoingContext(ctx)
	ctx = metadata.NewIncomingContext(ctx, sent)
	if l.Stats == nil {
		return ctx, func(error) {}
	}
	ctx = l.Stats.TagRPC(ctx, &stats.RPCTagInfo{FullMethodName: method})
	start := time.Now()
	l.Stats.HandleRPC(ctx, &stats.Begin{BeginTime: start})
	return ctx, func(err error) {
		l.Stats.HandleRPC(ctx, &stats.End{BeginTime: start, EndTime: time.Now(), Error: err})
	}
}

// hand copies a message of one type.
func hand(into, from any) error {
	to, ok := into.(proto.Message)
	of, known := from.(proto.Message)
	if !ok || !known {
		return status.Errorf(codes.Internal, "%T into %T", from, into)
	}
	proto.Merge(to, of)
	return nil
}

// stream is the client's end of one.
type stream struct {
	grpc.ClientStream // nil: what is not here is not used
	ctx               context.Context
	run               func(*stream)
	request           any
	sent              chan any // by the service; closed at its end
	err               error    // the end; to be read when sent is closed
}

func (s *stream) Context() context.Context     { return s.ctx }
func (s *stream) Header() (metadata.MD, error) { return nil, nil }
func (s *stream) Trailer() metadata.MD         { return nil }
func (s *stream) SendMsg(m any) error          { s.request = m; return nil }
func (s *stream) CloseSend() error             { s.run(s); return nil }

func (s *stream) RecvMsg(into any) error {
	m, ok := <-s.sent
	switch {
	case ok:
		return hand(into, m)
	case s.err != nil:
		return s.err
	}
	return io.EOF
}

// serverStream is the service's end of it.
type serverStream struct {
	grpc.ServerStream // nil: what is not here is not used
	client            *stream
	ctx               context.Context
}

func (s *serverStream) Context() context.Context { return s.ctx }
func (s *serverStream) RecvMsg(into any) error   { return hand(into, s.client.request) }

func (s *serverStream) SendMsg(m any) error {
	select {
	case s.client.sent <- proto.Clone(m.(proto.Message)):
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}
