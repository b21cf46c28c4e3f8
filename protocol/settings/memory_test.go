package settings

import (
	"bytes"
	"errors"
	"log/slog"
	"math"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/KimMachineGun/automemlimit/memlimit"
)

// TestMemoryLimitFollowsTheContainer sets the limit of this process, which is
// that of the test again afterwards.
func TestMemoryLimitFollowsTheContainer(t *testing.T) {
	was := debug.SetMemoryLimit(-1)
	t.Cleanup(func() { debug.SetMemoryLimit(was) })
	const container = 1 << 30
	tenths := func(n int64) int64 { return n * container / 10 }
	for _, c := range []struct {
		name      string
		container memlimit.Provider
		env       string // GOMEMLIMIT
		limit     int64
		says      string
	}{
		{"a container", memlimit.Limit(container), "", tenths(9), "msg=\"memory limit\" bytes=966367641"},
		{"the environment", memlimit.Limit(container), "7GiB", was, ""},
		{"no container", func() (uint64, error) { return 0, memlimit.ErrNoLimit }, "", math.MaxInt64, ""},
		{"who knows", func() (uint64, error) { return 0, errors.New("no cgroup") }, "", was, "no cgroup"},
	} {
		t.Run(c.name, func(t *testing.T) {
			debug.SetMemoryLimit(was)
			if c.env != "" {
				t.Setenv("GOMEMLIMIT", c.env) // read by the runtime at the start of a process, and only looked for here
			}
			var out bytes.Buffer
			said := limitMemory(slog.New(slog.NewTextHandler(&out, nil)), c.container)
			if got := debug.SetMemoryLimit(-1); got != c.limit || said != c.limit {
				t.Errorf("limit %d, %d is returned, want %d", got, said, c.limit)
			}
			if text := out.String(); !strings.Contains(text, c.says) || c.says == "" && c.env == "" && text != "" {
				t.Errorf("%q is said, want %q", text, c.says)
			}
		})
	}
}
