package e2e

import (
	"bufio"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// TestFrozenEnginesDoNotHoldUpText stops two of three engines in the middle of
// their lives, as a machine does that swaps: they take connections and never
// answer. A prompt that is text must find the third one.
func TestFrozenEnginesDoNotHoldUpText(t *testing.T) {
	p := open(t, stage.Options{})
	binary := filepath.Join(t.TempDir(), "fakevllm")
	build := exec.Command("go", "build", "-o", binary, "github.com/kvscout/kvscout/e2e/cmd/fakevllm")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var engines []*exec.Cmd
	for n := range 3 {
		cmd := exec.Command(binary, "-port", "0", "-events-port", "0", "-replay-port", "0")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		line, err := bufio.NewReader(out).ReadString('\n')
		url, ok := strings.CutPrefix(strings.TrimSpace(line), "http ")
		if err != nil || !ok {
			t.Fatalf("engine %d said %q, %v", n, line, err)
		}
		if _, err := p.Agent(stage.AgentOptions{Engine: url, Pod: fmt.Sprintf("pod%d", n)}); err != nil {
			t.Fatal(err)
		}
		if err := p.Until(t.Context(), patience, fmt.Sprintf("default_pod%d_0", n), "settle", stage.Settled); err != nil {
			t.Fatal(err)
		}
		engines = append(engines, cmd)
	}
	for _, cmd := range engines[:2] {
		if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	worst := time.Duration(0)
	for n := range 12 {
		watch := newStopwatch()
		answer, err := p.Client.Score(t.Context(), &api.ScoreRequest{Request: &api.Request{
			Model: "fake", Prompt: api.Body(fmt.Sprintf(`{"prompt":%q}`, fmt.Sprintf("prompt %d is like no other", n))),
		}})
		if err != nil || answer.GetRanking().GetPromptTokens() == 0 {
			t.Fatalf("prompt %d: %v, %q", n, err, answer.GetRanking().Lacks())
		}
		worst = max(worst, watch.ours())
	}
	t.Log("longest text call:", worst)
	if worst > 500*time.Millisecond+leeway {
		t.Errorf("a text call took %v", worst)
	}
}
