package sim

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// compare plays the same fleet under the default policy and under least tokens.
// learned is what the default's scheduler believes of each pod at the end: ms
// to compute 4,000 tokens.
func compare(t *testing.T, c Config) (ours, blind Result, learned []float64) {
	t.Helper()
	c.Policy = LeastTokens
	blind = mustRun(t, c)
	c.Policy = policy.Default
	r := &run{cfg: c.withDefaults()}
	if err := r.start(); err != nil {
		t.Fatal(err)
	}
	if err := r.play(); err != nil {
		t.Fatal(err)
	}
	s := r.placer.(*scout)
	d, err := s.picker.Pick(&pick.Request{Model: Model, Top: -1, Prompt: pick.Prompt{BlockSize: 64, Length: 4000}}, s.clock())
	if err != nil {
		t.Fatal(err)
	}
	learned = make([]float64, len(r.pods))
	for _, one := range d.Candidates {
		at := slices.IndexFunc(r.pods, func(p *pod) bool { return p.name == one.Member.Info.Name })
		learned[at] = one.Cost.Prefill
	}
	ours = r.result()
	t.Logf("default %.3f s, p99 %.2f, ITL %.1f, hit %.3f; least tokens %.3f s, p99 %.2f, ITL %.1f; 4,000 tokens in %.0f ms",
		ours.TTFTMean, ours.TTFTP99, ours.ITLMean, ours.TokenHit, blind.TTFTMean, blind.TTFTP99, blind.ITLMean, learned)
	return ours, blind, learned
}

func TestEqualEnginesShareTheWork(t *testing.T) {
	c := fleetOf(8, 64, chats(1, 8, 0.45, 60*time.Second, 64))
	c.Capacity = 4
	ours, blind, learned := compare(t, c)
	if ours.LoadCV > 0.2 {
		t.Errorf("load varies by %.3f", ours.LoadCV)
	}
	if low, high := slices.Min(learned), slices.Max(learned); high > 1.5*low {
		t.Errorf("equal engines are believed to take %.0f", learned)
	}
	if ours.TTFTMean > 0.9*blind.TTFTMean || ours.TTFTP99 > 1.05*blind.TTFTP99 || ours.ITLMean > blind.ITLMean {
		t.Error("not better than least tokens")
	}
}

func TestNothingIsLostWithoutSharing(t *testing.T) {
	c := fleetOf(8, 64, chats(1, 8, 0, 60*time.Second, 64))
	c.Capacity = 4
	if ours, blind, _ := compare(t, c); ours.TTFTMean > 1.05*blind.TTFTMean || ours.TTFTP99 > 1.05*blind.TTFTP99 || ours.ITLMean > 1.05*blind.ITLMean {
		t.Error("worse than least tokens")
	}
}

// One engine takes 2.9 times as long as the other for the same prompt.
func TestTwoKindsOfEnginesAreToldApart(t *testing.T) {
	c := fleetOf(8, 64, chats(1, 4, 0.45, 60*time.Second, 64))
	slow, err := Engine("qwen3-32b-a100-tp2")
	if err != nil {
		t.Fatal(err)
	}
	c.Capacity, c.Engines = 4, append(c.Engines, slow)
	ours, blind, learned := compare(t, c)
	for i := 0; i < len(learned); i += 2 {
		if ratio := learned[i+1] / learned[i]; math.Abs(math.Log(ratio/2.9)) > math.Log(1.6) {
			t.Errorf("pod %d is 2.9 times slower than its neighbour, believed: %.0f", i+1, learned)
		}
	}
	if ours.TTFTMean > 0.85*blind.TTFTMean {
		t.Error("not better than least tokens")
	}
}
