package fleet

import (
	"math"
	"time"
)

// Row is what every decision reads of every member. Rows lie side by side, so
// that a decision among a thousand reads memory in order and follows no pointer.
// Like a Member it says what was known when its View was made.
type Row struct {
	Member *Member
	// Model is the identity that the member's keys are rooted in.
	Model string
	// Hash of the member's name.
	Hash uint64
	// LastHeartbeat, and Sampled, the time of the load sample, by View.Since.
	LastHeartbeat, Sampled time.Duration
	KVUsage                float64
	Blocks                 int
	BlockSize              int
	// Running and Waiting requests; -1: not known.
	Running, Waiting      int32
	ID                    ID
	Sleeping, Unreachable bool
	Withdrawn             Withdrawal
}

// set writes what is known of a member; origin is what Since counts from.
func (r *Row) set(m *Member, origin time.Time) {
	r.Member, r.Model, r.Hash, r.ID = m, m.Info.Model(), m.Hash, m.ID
	r.LastHeartbeat, r.Sampled = m.LastHeartbeat.Sub(origin), m.Load.At.Sub(origin)
	r.KVUsage = m.Load.KVUsage
	r.Blocks, r.BlockSize = int(min(m.Info.Blocks, math.MaxInt32)), m.Info.BlockSize
	r.Running, r.Waiting = int32(min(m.Load.Running, math.MaxInt32)), int32(min(m.Load.Waiting, math.MaxInt32))
	r.Sleeping, r.Unreachable, r.Withdrawn = m.Load.Sleeping, m.Load.Unreachable, m.Withdrawn
}

// Requests is the number of requests at the engine by its load sample and the
// decisions since; without a sample by the open decisions alone.
func (r *Row) Requests(reserved *Reserved) int {
	if r.Running < 0 {
		return reserved.Open
	}
	return max(0, int(r.Running)+max(int(r.Waiting), 0)+reserved.Unsampled-reserved.Ended)
}
