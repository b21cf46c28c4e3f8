package e2e

import (
	"os"
	"strconv"
	"strings"
	"time"
)

// crowded is how many times longer something may take on a machine that has
// more to do than processors, whatever the cause.
const crowded = 3

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

// over says whether a promised time has passed: on an idle machine that time,
// on a crowded one up to three times as much.
func (s stopwatch) over(promised time.Duration) bool {
	wall := time.Since(s.start)
	if wall > crowded*promised {
		return true
	}
	now, known := pressure()
	return s.known && known && wall-(now-s.stalled) > promised
}

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
