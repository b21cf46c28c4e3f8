package bus

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
)

// TestServerLogReachesOurs: the embedded server's trouble is seen.
func TestServerLogReachesOurs(t *testing.T) {
	var text bytes.Buffer
	l := &serverLog{log: slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	l.Noticef("n%d", 1)
	l.Debugf("d%d", 2)
	l.Tracef("t%d", 3)
	l.Warnf("w%d", 4)
	l.Errorf("e%d", 5)
	for _, want := range []string{`level=DEBUG msg="NATS server" text=n1`, "text=d2", "text=t3", `level=WARN msg="the embedded NATS server warns" text=w4`, `level=ERROR msg="the embedded NATS server reports an error" text=e5`} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("%q is missing", want)
		}
	}
	l.Fatalf("first %d", 1)
	l.Fatalf("second")
	if err := *l.fatal.Load(); err == nil || err.Error() != "first 1" || errors.Is(err, io.EOF) {
		t.Error(err)
	}
}
