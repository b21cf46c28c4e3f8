package arrival

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Generators lists the names that Generate knows, with what each stands for.
func Generators() []string {
	var list []string
	for _, p := range presets {
		list = append(list, p.name+": "+p.about+"\n    "+p.spec)
	}
	return list
}

// presets are complete specs in the words that callers use to change them.
var presets = []struct{ name, about, spec string }{
	{"r1", "llm-d's load stages on 8 pods of Qwen3-32B", "groups=150,prompts=5,head=6000,input=1200,output=500,gap=150," +
		"stages=15x50+3x20+10x20+15x20+20x38+22x34+25x30+30x25+35x21+40x38+43x36+46x33+49x30+52x29+55x27+57x26+60x25"},
	{"r2", "llm-d's load stages on 4 pods of Llama-70B", "groups=83,prompts=3,head=8000,input=1000,output=1000,gap=150,times=constant," +
		"stages=9x30+3x210+4x180+5x120+6x120+8x90+10x70+12x60+15x50+20x50"},
	{"shared", "groups of prompts with one head each", "groups=150,prompts=5,head=6000,input=1200,output=250,qps=20,seconds=60"},
	{"unshared", "prompts that share nothing, at rising speed", "groups=1,prompts=0,head=0,input=6000~6000:100-60000,output=300~200:10-1000," +
		"gap=60,stages=4x60+8x60+12x60+16x60+20x60"},
	{"hot", "one hot prefix in all traffic", "groups=1,prompts=0,head=2548,input=7252,output=250,qps=3,seconds=300"},
	{"code", "closed loop: code generation, a long head a session", "sessions=400,concurrency=50,ramp=30,apps=1,shared=0," +
		"head=55000~30000:3000-100000,turns=6~3:2-20,input=1500~1200:100-10000,output=800~600:50-4000,pause=0"},
	{"agent", "closed loop: agents that wait for their tools", "sessions=400,concurrency=50,ramp=30,apps=4,shared=8000," +
		"head=2000~1500:200-10000,turns=20~10:3-60,input=800~1000:50-8000,output=150~120:20-1000,pause=3~5:0.2-60"},
	{"chat", "closed loop: chat with pauses to read and type", "sessions=2000,concurrency=300,ramp=45,apps=1,shared=1000," +
		"head=4000~2500:500-15000,turns=4~2.5:1-15,input=50~40:10-1000,output=n300~150:10-1000,pause=45"},
}

// Generate makes a workload of a spec: a generator's name, and after a colon
// what differs from its defaults, as
//
//	shared:groups=150,prompts=5,head=6000,input=1200,output=250,qps=20,seconds=60
//
// Rates are qps and seconds, or stages=15x50+3x20 (QPS x seconds) with gap
// seconds of silence between; times=poisson or constant. Lengths and pauses
// are numbers, mean~sd:min-max (lognormal) or nmean~sd:min-max (normal).
func Generate(spec string, o Options) (Workload, error) {
	if err := o.check(); err != nil {
		return Workload{}, err
	}
	if o.Speed != 0 && o.Speed != 1 {
		return Workload{}, fmt.Errorf("arrivals %s: a generator states its own rates, so speed %v has no meaning", spec, o.Speed)
	}
	name, changes, _ := strings.Cut(spec, ":")
	for _, p := range presets {
		if p.name != name {
			continue
		}
		g := newGenerator(strings.Contains(p.spec, "sessions="))
		err := g.set(p.spec)
		if err == nil && changes != "" {
			g.rates = 0
			err = g.set(changes)
		}
		if err == nil {
			err = g.check()
		}
		if err != nil {
			return Workload{}, fmt.Errorf("arrivals %s: %w", spec, err)
		}
		return g.workload(spec, o.BlockSize), nil
	}
	var known []string
	for _, p := range presets {
		known = append(known, p.name)
	}
	return Workload{}, fmt.Errorf("arrivals %s: no generator %q: want one of %s", spec, name, strings.Join(known, ", "))
}

// generator is what a spec's words change.
type generator struct {
	open         staged
	loop         loops
	words        map[string]func(string) error
	qps, seconds float64
	rates        int // 1: by qps and seconds; 2: by stages; 3: both
	closed       bool
}

func newGenerator(closed bool) *generator {
	g := &generator{closed: closed}
	if closed {
		g.words = map[string]func(string) error{
			"sessions": count(&g.loop.sessions), "concurrency": count(&g.loop.concurrency), "apps": count(&g.loop.apps), "ramp": duration(&g.loop.ramp),
			"shared": drawn(&g.loop.shared), "head": drawn(&g.loop.head), "turns": drawn(&g.loop.turns), "input": drawn(&g.loop.input),
			"output": drawn(&g.loop.output), "pause": drawn(&g.loop.pause),
		}
		return g
	}
	g.words = map[string]func(string) error{
		"groups": count(&g.open.groups), "prompts": count(&g.open.prompts), "gap": duration(&g.open.gap),
		"head": drawn(&g.open.head), "input": drawn(&g.open.input), "output": drawn(&g.open.output),
		"qps":     func(text string) error { g.rates |= 1; return number(&g.qps)(text) },
		"seconds": func(text string) error { g.rates |= 1; return number(&g.seconds)(text) },
		"stages": func(text string) (err error) {
			g.rates |= 2
			g.open.stages, err = parseStages(text)
			return err
		},
		"times": func(text string) error {
			if text != "poisson" && text != "constant" {
				return errors.New("want poisson or constant")
			}
			g.open.constant = text == "constant"
			return nil
		},
	}
	return g
}

func (g *generator) set(spec string) error {
	for word := range strings.SplitSeq(spec, ",") {
		key, value, _ := strings.Cut(word, "=")
		set, ok := g.words[key]
		if !ok {
			return fmt.Errorf("no setting %q: want %s", key, strings.Join(slices.Sorted(maps.Keys(g.words)), ", "))
		}
		if err := set(value); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	switch g.rates {
	case 3:
		return errors.New("both stages and qps with seconds: want one of them")
	case 1:
		stage, err := newStage(g.qps, g.seconds)
		if err != nil {
			return err
		}
		g.open.stages = []Stage{stage}
	}
	return nil
}

func (g *generator) check() error {
	if g.closed {
		return g.loop.check()
	}
	return g.open.check()
}

func (g *generator) workload(name string, size int) Workload {
	if g.closed {
		return g.loop.workload(name, size)
	}
	return g.open.workload(name, size)
}

func count(to *int) func(string) error {
	return func(text string) error {
		v, err := strconv.Atoi(text)
		if err != nil || v < 0 || v > maxRequests {
			return fmt.Errorf("%q: want a number of 0 to %d", text, maxRequests)
		}
		*to = v
		return nil
	}
}

func number(to *float64) func(string) error {
	return func(text string) error {
		v, err := strconv.ParseFloat(text, 64)
		if err != nil || !(v >= 0 && v <= maxRequests) {
			return fmt.Errorf("%q: want a number of 0 to %d", text, maxRequests)
		}
		*to = v
		return nil
	}
}

func duration(to *time.Duration) func(string) error {
	return func(text string) error {
		var seconds float64
		err := number(&seconds)(text)
		*to = time.Duration(seconds * float64(time.Second))
		return err
	}
}

func drawn(to *draw) func(string) error {
	return func(text string) (err error) {
		*to, err = parseDraw(text)
		return err
	}
}
