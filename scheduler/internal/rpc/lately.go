package rpc

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

const (
	// maxKept candidates of a decision that is kept for people.
	maxKept = 16
	// Members are compared every so often: of small fleets, of larger ones once for
	// each hundred less often, and at last.
	followEvery = 200 * time.Millisecond
	followLeast = 2 * time.Second
)

// keep a decision that was made, for people who look at the last ones.
func (s *Service) keep(in *api.Request, d *pick.Decision, ranking *api.Ranking, now time.Time) {
	if !s.lately.Due(now) {
		return
	}
	if len(ranking.GetCandidates()) > maxKept {
		all := ranking.Candidates
		ranking.Candidates = all[:maxKept]
		few := proto.CloneOf(ranking)
		ranking.Candidates = all
		ranking = few
	}
	s.lately.Decided(&api.RecentDecision{
		DecisionId: d.ID, RequestId: in.GetRequestId(), Tenant: in.GetTenant(), Model: d.Model,
		TimeMs: float64(now.UnixMicro()) / 1000, Ranking: ranking, Counterfactual: counterfactual(&d.Shadow),
	})
}

// follow the members until ctx is done, so that people see later what changed.
func (s *Service) follow(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		now := time.Now()
		fleet := s.fleet("", now)
		delivered := s.cfg.Fleet.Stats().Delivered
		s.lately.Members(now, fleet, &api.HistoryPoint{
			ReportedPromptTokens: delivered.Prompt, PredictedCachedTokens: delivered.Predicted, ReportedCachedTokens: delivered.Cached,
		})
		timer.Reset(min(followLeast, followEvery*time.Duration(1+len(fleet.GetMembers())/100)))
	}
}

// Changed notes that a setting is another one, for people.
func (s *Service) Changed(setting, from, to string) { s.lately.Set(time.Now(), setting, from, to) }

// ListDecisions gives the last ones.
func (s *Service) ListDecisions(_ context.Context, in *api.ListDecisionsRequest) (*api.ListDecisionsResponse, error) {
	return &api.ListDecisionsResponse{Decisions: s.lately.Decisions(in.GetModel(), in.GetMemberId(), int(in.GetMaxDecisions()))}, nil
}

// ListChanges gives the last ones.
func (s *Service) ListChanges(_ context.Context, in *api.ListChangesRequest) (*api.ListChangesResponse, error) {
	return &api.ListChangesResponse{Changes: s.lately.Changes(int(in.GetMaxChanges()))}, nil
}

// GetHistory gives the counts of the last hour.
func (s *Service) GetHistory(context.Context, *api.GetHistoryRequest) (*api.GetHistoryResponse, error) {
	return &api.GetHistoryResponse{Points: s.lately.History()}, nil
}
