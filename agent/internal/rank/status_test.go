package rank

import (
	"strings"
	"testing"

	"github.com/kvscout/kvscout/agent/internal/publish"
	"github.com/kvscout/kvscout/protocol/pb"
)

func TestDisbelief(t *testing.T) {
	exact, syncing := publish.Opinion{Scheduler: "a", Trust: pb.Trust_TRUST_EXACT}, publish.Opinion{Scheduler: "b", Trust: pb.Trust_TRUST_SYNCING, Reason: "gap"}
	refused := publish.Opinion{Scheduler: "c", Trust: pb.Trust_TRUST_EXACT, Refused: "why"}
	for _, c := range []struct {
		own      pb.Trust
		opinions []publish.Opinion
		want     string
	}{
		{pb.Trust_TRUST_EXACT, nil, "no scheduler"},
		{pb.Trust_TRUST_EXACT, []publish.Opinion{exact}, ""},
		{pb.Trust_TRUST_EXACT, []publish.Opinion{refused, syncing, exact}, ""},
		{pb.Trust_TRUST_EXACT, []publish.Opinion{syncing}, "b: gap"},
		{pb.Trust_TRUST_EXACT, []publish.Opinion{refused}, "c: why"},
		{pb.Trust_TRUST_SYNCING, []publish.Opinion{exact}, "own"},
	} {
		if got := disbelief(c.own, "own", c.opinions); (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%v %v: %q, want %q", c.own, c.opinions, got, c.want)
		}
	}
}
