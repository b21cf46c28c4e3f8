package fit

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// simulate writes the log of a simulated engine.
func simulate(t *testing.T, name, spec string, pods int) []byte {
	t.Helper()
	e, err := sim.Engine(name)
	if err != nil {
		t.Fatal(err)
	}
	return simulateEngine(t, e, spec, pods)
}

func simulateEngine(t *testing.T, e sim.Profile, spec string, pods int) []byte {
	t.Helper()
	w, err := arrival.Generate(spec, arrival.Options{BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	encoder := json.NewEncoder(&log)
	_, err = sim.Run(sim.Config{Arrivals: w.Play, Seed: 1, Policy: sim.LeastTokens, Pods: pods, Engines: []sim.Profile{e}, Each: func(s sim.Served) {
		if err := encoder.Encode(s); err != nil {
			t.Error(err)
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	return log.Bytes()
}

func near(got, want, share float64) bool { return math.Abs(got-want) <= share*want }

// The constants that the simulator played with come out of its log, whatever
// engine the fit began with.
func TestKnownConstantsAreRecovered(t *testing.T) {
	for _, name := range []string{"qwen3-32b-h100-tp2", "llama-3.1-8b-l40s", "llama-3.1-70b-h100-tp4"} {
		// Long prompts in quiet, and many short ones at a time: without both the
		// constants cannot be told apart.
		log := simulate(t, name, "shared:groups=3,prompts=0,head=2048,input=6000~8000:200-60000,output=400~300:8-1500,stages=.15x1500+.4x200,gap=60", 2)
		log = append(log, bytes.ReplaceAll(simulate(t, name, "unshared:input=150~100:32-300,output=400~300:8-1500,stages=2x60+8x60+16x60", 2), []byte("pod-"), []byte("other-"))...)
		list, timed, err := ReadLog(bytes.NewReader(log))
		if err != nil || !timed {
			t.Fatal(err, timed)
		}
		for _, from := range []string{"qwen3-32b-h100-tp2", "qwen3-32b-a100-tp2"} {
			want, _ := sim.Engine(name)
			base, _ := sim.Engine(from)
			f, err := FromLog(list, timed, base)
			if err != nil {
				t.Fatalf("%s from %s: %v", name, from, err)
			}
			e := f.Engine
			if !near(e.TokenMS, want.TokenMS, .05) || !near(e.PairMS, want.PairMS, .05) || !near(e.StepMS, want.StepMS, .05) ||
				!near(e.SequenceMS, want.SequenceMS, .05) || !near(e.ContextMS, want.ContextMS, .05) {
				t.Errorf("%s from %s:\n%+v\nwant\n%+v\n%+v", name, from, e, want, f)
			}
		}
	}
}

func TestALogWithoutTimesIsOfRequestsAlone(t *testing.T) {
	want, _ := sim.Engine("llama-3.1-8b-h100")
	base, _ := sim.Engine("")
	var log strings.Builder
	for i := range 200 {
		prompt, cached, output := 2000+313*i%40000, (i%5)*400, 20+i%300
		q := &observed{Served: sim.Served{Prompt: prompt, Cached: cached}}
		ttft := 3 + q.computing(want) // 3 ms beside the engine
		context := float64(prompt) + float64(output)/2
		e2e := ttft + float64(output-1)*(want.StepMS+base.SequenceMS+want.ContextMS*context)
		json.NewEncoder(&log).Encode(map[string]any{"prompt": prompt, "cached": cached, "output": output, "ttft": ttft / 1000, "e2e": e2e / 1000})
	}
	list, timed, err := ReadLog(strings.NewReader(log.String()))
	if err != nil || timed {
		t.Fatal(err, timed)
	}
	f, err := FromLog(list, timed, base)
	if err != nil {
		t.Fatal(err)
	}
	if e := f.Engine; !near(f.OverheadMS, 3, .05) || !near(e.TokenMS, want.TokenMS, .01) || !near(e.PairMS, want.PairMS, .01) || !near(e.StepMS, want.StepMS, .01) || !near(e.ContextMS, want.ContextMS, .01) || len(f.Notes) == 0 {
		t.Errorf("%+v", f)
	}
}

func TestBadLogsAreNamed(t *testing.T) {
	base, _ := sim.Engine("")
	good := `{"prompt":100,"cached":0,"output":10,"ttft":0.1,"e2e":0.3}` + "\n"
	for want, text := range map[string]string{
		"line 2: invalid":      good + "x",
		"line 1: prompt 0":     `{}`,
		"cached < prompt":      strings.Replace(good, `"cached":0`, `"cached":100`, 1),
		"on some lines only":   good + strings.Replace(good, "{", `{"at":1,`, 1),
		"longer than":          strings.Repeat("x", maxLine+1),
		"at least 20":          good,
		"only 0 requests":      strings.Repeat(good, 30),
		"of different lengths": strings.Repeat(strings.Replace(good, "100", "5000", 1), 30),
	} {
		list, timed, err := ReadLog(strings.NewReader(text))
		if err == nil {
			_, err = FromLog(list, timed, base)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
}
