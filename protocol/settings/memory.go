package settings

import (
	"log/slog"
	"math"
	"runtime/debug"

	"github.com/KimMachineGun/automemlimit/memlimit"
)

// LimitMemory lets the garbage collector keep the process within nine tenths of
// the container's memory; GOMEMLIMIT in the environment wins. It returns the
// limit in force, math.MaxInt64 where there is none.
func LimitMemory(log *slog.Logger) int64 { return limitMemory(log, memlimit.FromCgroup) }

func limitMemory(log *slog.Logger, container memlimit.Provider) int64 {
	_, err := memlimit.Set(memlimit.WithProvider(container))
	limit := debug.SetMemoryLimit(-1)
	switch {
	case err != nil:
		log.Warn("the container's memory limit is not known", "error", err)
	case limit < math.MaxInt64:
		log.Info("memory limit", "bytes", limit)
	}
	return limit
}
