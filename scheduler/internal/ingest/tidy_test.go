package ingest

import (
	"runtime/debug"
	"runtime/metrics"
	"testing"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// Beside a large index garbage is kept short, unless somebody asked for less, and
// when the index is gone it is as it was.
func TestGarbageIsShortBesideALargeIndex(t *testing.T) {
	share := func() int {
		s := []metrics.Sample{{Name: "/gc/gogc:percent"}}
		metrics.Read(s)
		return int(s[0].Value.Uint64())
	}
	was := debug.SetGCPercent(100)
	defer debug.SetGCPercent(was)
	for before, beside := range map[int]int{100: garbageShare, 10: 10} {
		debug.SetGCPercent(before)
		in := &Ingest{cfg: Config{Index: index.New(index.Config{})}}
		step := func(what string, want int) {
			t.Helper()
			in.tidy()
			if got := share(); got != want {
				t.Errorf("%s: %d percent of garbage, want %d", what, got, want)
			}
		}
		step("empty", before)
		keys := make([]blockkey.Key, 4096)
		for c := uint64(1); in.cfg.Index.Stats().Bytes < largeIndex; c++ {
			for i := range keys {
				keys[i] = blockkey.Key(blockkey.Digest(blockkey.Key(c<<32 | uint64(i))))
			}
			in.cfg.Index.Store(1, 0, nil, 0, keys)
		}
		step("large", beside)
		step("large still", beside)
		in.cfg.Index.Forget(1)
		in.cfg.Index.Forget(1) // what readers might have seen goes with the next change
		if size := in.cfg.Index.Stats().Bytes; size >= largeIndex/2 {
			t.Fatalf("%d bytes are left", size)
		}
		step("empty again", before)
		in.tidying, in.garbage = true, before
		in.untidy()
		if share() != before || in.tidying {
			t.Error("not given back")
		}
	}
}
