package main

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/e2e/realvllm"
)

func TestThePageIsMadeFromTheResults(t *testing.T) {
	list, err := read("../../../docs/compatibility")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../../docs/COMPATIBILITY.md")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(strings.Split(render(list), "\n"), strings.Split(string(page), "\n")); d != "" {
		t.Errorf("go run ./e2e/cmd/compatibility makes another page:\n%s", d)
	}
}

// TestNoReleaseIsPromisedMoreThanItHas holds every result that is kept.
func TestNoReleaseIsPromisedMoreThanItHas(t *testing.T) {
	list, err := read("../../../docs/compatibility")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range list {
		for _, p := range r.Phases {
			if p.Over > 0 || p.Failed || p.Trust == "EXACT" && p.Why == "" && p.Exact < p.Judged {
				t.Errorf("vLLM %s, %s, %s: %+v", r.Release, p.Engine, p.Name, p)
			}
		}
	}
}

func TestWhatIsOverOrALowerBoundIsSaid(t *testing.T) {
	r := realvllm.Result{Release: "0.99.0", Phases: []realvllm.Phase{
		{Engine: "full", Name: "salts", Judged: 4, Exact: 4},
		{Engine: "ranks", Name: "two", Judged: 4, Exact: 3, Under: 1},
		{Engine: "offload", Name: "a", Judged: 4, Exact: 3, Over: 1},
	}}
	for engine, want := range map[string]string{
		"full": ", exact (4)", "ranks": ", lower bound: 3 of 4 exact", "offload": ", **1 of 4 over**", "hybrid": "",
	} {
		if got := counts(r, engine); got != want {
			t.Errorf("%s: %q, want %q", engine, got, want)
		}
	}
}
