package rank

import (
	"cmp"
	"fmt"
	"time"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/pb"
)

// trustLocked weighs everything that speaks against the cache state.
func (r *Rank) trustLocked() (pb.Trust, string) {
	st := r.mirror.Stats()
	held := r.mirror.Count(mirror.LaneDisk)
	switch {
	case r.broken != "":
		return pb.Trust_TRUST_UNKNOWN, r.broken
	case r.stream.foreign != "":
		return pb.Trust_TRUST_UNKNOWN, r.stream.foreign
	case st.NoCredit != "":
		return pb.Trust_TRUST_UNKNOWN, st.NoCredit
	case r.trust == vllm.Unreadable:
		return pb.Trust_TRUST_UNKNOWN, fmt.Sprintf("events that this agent cannot read, of vLLM %s: %s",
			cmp.Or(r.info.GetEngineVersion(), "of a version that it does not tell"), r.reason)
	case r.trust == vllm.Syncing:
		return pb.Trust_TRUST_SYNCING, r.reason
	case r.blockSizeLocked() == 0:
		return pb.Trust_TRUST_SYNCING, "the block size is not known yet"
	case r.stream.trial:
		return pb.Trust_TRUST_SYNCING, "the event stream was another engine's and is held against this engine's counters"
	case r.trust == vllm.Approximate:
		return pb.Trust_TRUST_APPROXIMATE, r.reason
	case r.incarnation.missing != "":
		return pb.Trust_TRUST_APPROXIMATE, r.incarnation.missing
	case r.droppedLocked(st):
		return pb.Trust_TRUST_APPROXIMATE, "the mirror is full: blocks are missing"
	case r.refusedLocked(st):
		return pb.Trust_TRUST_APPROXIMATE, "events of another block size or form: blocks are missing"
	case r.hits.guess != "":
		return pb.Trust_TRUST_APPROXIMATE, r.hits.guess
	case st.Guess != "":
		return pb.Trust_TRUST_APPROXIMATE, st.Guess
	case (r.mirror.HasEnds() || r.mirror.Dropped() > 0) && r.mirror.Offloads():
		return pb.Trust_TRUST_APPROXIMATE, "blocks of a hybrid or speculating engine count in GPU memory only"
	case r.incarnation.fetched && !r.mirror.Offloads():
		return pb.Trust_TRUST_APPROXIMATE, "a connector brings blocks that no event tells of"
	case st.Withheld > 0:
		return pb.Trust_TRUST_APPROXIMATE, fmt.Sprintf("%d blocks withheld: their content is not certain", st.Withheld)
	case st.Suspect > 0:
		return pb.Trust_TRUST_APPROXIMATE, fmt.Sprintf("%d blocks may have lost their last copy", st.Suspect)
	case st.Waiting > 16+held/16:
		return pb.Trust_TRUST_APPROXIMATE, fmt.Sprintf("%d blocks whose prefix was never announced", st.Waiting)
	}
	return pb.Trust_TRUST_EXACT, ""
}

// logTrustLocked says when the trust is another one than was said.
func (r *Rank) logTrustLocked() {
	trust, reason := r.trustLocked()
	if trust == r.said {
		return
	}
	first, after := r.said == pb.Trust_TRUST_UNSPECIFIED, time.Since(r.saidAt).Round(time.Millisecond)
	r.said, r.saidAt = trust, time.Now()
	switch trust {
	case pb.Trust_TRUST_EXACT:
		blocks := r.mirror.Count(mirror.LaneGPU)
		if first {
			r.log.Info("cache state is EXACT", "batches", r.batches, "blocks", blocks)
			return
		}
		r.log.Info("cache state is EXACT", "batches", r.batches, "blocks", blocks, "after", after)
	case pb.Trust_TRUST_SYNCING:
		if first {
			r.log.Info("cache state is SYNCING", "reason", reason)
			return
		}
		r.log.Warn("cache state is SYNCING: schedulers give the cache no credit", "reason", reason,
			"do", "nothing for a few seconds; if it stays, see whether the engine runs and answers on its event socket")
	case pb.Trust_TRUST_APPROXIMATE:
		r.log.Warn("cache state is APPROXIMATE: blocks may be missing", "reason", reason,
			"do", "look the reason up in docs/OPERATIONS.md; often it is the engine's configuration")
	default:
		r.log.Warn("cache state is UNKNOWN: the engine sends no usable events", "reason", reason,
			"do", "check the engine's --kv-events-config, and -events; requests come by load alone meanwhile")
	}
}

func (r *Rank) droppedLocked(st mirror.Stats) bool {
	return r.incarnation.dropped || st.Dropped > r.incarnation.before.Dropped
}

func (r *Rank) refusedLocked(st mirror.Stats) bool {
	return r.incarnation.refused || st.Refused > r.incarnation.before.Refused
}

// TrustName is the word for it in texts and metrics.
func TrustName(t pb.Trust) string {
	switch t {
	case pb.Trust_TRUST_EXACT:
		return "exact"
	case pb.Trust_TRUST_SYNCING:
		return "syncing"
	case pb.Trust_TRUST_APPROXIMATE:
		return "approximate"
	}
	return "unknown"
}
