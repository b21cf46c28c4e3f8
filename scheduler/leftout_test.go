package scheduler

import (
	"log/slog"
	"testing"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/journal"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// TestLeftOutMembersAreSaid, once for each time, and when they come back.
func TestLeftOutMembersAreSaid(t *testing.T) {
	var log journal.Journal
	s, stop := start(t, Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	agent(t, "nats://"+s.Addrs().NATS, 3)
	client := api.NewSchedulerClient(dial(t, s))
	exact(t, client)
	for range 3 {
		d, err := client.Pick(t.Context(), &api.PickRequest{Request: &api.Request{Model: "m"}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{DecisionId: d.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FAILED}}}); err != nil {
			t.Fatal(err)
		}
	}
	await.True(t, "the member is said to be left out", func() bool {
		return len(log.Lines("level=WARN", "member is left out", "member="+member, "pod=pod", "do=")) == 1
	})
	await.True(t, "it is said to be back", func() bool {
		return len(log.Lines("level=INFO", "member is not left out any more", "member="+member)) == 1
	})
	if n := len(log.Lines("member is left out")); n != 1 {
		t.Errorf("said %d times", n)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}
