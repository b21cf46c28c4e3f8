package sizing

import (
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// needs is a workload for which so many pods are enough.
func needs(n int, tried map[int]int) func(int) (sim.Result, error) {
	return func(pods int) (sim.Result, error) {
		tried[pods]++
		if pods >= n {
			return sim.Result{TTFTP90: 1}, nil
		}
		return sim.Result{TTFTP90: 3}, nil
	}
}

func TestTheFewestPodsAreFound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.IntRange(1, 300).Draw(t, "most pods")
		n := rapid.IntRange(1, 400).Draw(t, "needed")
		tried := make(map[int]int)
		got, r, err := Smallest(Goal{TTFTP90: 2, MaxPods: most}, needs(n, tried))
		want, seconds := n, 1.0
		if n > most {
			want, seconds = 0, 3
		}
		if got != want || r.TTFTP90 != seconds || err != nil {
			t.Fatalf("%d pods, p90 %v: %v; want %d", got, r.TTFTP90, err, want)
		}
		for pods, times := range tried {
			if times > 1 || pods < 1 || pods > most {
				t.Fatalf("%d pods were played %d times", pods, times)
			}
		}
	})
}

func TestAFleetThatRefusesDoesNotReachTheGoal(t *testing.T) {
	n, _, _ := Smallest(Goal{TTFTP90: 2, MaxPods: 4}, func(int) (sim.Result, error) { return sim.Result{TTFTP90: 1, Rejects: 1}, nil })
	if n != 0 {
		t.Errorf("%d pods", n)
	}
	broken := errors.New("broken")
	if _, _, err := Smallest(Goal{MaxPods: 4}, func(int) (sim.Result, error) { return sim.Result{}, broken }); !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
}

func TestTableAndPlotNameTheCheapest(t *testing.T) {
	p := Price{Pod: 6, HostGB: .005}
	fleets := []Fleet{
		{Policy: "least-tokens", Pods: 9, Cost: p.Of(9, 0)},
		{Policy: "least-tokens", HostGB: 400, Pods: 8, Cost: p.Of(8, 400)},
		{Policy: "default", HostGB: 400, Pods: 6, Cost: p.Of(6, 400)},
		{Policy: "random", HostGB: 400},
	}
	if fleets[2].Cost != 48 {
		t.Errorf("6 pods of 6 and 400 GB at 0.005 cost %v", fleets[2].Cost)
	}
	var table, plot strings.Builder
	g := Goal{TTFTP90: 2, MaxPods: 64}
	if err := errors.Join(Table(&table, g, fleets), Plot(&plot, "x", fleets)); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(table.String(), "\n")
	if !strings.Contains(lines[3], "cheapest") || !strings.Contains(lines[4], "> 64") || !strings.Contains(lines[5], "6 pods with 400 GB of host memory each under default: 48.00 an hour.") {
		t.Error(table.String())
	}
	if !strings.Contains(plot.String(), "least tokens") || strings.Contains(plot.String(), "random") {
		t.Error("the plot lacks a policy or has one that failed")
	}
	table.Reset()
	if err := Table(&table, g, fleets[3:]); err != nil || !strings.Contains(table.String(), "No fleet of up to 64 pods") {
		t.Error(err, table.String())
	}
	if err := Plot(&plot, "x", fleets[3:]); err == nil {
		t.Error("a plot of nothing")
	}
}
