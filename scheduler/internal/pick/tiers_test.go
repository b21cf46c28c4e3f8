package pick

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// tiers has one chain of 250 blocks in the GPU, host and disk of a member each,
// and a member without.
func tiers(t *testing.T) (*bed, Request) {
	b := newBed(t)
	le := prompt(1, 0, 4100)
	disk, host, gpu := b.join("a-disk"), b.join("b-host"), b.join("c-gpu")
	b.join("d-none")
	b.hold(disk, index.LaneDisk, le, 250)
	b.hold(host, index.LaneHost, le, 250)
	b.hold(host, index.LaneDisk, le, 250)
	b.gpu(gpu, le, 250)
	return b, Request{Prompt: tokens(le)}
}

func TestOneChainInGPUHostAndDiskRanksInThatOrder(t *testing.T) {
	b, r := tiers(t)
	var order []string
	for _, c := range b.pick(r).Candidates {
		order = append(order, c.Member.Info.Name)
	}
	if want := []string{"c-gpu", "b-host", "a-disk", "d-none"}; !cmp.Equal(order, want) {
		t.Errorf("%v", order)
	}
}

func TestATierSlowerThanComputingCountsAsAMiss(t *testing.T) {
	b, r := tiers(t)
	b.estimates.Speeds.Prior.DiskMS = 1 // a token takes 0.05 ms to be computed
	cost := make(map[string]float64)
	for _, c := range b.pick(r).Candidates {
		cost[c.Member.Info.Name] = c.Cost.FirstToken()
	}
	// The fixed part of a prefill is paid once by each.
	if d := cost["a-disk"] - cost["d-none"]; d > 1e-9 || d < -1e-9 {
		t.Errorf("from a slow disk %v ms, computed %v ms", cost["a-disk"], cost["d-none"])
	}
	if cost["b-host"] >= cost["a-disk"] {
		t.Errorf("%v", cost)
	}
}
