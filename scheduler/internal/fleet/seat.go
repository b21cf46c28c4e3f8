package fleet

import (
	"math"
	"time"
)

// Seat is what every decision reads of every member. Seats lie side by side, so
// that a decision among a thousand reads memory in order and follows no pointer.
// Like a Member it says what was known when its View was made.
type Seat struct {
	Member *Member
	// Model is the identity that the member's keys are rooted in.
	Model string
	// Hash of the member's name.
	Hash uint64
	// Heard last, and Sampled, the time of the load sample, by View.Since.
	Heard, Sampled time.Duration
	KVUsage        float64
	Blocks         int
	BlockSize      int
	// Running and Waiting requests; -1: not known.
	Running, Waiting      int32
	ID                    ID
	Sleeping, Unreachable bool
}

// set writes what is known of a member; origin is what Since counts from.
func (s *Seat) set(m *Member, origin time.Time) {
	s.Member, s.Model, s.Hash, s.ID = m, m.Info.Model(), m.Hash, m.ID
	s.Heard, s.Sampled = m.Heard.Sub(origin), m.Load.At.Sub(origin)
	s.KVUsage = m.Load.KVUsage
	s.Blocks, s.BlockSize = int(min(m.Info.Blocks, math.MaxInt32)), m.Info.BlockSize
	s.Running, s.Waiting = int32(min(m.Load.Running, math.MaxInt32)), int32(min(m.Load.Waiting, math.MaxInt32))
	s.Sleeping, s.Unreachable = m.Load.Sleeping, m.Load.Unreachable
}

// Requests is the number of requests at the engine by its load sample and the
// decisions since; without a sample by the open decisions alone.
func (s *Seat) Requests(r *Reserved) int {
	if s.Running < 0 {
		return r.Open
	}
	return max(0, int(s.Running)+max(int(s.Waiting), 0)+r.Unseen-r.Ended)
}
