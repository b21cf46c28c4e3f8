package main

import (
	"fmt"
	"os"
	"testing"
	"time"
)

// TestMain lets the test's own program play the parts.
func TestMain(m *testing.M) {
	if name := os.Getenv(partVariable); name != "" {
		if err := runPart(name); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func TestNothingIsLostAtFullSpeed(t *testing.T) {
	o := options{span: 100 * time.Millisecond, runs: 1}
	for i, into := range []string{"scheduler", "agent"} {
		t.Run(into, func(t *testing.T) {
			one, err := measureThroughput(t.Context(), o, throughputShapes[i], into)
			if err != nil {
				t.Fatal(err)
			}
			t.Log(one)
		})
	}
}

func TestEveryEventBecomesVisible(t *testing.T) {
	one, err := measureLatency(t.Context(), options{span: 100 * time.Millisecond, runs: 1}, latencyCases[1])
	if err != nil {
		t.Fatal(err)
	}
	t.Log(one)
}

func TestEveryPickIsAnswered(t *testing.T) {
	c := pickCases[1]
	c.rate = 200
	one, err := measurePicks(t.Context(), options{span: 100 * time.Millisecond, runs: 1}, c)
	if err != nil {
		t.Fatal(err)
	}
	if one.Picks != 20 || one.Due.Max < one.Sent.P50 || one.Sent.P50 <= 0 {
		t.Errorf("%+v", one)
	}
	t.Log(one)
}

func TestStreamKeepsThePoolFull(t *testing.T) {
	for _, s := range append([]shape{latencyShape}, throughputShapes...) {
		t.Run(s.name, func(t *testing.T) {
			stream := newStream(s)
			for stream.blocks < 2*cycle*poolBlocks {
				_, keys := stream.next()
				if len(keys) == 0 || stream.held > poolBlocks {
					t.Fatalf("%d keys, %d blocks held", len(keys), stream.held)
				}
			}
			if stream.held != poolBlocks {
				t.Errorf("%d blocks held in the end", stream.held)
			}
		})
	}
}
