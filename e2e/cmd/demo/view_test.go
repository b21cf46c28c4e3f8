package main

import (
	"strings"
	"testing"
	"time"
)

func samplePicture(members int) picture {
	p := picture{title: "three fleets", at: 15 * time.Second, of: 60 * time.Second, note: "a note", decision: strings.Repeat("long ", 20) + "held"}
	for _, name := range []string{"round-robin", "least-requests", "kvscout"} {
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
		if text := strings.Join(lines, "\n"); !strings.Contains(text, "round-robin") || !strings.Contains(text, "▅▅▅▅▅▅▅▅") || width == 80 && (len(lines) > 23 || !strings.Contains(text, "held")) {
			t.Errorf("width %d: %d lines\n%s", width, len(lines), text)
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

func TestPlainLinesNameAllFleets(t *testing.T) {
	p := samplePicture(2)
	p.decision = "why"
	want := ` 15 s  a note
  round-robin     1100 done, hit rate 25.0 %, TTFT mean 400 ms p99 120.0 s
  least-requests  1100 done, hit rate 25.0 %, TTFT mean 400 ms p99 120.0 s
  kvscout         1100 done, hit rate 25.0 %, TTFT mean 400 ms p99 120.0 s
  why`
	if got := p.line(); got != want {
		t.Errorf("got %q", got)
	}
}
