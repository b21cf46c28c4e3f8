// Package journal is a log for tests, which read it while it is written.
package journal

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
)

// Journal keeps what is written to it. The zero value is empty.
type Journal struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

// Write takes a part of the log.
func (j *Journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

// String is all that was written.
func (j *Journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

// Lines are those that have all of these in them.
func (j *Journal) Lines(with ...string) []string { return j.Since(0, with...) }

// Since leaves out the first n of all lines.
func (j *Journal) Since(n int, with ...string) (found []string) {
next:
	for line := range strings.Lines(j.String()) {
		if n--; n >= 0 {
			continue
		}
		for _, w := range with {
			if !strings.Contains(line, w) {
				continue next
			}
		}
		found = append(found, line)
	}
	return found
}

// Logger writes to it as text, everything from debug on.
func (j *Journal) Logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(j, &slog.HandlerOptions{Level: slog.LevelDebug}))
}
