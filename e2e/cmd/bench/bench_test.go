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
	o := options{span: 200 * time.Millisecond, runs: 1}
	for _, into := range []string{"agent", "scheduler"} {
		for _, s := range throughputShapes {
			t.Run(into+", "+s.name, func(t *testing.T) {
				one, err := measureThroughput(t.Context(), o, s, into)
				if err != nil {
					t.Fatal(err)
				}
				if one.Blocks < poolBlocks {
					t.Errorf("%d blocks do not fill the pool", one.Blocks)
				}
				t.Log(one)
			})
		}
	}
}

func TestEveryEventBecomesVisible(t *testing.T) {
	o := options{span: 200 * time.Millisecond, runs: 1}
	for _, c := range latencyCases {
		t.Run(c.name, func(t *testing.T) {
			one, err := measureLatency(t.Context(), o, c)
			if err != nil {
				t.Fatal(err)
			}
			t.Log(one)
		})
	}
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
