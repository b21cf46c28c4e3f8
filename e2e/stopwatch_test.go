package e2e

import (
	"os"
	"strconv"
	"strings"
	"time"
)

// leeway is what anything may take longer than promised on a machine that is slow,
// or has instruments in its programs, without being crowded.
const leeway = 4 * time.Second

// stopwatch tells time that was ours from time that went by while somebody
// waited for a processor.
type stopwatch struct {
	start   time.Time
	stalled time.Duration
	known   bool
}

func newStopwatch() stopwatch {
	stalled, known := pressure()
	return stopwatch{start: time.Now(), stalled: stalled, known: known}
}

// ours is the time that was ours; nothing where the system does not say.
func (s stopwatch) ours() time.Duration {
	now, known := pressure()
	if !s.known || !known {
		return 0
	}
	return time.Since(s.start) - (now - s.stalled)
}

// over says whether a promised time has passed, with leeway. On a crowded machine
// it may take as long as crowded says.
func (s stopwatch) over(promised time.Duration) bool {
	return s.ours() > promised+leeway || time.Since(s.start) > crowded(promised)
}

// crowded is how long to wait for what is promised within a time where others
// want the processors, too: as long as any wait, or a multiple of the promise.
func crowded(promised time.Duration) time.Duration { return max(patience, 4*promised) }

// pressure is the time so far in which some task of the machine waited for a
// processor; false where the system does not say.
func pressure() (time.Duration, bool) {
	text, err := os.ReadFile("/proc/pressure/cpu")
	if err != nil {
		return 0, false
	}
	some, _, _ := strings.Cut(string(text), "\n")
	_, total, ok := strings.Cut(some, "total=")
	us, err := strconv.ParseInt(strings.TrimSpace(total), 10, 64)
	return time.Duration(us) * time.Microsecond, ok && err == nil
}
