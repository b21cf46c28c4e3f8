package rpc

import (
	"context"
	"errors"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/admission"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// maxMessage bounds the text of a status: errors quote names that callers made.
const maxMessage = 1 << 10

// domain of the reasons.
const domain = "kvscout"

var (
	errPanic    = errors.New("internal error")
	errUnready  = errors.New("not all members are known yet")
	errPrompt   = errors.New("invalid prompt")
	errOperator = errors.New("the service Admin is for operators, and the certificate names none")
	errReused   = errors.New("another request had this request_id")

	errForgotten = errors.New("no decision of it is remembered")
)

// How long to wait before a call is worth trying again: until somebody else's
// call may have ended, a heartbeat has come, or a pod has.
const (
	waitCall   = 100 * time.Millisecond
	waitMember = time.Second
	waitPod    = 5 * time.Second
)

// meanings of errors to callers. The first match counts.
var meanings = []struct {
	err    error
	code   codes.Code
	reason api.ErrorReason
	wait   time.Duration // 0: waiting does not help
}{
	{context.Canceled, codes.Canceled, api.ErrorReason_ERROR_REASON_CANCELLED, 0},
	{context.DeadlineExceeded, codes.DeadlineExceeded, api.ErrorReason_ERROR_REASON_DEADLINE, 0},
	{admission.ErrWaited, codes.DeadlineExceeded, api.ErrorReason_ERROR_REASON_QUEUE_TIMEOUT, 0},
	{admission.ErrFull, codes.ResourceExhausted, api.ErrorReason_ERROR_REASON_QUEUE_FULL, waitMember},
	{errPrompt, codes.InvalidArgument, api.ErrorReason_ERROR_REASON_INVALID_PROMPT, 0},
	{intake.ErrInvalid, codes.InvalidArgument, api.ErrorReason_ERROR_REASON_INVALID_REQUEST, 0},
	{pick.ErrPrompt, codes.InvalidArgument, api.ErrorReason_ERROR_REASON_INVALID_PROMPT, 0},
	{pick.ErrPolicy, codes.InvalidArgument, api.ErrorReason_ERROR_REASON_UNKNOWN_POLICY, 0},
	{pick.ErrNotAllowed, codes.PermissionDenied, api.ErrorReason_ERROR_REASON_POLICY_NOT_ALLOWED, 0},
	{errOperator, codes.PermissionDenied, api.ErrorReason_ERROR_REASON_NOT_AN_OPERATOR, 0},
	{errUnready, codes.Unavailable, api.ErrorReason_ERROR_REASON_STARTING, waitMember},
	{pick.ErrGone, codes.Unavailable, api.ErrorReason_ERROR_REASON_MODEL_GONE, waitPod},
	{pick.ErrModel, codes.NotFound, api.ErrorReason_ERROR_REASON_UNKNOWN_MODEL, 0},
	{pick.ErrAdapter, codes.NotFound, api.ErrorReason_ERROR_REASON_UNKNOWN_ADAPTER, 0},
	{pick.ErrExcluded, codes.FailedPrecondition, api.ErrorReason_ERROR_REASON_EXCLUDED, 0},
	{pick.ErrNoCandidate, codes.Unavailable, api.ErrorReason_ERROR_REASON_NO_CANDIDATE, waitMember},
	{pick.ErrNoMembers, codes.Unavailable, api.ErrorReason_ERROR_REASON_NO_MEMBERS, waitPod},
	{errWatchers, codes.ResourceExhausted, api.ErrorReason_ERROR_REASON_TOO_MANY_CALLS, waitMember},
	{errCalls, codes.ResourceExhausted, api.ErrorReason_ERROR_REASON_TOO_MANY_CALLS, waitCall},
	{errReused, codes.AlreadyExists, api.ErrorReason_ERROR_REASON_REQUEST_ID_REUSED, 0},
	{errForgotten, codes.NotFound, api.ErrorReason_ERROR_REASON_UNKNOWN_REQUEST, 0},
	{admission.ErrClosed, codes.Unavailable, api.ErrorReason_ERROR_REASON_STOPPING, 0},
}

// statusOf gives an error its status. What has one keeps it: that comes from
// gRPC itself.
func statusOf(err error) error {
	if err == nil {
		return nil
	}
	if own, ok := status.FromError(err); ok {
		return own.Err()
	}
	text := err.Error()
	if len(text) > maxMessage {
		text = strings.ToValidUTF8(text[:maxMessage], "") + " ..."
	}
	for _, m := range meanings {
		if errors.Is(err, m.err) {
			return detailed(m.code, text, m.reason, m.wait)
		}
	}
	return detailed(codes.Internal, text, api.ErrorReason_ERROR_REASON_INTERNAL, 0)
}

// detailed is a status with its reason and, if that helps, how long to wait.
func detailed(code codes.Code, text string, reason api.ErrorReason, wait time.Duration) error {
	details := []protoadapt.MessageV1{&errdetails.ErrorInfo{
		Reason: strings.TrimPrefix(reason.String(), "ERROR_REASON_"),
		Domain: domain,
	}}
	if wait > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(wait)})
	}
	st, err := status.New(code, text).WithDetails(details...)
	if err != nil { // the text alone is better than no answer
		return status.Error(code, text)
	}
	return st.Err()
}
