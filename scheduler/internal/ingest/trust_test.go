package ingest

import (
	"testing"

	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

func TestTrustIsTheSameOnTheBus(t *testing.T) {
	for wire, name := range pb.Trust_name {
		trust := fleet.TrustOf(wire)
		if known := pb.Trust(wire) != pb.Trust_TRUST_UNSPECIFIED; known && ("TRUST_"+trust.String() != name || trust.Wire() != wire) {
			t.Errorf("%s is %v, which is %d of %d", name, trust, trust.Wire(), wire)
		}
	}
	for _, wire := range []int32{-1, 0, 5, 256, 257, 260, 1 << 30} {
		if trust := fleet.TrustOf(wire); trust != fleet.Unknown {
			t.Errorf("%d is %v", wire, trust)
		}
	}
}
