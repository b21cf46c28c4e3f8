package rpc

import (
	"context"
	"errors"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvscout/kvscout/scheduler/internal/admission"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// maxMessage bounds the text of a status: errors quote names that callers made.
const maxMessage = 1 << 10

var (
	errPanic   = errors.New("internal error")
	errUnready = errors.New("not all members are known yet")
)

// codeOf is the map from errors to status codes. The first match counts.
var codeOf = []struct {
	err  error
	code codes.Code
}{
	{context.Canceled, codes.Canceled},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{admission.ErrWaited, codes.DeadlineExceeded},
	{admission.ErrFull, codes.ResourceExhausted},
	{intake.ErrInvalid, codes.InvalidArgument},
	{pick.ErrPrompt, codes.InvalidArgument},
	{pick.ErrPolicy, codes.InvalidArgument},
	{pick.ErrNotAllowed, codes.PermissionDenied},
	{errUnready, codes.Unavailable},
	{pick.ErrModel, codes.NotFound},
	{pick.ErrAdapter, codes.NotFound},
	{pick.ErrNoCandidate, codes.Unavailable},
	{pick.ErrNoMembers, codes.Unavailable},
	{errWatchers, codes.ResourceExhausted},
	{errCalls, codes.ResourceExhausted},
	{admission.ErrClosed, codes.Unavailable},
}

// statusOf gives an error its status. What has one keeps it: that comes from
// gRPC itself.
func statusOf(err error) error {
	if err == nil {
		return nil
	}
	code := codes.Internal
	if own, ok := status.FromError(err); ok {
		return own.Err()
	}
	for _, c := range codeOf {
		if errors.Is(err, c.err) {
			code = c.code
			break
		}
	}
	text := err.Error()
	if len(text) > maxMessage {
		text = strings.ToValidUTF8(text[:maxMessage], "") + " ..."
	}
	return status.Error(code, text)
}
