package chronicle

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func decision(i int, member string) *api.RecentDecision {
	return &api.RecentDecision{DecisionId: fmt.Sprint(i), Model: "m", Ranking: &api.Ranking{Candidates: []*api.Candidate{{Member: &api.Member{Id: member}}}}}
}

// Whatever comes, so many are kept, the newest first, and nothing else is known by
// its id.
func TestDecisionsAreTheLastOnes(t *testing.T) {
	c := New()
	for i := range 3 * maxDecisions {
		c.Decided(decision(i, fmt.Sprint("member-", i%2)))
	}
	all := c.Decisions("", "", 10*maxDecisions)
	if len(all) != maxDecisions || len(c.byID) != maxDecisions || all[0].GetDecisionId() != fmt.Sprint(3*maxDecisions-1) || all[maxDecisions-1].GetDecisionId() != fmt.Sprint(2*maxDecisions) {
		t.Errorf("%d kept, %d known, from %v to %v", len(all), len(c.byID), all[0], all[len(all)-1])
	}
	if got := c.Decisions("", "", 0); len(got) != usualDecisions {
		t.Errorf("%d by default", len(got))
	}
	if got := c.Decisions("m", "member-1", 3); len(got) != 3 || got[0].GetDecisionId() != "767" || got[2].GetDecisionId() != "763" {
		t.Errorf("of a member: %v", got)
	}
	if got := c.Decisions("other", "", 3); len(got) != 0 {
		t.Errorf("of another model: %v", got)
	}
}

// Of each second so many are kept, whoever asks.
func TestDecisionsAreKeptApart(t *testing.T) {
	c, kept := New(), 0
	for i := range 100_000 {
		if c.Due(noon.Add(time.Duration(i) * 10 * time.Microsecond)) {
			kept++
		}
	}
	if kept != 20 {
		t.Errorf("%d of a second", kept)
	}
}

// A later report adds to an earlier one, and one of a decision that is not kept is
// nothing. Who was given the list before sees none of it.
func TestReportsAddUp(t *testing.T) {
	c := New()
	c.Decided(decision(1, "a"))
	before := c.Decisions("", "", 1)[0]
	ms, prompt := 12.5, uint32(100)
	c.Reported(&api.Report{DecisionId: "1", Outcome: api.Outcome_OUTCOME_FIRST_TOKEN, TtftMs: &ms})
	c.Reported(&api.Report{DecisionId: "1", Outcome: api.Outcome_OUTCOME_FINISHED, PromptTokens: &prompt, MemberId: "b"})
	c.Reported(&api.Report{DecisionId: "2", Outcome: api.Outcome_OUTCOME_FINISHED})
	want := &api.Report{DecisionId: "1", Outcome: api.Outcome_OUTCOME_FINISHED, PromptTokens: &prompt, TtftMs: &ms, MemberId: "b"}
	if got := c.Decisions("", "", 1)[0].GetReport(); !proto.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if before.GetReport() != nil {
		t.Errorf("changed behind its reader's back: %v", before)
	}
}

func fleet(members ...*api.MemberState) *api.ListMembersResponse {
	return &api.ListMembersResponse{Members: members, Scheduler: &api.SchedulerState{Readiness: "ready"}}
}

func state(id string, trust api.Trust, epoch uint64) *api.MemberState {
	running := uint32(2)
	return &api.MemberState{Member: &api.Member{Id: id}, CacheState: &api.CacheState{Trust: trust, Epoch: epoch}, Models: []string{"m"}, RunningRequests: &running}
}

func TestMembersLeaveTheirChangesAndCounts(t *testing.T) {
	c := New()
	exact, syncing := api.Trust_TRUST_EXACT, api.Trust_TRUST_SYNCING
	sums := &api.HistoryPoint{ReportedPromptTokens: 10, PredictedCachedTokens: 6, ReportedCachedTokens: 5}
	c.Members(noon, fleet(state("a", exact, 1e9), state("b", exact, 1e9)), sums)
	c.Members(noon.Add(time.Second), fleet(state("a", syncing, 2e9)), sums)
	c.Set(noon.Add(2*time.Second), "-policy", "default", "random")
	c.Members(noon.Add(pointGap), fleet(state("a", syncing, 2e9)), sums)
	var got []string
	for _, x := range c.Changes(0) {
		got = append(got, fmt.Sprintf("%v %s %s", x.GetTimeMs()-milliseconds(noon), x.GetMemberId(), x.GetWhat()))
	}
	want := []string{"2000  -policy", "1000 b left", "1000 a trust", "1000 a incarnation", "0  scheduler", "0 b joined", "0 a joined"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%q, want %q", got, want)
	}
	points := c.History()
	if len(points) != 2 || points[0].GetTimeMs() != milliseconds(noon) || points[0].GetExactMembers() != 2 || points[1].GetSyncingMembers() != 1 ||
		points[1].GetRunningRequests() != 2 || points[1].GetReportedCachedTokens() != 5 {
		t.Errorf("%v", points)
	}
	for i := range 2 * maxChanges {
		c.Set(noon, fmt.Sprint(i), "", "")
	}
	for i := range 2 * maxPoints {
		c.Members(noon.Add(time.Duration(i+2)*pointGap), fleet(), sums)
	}
	if n, m := len(c.Changes(10*maxChanges)), len(c.History()); n != maxChanges || m != maxPoints || len(c.Changes(0)) != usualChanges {
		t.Errorf("%d changes, %d points", n, m)
	}
}
