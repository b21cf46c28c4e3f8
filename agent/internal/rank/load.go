package rank

import (
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/pb"
)

// loadTTL is the age at which a load sample says nothing any more.
const loadTTL = 10 * time.Second

// Heartbeat is called by the publisher.
func (r *Rank) Heartbeat() (*pb.MemberInfo, *pb.Load) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.logTrustLocked()
	info := r.info
	if size := uint32(r.blockSizeLocked()); info != nil && info.BlockSize != size {
		info = proto.Clone(info).(*pb.MemberInfo)
		info.BlockSize = size
		r.info = info
	}
	if r.load == nil {
		return info, nil
	}
	age := time.Since(r.loadAt)
	if age > loadTTL {
		return info, nil
	}
	load := proto.Clone(r.load).(*pb.Load)
	load.AgeMs = uint32(age.Milliseconds())
	return info, load
}

// sample replaces the load by that of the engine's process that began at a time.
// The publisher decides whether that can wait for the next heartbeat.
func (r *Rank) sample(l *vllm.Load, began time.Time, at time.Time) {
	load := loadOf(l)
	load.ProcessStartMs = uint64(began.UnixMilli())
	r.mu.Lock()
	r.load, r.loadAt = load, at
	r.mu.Unlock()
	r.wake()
}

// Unreachable says that the engine does not answer.
func (r *Rank) Unreachable(at time.Time) {
	r.mu.Lock()
	r.load, r.loadAt = &pb.Load{Unreachable: true}, at
	r.mu.Unlock()
	r.wake()
}

func loadOf(l *vllm.Load) *pb.Load {
	return &pb.Load{
		Running: whole(l.Running), Waiting: whole(l.Waiting), KvUsage: l.KVUsage,
		PromptTokens: l.PromptTokens, CachedTokens: l.CachedTokens, GenerationTokens: l.GenerationTokens,
		PrefillSeconds: l.PrefillSeconds, PrefillComputedTokens: l.PrefillComputedTokens, PrefillRequests: l.PrefillRequests,
		InterTokenSeconds: l.InterTokenSeconds, InterTokenCount: l.InterTokenCount,
		QueueSeconds: l.QueueSeconds, QueueRequests: l.QueueRequests,
		RequestPromptTokens: l.RequestPromptTokens, RequestGenerationTokens: l.RequestGenerationTokens,
		RunningAdapters: l.RunningAdapters, Sleeping: l.Sleeping,
	}
}

// whole makes a count of a gauge.
func whole(v *float64) *uint32 {
	if v == nil {
		return nil
	}
	n := uint32(min(*v, math.MaxUint32))
	return &n
}
