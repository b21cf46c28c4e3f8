package logging

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvscout/kvscout/e2e/journal"
)

// limited runs a log until the end of the test.
func limited(t *testing.T) (*slog.Logger, *journal.Journal, func()) {
	t.Helper()
	j := &journal.Journal{}
	l := Limit(slog.NewTextHandler(j, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
	return slog.New(l), j, l.Start()
}

func count(lines []string, with string) int {
	n := 0
	for _, l := range lines {
		if strings.Contains(l, with) {
			n++
		}
	}
	return n
}

func TestSeldomLinesPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, j, stop := limited(t)
		for i := range 20 {
			log.Warn("member missed its heartbeats", "member", "a", "for", time.Duration(i))
			time.Sleep(pause)
		}
		stop()
		if lines := j.Lines(); len(lines) != 20 || count(lines, "left_out") != 0 {
			t.Errorf("%d lines of 20\n%s", len(lines), j.String())
		}
	})
}

// TestStandingFaultIsAFewLines: ten minutes of eight failures a second.
func TestStandingFaultIsAFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, j, stop := limited(t)
		log = log.With("component", "nats")
		for i := range 8 * 600 {
			log.Error("cannot connect", "error", fmt.Errorf("dial 10.0.0.1:%d: refused", 30000+i), "attempts", i)
			time.Sleep(125 * time.Millisecond)
		}
		stop()
		lines := j.Lines()
		if len(lines) < burst+4 || len(lines) > burst+6 {
			t.Errorf("%d lines\n%s", len(lines), j.String())
		}
		said := 0
		for _, l := range lines {
			said++
			if _, n, ok := strings.Cut(l, "left_out="); ok {
				var left int
				fmt.Sscan(n, &left)
				said += left
			}
		}
		if said != 8*600 {
			t.Errorf("%d of 4800 are accounted for", said)
		}
	})
}

// TestLastLineIsNotLost: a member that flaps and then stays away is away in the
// log, too.
func TestLastLineIsNotLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, j, stop := limited(t)
		defer stop()
		for i := range 10 {
			log.Info("member is exact", "member", "a", "round", i)
			time.Sleep(time.Second)
			log.Warn("member missed its heartbeats", "member", "a", "round", i)
			time.Sleep(time.Second)
		}
		time.Sleep(pause)
		lines := j.Lines()
		if last := lines[len(lines)-1]; !strings.Contains(last, "missed its heartbeats") || !strings.Contains(last, "round=9") || !strings.Contains(last, "left_out=5") {
			t.Errorf("the last line is %s", last)
		}
	})
}

func TestStormOfManyIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, j, stop := limited(t)
		for i := range 1000 {
			log.Warn("member missed its heartbeats", "member", fmt.Sprintf("default_pod-%d_0", i))
		}
		if n := len(j.Lines()); n != stormBurst {
			t.Errorf("%d lines at once, want %d", n, stormBurst)
		}
		log.Info("connected")
		if n := count(j.Lines(), "msg=connected"); n != 1 {
			t.Error("another message has to wait")
		}
		time.Sleep(stormPause + flushEvery)
		if n := count(j.Lines(), "others_left_out=979"); n != 1 {
			t.Errorf("what was left out is not said:\n%s", j.String())
		}
		// Each alone is heard of at once when the storm is over.
		time.Sleep(time.Minute)
		log.Warn("member missed its heartbeats", "member", "another")
		if n := count(j.Lines(), "member=another"); n != 1 {
			t.Error("a single member is not logged after the storm")
		}
		stop()
	})
}

func TestOtherReasonIsAnotherThing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, j, stop := limited(t)
		for range 10 {
			log.Error("cannot connect", "error", errors.New("refused"))
		}
		log.Error("cannot connect", "error", errors.New("authorization violation"))
		if n := count(j.Lines(), "authorization"); n != 1 {
			t.Error("another reason was left out")
		}
		for i := range 100 {
			log.Debug("detail", "i", i)
		}
		if n := count(j.Lines(), "detail"); n != 100 {
			t.Errorf("%d of 100 debug lines", n)
		}
		stop()
		if n := count(j.Lines(), "left_out=5"); n != 1 {
			t.Errorf("the end does not say what was left out:\n%s", j.String())
		}
	})
}

func TestThingsAreBounded(t *testing.T) {
	l := Limit(slog.DiscardHandler)
	for i := range 3 * maxThings {
		r := slog.NewRecord(time.Now(), slog.LevelWarn, "storm", 0)
		r.AddAttrs(slog.String("member", fmt.Sprint(i)))
		_ = l.Handle(t.Context(), r)
	}
	if n := len(l.shared.things.of); n > maxThings {
		t.Errorf("%d things are remembered", n)
	}
}
