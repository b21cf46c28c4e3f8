package ingest

import (
	"math"
	"time"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// maxInterval bounds what is believed of a member's heartbeats. It never helps
// to expect them sooner than protocol.HeartbeatEvery.
const maxInterval = time.Minute

func infoOf(h *pb.Heartbeat) fleet.Info {
	i := h.GetInfo()
	info := fleet.Info{
		Namespace: i.GetNamespace(), Pod: i.GetPod(), PodUID: i.GetPodUid(), Rank: int(i.GetRank()),
		Address: i.GetAddress(), TLS: i.GetTls(), Engine: i.GetEngine(), EngineVersion: i.GetEngineVersion(),
		Models: i.GetModels(), Root: i.GetRoot(),
		BlockSize: int(i.GetBlockSize()), Blocks: i.GetBlocks(),
		MaxModelLen: int(min(i.GetMaxModelLen(), math.MaxInt32)),
		HidesExtras: i.GetHidesExtraKeys(), Offloads: i.GetOffloads(),
		Heartbeat: min(max(time.Duration(h.GetIntervalMs())*time.Millisecond, protocol.HeartbeatEvery), maxInterval),
		Labels:    i.GetLabels(), AgentRelease: protocol.Shorten(protocol.MaxRelease, h.GetRelease()),
	}
	for _, a := range i.GetAdapters() {
		info.Adapters = append(info.Adapters, fleet.Adapter{Name: a.GetName(), Root: a.GetRoot()})
	}
	return info
}

// loadOf is nil when the message carries no sample.
func loadOf(l *pb.Load, now time.Time) *fleet.Load {
	if l == nil {
		return nil
	}
	return &fleet.Load{
		At:      now.Add(-time.Duration(l.GetAgeMs()) * time.Millisecond),
		Running: gauge(l.Running), Waiting: gauge(l.Waiting),
		KVUsage: number(l.KvUsage),
		Totals: fleet.Totals{
			PromptTokens: number(l.PromptTokens), CachedTokens: number(l.CachedTokens),
			GenerationTokens: number(l.GenerationTokens),
			PrefillSeconds:   number(l.PrefillSeconds), PrefillComputedTokens: number(l.PrefillComputedTokens),
			PrefillRequests:   number(l.PrefillRequests),
			InterTokenSeconds: number(l.InterTokenSeconds), InterTokenCount: number(l.InterTokenCount),
			QueueSeconds: number(l.QueueSeconds), QueueRequests: number(l.QueueRequests),
			RequestPromptTokens: number(l.RequestPromptTokens), RequestGenerationTokens: number(l.RequestGenerationTokens),
		},
		RunningAdapters: l.GetRunningAdapters(),
		Sleeping:        l.GetSleeping(),
		Unreachable:     l.GetUnreachable(),
		ProcessStart:    l.GetProcessStartMs(),
	}
}

// gauge is -1 where nothing is known.
func gauge(v *uint32) int {
	if v == nil {
		return -1
	}
	return int(min(*v, math.MaxInt32))
}

// number is NaN where nothing is known.
func number(v *float64) float64 {
	if v == nil {
		return math.NaN()
	}
	return *v
}
