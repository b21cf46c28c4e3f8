package sim

import (
	"math"
	"os"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// What the program came to on the first ten minutes of the conversation trace at
// twice its speed, in front of fake engines on sockets: the middle of two runs.
// docs/SIMULATOR.md has the whole of it.
func TestDynamoCostIsWhatItsProgramCameTo(t *testing.T) {
	f, err := os.Open("testdata/mooncake_conversation_trace.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w, err := arrival.Trace(f, "conversation", arrival.Options{BlockSize: 64, Speed: 2, First: 5 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	engine, err := Engine(DefaultEngine)
	if err != nil {
		t.Fatal(err)
	}
	const programTTFT, programHit = .98, .1675
	var ttft, hit []float64
	for seed := range uint64(2) {
		r := mustRun(t, Config{
			Arrivals: w.Play, Seed: seed + 1, Policy: "dynamo-cost", Pods: 8, Engines: []Profile{engine}, Capacity: 4,
			DecisionLag: 80 * time.Millisecond, // the way to the engines and back
		})
		if r.Requests != 1750 {
			t.Fatalf("%d requests", r.Requests)
		}
		ttft, hit = append(ttft, r.TTFTMean), append(hit, r.TokenHit)
	}
	t.Logf("mean TTFT %.3f s, hits %.3f", mean(ttft), mean(hit))
	if off := mean(ttft)/programTTFT - 1; math.Abs(off) > .1 {
		t.Errorf("mean TTFT %.3f s, the program's was %.3f s", mean(ttft), programTTFT)
	}
	if off := mean(hit)/programHit - 1; math.Abs(off) > .1 {
		t.Errorf("hits %.3f, the program's were %.4f", mean(hit), programHit)
	}
}
