package sim

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// Knowledge that no scheduler has, for one that is to be told: what each is worth
// is what the estimate in its place costs. A policy's name with some of them behind
// it, as in default+curves+backlog, is an arm of a run.
const (
	// KnowCurves: how long this prompt takes on each engine, beside what that
	// decodes now.
	KnowCurves = "curves"
	// KnowBacklog: requests, memory in use, and how long an engine takes until
	// all that was sent there is computed.
	KnowBacklog = "backlog"
	// KnowCache: what an engine holds at this moment, or will have computed for
	// those before.
	KnowCache = "cache"
	// KnowOutput: how long the output will be.
	KnowOutput = "output"
)

// knowledge lists all there is, in the order of their names in an arm.
var knowledge = []string{KnowCurves, KnowBacklog, KnowCache, KnowOutput}

// Knowing names the arm of a policy that is told so much.
func Knowing(name string, known ...string) string {
	return strings.Join(append([]string{name}, known...), "+")
}

// Ablation are the arms of a policy that say what it does not know: one kind of
// knowledge at a time, then all.
func Ablation(name string) []string {
	var arms []string
	for _, k := range knowledge {
		arms = append(arms, Knowing(name, k))
	}
	return append(arms, Knowing(name, knowledge...))
}

// cutKnown splits the name of an arm into the policy and what it is told.
func cutKnown(arm string) (name string, known []string) {
	for {
		at := strings.LastIndex(arm, "+")
		if at < 0 || !slices.Contains(knowledge, arm[at+1:]) {
			return arm, known
		}
		arm, known = arm[:at], append(known, arm[at+1:])
	}
}

// Told tells whether an arm is one that is told something.
func Told(arm string) bool {
	_, known := cutKnown(arm)
	return len(known) > 0
}

// truth tells the picker what the arm knows.
type truth struct {
	*scout
	curves, backlog, cache bool
	speeds                 []learn.Speed // of the candidates, by pod
}

// newTruth is nil where there is nothing to tell.
func newTruth(s *scout, known []string) *truth {
	t := &truth{scout: s, curves: slices.Contains(known, KnowCurves), backlog: slices.Contains(known, KnowBacklog), cache: slices.Contains(known, KnowCache)}
	if !t.curves && !t.backlog && !t.cache {
		return nil
	}
	t.speeds = make([]learn.Speed, maxPods)
	return t
}

// tell corrects what is believed of a candidate.
func (t *truth) tell(r *pick.Request, id fleet.ID, c *policy.Candidate) {
	p := t.byID[id]
	if t.cache {
		gpu, host, coming := p.finds(r.Prompt.Keys, r.Prompt.Length, math.MaxUint64)
		c.GPU, c.Host, c.Disk, c.Predicted = gpu*p.blockSize, host*p.blockSize, 0, coming*p.blockSize
		c.Uncached = r.Prompt.Length - (gpu+host+coming)*p.blockSize
		c.Spare = (p.cache.limit - len(p.cache.byKey)) * p.blockSize
	}
	if t.backlog {
		ms, tokens := p.backlog()
		c.Load.WaitMS, c.Load.Tokens = ms, float64(tokens)
		c.Load.Requests, c.Load.Waiting = float64(len(p.running)+len(p.waiting)), float64(len(p.waiting))
		c.Load.KVUsage = float64(p.cache.used()) / float64(p.cache.limit)
	}
	if t.curves {
		c.Speed = p.speed(&t.speeds[id], c.Speed, c.Uncached, r.Prompt.Length-c.Uncached)
	}
}

// decoding is the batch that decodes, and its tokens.
func (e *engine) decoding() (batch, context int) {
	for _, r := range e.running {
		if r.decoding() {
			batch++
			context += r.goal
		}
	}
	return batch, context
}

// speed is what the engine takes for a prompt beside what it decodes now; what is
// no property of the engine stays as it is believed.
func (e *engine) speed(s *learn.Speed, believed *learn.Speed, missing, cached int) *learn.Speed {
	*s = *believed
	p := &e.profile
	batch, context := e.decoding()
	var w prefill
	w.add(max(missing, 1), cached)
	step := p.ms(prefill{}, batch, context, 1)
	// The fixed part is what this prompt takes beyond its tokens and pairs.
	s.B, s.C = p.TokenMS, p.PairMS
	s.A = p.work(w, batch, context) - s.B*w.tokens - s.C*w.pairs
	s.StepMS = step
	s.StepRequestMS = p.SequenceMS + p.ContextMS*float64(context)/float64(max(batch, 1))
	s.StepBaseMS = p.StepMS
	return s
}

// work is the time in ms of so much prefill in whole steps, beside a batch.
func (p *Profile) work(w prefill, batch, context int) float64 {
	steps := ceil(int(w.tokens), p.StepTokens)
	if steps == 0 {
		return 0
	}
	return p.ms(w, batch, context, 1) + float64(steps-1)*p.ms(prefill{}, batch, context, 1) - float64(steps-1)*p.StepMS
}

// backlog is how long the engine takes, in ms from now on, until all prompts that
// it has are computed, and their tokens.
func (e *engine) backlog() (ms float64, tokens int) {
	now, underway := e.calendar.now, map[*request]int{}
	if s := &e.stretch; e.busy {
		ends := s.start + s.time(&e.profile, s.reached(&e.profile, now))
		ms = float64(ends-now) / float64(time.Millisecond)
		for _, c := range s.prefills {
			underway[c.r] = c.tokens
			tokens += c.tokens
		}
	}
	var left prefill
	for _, r := range e.running {
		if !r.decoding() {
			done := underway[r]
			left.add(r.goal-r.computed-done, r.computed+done)
		}
	}
	for _, r := range e.waiting {
		gpu, host, coming := e.finds(r.Keys, r.goal, r.turn)
		cached := (gpu + host + coming) * e.blockSize
		left.add(r.goal-cached, cached)
	}
	tokens += int(left.tokens)
	batch, context := e.decoding()
	return ms + e.profile.work(left, batch, context), tokens
}

// finds is what a prompt will find at the engine, in blocks: in the GPU's memory,
// in the host's, and computed by then for those that came before its turn.
func (e *engine) finds(keys []blockkey.Key, length int, turn uint64) (gpu, host, coming int) {
	most := (length - 1) / e.blockSize
	keys = keys[:min(len(keys), most)]
	gpu = e.cache.match(keys, most)
	if e.hybrid {
		gpu = e.cache.lastEnd(keys[:gpu])
	}
	if e.host != nil {
		host = e.host.match(keys[gpu:], most)
	}
	if e.hybrid {
		return gpu, host, 0
	}
	for _, list := range [][]*request{e.running, e.waiting} {
		for _, o := range list {
			if o.turn >= turn {
				continue
			}
			coming = max(coming, common(o.Keys[:min(len(o.Keys), o.Length/e.blockSize)], keys)-gpu-host)
		}
	}
	return gpu, host, coming
}

// common is how many leading keys are the same. Equal keys mean equal ones before
// them.
func common(a, b []blockkey.Key) int {
	low, high := 0, min(len(a), len(b))
	for low < high {
		if middle := (low + high + 1) / 2; a[middle-1] == b[middle-1] {
			low = middle
		} else {
			high = middle - 1
		}
	}
	return low
}

// checkKnown says what is wrong with an arm that is told something.
func (c Config) checkKnown() error {
	name, known := cutKnown(c.Policy)
	switch {
	case len(known) == 0:
		return nil
	case Bound(name):
		return fmt.Errorf("policy %s: %s knows all that there is to know", c.Policy, name)
	case c.DecisionLag > 0 && slices.Contains(known, KnowBacklog):
		return fmt.Errorf("policy %s with a decision lag: what is on its way to an engine is not in its backlog", c.Policy)
	}
	return nil
}
