package realvllm_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/e2e/realvllm"
	"github.com/kvscout/kvscout/e2e/scenario"
)

// TestRealEngineMovesWhatTheFakeDoes plays the scenarios on a real engine: every
// metric and every event is at each look what it is on the fake, whose own test
// holds the same text.
func TestRealEngineMovesWhatTheFakeDoes(t *testing.T) {
	t.Parallel()
	home := os.Getenv("KVSCOUT_VLLM")
	if home == "" {
		t.Skip("SKIPPED: no real vLLM (make test-vllm installs one and runs this)")
	}
	log, err := os.CreateTemp(t.TempDir(), "vllm-*.log")
	if err != nil {
		t.Fatal(err)
	}
	e, err := realvllm.New(realvllm.Config{
		Home: home, BlockSize: scenario.BlockSize, Blocks: scenario.Blocks, Lora: true, Log: log,
		Args: []string{
			"--max-model-len", fmt.Sprint(scenario.MaxModelLen), "--max-num-batched-tokens", fmt.Sprint(scenario.MaxBatchedTokens),
			"--max-num-seqs", fmt.Sprint(scenario.MaxSequences),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Kill()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("the engine's log ends:\n%s", text[max(0, len(text)-4000):])
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), startTime)
	defer cancel()
	if err := e.Start(ctx); err != nil {
		t.Fatal(err)
	}
	at := scenario.Engine{URL: e.URL(), Events: e.Events(), Model: realvllm.Model}
	for _, s := range scenario.List {
		began := time.Now()
		text, err := s.Run(t.Context(), at)
		if err != nil {
			t.Error(err)
			continue
		}
		want := s.Moved()
		t.Logf("%-40s %3d lines, %v", s.Name, strings.Count(text, "\n"), time.Since(began).Round(time.Millisecond))
		if d := cmp.Diff(strings.Split(want, "\n"), strings.Split(text, "\n")); d != "" {
			t.Errorf("%s: - fake, + real:\n%s", s.Name, d)
		}
	}
}
