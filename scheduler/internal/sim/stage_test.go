package sim

import (
	"testing"

	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// Load that climbs past what two pods can serve is slow where it is steep
// and was not before.
func TestStagesSeparateRates(t *testing.T) {
	w, err := arrival.Generate("shared:groups=4,prompts=0,head=1024,input=8000,output=50,gap=200,stages=1x60+12x60", arrival.Options{BlockSize: 512})
	if err != nil {
		t.Fatal(err)
	}
	e, err := Engine("")
	if err != nil {
		t.Fatal(err)
	}
	res, err := Run(Config{Arrivals: w.Play, Stages: w.Stages, Seed: 1, Policy: LeastTokens, Pods: 2, Engines: []Profile{e}})
	if err != nil {
		t.Fatal(err)
	}
	if len(res.Stages) != 2 || res.Stages[0].Requests+res.Stages[1].Requests != res.Requests {
		t.Fatalf("%d requests in stages %+v", res.Requests, res.Stages)
	}
	calm, steep := res.Stages[0], res.Stages[1]
	if calm.QPS != 1 || calm.TTFTP90 > 1.5 || steep.TTFTP90 < 10 || calm.Throughput > 60 || steep.Throughput < 150 {
		t.Errorf("calm %+v, steep %+v", calm, steep)
	}
}
