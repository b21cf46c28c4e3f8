package main

import (
	"encoding/json"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/scheduler/internal/sim/sizing"
)

// The fleet that is found reaches the goal when it is played alone, and with a
// pod less it does not.
func TestSizeFindsTheEdge(t *testing.T) {
	const spec = "shared:groups=4,prompts=0,head=1024,input=8000,output=100,qps=8,seconds=60"
	plot := filepath.Join(t.TempDir(), "out.svg")
	out, errs, code := play(t, "size", "-arrivals", spec, "-block-size", "512", "-ttft-p90", "1s", "-host-gb", "0,100", "-json", "-plot", plot)
	if code != 0 {
		t.Fatal(errs)
	}
	var fleets []sizing.Fleet
	for line := range strings.Lines(out) {
		var f sizing.Fleet
		if err := json.Unmarshal([]byte(line), &f); err != nil {
			t.Fatal(err)
		}
		fleets = append(fleets, f)
	}
	if len(fleets) != 4 || fleets[1].HostGB != 100 || fleets[1].Result.Settings.HostTokens != 381_469 {
		t.Fatalf("%+v", fleets)
	}
	f := fleets[0]
	if f.Pods < 2 || f.Pods > 16 || f.Result.TTFTP90 > 1 || f.Cost != 6*float64(f.Pods) {
		t.Errorf("%+v", f)
	}
	for pods, reached := range map[int]bool{f.Pods: true, f.Pods - 1: false} {
		out, errs, code := play(t, "size", "-arrivals", spec, "-block-size", "512", "-ttft-p90", "1s", "-host-gb", "0", "-policies", f.Policy, "-max-pods", strconv.Itoa(pods))
		if code != 0 || strings.Contains(out, "No fleet") == reached {
			t.Errorf("with up to %d pods: exit %d: %s%s", pods, code, out, errs)
		}
	}
	if svg := read(t, plot); !strings.Contains(svg, "cost an hour") {
		t.Errorf("%.200s", svg)
	}
}

func TestSizeRefusesWhatItCannotUse(t *testing.T) {
	for want, args := range map[string][]string{
		"no workload": {},
		"-ttft-p90":   {"-arrivals", "hot", "-ttft-p90", "0s"},
		"-host-gb":    {"-arrivals", "hot", "-host-gb", "much"},
		"-pod-price":  {"-arrivals", "hot", "-pod-price", "NaN"},
	} {
		if _, errs, code := play(t, append([]string{"size"}, args...)...); code != 2 || !strings.Contains(errs, want) {
			t.Errorf("%q: exit %d: %s", args, code, errs)
		}
	}
}
