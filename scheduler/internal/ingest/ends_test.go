package ingest

import (
	"testing"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

const hybridEpoch = 77

var (
	hybridKeys = []uint64{11, 12, 13, 14}
	endsRule   = &pb.HitRule{Ends: true}
)

func hybridHeader(sequence uint64, rule *pb.HitRule) *pb.Header {
	return &pb.Header{Version: protocol.Version, Member: name, Epoch: hybridEpoch, Sequence: sequence, Rule: rule}
}

// claimOf claims so many of hybridKeys on each lane, and those that are ends.
func claimOf(held int, ends ...uint64) []*pb.LaneState {
	state := func(l pb.Lane, keys []uint64) *pb.LaneState {
		s := &pb.LaneState{Lane: l, Count: uint64(len(keys))}
		for _, k := range keys {
			s.Digest ^= blockkey.Digest(blockkey.Key(k))
		}
		return s
	}
	keys := hybridKeys[:held]
	return []*pb.LaneState{state(pb.Lane_LANE_GPU, keys), state(pb.Lane_LANE_HOST, keys), state(pb.Lane_LANE_DISK, keys), state(pb.Lane_LANE_ENDS, ends)}
}

// storedWithEnds is the first delta of a hybrid engine: four blocks, a hit may end at
// the third.
func storedWithEnds() *pb.Delta {
	return &pb.Delta{
		Header: hybridHeader(1, endsRule),
		Changes: []*pb.Change{
			{Change: &pb.Change_Stored{Stored: &pb.Stored{Lane: pb.Lane_LANE_GPU, Through: pb.Lane_LANE_DISK, Keys: hybridKeys}}},
			{Change: &pb.Change_Stored{Stored: &pb.Stored{Lane: pb.Lane_LANE_ENDS, Position: 2, Before: hybridKeys[:2], Keys: hybridKeys[2:3]}}},
		},
		Lanes: claimOf(4, 13),
	}
}

func (r *rig) end() uint32 {
	keys := make([]blockkey.Key, len(hybridKeys))
	for i, k := range hybridKeys {
		keys[i] = blockkey.Key(k)
	}
	asked := []index.End{{Member: index.Member(id), Limit: 4}}
	r.index.Ends(keys, asked)
	return asked[0].Blocks
}

func (r *rig) is(t *testing.T, trust fleet.Trust, rule fleet.HitRule, end uint32) {
	t.Helper()
	if p := r.m.cacheState(); p.Trust != trust || p.Rule != rule || r.end() != end {
		t.Errorf("%v (%s), rule %+v, end %d; want %v, %+v, %d", p.Trust, p.Reason, p.Rule, r.end(), trust, rule, end)
	}
}

func TestEndsFollowTheWire(t *testing.T) {
	r := newRig(t, 1)
	beat := func(sequence uint64, rule *pb.HitRule, lanes []*pb.LaneState) {
		r.m.heartbeat(&pb.Heartbeat{Header: hybridHeader(sequence, rule), Trust: pb.Trust_TRUST_EXACT, Lanes: lanes}, r.now)
	}
	beat(0, nil, claimOf(0)) // before the first events nothing is known of groups
	r.m.delta(storedWithEnds(), 0, r.now)
	r.is(t, fleet.Exact, fleet.HitRule{Ends: true}, 3)
	beat(1, endsRule, claimOf(4, 13))
	r.is(t, fleet.Exact, fleet.HitRule{Ends: true}, 3)

	r.m.delta(&pb.Delta{
		Header: hybridHeader(2, endsRule),
		Changes: []*pb.Change{
			{Change: &pb.Change_Removed{Removed: &pb.Removed{Lane: pb.Lane_LANE_ENDS, Position: 2, Before: hybridKeys[:2], Keys: hybridKeys[2:3]}}},
			{Change: &pb.Change_Stored{Stored: &pb.Stored{Lane: pb.Lane_LANE_ENDS, Position: 0, Keys: hybridKeys[:1]}}},
		},
		Lanes: claimOf(4, 11),
	}, 0, r.now)
	r.is(t, fleet.Exact, fleet.HitRule{Ends: true}, 1)

	// A claim that the ends do not agree with is a claim about nothing else.
	beat(2, endsRule, claimOf(4, 12))
	r.is(t, fleet.Syncing, fleet.HitRule{Ends: true}, 0)
}

func TestAnotherRuleNeedsASnapshot(t *testing.T) {
	for name, change := range map[string]func(*rig){
		"heartbeat": func(r *rig) {
			r.m.heartbeat(&pb.Heartbeat{
				Header: hybridHeader(1, &pb.HitRule{Ends: true, DroppedBlocks: 1}), Trust: pb.Trust_TRUST_EXACT, Lanes: claimOf(4, 13),
			}, r.now)
		},
		"delta": func(r *rig) {
			r.m.delta(&pb.Delta{Header: hybridHeader(2, nil), Lanes: claimOf(4, 13)[:protocol.Lanes]}, 0, r.now)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 1)
			r.m.heartbeat(&pb.Heartbeat{Header: hybridHeader(0, nil), Trust: pb.Trust_TRUST_EXACT, Lanes: claimOf(0)}, r.now)
			r.m.delta(storedWithEnds(), 0, r.now)
			change(r)
			if p := r.m.cacheState(); p.Trust != fleet.Syncing || r.end() != 0 {
				t.Fatalf("%v (%s), end %d", p.Trust, p.Reason, r.end())
			}
			r.later(maxBackoff)
			rule := &pb.HitRule{Ends: true, DroppedBlocks: 1, DroppedToTheEnd: true}
			first := storedWithEnds()
			r.m.chunk(r.m.ask(r.now), &pb.SnapshotChunk{
				Header: hybridHeader(2, rule), Last: true, Trust: pb.Trust_TRUST_EXACT, Lanes: claimOf(4, 13),
				Stored: []*pb.Stored{first.Changes[0].GetStored(), first.Changes[1].GetStored()},
			}, 0, r.now)
			r.is(t, fleet.Exact, fleet.HitRule{Ends: true, Dropped: 1, DroppedToTheEnd: true}, 3)
		})
	}
}
