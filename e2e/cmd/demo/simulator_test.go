package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/trace"
)

// TestSimulatorAgreesWithThePrograms plays one list of requests through the
// programs with fake engines, in turn and by the scheduler's picks, and in the
// simulator. Engines, KV cache and requests are the same; so must be what is
// found cached and the mean time to first token.
//
// Which of several equal engines a prompt goes to first follows from names, and
// decides what they hold from then on. The simulator plays several such draws,
// and the programs may be 5 % beyond their range; in turn there is one draw.
//
// The way to an engine and back is what callers waited and the engine did not
// see. The simulator is told of it by -decision-lag. It says how busy the
// machine is: the times are allowed that much more, and they are not judged
// where it is over 5 % of them, since then steps and requests are late, too. Hits
// of a fleet served in turn are always judged.
func TestSimulatorAgreesWithThePrograms(t *testing.T) {
	const (
		engines   = 4
		capacity  = 0.2
		tolerance = 0.05
		draws     = 12
	)
	folder := t.TempDir()
	simulator := filepath.Join(folder, "kvscout-sim")
	if text, err := exec.Command("go", "build", "-o", simulator, "../../../scheduler/cmd/kvscout-sim").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	files := make([]string, draws)
	var span time.Duration
	for i := range files {
		files[i] = filepath.Join(folder, fmt.Sprintf("requests-%d.jsonl", i))
		span = writeRequests(t, files[i], uint32(i)*100_000)
	}
	// Four engines and twice the load are the file's own pace.
	out, err := runDemo(t, context.Background(), options{
		proxy: "gateway", trace: files[0], span: span, json: true, engines: engines, speedup: 1, load: 2, capacity: capacity, seed: 1,
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	var played struct{ Fleets []outcome }
	if err := json.Unmarshal(lines[len(lines)-1], &played); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for i, policy := range []string{"round-robin", "least-requests", "default"} {
		f, inTurn := played.Fleets[i], i == 0
		way := f.TTFTMean - f.EngineTTFTMean
		busy := way > tolerance*f.EngineTTFTMean
		if f.Failed > 0 || !busy && f.Requests != listed {
			t.Fatalf("%+v", f)
		}
		var ttft, hits []float64
		for _, file := range files {
			one := simulate(t, simulator, "-trace", file, "-block-size", "16", "-pods", fmt.Sprint(engines), "-capacity", fmt.Sprint(capacity),
				"-policies", policy, "-report-outputs", "-decision-lag", fmt.Sprint(time.Duration(way*float64(time.Millisecond))), "-json")
			ttft, hits = append(ttft, 1000*one.TTFT), append(hits, one.Hit)
		}
		hit := share(f.CachedTokens, f.PromptTokens)
		t.Logf("%s: TTFT %.1f ms, of which %.1f the way; simulated %.1f to %.1f. Hits %.4f; simulated %.4f to %.4f", policy,
			f.TTFTMean, way, slices.Min(ttft), slices.Max(ttft), hit, slices.Min(hits), slices.Max(hits))
		if busy {
			t.Logf("%s: TTFT is not judged, the machine is too busy", policy)
		} else if low, high := slices.Min(ttft)*(1-tolerance)-way, slices.Max(ttft)*(1+tolerance)+way; f.TTFTMean < low || f.TTFTMean > high {
			t.Errorf("%s: TTFT is %.1f ms, want %.1f to %.1f", policy, f.TTFTMean, low, high)
		}
		if busy && !inTurn {
			continue // late reports and events send prompts elsewhere
		}
		if low, high := slices.Min(hits)-tolerance, slices.Max(hits)+tolerance; hit < low || hit > high {
			t.Errorf("%s: hits are %.4f, want %.4f to %.4f", policy, hit, low, high)
		}
	}
}

// listed is the number of requests in the list.
const listed = 180

// writeRequests writes the list in Mooncake's form and gives its span: prompts
// that share one of sixteen beginnings of 4,096 tokens, some often and some
// seldom, and go on for 1,024 to 4,096 of their own, at random moments, so dense
// that four engines in turn are half busy. Another base gives the same requests
// other ids.
func writeRequests(t *testing.T, path string, base uint32) time.Duration {
	t.Helper()
	const (
		beginning = 8   // ids
		interval  = 80. // ms
	)
	r := rand.New(rand.NewPCG(1, 1))
	var text bytes.Buffer
	out := json.NewEncoder(&text)
	at, own := 0., base+1000
	for range listed {
		group := min(uint32(4*r.ExpFloat64()), 15)
		length := beginning*trace.IDTokens + 1024 + r.IntN(3073)
		ids := make([]uint32, (length+trace.IDTokens-1)/trace.IDTokens)
		for i := range ids {
			if own++; i < beginning {
				ids[i] = base + group*beginning + uint32(i)
			} else {
				ids[i] = own
			}
		}
		if err := out.Encode(map[string]any{"timestamp": int(at), "input_length": length, "output_length": 10 + r.IntN(51), "hash_ids": ids}); err != nil {
			t.Fatal(err)
		}
		at += interval * r.ExpFloat64()
	}
	if err := os.WriteFile(path, text.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return time.Duration(at+1) * time.Millisecond
}

// simulated is what counts of the simulator's result.
type simulated struct {
	TTFT float64 `json:"ttft_mean_s"`
	Hit  float64 `json:"token_hit"`
}

// simulate runs the simulator, which prints one object.
func simulate(t *testing.T, program string, args ...string) (got simulated) {
	t.Helper()
	text, err := exec.Command(program, args...).Output()
	if err == nil {
		err = json.Unmarshal(text, &got)
	}
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, text)
	}
	return got
}
