package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"go.uber.org/goleak"
)

func runDemo(t *testing.T, ctx context.Context, o options) ([]byte, error) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	err = run(ctx, o, f)
	b, readErr := os.ReadFile(f.Name())
	if readErr != nil {
		t.Fatal(readErr)
	}
	return b, err
}

func TestDemoEndsWithOneObjectAndLeavesNothing(t *testing.T) {
	defer goleak.VerifyNone(t)
	out, err := runDemo(t, context.Background(), options{
		proxy: "gateway", warm: time.Second, span: 2 * time.Second, json: true, engines: 2, speedup: 20, load: 2, capacity: 1, seed: 3,
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	var got struct{ Fleets []outcome }
	if err := json.Unmarshal(lines[len(lines)-1], &got); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if len(got.Fleets) != 3 || got.Fleets[0].Name != "round-robin" || got.Fleets[1].Name != "least-requests" || got.Fleets[2].Name != "kvscout" {
		t.Fatalf("%+v", got)
	}
	for _, line := range lines[:len(lines)-1] {
		if utf8.RuneCount(line) > 80 {
			t.Errorf("more than 80 columns: %s", line)
		}
	}
	if !bytes.Contains(out, []byte("kvscout than least-requests: median")) {
		t.Errorf("no conclusion:\n%s", out)
	}
	for _, f := range got.Fleets {
		if f.Requests+f.Unfinished == 0 || f.Failed > 0 || f.TTFTp50 <= 0 || f.TTFTp99 < f.TTFTp90 {
			t.Errorf("%+v", f)
		}
		// On a machine too slow for the plan nothing can be predicted.
		if f.Unfinished == 0 && float64(f.AbsErrorTokens) > .25*float64(f.PromptTokens) {
			t.Errorf("predictions are far off: %+v", f)
		}
	}
}

func TestInterruptStopsEverything(t *testing.T) {
	defer goleak.VerifyNone(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	begin := time.Now()
	if _, err := runDemo(t, ctx, options{proxy: "gateway", span: 30 * time.Second, engines: 2, speedup: 4, load: 2, capacity: 1}); err == nil {
		t.Error("an interrupted demo ended well")
	}
	if took := time.Since(begin); took > time.Minute {
		t.Errorf("stopped after %v", took)
	}
}

func TestOptionsSayAllThatIsWrong(t *testing.T) {
	if err := (options{proxy: "gateway", span: time.Hour, engines: 8, speedup: 4, load: 2.5, capacity: 1}).validate(); err == nil {
		t.Error("an hour is more than the trace has")
	}
	if err := (options{proxy: "squid", span: time.Second, engines: 8, speedup: 4, load: 1, capacity: 1}).validate(); err == nil || !strings.Contains(err.Error(), "-proxy") {
		t.Errorf("a proxy that is not known: %v", err)
	}
	t.Setenv("HAPROXY", filepath.Join(t.TempDir(), "haproxy"))
	if err := (options{proxy: "haproxy", span: time.Second, engines: 8, speedup: 4, load: 1, capacity: 1}).validate(); err == nil || !strings.Contains(err.Error(), "-proxy haproxy: no HAProxy: make test-haproxy installs it") {
		t.Errorf("a program that is not there: %v", err)
	}
	if err := (options{}).validate(); err == nil {
		t.Error("nothing is no option")
	}
}
