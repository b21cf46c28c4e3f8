package main

import (
	"strings"
	"testing"
	"time"
)

func samplePicture(members int) picture {
	p := picture{title: "two fleets", at: 15 * time.Second, of: 60 * time.Second, note: "a note"}
	for _, name := range []string{"round-robin", "kvscout"} {
		f := fleetPicture{name: name, sum: sum{sent: 1200, done: 1100, open: 100, prompt: 1000, cached: 250, error: 3},
			ttft: quantiles{400 * time.Millisecond, 300 * time.Millisecond, 12 * time.Second, 120 * time.Second}}
		for range members {
			f.members = append(f.members, memberPicture{name: "7", cached: 0.55, used: 0.9, running: 12, waiting: 3, hitRate: 0.25, trust: "APPROXIMATE"})
		}
		p.fleets = append(p.fleets, f)
	}
	return p
}

func TestPictureFitsEveryWidth(t *testing.T) {
	for _, width := range []int{40, 80, 118, 119, 200} {
		lines := samplePicture(8).lines(width)
		for _, l := range lines {
			if n := visible(l); n > width {
				t.Errorf("width %d: %d columns: %q", width, n, l)
			}
		}
		beside := strings.Contains(strings.Join(lines, "\n"), "round-robin") && len(lines) == 4+3+8
		if want := width >= 2*columnWidth+3; beside != want {
			t.Errorf("width %d: beside each other %v in %d lines", width, beside, len(lines))
		}
	}
}

func TestBarIsAsWideAsAsked(t *testing.T) {
	for _, c := range []struct {
		share float64
		want  string
	}{{0, "····"}, {1, "████"}, {.5, "██··"}, {.55, "██▎·"}, {-1, "····"}, {7, "████"}} {
		if got := bar(c.share, 4); got != c.want {
			t.Errorf("bar of %v is %q, want %q", c.share, got, c.want)
		}
	}
}

func TestPlainLineNamesBothFleets(t *testing.T) {
	want := " 15 s | round-robin: 1100 done, 24 running, 6 waiting, hit rate 25.0 %, TTFT p50 300 ms p90 12.0 s, 0 of 2 exact" +
		" | kvscout: 1100 done, 24 running, 6 waiting, hit rate 25.0 %, TTFT p50 300 ms p90 12.0 s, 0 of 2 exact"
	if got := samplePicture(2).line(); got != want {
		t.Errorf("got %q", got)
	}
}
