package rest

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// fail answers with an error. Those of the services have a reason; the others are
// about the request itself.
func fail(ctx context.Context, mux *runtime.ServeMux, m runtime.Marshaler, w http.ResponseWriter, r *http.Request, err error) {
	var own *runtime.HTTPStatusError
	if !errors.As(err, &own) {
		own = &runtime.HTTPStatusError{HTTPStatus: runtime.HTTPStatusFromCode(status.Code(err)), Err: err}
	}
	st, reason := status.Convert(own.Err), false
	for _, detail := range st.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			reason = true
		case *errdetails.RetryInfo:
			wait := max(1, math.Ceil(d.GetRetryDelay().AsDuration().Seconds()))
			w.Header().Set("Retry-After", strconv.FormatFloat(wait, 'f', 0, 64))
		}
	}
	if code := st.Code(); !reason && (code == codes.InvalidArgument || code == codes.Unimplemented) {
		if with, err := st.WithDetails(&errdetails.ErrorInfo{Domain: "kvscout",
			Reason: strings.TrimPrefix(api.ErrorReason_ERROR_REASON_INVALID_REQUEST.String(), "ERROR_REASON_")}); err == nil {
			st = with
		}
	}
	runtime.DefaultHTTPErrorHandler(ctx, mux, m, w, r, &runtime.HTTPStatusError{HTTPStatus: own.HTTPStatus, Err: st.Err()})
}

// misrouted answers what no path, or another method, stands for.
func misrouted(ctx context.Context, mux *runtime.ServeMux, m runtime.Marshaler, w http.ResponseWriter, r *http.Request, code int) {
	text := http.StatusText(code) + ": see GET /openapi.json"
	fail(ctx, mux, m, w, r, refused(code, codes.Unimplemented, text))
}

// refused is an error with a status that no code of gRPC stands for.
func refused(httpStatus int, code codes.Code, text string) error {
	return &runtime.HTTPStatusError{HTTPStatus: httpStatus, Err: status.Error(code, text)}
}

// Refuse answers somebody who may not ask this, as the API answers who is no
// operator.
func Refuse(w http.ResponseWriter, r *http.Request, text string) {
	st := status.New(codes.PermissionDenied, text)
	if with, err := st.WithDetails(&errdetails.ErrorInfo{Domain: "kvscout",
		Reason: strings.TrimPrefix(api.ErrorReason_ERROR_REASON_NOT_AN_OPERATOR.String(), "ERROR_REASON_")}); err == nil {
		st = with
	}
	fail(r.Context(), runtime.NewServeMux(), form, w, r, st.Err())
}
