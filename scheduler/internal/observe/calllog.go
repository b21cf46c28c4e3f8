package observe

import (
	"context"
	"log/slog"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/rpc"
)

// callLog says of single requests what became of them: at debug of each, and of
// those that this scheduler failed as warnings. Otherwise it costs one question.
type callLog struct{ log *slog.Logger }

// decided writes one line for a decision.
func (l callLog) decided(ctx context.Context, d *rpc.Decided) {
	if !l.log.Enabled(ctx, slog.LevelDebug) {
		return
	}
	first := &d.Decision.Candidates[0]
	l.log.DebugContext(ctx, "decided", "method", d.Method, "decision", d.Decision.ID, "request", d.Request.GetRequestId(), "session", d.Session,
		"tenant", d.Request.GetTenant(), "model", d.Decision.Model, "member", first.Member.Info.Name, "address", first.Member.Info.Address,
		"reason", d.Decision.Reason, "fallback", d.Decision.Fallback(), "took", d.Took, "intake", d.Intake, "queued", d.Queued.Round(time.Microsecond))
}

// called writes one line for a report, and for a call that failed.
func (l callLog) called(ctx context.Context, method string, req any, err error) {
	level := levelOf(err)
	if !l.log.Enabled(ctx, level) {
		return
	}
	var attributes []any
	switch r := req.(type) {
	case *api.ReportRequest:
		attributes = []any{"reports", len(r.GetReports())}
	case interface{ GetRequest() *api.Request }:
		q := r.GetRequest()
		attributes = []any{"request", q.GetRequestId(), "session", q.GetSessionId(), "tenant", q.GetTenant(), "model", q.GetModel()}
	}
	switch {
	case err != nil:
		attributes = append(attributes, "method", method, "code", codeName(status.Code(err)), "error", status.Convert(err).Message())
		if level >= slog.LevelWarn {
			attributes = append(attributes, "do", "see the code in docs/OPERATIONS.md")
		}
		l.log.Log(ctx, level, "call failed", attributes...)
	case method == api.Scheduler_Report_FullMethodName:
		for _, r := range req.(*api.ReportRequest).GetReports() {
			l.log.DebugContext(ctx, "reported", "decision", r.GetDecisionId(), "member", r.GetMemberId(), "outcome", outcomeName(r.GetOutcome()))
		}
	}
}

// levelOf a call's end: what the caller has to mend, or ended itself, is for
// those who look for it; what this scheduler could not do is a warning.
func levelOf(err error) slog.Level {
	switch status.Code(err) {
	case codes.Internal, codes.Unknown, codes.Unavailable, codes.ResourceExhausted, codes.DeadlineExceeded:
		return slog.LevelWarn
	}
	return slog.LevelDebug
}
