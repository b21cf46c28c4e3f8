package membership

import (
	"log/slog"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// leftOut says which members are left out because callers report that they
// fail, and when they are taken back.
type leftOut struct {
	log   *slog.Logger
	since map[string]time.Time // by name
}

// judge compares the fleet with what was said last.
func (l *leftOut) judge(view *fleet.View, now time.Time) {
	if !view.Failing() && len(l.since) == 0 {
		return
	}
	gone := make(map[string]time.Time)
	for _, m := range view.Members {
		until := m.Failing().Until(now)
		if until.IsZero() {
			continue
		}
		since, known := l.since[m.Info.Name]
		if !known {
			since = now
			l.log.Warn("member is left out: callers report that it fails", "member", m.Info.Name, "pod", m.Info.Pod, "address", m.Info.Address,
				"for", until.Sub(now).Round(time.Millisecond), "do", "see the engine's log; one request tries it then, and takes it back if it goes well")
		}
		gone[m.Info.Name] = since
	}
	for name, since := range l.since {
		if _, still := gone[name]; !still {
			l.log.Info("member is not left out any more", "member", name, "after", now.Sub(since).Round(time.Millisecond))
		}
	}
	l.since = gone
}
