package extproc

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/edge"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

func candidate(address string) *api.Candidate {
	return &api.Candidate{Member: &api.Member{Address: address}, CachedTokens: &api.CachedTokens{Gpu: 16, Host: 32, Disk: 64, Predicted: 128}}
}

func TestChoices(t *testing.T) {
	pulling := candidate("a:1")
	pulling.Pull = &api.Pull{From: &api.Member{Address: "b:2"}}
	for name, c := range map[string]struct {
		ranking   *api.Ranking
		endpoints []string
		headers   map[string]string
	}{
		"as many as are wanted":  {&api.Ranking{Candidates: []*api.Candidate{candidate("a:1"), candidate("b:2"), candidate("c:3")}}, []string{"a:1", "b:2"}, nil},
		"each once":              {&api.Ranking{Candidates: []*api.Candidate{candidate("a:1"), candidate("a:1"), candidate(""), candidate("c:3")}}, []string{"a:1", "c:3"}, nil},
		"one decodes":            {&api.Ranking{Candidates: []*api.Candidate{candidate("a:1"), candidate("b:2")}, Decode: candidate("d:4")}, []string{"d:4"}, map[string]string{"x-prefiller-host-port": "a:1"}},
		"one has blocks to pull": {&api.Ranking{Candidates: []*api.Candidate{pulling}}, []string{"a:1"}, map[string]string{"x-kv-cache-source-host-port": "b:2"}},
		"no address":             {&api.Ranking{Candidates: []*api.Candidate{candidate(""), candidate("b:2")}}, nil, nil},
		"no address to decode":   {&api.Ranking{Candidates: []*api.Candidate{candidate("a:1")}, Decode: candidate("")}, nil, nil},
	} {
		var withdrawn []string
		s := New(Config{Options: Options{Endpoints: 2}, Fleet: fleet.New(fleet.Config{}), Report: func(_ context.Context, r *api.ReportRequest) (*api.ReportResponse, error) {
			withdrawn = append(withdrawn, r.GetReports()[0].GetDecisionId()+" "+r.GetReports()[0].GetOutcome().String())
			return &api.ReportResponse{}, nil
		}})
		got, err := s.choose(t.Context(), s.cfg.Fleet.View(), "d1", c.ranking)
		if c.endpoints == nil {
			if why := (edge.Refusal{}); !errors.As(err, &why) || why.Status != 503 || !cmp.Equal(withdrawn, []string{"d1 OUTCOME_CANCELLED"}) {
				t.Errorf("%s: %v %v, withdrawn %v", name, got, err, withdrawn)
			}
			continue
		}
		if err != nil || got.decision != "d1" || got.cached != 240 || len(withdrawn) > 0 {
			t.Errorf("%s: %+v %v, withdrawn %v", name, got, err, withdrawn)
			continue
		}
		if d := cmp.Diff(c.endpoints, got.endpoints) + cmp.Diff(c.headers, got.headers); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}

func TestObjectives(t *testing.T) {
	got, err := ParseObjectives("chat=10, batch=-100")
	if d := cmp.Diff(map[string]int32{"chat": 10, "batch": -100}, got); d != "" || err != nil {
		t.Error(d, err)
	}
	for _, wrong := range []string{"chat", "=1", "chat=", "chat=101", "chat=1.5", "chat=1,chat=2", "chat=1,"} {
		if got, err := ParseObjectives(wrong); err == nil {
			t.Errorf("%q is %v", wrong, got)
		}
	}
	var priority int32
	name := ""
	pick := func(_ context.Context, r *api.PickRequest) (*api.PickResponse, error) {
		priority, name = r.GetRequest().GetPriority(), r.GetRequest().GetRequestId()
		return &api.PickResponse{Ranking: &api.Ranking{EnginePriority: 7, Candidates: []*api.Candidate{candidate("a:1")}}}, nil
	}
	for objective, want := range map[string]int32{"chat": 10, "other": 0, "": 0} {
		s := New(Config{Options: Options{Endpoints: 1, Objectives: got, Priority: true}, Fleet: fleet.New(fleet.Config{}), Pick: pick})
		c, err := s.decide(t.Context(), &ask{request: &api.Request{Prompt: api.Body("{}"), Headers: map[string]string{"x-gateway-inference-objective": objective, "x-request-id": "r" + objective}}})
		if err != nil || name != "r"+objective || priority != want || c.priority == nil || *c.priority != 7 {
			t.Errorf("%q: priority %d, %+v %v", objective, priority, c, err)
		}
	}
}
