package arrival

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// staged is open-loop traffic at stated rates. A prompt is its group's head
// and an input of its own.
type staged struct {
	// groups with a head each. With prompts, every group has that many fixed
	// prompts, and all are shuffled once and cycled; at zero, each request
	// asks a random group something that nobody asks again.
	groups, prompts     int
	head, input, output draw
	stages              []Stage // QPS and, as End, how long
	gap                 time.Duration
	constant            bool // evenly spaced, else Poisson
}

func (l staged) check() error {
	requests := 0.0
	for _, s := range l.stages {
		requests += s.QPS * s.End.Seconds()
	}
	switch {
	case len(l.stages) == 0:
		return fmt.Errorf("no rate: give qps and seconds, or stages")
	case l.groups < 1 || l.prompts < 0 || l.groups*max(1, l.prompts) > maxRequests:
		return fmt.Errorf("%d groups of %d prompts: want at least 1 of 0 or more, %d in all", l.groups, l.prompts, maxRequests)
	case requests > maxRequests:
		return fmt.Errorf("%.0f requests: want at most %d", requests, maxRequests)
	case l.head.min+l.input.min < 1:
		return fmt.Errorf("prompts may be empty: head and input are 0")
	}
	return nil
}

// maxRequests bounds what a generator makes.
const maxRequests = 10_000_000

func (l staged) workload(name string, size int) Workload {
	w := Workload{Name: name, Stages: make([]Stage, len(l.stages))}
	at := time.Duration(0)
	for i, s := range l.stages {
		w.Stages[i] = Stage{QPS: s.QPS, Start: at, End: at + s.End}
		at += s.End + l.gap
	}
	w.play = func(seed uint64) Source {
		return newSchedule(size, l.plan(w.Stages, rand.New(rand.NewPCG(seed, 0x6c616464))))
	}
	return w
}

// prompt is a head and an input.
type prompt struct{ head, input span }

func (p prompt) append(dst []span) []span { return append(dst, p.head, p.input) }

func (l staged) plan(stages []Stage, rng *rand.Rand) []planned {
	heads := make([]span, l.groups)
	for g := range heads {
		heads[g] = span{id: uint64(g), tokens: l.head.tokens(rng)}
	}
	var cycle []prompt
	for g := range heads {
		for range l.prompts {
			cycle = append(cycle, prompt{heads[g], span{id: private(len(cycle)), tokens: l.input.tokens(rng)}})
		}
	}
	rng.Shuffle(len(cycle), func(i, j int) { cycle[i], cycle[j] = cycle[j], cycle[i] })
	var plan []planned
	for _, s := range stages {
		for _, at := range l.times(s, rng) {
			var p prompt
			if l.prompts > 0 {
				p = cycle[len(plan)%len(cycle)]
			} else {
				p = prompt{heads[rng.IntN(l.groups)], span{id: private(len(plan)), tokens: l.input.tokens(rng)}}
			}
			plan = append(plan, planned{at: at, length: max(1, p.head.tokens+p.input.tokens), output: max(1, l.output.tokens(rng)), spans: p.append})
		}
	}
	return plan
}

// times are the arrivals of one stage.
func (l staged) times(s Stage, rng *rand.Rand) []time.Duration {
	var list []time.Duration
	if l.constant {
		for i := range int((s.End - s.Start).Seconds() * s.QPS) {
			list = append(list, s.Start+time.Duration(float64(i)/s.QPS*float64(time.Second)))
		}
		return list
	}
	for at := s.Start; ; {
		at += time.Duration(rng.ExpFloat64() / s.QPS * float64(time.Second))
		if at >= s.End {
			return list
		}
		list = append(list, at)
	}
}

// parseStages reads QPSxSECONDS+QPSxSECONDS and so on.
func parseStages(text string) ([]Stage, error) {
	var list []Stage
	for piece := range strings.SplitSeq(text, "+") {
		qps, seconds, ok := strings.Cut(piece, "x")
		q, err1 := strconv.ParseFloat(qps, 64)
		s, err2 := strconv.ParseFloat(seconds, 64)
		if !ok || err1 != nil || err2 != nil {
			return nil, fmt.Errorf("%q: want QPSxSECONDS, as 15x50, joined by +", piece)
		}
		stage, err := newStage(q, s)
		if err != nil {
			return nil, err
		}
		list = append(list, stage)
	}
	return list, nil
}

func newStage(qps, seconds float64) (Stage, error) {
	if !(qps >= 1e-3 && qps <= 1e5) || !(seconds > 0 && seconds <= 1e6) {
		return Stage{}, fmt.Errorf("%v requests a second for %v s: want 0.001 to 100000 for up to 1000000", qps, seconds)
	}
	return Stage{QPS: qps, End: time.Duration(seconds * float64(time.Second))}, nil
}
