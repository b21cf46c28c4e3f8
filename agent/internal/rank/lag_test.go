package rank

import (
	"testing"
	"time"

	"github.com/kvscout/kvscout/agent/internal/vllm"
)

// Live batches with a stamp tell how late they are applied, and the next delta
// carries the oldest stamp. Batches that were replayed tell nothing, nor do stamps
// that are no time.
func TestLagIsOfLiveBatches(t *testing.T) {
	r := newRank(Config{Member: "m", Identity: Identity{Model: "model", BlockSize: 16}, Log: quiet})
	var lags []time.Duration
	r.lag = func(d time.Duration) { lags = append(lags, d) }
	stamp := float64(time.Now().Add(-time.Minute).Unix())
	for i, c := range []struct {
		live  bool
		stamp float64
	}{{false, stamp - 10}, {true, 0}, {true, -1}, {true, 1e300}, {true, stamp}, {true, stamp + 1}} {
		r.Apply(vllm.Mark{Sequence: uint64(i), Live: c.live}, vllm.Batch{Time: c.stamp})
	}
	if len(lags) != 2 || lags[0] < time.Minute || lags[1] >= lags[0] {
		t.Errorf("lags %v", lags)
	}
	if _, st := r.Drain(nil); st.EventTime.Unix() != int64(stamp) {
		t.Errorf("the delta's events are of %v, want %v", st.EventTime, time.Unix(int64(stamp), 0))
	}
	if _, st := r.Drain(nil); !st.EventTime.IsZero() {
		t.Errorf("no events are of %v", st.EventTime)
	}
}
