package ingest

import "sync/atomic"

// Stats counts what happened since New, and says how things stand.
type Stats struct {
	// Members followed, and how many of them have no cache state now.
	Members, Syncing int64
	// InFlight is the number of snapshots awaited now.
	InFlight int64
	// AwaitedBytes are held of snapshots that are not complete, and of deltas
	// that wait for them.
	AwaitedBytes int64
	// Deltas, Heartbeats and Chunks read; Keys stored and removed by them.
	Deltas, Heartbeats, Chunks, Keys uint64
	// Epochs begun or found in a snapshot; EpochsBack went back, as when two
	// agents speak for one member.
	Epochs, EpochsBack uint64
	// Repeated deltas, and Ignored messages: before the member's first
	// heartbeat, before its snapshot was asked for, or after it was given up.
	Repeated, Ignored uint64
	// Gaps and Mismatches of digest, count or index lead to Resyncs.
	Gaps, Mismatches, Resyncs uint64
	// Snapshots taken; FailedSnapshots include NoResponders, and Overflows of
	// what may be held of snapshots and of the deltas meanwhile.
	Snapshots, FailedSnapshots, NoResponders, Overflows uint64
	// Malformed, WrongVersion and WrongMember messages were refused.
	Malformed, WrongVersion, WrongMember uint64
	// RefusedMembers are announcements of members that were not taken up.
	RefusedMembers uint64
	// Verdicts sent to agents.
	Verdicts uint64
	// Dropped messages found a queue full, here or in the NATS client.
	Dropped uint64
}

type counters struct {
	members, syncing, awaited                  atomic.Int64
	deltas, heartbeats, chunks, keys           atomic.Uint64
	epochs, epochsBack                         atomic.Uint64
	repeated, ignored                          atomic.Uint64
	gaps, mismatches, resyncs                  atomic.Uint64
	snapshots, failed, noResponders, overflows atomic.Uint64
	malformed, wrongVersion, wrongMember       atomic.Uint64
	refusedMembers, verdicts, dropped          atomic.Uint64
}

// Stats returns the counts.
func (in *Ingest) Stats() Stats {
	c := &in.count
	st := Stats{
		Members: c.members.Load(), Syncing: c.syncing.Load(), InFlight: in.inFlight.Load(), AwaitedBytes: c.awaited.Load(),
		Deltas: c.deltas.Load(), Heartbeats: c.heartbeats.Load(), Chunks: c.chunks.Load(), Keys: c.keys.Load(),
		Epochs: c.epochs.Load(), EpochsBack: c.epochsBack.Load(),
		Repeated: c.repeated.Load(), Ignored: c.ignored.Load(),
		Gaps: c.gaps.Load(), Mismatches: c.mismatches.Load(), Resyncs: c.resyncs.Load(),
		Snapshots: c.snapshots.Load(), NoResponders: c.noResponders.Load(), Overflows: c.overflows.Load(),
		Malformed: c.malformed.Load(), WrongVersion: c.wrongVersion.Load(), WrongMember: c.wrongMember.Load(),
		RefusedMembers: c.refusedMembers.Load(), Verdicts: c.verdicts.Load(), Dropped: c.dropped.Load(),
	}
	st.FailedSnapshots = c.failed.Load() + st.NoResponders + st.Overflows
	if subscriptions := in.subscriptions.Load(); subscriptions != nil {
		for _, s := range *subscriptions {
			if n, err := s.Dropped(); err == nil {
				st.Dropped += uint64(n)
			}
		}
	}
	return st
}
