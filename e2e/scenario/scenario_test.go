package scenario

import (
	"bytes"
	"context"
	"flag"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kvscout/kvscout/e2e/fakevllm"
)

var update = flag.Bool("update", false, "write testdata/moved.txt anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake starts an engine that the list can be played on.
func fake(t *testing.T) Engine {
	t.Helper()
	e, err := fakevllm.New(fakevllm.Config{
		Model: "tiny", BlockSize: BlockSize, Blocks: Blocks, MaxModelLen: MaxModelLen,
		MaxBatchedTokens: MaxBatchedTokens, MaxSequences: MaxSequences, Preemption: true,
		Adapters: []fakevllm.Adapter{{Name: Adapter, Path: "/ad1"}}, MaxAdapters: 2,
		// A chunk takes so long that an engine can be held between two on a busy machine.
		Profile: fakevllm.Profile{StepFloor: 5, PerToken: .6},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		http.DefaultClient.CloseIdleConnections()
	})
	return Engine{URL: e.URL(), Events: strings.TrimPrefix(e.Events(0).Endpoint(), "tcp://"), Model: "tiny"}
}

// What moves on the fake is written down, and the same as on the real engine,
// which e2e/realvllm plays the list on.
func TestFakeMovesWhatIsWrittenDown(t *testing.T) {
	e := fake(t)
	var all strings.Builder
	for _, s := range List {
		text, err := s.Run(t.Context(), e)
		if err != nil {
			t.Fatal(err)
		}
		all.WriteString(text)
	}
	const path = "testdata/moved.txt"
	if *update {
		if err := os.WriteFile(path, []byte(all.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(all.String(), "\n")); d != "" {
		t.Errorf("-update writes it anew:\n%s", d)
	}
}

// TestPageNamesEveryMetricThatIsRead holds docs/ENGINE-METRICS.md to the agent
// and to what is compared here.
func TestPageNamesEveryMetricThatIsRead(t *testing.T) {
	page, err := os.ReadFile("../../docs/ENGINE-METRICS.md")
	if err != nil {
		t.Fatal(err)
	}
	agent, err := os.ReadFile("../../agent/internal/vllm/metrics.go")
	if err != nil {
		t.Fatal(err)
	}
	names := slices.Clone(compared)
	for _, m := range regexp.MustCompile(`"(?:vllm:([a-z_]+)|(http_requests_total))"`).FindAllSubmatch(agent, -1) {
		names = append(names, string(m[1])+string(m[2]))
	}
	if len(names) < len(compared)+15 {
		t.Fatalf("the agent reads only %d metrics: the test looks in the wrong place", len(names)-len(compared))
	}
	for _, name := range names {
		name = strings.TrimSuffix(strings.TrimSuffix(name, "_sum"), "_count")
		if !bytes.Contains(page, []byte("`"+name+"`")) {
			t.Errorf("docs/ENGINE-METRICS.md does not say what moves %s", name)
		}
	}
}
