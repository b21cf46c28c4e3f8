package client

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

func TestHeadersSayMore(t *testing.T) {
	r := Request(map[string]string{"x-llm-d-inference-fairness-id": "team", "x-slo-ttft-ms": "200", "x-llm-d-slo-tpot-ms": "-5"})
	if r.GetTenant() != "team" || r.GetSlo().GetTtftMs() != 200 || r.GetSlo().GetTpotMs() != 0 {
		t.Error(r)
	}
	if o := Objective(map[string]string{"x-gateway-inference-objective": "chat"}); o != "chat" {
		t.Error(o)
	}
	for _, wrong := range []string{"", "x", "NaN", "Inf", "-1", "1e300"} {
		if ms := milliseconds(wrong); ms != 0 {
			t.Errorf("%q is %v ms", wrong, ms)
		}
	}
}

// Where a request goes, and what the engine is told besides.
func TestPlacements(t *testing.T) {
	member := func(address string, rank uint32) *api.Candidate {
		return &api.Candidate{Member: &api.Member{Address: address, Rank: rank}}
	}
	pulls := member("a:1", 0)
	pulls.Pull = &api.Pull{From: &api.Member{Address: "b:1"}}
	for name, c := range map[string]struct {
		ranking *api.Ranking
		address string
		headers map[string]string
	}{
		"alone":                  {&api.Ranking{Candidates: []*api.Candidate{member("a:1", 3)}}, "a:1", map[string]string{}},
		"ranks at two addresses": {&api.Ranking{Candidates: []*api.Candidate{member("a:1", 0), member("a:2", 1)}}, "a:1", map[string]string{}},
		"ranks at one address":   {&api.Ranking{Candidates: []*api.Candidate{member("a:1", 1), member("a:1", 0)}}, "a:1", map[string]string{RankHeader: "1"}},
		"pulls":                  {&api.Ranking{Candidates: []*api.Candidate{pulls}}, "a:1", map[string]string{PullHeader: "b:1"}},
		"decodes elsewhere": {&api.Ranking{Candidates: []*api.Candidate{member("a:1", 0), member("b:1", 0)}, Decode: member("c:1", 0)}, "c:1",
			map[string]string{PrefillHeader: "a:1"}},
	} {
		p := placed(nil, &api.PickResponse{Ranking: c.ranking})
		if d := cmp.Diff(c.headers, p.Headers); p.Address != c.address || d != "" {
			t.Errorf("%s: to %s %s", name, p.Address, d)
		}
	}
}

// What passes goes into the report.
func TestAnswersAreReported(t *testing.T) {
	const usage = `"usage":{"prompt_tokens":100,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":96}}`
	n := func(n uint32) *uint32 { return &n }
	counted := &api.Report{PromptTokens: n(100), OutputTokens: n(7), CachedTokens: n(96)}
	for name, c := range map[string]struct {
		status     int
		kind, body string
		want       *api.Report
	}{
		"whole":        {200, "application/json", "{" + usage + "}", counted},
		"events":       {200, "text/event-stream", "data: {" + usage + "}\n\n", counted},
		"nothing":      {200, "", "", &api.Report{}},
		"refused":      {400, "application/json", "{" + usage + "}", &api.Report{Outcome: api.Outcome_OUTCOME_CANCELLED}},
		"failed":       {503, "application/json", "", &api.Report{Outcome: api.Outcome_OUTCOME_FAILED}},
		"failed later": {200, "text/event-stream", "data: {\"error\":{}}\n\n", &api.Report{Outcome: api.Outcome_OUTCOME_FAILED}},
	} {
		a := (&Placement{}).Answer(c.status, c.kind)
		a.Take([]byte(c.body))
		if d := cmp.Diff(c.want, a.Report(), protocmp.Transform()); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}

// The first token is told when it passes, whoever asked for usage.
func TestAnswersTellTheFirstToken(t *testing.T) {
	for name, pass := range map[string]func(*Answer, []byte){"take": (*Answer).Take, "pass": func(a *Answer, b []byte) { a.Pass(b) }} {
		p := new(Placement)
		a := p.Answer(200, "text/event-stream")
		pass(a, []byte("data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n"))
		if p.first.Load() != 0 {
			t.Errorf("%s: a role is no token", name)
		}
		pass(a, []byte("data: {\"choices\":[{\"text\":\"x\"}]}\n\n"))
		if p.first.Load() == 0 || !a.Events() || len(a.Rest()) != 0 {
			t.Errorf("%s: no first token", name)
		}
	}
}
