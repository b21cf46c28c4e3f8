// Package edge is what servers of inference requests have in common, the endpoint
// picker and the gateway: how they refuse one, how requests end, and how much
// memory they may take. Who is refused, and why, they know themselves.
package edge

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// ReasonHeader says for programs why a request was refused.
	ReasonHeader = "x-llm-d-request-dropped-reason"
	// DecisionHeader of the response names the decision, CachedHeader the prompt
	// tokens that were predicted to be cached, to clients that send ExplainHeader.
	DecisionHeader = "x-kvscout-decision"
	CachedHeader   = "x-kvscout-cached-tokens"
	ExplainHeader  = "x-kvscout-explain"
)

// Refusal is an answer of our own in the engine's place.
type Refusal struct {
	Status int
	Reason string // for programs; empty: the status says it
	Text   string
	Wait   time.Duration // 0: waiting does not help
}

var (
	// TooLong is a body beyond MaxBody.
	TooLong = Refusal{Status: 413, Text: "the request has more than 32 MiB"}
	// TooMany are bodies beyond the Budget.
	TooMany = Refusal{Status: 429, Reason: saturated, Text: "too many requests are being sent at a time", Wait: time.Second}
	// TooManyOpen are requests beyond what is served at a time.
	TooManyOpen = Refusal{Status: 429, Reason: saturated, Text: "too many requests are under way", Wait: time.Second}
	// Nobody is there to be asked.
	Nobody = Refusal{Status: 503, Reason: NoEndpoints, Text: "no member is known, or none has an address", Wait: time.Second}
)

// Encoded is a body that cannot be read as it is sent.
func Encoded(encoding string) Refusal {
	return Refusal{Status: 415, Text: fmt.Sprintf("a body with content-encoding %.20q cannot be read: send it as it is", encoding)}
}

// Reasons for programs.
const (
	NoEndpoints = "rejected-no-endpoints"
	saturated   = "rejected-saturated"
)

// reasons of the API's errors, as the protocol has them.
var reasons = map[string]string{
	"QUEUE_FULL": saturated, "TOO_MANY_CALLS": saturated,
	"QUEUE_TIMEOUT": "rejected-ttl-expired", "DEADLINE": "rejected-ttl-expired",
	"CANCELLED": "rejected-context-cancelled", "STOPPING": "rejected-shutting-down",
	"MODEL_GONE": NoEndpoints, "NO_CANDIDATE": NoEndpoints, "NO_MEMBERS": NoEndpoints, "STARTING": NoEndpoints, "EXCLUDED": NoEndpoints,
}

// types of errors, as vLLM names them.
var types = map[int]string{
	400: "BadRequestError", 403: "PermissionDeniedError", 404: "NotFoundError", 413: "RequestTooLargeError", 415: "UnsupportedMediaTypeError",
	429: "TooManyRequestsError", 500: "InternalServerError", 502: "BadGatewayError", 503: "ServiceUnavailableError",
}

// Of is what the client is told of an error of the API.
func Of(err error) Refusal {
	var own Refusal
	if errors.As(err, &own) {
		return own
	}
	var st *status.Status
	if coded := interface{ GRPCStatus() *status.Status }(nil); errors.As(err, &coded) {
		st = coded.GRPCStatus() // without what was said around it
	} else {
		st = status.Convert(err)
	}
	r := Refusal{Text: st.Message()}
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			r.Reason = reasons[d.GetReason()]
		case *errdetails.RetryInfo:
			r.Wait = d.GetRetryDelay().AsDuration()
		}
	}
	switch st.Code() {
	case codes.InvalidArgument, codes.AlreadyExists:
		r.Status = 400
	case codes.NotFound:
		r.Status = 404
	case codes.PermissionDenied:
		r.Status = 403
	case codes.ResourceExhausted:
		r.Status = 429
	case codes.Unavailable, codes.FailedPrecondition, codes.DeadlineExceeded, codes.Canceled:
		r.Status = 503
	default:
		r.Status = 500
	}
	return r
}

// Headers of the answer, each a name and a value.
func (r Refusal) Headers() [][2]string {
	list := [][2]string{{"content-type", "application/json"}}
	if r.Reason != "" {
		list = append(list, [2]string{ReasonHeader, r.Reason})
	}
	if r.Wait > 0 {
		list = append(list, [2]string{"retry-after", strconv.Itoa(int(math.Ceil(r.Wait.Seconds())))})
	}
	return list
}

// Body of the answer as vLLM writes it.
func (r Refusal) Body() []byte {
	body, err := json.Marshal(map[string]any{"error": map[string]any{
		"message": r.Text, "type": types[r.Status], "param": nil, "code": r.Status,
	}})
	if err != nil { // a string and a number
		panic(err)
	}
	return body
}

// Error makes a refusal one of the errors of a decision.
func (r Refusal) Error() string { return r.Text }
