package bus

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
)

// TestOutageIsAFewLines: ten minutes without a server, and then another reason.
func TestOutageIsAFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		o := &Outage{log: slog.New(slog.NewTextHandler(&log, nil))}
		o.lost()
		attempts := 0
		for end := time.Now().Add(10 * time.Minute); time.Now().Before(end); {
			attempts++
			time.Sleep(o.delay(attempts))
			how := [...]string{"connection refused", "connection reset by peer"}[attempts%2] // by turns
			o.Failed(fmt.Errorf("dial tcp 10.0.0.1:4222 from %d: %s", 40000+attempts, how))
		}
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		if len(lines) != 2*3 {
			t.Errorf("%d lines:\n%s", len(lines), log.String())
		}
		o.Failed(nats.ErrAuthorization)
		if !strings.Contains(log.String(), "authorization") {
			t.Error("another reason is not said")
		}
		if n, lasted := o.over(); n != attempts || lasted < 10*time.Minute {
			t.Errorf("%d attempts in %v, want %d in 10m", n, lasted, attempts)
		}
		if n, lasted := o.over(); n != 0 || lasted != 0 {
			t.Errorf("after the end: %d attempts in %v", n, lasted)
		}
	})
}

// TestAttemptsBackOff, and farther from a server that refuses us than from one
// that is away.
func TestAttemptsBackOff(t *testing.T) {
	away, refused := &Outage{log: slog.New(slog.DiscardHandler)}, &Outage{log: slog.New(slog.DiscardHandler)}
	away.Failed(errors.New("connection refused"))
	refused.Failed(fmt.Errorf("connect: %w", nats.ErrAuthorization))
	for n := 1; n <= 5; n++ {
		if d := away.delay(n); d > shortest*5/4 {
			t.Errorf("attempt %d after %v", n, d)
		}
	}
	for n := 20; n < 40; n++ {
		if d := away.delay(n); d < longest*3/4 || d > longest*5/4 {
			t.Errorf("attempt %d at a server that is away after %v", n, d)
		}
		if d := refused.delay(n); d < longestRefused*3/4 {
			t.Errorf("attempt %d at a server that refuses after %v", n, d)
		}
	}
}
