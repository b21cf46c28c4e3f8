package publish

import (
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/protocol/pb"
)

// calm is the least time between two heartbeats for the load's sake.
const calm = 100 * time.Millisecond

// beat remembers the last heartbeat, to tell what cannot wait for the next.
type beat struct {
	at    time.Time // zero: none that counts
	epoch uint64
	trust pb.Trust
	rule  *pb.HitRule
	info  *pb.MemberInfo
	load  *pb.Load
}

func (b *beat) sent(st State, info *pb.MemberInfo, load *pb.Load, now time.Time) {
	b.at, b.epoch, b.trust, b.rule, b.info, b.load = now, st.Epoch, st.Trust, st.Rule, info, load
}

func (b *beat) forget() { b.at = time.Time{} }

// due tells whether something changed that cannot wait: trust, epoch and rule at
// once, member and load after a short calm.
func (b *beat) due(st State, now time.Time, p CacheState) bool {
	if b.at.IsZero() || st.Epoch != b.epoch || st.Trust != b.trust || !proto.Equal(st.Rule, b.rule) {
		return true
	}
	if now.Sub(b.at) < calm {
		return false
	}
	info, load := p.Heartbeat()
	return loadMoved(b.load, load) || !proto.Equal(b.info, info)
}

// loadMoved tells whether a decision could turn out differently with the new
// sample: a quarter more or less of what runs or waits, a twentieth of the
// cache, another state of sleep or reach, another process.
func loadMoved(a, b *pb.Load) bool {
	if (a == nil) != (b == nil) {
		return true
	}
	return countMoved(a.GetRunning(), b.GetRunning()) ||
		countMoved(a.GetWaiting(), b.GetWaiting()) ||
		math.Abs(a.GetKvUsage()-b.GetKvUsage()) >= 0.05 ||
		a.GetSleeping() != b.GetSleeping() || a.GetUnreachable() != b.GetUnreachable() || a.GetProcessStartMs() != b.GetProcessStartMs()
}

func countMoved(a, b uint32) bool {
	low, high := min(a, b), max(a, b)
	return high-low >= 1+low/4
}
