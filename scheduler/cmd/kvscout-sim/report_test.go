package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func read(t *testing.T, path ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestPlotIsDrawn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "out.svg")
	if _, errs, code := play(t, "-trace", trace, "-policies", "least-tokens,oracle", "-plot", path); code != 0 {
		t.Fatal(errs)
	}
	if svg := read(t, path); !strings.Contains(svg, "least tokens") || !strings.HasSuffix(strings.TrimSpace(svg), "</svg>") {
		t.Errorf("%.300s", svg)
	}
}

// What was played is not played again unless settings or code changed, and a
// torn file is not silently played over.
func TestReportGoesOnWhereItStopped(t *testing.T) {
	out := t.TempDir()
	report := func(code string) {
		t.Helper()
		if _, errs, status := play(t, "report", "-out", out, "-only", "^hot/(random|default)$", "-seeds", "1", "-code", code); status != 0 {
			t.Fatal(errs)
		}
	}
	report("first")
	cell := filepath.Join(out, "routing", "hot.json")
	lines := strings.SplitAfter(strings.TrimSpace(read(t, cell)), "\n")
	// One run is missing, and another can be told from one played again.
	kept := strings.Replace(strings.Join(lines[1:], ""), `"requests":`, `"requests":1`, 1)
	if err := os.WriteFile(cell, []byte(kept), 0o644); err != nil {
		t.Fatal(err)
	}
	report("first")
	if got := read(t, cell); len(strings.Split(strings.TrimSpace(got), "\n")) != len(lines) || !strings.HasPrefix(got, lines[0]) {
		t.Errorf("the missing run was not made: %.500s", got)
	} else if strings.Count(got, `"requests":1`) == strings.Count(strings.Join(lines, ""), `"requests":1`) {
		t.Error("a run that was there was played again")
	}
	report("second")
	if got := read(t, cell); strings.Contains(got, `"first"`) || strings.ReplaceAll(got, "second", "first") != strings.Join(lines, "")+"\n" {
		t.Error("other code did not play all again, or played otherwise")
	}
	page := read(t, out, "ROUTING.md")
	if !strings.Contains(page, "![hot](routing/hot.svg)") || !strings.Contains(page, "go run ./scheduler/cmd/kvscout-sim -arrivals hot ") {
		t.Errorf("%.2000s", page)
	}
	before := read(t, out, "routing", "hot.svg")
	if _, errs, status := play(t, "report", "-out", out, "-render"); status != 0 || read(t, out, "ROUTING.md") != page || read(t, out, "routing", "hot.svg") != before {
		t.Errorf("the same results give another page: %s", errs)
	}
	if err := os.WriteFile(cell, []byte(lines[0][:50]), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, errs, status := play(t, "report", "-out", out, "-only", "^hot/"); status != 1 || !strings.Contains(errs, "hot.json: line 1") || !strings.Contains(errs, "delete it") {
		t.Errorf("exit %d: %s", status, errs)
	}
}

func TestReportRefusesWhatItCannotUse(t *testing.T) {
	for want, args := range map[string][]string{
		"-only":               {"-only", "("},
		"-seeds and -jobs":    {"-seeds", "0"},
		"unexpected argument": {"x"},
		"not defined":         {"-no-such-flag"},
	} {
		if _, errs, code := play(t, append([]string{"report"}, args...)...); code != 2 || !strings.Contains(errs, want) {
			t.Errorf("%q: exit %d: %s", args, code, errs)
		}
	}
	if _, errs, code := play(t, "report", "-only", "^conversation-1x-c1/random$", "-traces", "nowhere", "-out", t.TempDir()); code != 1 || !strings.Contains(errs, "nowhere") {
		t.Errorf("no traces: exit %d: %s", code, errs)
	}
	out, _, code := play(t, "report", "-help")
	if code != 0 || !bytes.Contains([]byte(out), []byte("-short")) {
		t.Errorf("help: exit %d: %s", code, out)
	}
}
