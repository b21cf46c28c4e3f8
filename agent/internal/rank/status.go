package rank

import (
	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/publish"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/pb"
)

// Status is what people are told of a member.
type Status struct {
	Member    string            `json:"member"`
	Trust     string            `json:"trust"`
	Reason    string            `json:"reason,omitempty"` // when trust is not EXACT
	Epoch     uint64            `json:"epoch"`
	Connected bool              `json:"connected"`
	Batches   uint64            `json:"engine_batches"`
	BlockSize int               `json:"block_size"`
	Held      [mirror.Lanes]int `json:"held"` // blocks on gpu, host, disk lane
	Facts     []Fact            `json:"facts"`
	// Schedulers that say what they make of it, and whether one believes it.
	Believed   bool      `json:"believed"`
	Schedulers []Opinion `json:"schedulers"`
	Disbelief  string    `json:"-"` // why none does
}

// Opinion is what one scheduler makes of a member.
type Opinion struct {
	Scheduler string `json:"scheduler"`
	Trust     string `json:"trust"`
	Reason    string `json:"reason,omitempty"`  // when its trust is not EXACT
	Refused   string `json:"refused,omitempty"` // why nothing that the agent says counts there
}

// Status with what schedulers make of it.
func (r *Rank) Status() Status {
	s, trust := r.status()
	opinions := r.publisher.Opinions()
	for _, o := range opinions {
		s.Schedulers = append(s.Schedulers, Opinion{Scheduler: o.Scheduler, Trust: TrustName(o.Trust), Reason: o.Reason, Refused: o.Refused})
	}
	s.Disbelief = disbelief(trust, s.Reason, opinions)
	s.Believed = s.Disbelief == ""
	return s
}

// disbelief says why no scheduler takes a rank at its word; empty: one does.
func disbelief(own pb.Trust, reason string, opinions []publish.Opinion) string {
	if own == pb.Trust_TRUST_SYNCING {
		return reason
	}
	why := "no scheduler has sent a verdict on this member"
	for _, o := range opinions {
		switch {
		case o.Refused != "":
			why = "refused by scheduler " + o.Scheduler + ": " + o.Refused
		case o.Trust == pb.Trust_TRUST_SYNCING:
			why = "not yet believed by scheduler " + o.Scheduler + ": " + o.Reason
		default:
			return ""
		}
	}
	return why
}

func (r *Rank) status() (Status, pb.Trust) {
	tail := r.tail.Stats()
	r.mu.Lock()
	defer r.mu.Unlock()
	trust, reason := r.trustLocked()
	s := Status{
		Member: r.member, Trust: TrustName(trust), Reason: reason, Epoch: r.epoch,
		Connected: tail.Connected, Batches: r.batches, BlockSize: r.blockSizeLocked(),
		Facts: r.factsLocked(),
	}
	for l := range s.Held {
		s.Held[l] = r.mirror.Count(mirror.Lane(l))
	}
	return s, trust
}

// Trust that the cache state deserves.
func (r *Rank) Trust() pb.Trust {
	r.mu.Lock()
	defer r.mu.Unlock()
	trust, _ := r.trustLocked()
	return trust
}

// Opinions are what schedulers make of the rank.
func (r *Rank) Opinions() []publish.Opinion { return r.publisher.Opinions() }

// Tail counts what happened to the event stream.
func (r *Rank) Tail() vllm.TailStats { return r.tail.Stats() }

// Published counts what went over NATS.
func (r *Rank) Published() publish.Stats { return r.publisher.Stats() }

// Mirror counts what happened in the mirror.
func (r *Rank) Mirror() mirror.Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mirror.Stats()
}

// Held are the blocks on each lane.
func (r *Rank) Held() (held [mirror.Lanes]int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for l := range held {
		held[l] = r.mirror.Count(mirror.Lane(l))
	}
	return held
}

// Foreign counts how often the stream turned out to be another engine's.
func (r *Rank) Foreign() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stream.found
}

// Saved counts what happened to the state file; false: nothing is kept.
func (r *Rank) Saved() (SaverStats, bool) {
	if r.saver == nil {
		return SaverStats{}, false
	}
	return r.saver.counts(), true
}
