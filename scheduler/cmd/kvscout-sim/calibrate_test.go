package main

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// What a run logs gives back the engine that it played with, and the file that
// calibrate prints is one that -engine reads.
func TestCalibrateGivesTheEngineOfALog(t *testing.T) {
	folder := t.TempDir()
	log, file := filepath.Join(folder, "log.jsonl"), filepath.Join(folder, "mine.json")
	if _, errs, code := play(t, "-arrivals", "shared:groups=3,prompts=0,head=2048,input=6000~8000:200-60000,output=200,stages=.15x1000", "-pods", "1", "-engine", "llama-3.1-8b-h100", "-policies", "least-tokens", "-log", log); code != 0 {
		t.Fatal(errs)
	}
	out, errs, code := play(t, "calibrate", "-log", log)
	if code != 0 || !strings.Contains(errs, "us a token") {
		t.Fatal(out, errs)
	}
	var got sim.Profile
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatal(err)
	}
	if want, _ := sim.Engine("llama-3.1-8b-h100"); math.Abs(got.TokenMS/want.TokenMS-1) > .05 || math.Abs(got.PairMS/want.PairMS-1) > .05 || math.Abs(got.StepMS/want.StepMS-1) > .05 {
		t.Errorf("%+v, want %+v", got, want)
	}
	if err := os.WriteFile(file, []byte(out), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, errs, code := play(t, "-trace", trace, "-policies", "least-tokens", "-engine", file); code != 0 {
		t.Error(errs)
	}
	if _, errs, code := play(t, "-trace", trace, "-log", log); code != 2 || !strings.Contains(errs, "one run") {
		t.Errorf("a log of many runs: exit %d: %s", code, errs)
	}
}

func TestCalibrateReadsMetrics(t *testing.T) {
	const page = "../../../agent/internal/vllm/testdata/metrics-0.32.0.txt"
	out, errs, code := play(t, "calibrate", "-metrics", page)
	if code != 0 || !strings.Contains(out, `"kv_tokens"`) || !strings.Contains(errs, "means of 334 requests") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	for want, args := range map[string][]string{
		"0 requests": {"-metrics", page, "-since", page},
		"either":     {"-since", page},
		"no such":    {"-metrics", "nowhere"},
	} {
		if _, errs, code := play(t, append([]string{"calibrate"}, args...)...); code == 0 || !strings.Contains(errs, want) {
			t.Errorf("%q: exit %d: %s", args, code, errs)
		}
	}
}
