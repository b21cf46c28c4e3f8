package publish

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
)

// TestEndsTravelBesideTheLanes: ends are never joined with a lane, whatever
// keys they share, and only engines that have them speak of them.
func TestEndsTravelBesideTheLanes(t *testing.T) {
	keys := []blockkey.Key{1, 2, 3}
	st := State{Epoch: 5, Rule: &pb.HitRule{Ends: true}}
	for l := range protocol.Lanes {
		st.Lanes[l].Count, st.Lanes[l].Digest = 3, 7
	}
	st.Lanes[protocol.Ends].Count, st.Lanes[protocol.Ends].Digest = 3, 7
	e := newEncoder(member)
	ops := []mirror.Op{{Lane: mirror.LaneDisk, Keys: keys}, {Lane: mirror.LaneHost, Keys: keys}, {Lane: mirror.LaneGPU, Keys: keys}, {Lane: mirror.Ends, Keys: keys}}
	for p := range e.parts(ops, st, protocol.MaxMessage) {
		data, err := e.delta(p, st, 1)
		if err != nil {
			t.Fatal(err)
		}
		d, err := protocol.ReadDelta(data, member)
		if err != nil {
			t.Fatal(err)
		}
		want := []*pb.Change{
			{Change: &pb.Change_Stored{Stored: &pb.Stored{Lane: pb.Lane_LANE_GPU, Through: pb.Lane_LANE_DISK, Keys: []uint64{1, 2, 3}}}},
			{Change: &pb.Change_Stored{Stored: &pb.Stored{Lane: pb.Lane_LANE_ENDS, Keys: []uint64{1, 2, 3}}}},
		}
		if diff := cmp.Diff(want, d.GetChanges(), protocmp.Transform()); diff != "" {
			t.Error(diff)
		}
		if !d.GetHeader().GetRule().GetEnds() || len(d.GetLanes()) != protocol.Lanes+1 {
			t.Errorf("rule %v, %d lanes", d.GetHeader().GetRule(), len(d.GetLanes()))
		}
	}
	st.Rule, st.Lanes[protocol.Ends].Count, st.Lanes[protocol.Ends].Digest = nil, 0, 0
	for p := range e.parts(ops[:3], st, protocol.MaxMessage) {
		data, err := e.delta(p, st, 2)
		if err != nil {
			t.Fatal(err)
		}
		if d, err := protocol.ReadDelta(data, member); err != nil || d.GetHeader().GetRule() != nil || len(d.GetLanes()) != protocol.Lanes {
			t.Errorf("%v: rule %v, %d lanes", err, d.GetHeader().GetRule(), len(d.GetLanes()))
		}
	}
}

func TestRuleIsPublishedAtOnce(t *testing.T) {
	var b beat
	st := State{Epoch: 1, Trust: pb.Trust_TRUST_EXACT}
	b.sent(st, nil, nil, b.at.Add(1))
	b.at = b.at.Add(1)
	st.Rule = &pb.HitRule{DroppedBlocks: 1}
	if !b.due(st, b.at, nil) {
		t.Error("a heartbeat can wait although hits follow another rule")
	}
}
