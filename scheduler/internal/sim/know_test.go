package sim

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// What is told is true: who knows it predicts to a few ms what who estimates is far
// from, and each kind counts.
func TestWhoIsToldPredictsWhatComes(t *testing.T) {
	c := fleetOf(4, 64, chats(1, 4, 0.45, 2*time.Minute, 64))
	c.Capacity = 4
	off := make(map[string]Result)
	for _, arm := range append([]string{policy.Default, Knowing(policy.Default, KnowCurves, KnowBacklog)}, Ablation(policy.Default)...) {
		c.Policy = arm
		r := mustRun(t, c)
		t.Logf("%s: mean TTFT %.3f s, error %.1f ms, %.1f tokens", arm, r.TTFTMean, r.PredictedError, r.PredictedCachedError)
		if r.Policy != arm {
			t.Errorf("%s is called %s", arm, r.Policy)
		}
		off[arm] = r
	}
	guessed, curves := off[policy.Default], off[Knowing(policy.Default, KnowCurves)]
	both := off[Knowing(policy.Default, KnowCurves, KnowBacklog)]
	if !(curves.PredictedError < .75*guessed.PredictedError && both.PredictedError < curves.PredictedError/2) {
		t.Errorf("error %.1f ms, knowing curves %.1f ms, and backlog %.1f ms", guessed.PredictedError, curves.PredictedError, both.PredictedError)
	}
	if all := off[Knowing(policy.Default, knowledge...)]; all.PredictedError > guessed.PredictedError/2 || all.PredictedCachedError > 5 {
		t.Errorf("knowing all: error %.1f ms, %.1f tokens", all.PredictedError, all.PredictedCachedError)
	}
	if out := off[Knowing(policy.Default, KnowOutput)]; out.TTFTMean == guessed.TTFTMean {
		t.Error("the length of the output changes nothing")
	}
}

func TestArmsOfKnowledge(t *testing.T) {
	for arm, want := range map[string]string{
		"default": "default", "default+curves": "default curves", "sticky:tau=1e+3+cache+output": "sticky:tau=1e+3 output cache", "+": "+", "default+": "default+", "default+x": "default+x",
	} {
		name, known := cutKnown(arm)
		if got := strings.Join(append([]string{name}, known...), " "); got != want {
			t.Errorf("%q: %q, want %q", arm, got, want)
		}
		if Told(arm) != (len(known) > 0) || Told(arm) && !Bound(arm) {
			t.Errorf("%q: told %v, bound %v", arm, Told(arm), Bound(arm))
		}
	}
	c := fleetOf(1, 64, nil)
	for arm, want := range map[string]string{"oracle+cache": "knows all", "nobody+cache": "unknown policy", "default+curve": "unknown policy", "default+backlog": "decision lag", "default+cache": ""} {
		c.Policy, c.DecisionLag = arm, time.Millisecond
		if err := c.Validate(); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", arm, err, want)
		}
	}
	if arms := Ablation("default"); !slices.Contains(arms, "default+backlog") || arms[len(arms)-1] != "default+curves+backlog+cache+output" {
		t.Error(arms)
	}
}

// Four requests of 1,000 tokens: the first has begun and takes 50 ms; the others
// wait for it, and the last has half of its prompt from the third.
func TestBacklogIsWhatIsLeft(t *testing.T) {
	c := fleetOf(1, 100, nil)
	c.Policy = LeastTokens
	c.Engines = []Profile{{Name: "x", StepMS: 10, TokenMS: .05, KVTokens: 1 << 20, StepTokens: 2000}}
	r := begun(t, c)
	e := r.pods[0].engine
	for _, document := range []int{1, 2, 3, 3} {
		q := &request{Request: arrival.Request{Length: 1000, Output: 1, Keys: keys(document, 10)}}
		if e.arrivals == 3 {
			q.Keys = append(q.Keys[:5:5], keys(4, 10)[5:]...)
		}
		e.serve(q)
	}
	if ms, tokens := e.backlog(); ms != 50+2500*.05 || tokens != 3500 {
		t.Errorf("%v ms, %d tokens", ms, tokens)
	}
}
