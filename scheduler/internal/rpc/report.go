package rpc

import (
	"context"
	"fmt"
	"math"
	"time"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// maxReports of one call.
const maxReports = 4096

// outcomes of the wire.
var outcomes = map[api.Outcome]fleet.Outcome{
	api.Outcome_OUTCOME_FIRST_TOKEN: fleet.FirstToken,
	api.Outcome_OUTCOME_FINISHED:    fleet.Finished,
	api.Outcome_OUTCOME_FAILED:      fleet.Failed,
	api.Outcome_OUTCOME_CANCELLED:   fleet.Cancelled,
}

// Report closes decisions, or tells how far they came.
func (s *Service) Report(_ context.Context, req *api.ReportRequest) (*api.ReportResponse, error) {
	if n := len(req.GetReports()); n > maxReports {
		return nil, fmt.Errorf("%d reports, the limit is %d: %w", n, maxReports, intake.ErrInvalid)
	}
	results := make([]api.ReportResult, len(req.GetReports()))
	resp := &api.ReportResponse{Results: make([]*api.ReportResult, len(results))}
	now := time.Now()
	for i, r := range req.GetReports() {
		resp.Results[i] = &results[i]
		results[i].Status, results[i].Explanation = s.report(r, now)
	}
	s.waits.Wake()
	return resp, nil
}

// report records one report, and says what was made of it.
func (s *Service) report(r *api.Report, now time.Time) (api.ReportStatus, string) {
	outcome, ok := outcomes[r.GetOutcome()]
	wrong := ""
	switch ttft := r.GetTtftMs(); {
	case r.GetDecisionId() == "":
		wrong = "the report names no decision"
	case !ok:
		wrong = fmt.Sprintf("there is no outcome %d", r.GetOutcome())
	case r.PromptTokens != nil && r.GetCachedTokens() > r.GetPromptTokens():
		wrong = fmt.Sprintf("%d of %d prompt tokens cached", r.GetCachedTokens(), r.GetPromptTokens())
	case math.IsNaN(ttft) || math.IsInf(ttft, 0) || ttft < 0:
		wrong = fmt.Sprintf("ttft_ms is %v", ttft)
	}
	if wrong != "" {
		return api.ReportStatus_REPORT_STATUS_INVALID, wrong
	}
	known := s.cfg.Picker.Report(pick.Report{
		Decision:     r.GetDecisionId(),
		Outcome:      outcome,
		Member:       r.GetMemberId(),
		PromptTokens: wide(r.PromptTokens),
		CachedTokens: wide(r.CachedTokens),
		OutputTokens: uint64(r.GetOutputTokens()),
		TTFTMS:       r.GetTtftMs(),
	}, now)
	if s.cfg.Reported != nil {
		s.cfg.Reported(r.GetOutcome())
	}
	s.lately.Reported(r)
	if !known {
		return api.ReportStatus_REPORT_STATUS_UNKNOWN_DECISION, "there is no such decision, or no longer"
	}
	if name := r.GetMemberId(); name != "" && s.cfg.Fleet.View().Named(name) == nil {
		return api.ReportStatus_REPORT_STATUS_UNKNOWN_MEMBER, fmt.Sprintf("there is no member %.200q: nothing is reserved or counted for what it served", name)
	}
	return api.ReportStatus_REPORT_STATUS_RECORDED, ""
}

func wide(n *uint32) *uint64 {
	if n == nil {
		return nil
	}
	w := uint64(*n)
	return &w
}
