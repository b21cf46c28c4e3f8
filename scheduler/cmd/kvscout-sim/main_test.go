package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

func play(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(t.Context(), args, &out, &errs)
	return out.String(), errs.String(), code
}

const trace = "testdata/conversation.jsonl"

func TestJSONIsOneObjectAPolicyAndSeed(t *testing.T) {
	args := []string{"-trace", trace, "-policies", "least-tokens,default,oracle", "-pods", "8", "-speed", "2", "-capacity", "1", "-seeds", "2", "-json"}
	out, errs, code := play(t, args...)
	if code != 0 || errs != "" {
		t.Fatalf("exit %d: %s", code, errs)
	}
	var got []string
	for line := range strings.Lines(out) {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"policy", "seed", "requests", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "token_hit", "load_cv", "goodput", "headroom_share"} {
			if _, ok := fields[name]; !ok {
				t.Errorf("%s is missing: %s", name, line)
			}
		}
		if fields["requests"] != 60.0 {
			t.Errorf("%v requests", fields["requests"])
		}
		seed, _ := json.Marshal(fields["seed"])
		got = append(got, fields["policy"].(string)+" "+string(seed))
	}
	if diff := cmp.Diff([]string{"least-tokens 1", "least-tokens 2", "default 1", "default 2", "oracle 1", "oracle 2"}, got); diff != "" {
		t.Error(diff)
	}
	if again, _, _ := play(t, append(args, "-jobs", "3")...); again != out {
		t.Error("the same seeds gave other bytes")
	}
}

func TestTableHasALineForEachRun(t *testing.T) {
	out, _, code := play(t, "-trace", trace, "-policies", "random,capacity-oracle", "-engine", "llama-3.1-70b-h100-tp4", "-block-size", "16")
	if lines := strings.Split(strings.TrimSpace(out), "\n"); code != 0 || len(lines) != 3 || !strings.Contains(lines[2], "capacity-oracle") {
		t.Errorf("exit %d:\n%s", code, out)
	}
}

func TestPoliciesMayHaveParameters(t *testing.T) {
	got := names("default, weighted:prefix=3,kv=2,oracle,sticky:share=0.8")
	if diff := cmp.Diff([]string{"default", "weighted:prefix=3,kv=2", "oracle", "sticky:share=0.8"}, got); diff != "" {
		t.Error(diff)
	}
}

func TestEngineOfAFile(t *testing.T) {
	p, _ := sim.Engine("")
	p.Name, p.TokenMS = "", 10*p.TokenMS
	text, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "slow.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	out, errs, code := play(t, "-trace", trace, "-policies", "default", "-engine", file, "-json")
	var r sim.Result
	if err := json.Unmarshal([]byte(out), &r); code != 0 || err != nil || r.TTFTMean < 2 {
		t.Errorf("exit %d, %v: %s%s", code, err, out, errs)
	}
}

func TestMistakesAreSaid(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{nil, 2, "no workload"},
		{[]string{"-trace", trace, "more"}, 2, `"more"`},
		{[]string{"-trace", "testdata/none"}, 1, "testdata/none"},
		{[]string{"-trace", trace, "-policies", "best"}, 1, `"best"`},
		{[]string{"-trace", trace, "-engine", "abacus"}, 1, "qwen3-32b-h100-tp2"},
		{[]string{"-trace", trace, "-capacity", "-1"}, 1, "capacity"},
		{[]string{"-trace", trace, "-restart-at", "9@1s"}, 1, "pod 9"},
		{[]string{"-trace", trace, "-restart-at", "x@1s"}, 2, `"x"`},
		{[]string{"-trace", trace, "-seeds", "0"}, 2, "-seeds"},
		{[]string{"-trace", "main.go"}, 1, "main.go"},
	} {
		out, errs, code := play(t, c.args...)
		if code != c.code || !strings.Contains(errs, c.says) || out != "" {
			t.Errorf("%v: exit %d, %q, want %d and %q", c.args, code, errs, c.code, c.says)
		}
	}
	if out, errs, code := play(t, "-help"); code != 0 || errs != "" || !strings.Contains(out, "-sample-interval") {
		t.Errorf("help: exit %d, %q", code, errs)
	}
}

func TestTargetsAreRead(t *testing.T) {
	got, err := targets("ttft=500, tpot=50,e2e=9e3")
	if want := (policy.Targets{TTFT: 500, TPOT: 50, E2E: 9000}); err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
	for text, want := range map[string]string{"": "no target", "tpot": "no number", "tpot=0": "no number", "tpot=NaN": "no number", "rps=1": "want ttft"} {
		if _, err := targets(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}
