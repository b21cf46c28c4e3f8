package bus

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvscout/kvscout/e2e/journal"
)

func TestRefusalsCountByRight(t *testing.T) {
	const verdict, snapshot, load = 0, 1, 2
	var log journal.Journal
	r := NewRefusals(slog.New(slog.NewTextHandler(&log, nil)),
		Right{In: []string{"Subscription", ".verdict."}, Lacking: "nothing is heard"},
		Right{In: []string{"subscription"}, Lacking: "nobody can ask", Retried: true},
		Right{Lacking: "nobody is told", Lives: time.Second})
	now := time.Now()
	says := func(connected bool, after time.Duration, want string) {
		t.Helper()
		if got := r.Reason(connected, now.Add(after)); !strings.HasPrefix(got, want) || (got == "") != (want == "") {
			t.Errorf("%q, want %q", got, want)
		}
	}
	says(false, 0, "")
	r.notConnected(errors.New("refused"))
	says(false, 0, "cannot connect to NATS: refused")
	says(true, 0, "") // it is there by now

	for range 3 {
		r.forbidden(errors.New(`Permissions Violation for Subscription to "x.verdict.y"`), now)
	}
	says(true, 0, "nothing is heard: Permissions")
	if r.due(now.Add(2 * askAgain)) {
		t.Error("a right that can be done without is asked for again")
	}
	r.forbidden(errors.New(`permissions violation for subscription to "x.snapshot.y"`), now)
	says(true, 0, "nobody can ask")
	if r.due(now.Add(askAgain-1)) || !r.due(now.Add(askAgain)) {
		t.Error("a refused subscription is not asked for again in time")
	}
	r.forbidden(errors.New(`permissions violation for publish to "x.load.y"`), now)
	says(true, 0, "nobody is told")
	says(true, time.Second, "nobody can ask") // heartbeats are let through again
	if !r.Lacks(verdict, nil) || !r.Lacks(snapshot, nil) || !r.Lacks(load, nil) {
		t.Error("a right is not missed")
	}
	if n := len(log.Lines("NATS denies a permission")); n != 3 {
		t.Errorf("said %d times:\n%s", n, log.String())
	}
	for i := range 2 * maxRefusals {
		r.forbidden(errors.New("publish to "+strings.Repeat("x", i)), now)
	}
	if len(r.said) != maxRefusals {
		t.Errorf("%d are remembered", len(r.said))
	}
	r.connected()
	says(true, 0, "")
	late := fmt.Errorf("%w: publish", nats.ErrPermissionViolation)
	if !r.Lacks(load, late) {
		t.Error("what is heard and not yet told counts for nothing")
	}
	r.forbidden(late, now)
	if r.Lacks(verdict, late) {
		t.Error("another right is missed")
	}
	r.connected()
	if r.Lacks(verdict, nil) || len(r.said) > 0 || r.due(now.Add(askAgain)) {
		t.Error("a new connection has old refusals")
	}
}
