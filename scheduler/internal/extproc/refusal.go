package extproc

import (
	"encoding/json"
	"math"
	"strconv"
	"time"

	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// reasonHeader says for programs why a request was refused.
const reasonHeader = "x-llm-d-request-dropped-reason"

// refusal is an answer of our own in the engine's place.
type refusal struct {
	status int
	reason string
	text   string
	wait   time.Duration // 0: waiting does not help
}

var (
	tooLong  = refusal{status: 413, text: "the request has more than 32 MiB"}
	nobodyIn = refusal{status: 503, reason: noEndpoints, text: "no member is among the endpoints that the gateway allows", wait: time.Second}
	nobody   = refusal{status: 503, reason: noEndpoints, text: "no member is known, or none has an address", wait: time.Second}
)

const noEndpoints = "rejected-no-endpoints"

// reasons of the API's errors, as the protocol has them.
var reasons = map[string]string{
	"QUEUE_FULL": "rejected-saturated", "TOO_MANY_CALLS": "rejected-saturated",
	"QUEUE_TIMEOUT": "rejected-ttl-expired", "DEADLINE": "rejected-ttl-expired",
	"CANCELLED": "rejected-context-cancelled", "STOPPING": "rejected-shutting-down",
	"MODEL_GONE": noEndpoints, "NO_CANDIDATE": noEndpoints, "NO_MEMBERS": noEndpoints, "STARTING": noEndpoints, "EXCLUDED": noEndpoints,
}

// types of errors, as vLLM names them.
var types = map[int]string{
	400: "BadRequestError", 403: "PermissionDeniedError", 404: "NotFoundError", 413: "RequestTooLargeError", 415: "UnsupportedMediaTypeError",
	429: "TooManyRequestsError", 500: "InternalServerError", 503: "ServiceUnavailableError",
}

// refusalOf is what the client is told of an error of the API.
func refusalOf(err error) refusal {
	st := status.Convert(err)
	r := refusal{text: st.Message()}
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			r.reason = reasons[d.GetReason()]
		case *errdetails.RetryInfo:
			r.wait = d.GetRetryDelay().AsDuration()
		}
	}
	switch st.Code() {
	case codes.InvalidArgument, codes.AlreadyExists:
		r.status = 400
	case codes.NotFound:
		r.status = 404
	case codes.PermissionDenied:
		r.status = 403
	case codes.ResourceExhausted:
		r.status = 429
	case codes.Unavailable, codes.FailedPrecondition, codes.DeadlineExceeded, codes.Canceled:
		r.status = 503
	default:
		r.status = 500
	}
	return r
}

// answer is the refusal with a body as vLLM writes it.
func (r refusal) answer() *extproc.ProcessingResponse {
	body, err := json.Marshal(map[string]any{"error": map[string]any{
		"message": r.text, "type": types[r.status], "param": nil, "code": r.status,
	}})
	if err != nil { // a string and a number
		panic(err)
	}
	h := &extproc.HeaderMutation{}
	h.SetHeaders = append(h.SetHeaders, header("content-type", "application/json"))
	if r.reason != "" {
		h.SetHeaders = append(h.SetHeaders, header(reasonHeader, r.reason))
	}
	if r.wait > 0 {
		h.SetHeaders = append(h.SetHeaders, header("retry-after", strconv.Itoa(int(math.Ceil(r.wait.Seconds())))))
	}
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extproc.ImmediateResponse{
		Status: &typepb.HttpStatus{Code: typepb.StatusCode(r.status)}, Headers: h, Body: body, Details: "kvscout",
	}}}
}

// Error makes a refusal one of the errors of a decision.
func (r refusal) Error() string { return r.text }
