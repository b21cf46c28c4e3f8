// Package sim plays a fleet on a virtual clock: the real picker, fleet and
// index in front of engines that work in steps as vLLM does, fed by the
// requests of package arrival. It is how constants are chosen, how a fleet is
// sized before it is bought, and how policies are compared; docs/SIMULATOR.md
// has the rules and what they were checked against.
//
// No rule of the scheduler is written a second time here. What is here are
// engines, the wires between them and the scheduler, and bounds that know more
// than any scheduler. The package is pure: no clock, no I/O, no randomness but from the
// seed. The same Config gives the same Result.
package sim

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/admission"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/profile"
	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// Config of a run.
type Config struct {
	// Arrivals plays the workload from its beginning; the same seed gives the
	// same requests.
	Arrivals func(seed uint64) arrival.Source
	Seed     uint64
	// Stages of the arrivals, where they have some: the result says what
	// became of each.
	Stages []arrival.Stage
	// Policy of the scheduler, or one of the bounds; policy.Default when empty.
	Policy string
	// Pods in the fleet, 1 to 4,096.
	Pods int
	// Engines of the pods, in turn.
	Engines []Profile
	// Capacity multiplies the engines' KV cache; 0: 1.
	Capacity float64
	// HostTokens that every pod keeps in host memory; 0: it has none.
	HostTokens int
	// Hybrid: engines accept hits only where an earlier prompt ended, or parted
	// from one before it, as models with state-space layers do. FullDepth: the
	// scheduler goes by all blocks that they hold of a prompt all the same.
	Hybrid, FullDepth bool
	// Admission of the engines; VLLM when empty.
	Admission Admission
	// EnginePriority lets engines serve the waiting requests by the priority
	// of the scheduler's answer.
	EnginePriority bool
	// EventLag is the time from an engine's event to the scheduler,
	// SampleAge the same for its load; DecisionLag the time from the
	// scheduler's answer to the engine.
	EventLag, SampleAge, DecisionLag time.Duration
	// SampleInterval is the time between two load samples; 0: 1 s.
	SampleInterval time.Duration
	// Lose is the share of event batches that are lost, Resync the time in
	// which a snapshot comes then; 0: 100 ms.
	Lose   float64
	Resync time.Duration
	// NoReports: the scheduler is not told of first tokens and ends.
	// ReportOutputs: of ends it is told how many tokens came out, and learns
	// from that how long outputs are.
	NoReports, ReportOutputs bool
	// Queue lets requests wait for room; by its zero value none does.
	Queue admission.Rules
	// Targets of all requests.
	Targets policy.Targets
	// Measured of the engines beforehand: the model is Model, and an engine's
	// name stands for the GPU; nil: nothing was.
	Measured *profile.Set
	// Restarts of engines, which come back empty; what they served is sent
	// again. Adds are the times at which an empty pod joins.
	Restarts []Restart
	Adds     []time.Duration
	// Each, if set, is called with every request that was served to its end.
	Each func(Served)
	// Progress, if set, is called as requests end.
	Progress func(done, total int)

	blockSize int
}

// Restart of one engine.
type Restart struct {
	Pod int
	At  time.Duration
}

func (c Config) withDefaults() Config {
	c.Policy = cmp.Or(c.Policy, policy.Default)
	c.Capacity = cmp.Or(c.Capacity, 1)
	c.Admission = cmp.Or(c.Admission, VLLM)
	c.SampleInterval = cmp.Or(c.SampleInterval, time.Second)
	c.Resync = cmp.Or(c.Resync, 100*time.Millisecond)
	c.Queue.Wait = cmp.Or(c.Queue.Wait, time.Minute)
	c.Queue.BudgetMS = cmp.Or(c.Queue.BudgetMS, 1000)
	c.Engines = slices.Clone(c.Engines)
	for i := range c.Engines {
		c.Engines[i] = c.Engines[i].withDefaults()
	}
	if c.Each == nil {
		c.Each = func(Served) {}
	}
	if c.Progress == nil {
		c.Progress = func(int, int) {}
	}
	return c
}

// maxPods bounds a fleet, maxWaiting its queue, as the scheduler does.
const (
	maxPods    = 4096
	maxWaiting = 16384
)

// Validate joins all that is wrong with a Config.
func (c Config) Validate() error {
	var errs []error
	bad := func(wrong bool, format string, args ...any) {
		if wrong {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	c = c.withDefaults()
	bad(c.Arrivals == nil, "no arrivals")
	bad(c.Pods < 1 || c.Pods+len(c.Adds) > maxPods, "%d pods and %d added: want 1 to %d in all", c.Pods, len(c.Adds), maxPods)
	bad(!(c.Capacity > 0 && c.Capacity <= 1e4), "capacity %v: want a multiple of the engine's KV cache, above 0 and at most 10,000", c.Capacity)
	bad(c.Admission != VLLM && c.Admission != Reserve, "admission %q: want %s or %s", c.Admission, VLLM, Reserve)
	bad(c.Hybrid && (c.HostTokens > 0 || c.Admission == Reserve), "hybrid engines with host memory or admission %s: want neither", Reserve)
	bad(c.FullDepth && !c.Hybrid, "full depth of engines that are not hybrid")
	bad(c.HostTokens < 0 || c.HostTokens > 1e12, "host memory of %d tokens: want 0 or more", c.HostTokens)
	bad(!(c.Lose >= 0 && c.Lose < 1), "lose %v: want a share from 0 to less than 1", c.Lose)
	for name, d := range map[string]time.Duration{
		"event lag": c.EventLag, "sample age": c.SampleAge, "decision lag": c.DecisionLag, "resync": c.Resync,
		"longest wait": c.Queue.Wait, "age in the queue": c.Queue.Age,
	} {
		bad(d < 0, "%s %v: want no less than 0", name, d)
	}
	bad(c.Queue.Length < 0 || c.Queue.Length > maxWaiting, "queue of %d: want 0 to %d requests", c.Queue.Length, maxWaiting)
	bad(!(c.Queue.BudgetMS > 0), "queue budget of %v ms: want more than 0", c.Queue.BudgetMS)
	for name, ms := range map[string]float64{"first token": c.Targets.TTFT, "a token": c.Targets.TPOT, "a token of prompt or output": c.Targets.TPAT, "the end": c.Targets.E2E} {
		bad(!(ms >= 0 && ms <= 1e9), "target of %v ms for %s: want 0 to 1e9", ms, name)
	}
	bad(c.SampleInterval < time.Millisecond, "sample interval %v: want at least 1ms", c.SampleInterval)
	for _, r := range c.Restarts {
		bad(r.Pod < 0 || r.Pod >= c.Pods || r.At < 0, "restart of pod %d at %v: want a pod from 0 to %d and a time from 0", r.Pod, r.At, c.Pods-1)
	}
	for _, at := range c.Adds {
		bad(at < 0, "pod added at %v: want a time from 0", at)
	}
	errs = append(errs, c.checkKnown())
	if name, _ := cutKnown(c.Policy); !Bound(name) {
		if _, err := policy.Named(name); err != nil {
			errs = append(errs, fmt.Errorf("%w; beside the scheduler's there are %s, %s and %s", err, PooledLRU, CapacityOracle, Oracle))
		}
	}
	bad(len(c.Engines) == 0, "no engine")
	for _, e := range c.Engines {
		errs = append(errs, e.Validate())
	}
	return errors.Join(errs...)
}

// pod is one engine of the fleet.
type pod struct {
	*engine
	name string
	wire *wire
}

// run is one run under way.
type run struct {
	cfg      Config
	calendar calendar
	random   *rand.Rand
	source   arrival.Source
	placer   placer
	pods     []*pod
	open     int           // requests that came and have not ended
	moved    time.Duration // when one last came or ended
	broken   error         // why the run cannot go on
	log      log
}

// Run plays the workload to its end.
func Run(cfg Config) (Result, error) {
	if err := cfg.Validate(); err != nil {
		return Result{}, err
	}
	r := &run{cfg: cfg.withDefaults()}
	if err := r.start(); err != nil {
		return Result{}, err
	}
	if err := r.play(); err != nil {
		return Result{}, err
	}
	return r.result(), nil
}

// start sets up the fleet.
func (r *run) start() error {
	r.random = rand.New(rand.NewPCG(r.cfg.Seed, 0x73696d))
	r.source = r.cfg.Arrivals(r.cfg.Seed)
	r.log.stages = newStageLogs(r.cfg.Stages)
	r.cfg.blockSize = r.source.BlockSize()
	for _, e := range r.cfg.Engines {
		if r.blocks(e) < 1 {
			return fmt.Errorf("engine %s: a KV cache of %d tokens times %v has no block of %d", e.Name, e.KVTokens, r.cfg.Capacity, r.cfg.blockSize)
		}
	}
	var err error
	if r.placer, err = newPlacer(r); err != nil {
		return err
	}
	for range r.cfg.Pods {
		r.add()
	}
	for _, s := range r.cfg.Restarts {
		r.calendar.at(s.At, func() { r.restart(r.pods[s.Pod]) })
	}
	for _, at := range r.cfg.Adds {
		r.calendar.at(at, r.add)
	}
	return nil
}

// blocks of one engine.
func (r *run) blocks(e Profile) int {
	return int(min(float64(e.KVTokens)*r.cfg.Capacity/float64(r.cfg.blockSize), boundless-1))
}

// engine of the pod with that number.
func (r *run) engine(pod int) Profile { return r.cfg.Engines[pod%len(r.cfg.Engines)] }

// memory is the number of blocks that all pods together hold at the start.
func (r *run) memory() int {
	sum := 0
	for i := range r.cfg.Pods {
		sum += r.blocks(r.engine(i))
	}
	return sum
}

// newPlacer returns the arm that the policy names.
func newPlacer(r *run) (placer, error) {
	memory := r.memory() + r.cfg.Pods*r.cfg.HostTokens/r.cfg.blockSize
	switch r.cfg.Policy {
	case Oracle:
		return newOracle(), nil
	case PooledLRU:
		return newPooledLRU(memory), nil
	case CapacityOracle:
		hits, err := bestHits(r.cfg.Arrivals(r.cfg.Seed), memory)
		return newCapacityOracle(hits), err
	}
	return newScout(r)
}

// add lets an empty pod join.
func (r *run) add() {
	p := &pod{name: fmt.Sprintf("pod-%04d", len(r.pods))}
	kind := r.engine(len(r.pods))
	p.engine = newEngine(kind, r.cfg.blockSize, r.blocks(kind), &r.calendar, reporter{r, p})
	p.admission, p.ranked, p.hybrid = r.cfg.Admission, r.cfg.EnginePriority, r.cfg.Hybrid
	if n := r.cfg.HostTokens / r.cfg.blockSize; n > 0 {
		p.host = newCache(n)
	}
	r.pods = append(r.pods, p)
	r.placer.join(p)
}

// stall is longer than any step of an engine, restart or wait of a client.
const stall = 24 * time.Hour

// play lets one thing happen after the other until every request has ended.
func (r *run) play() error {
	for {
		arrives, more := r.source.Peek()
		if r.open == 0 && !more {
			return nil
		}
		next, ok := r.calendar.next()
		if more && (!ok || arrives <= next) {
			q, _ := r.source.Next()
			r.calendar.now = max(r.calendar.now, q.At)
			r.open++
			r.moved = r.calendar.now
			r.log.came(&q, r.cfg.blockSize)
			if err := r.send(&request{Request: q}); err != nil {
				return err
			}
			continue
		}
		r.calendar.step()
		switch {
		case r.broken != nil:
			return r.broken
		case r.calendar.now > r.moved+stall:
			return fmt.Errorf("%d requests have not moved since %v: the engine model is wrong", r.open, r.moved)
		}
	}
}

// send places a request, or lets it wait for a place.
func (r *run) send(q *request) error {
	p, err := r.placer.place(q)
	if err != nil {
		return fmt.Errorf("request %d: %w", q.ID, err)
	}
	if p != nil {
		r.deliver(q, p)
	}
	return nil
}

// deliver brings a request to the engine that was chosen.
func (r *run) deliver(q *request, p *pod) {
	if !p.fits(q) {
		r.placer.end(q, fleet.Failed)
		r.refuse(q)
		return
	}
	r.log.placed(q, p)
	if r.cfg.DecisionLag == 0 {
		p.serve(q)
		return
	}
	r.calendar.at(r.calendar.now+r.cfg.DecisionLag, func() { p.serve(q) })
}

// refuse ends a request that is too large for the engine that it came to, or
// found no place in the queue or in time.
func (r *run) refuse(q *request) {
	r.log.rejects++
	r.over(q)
}

func (r *run) over(q *request) {
	r.moved = r.calendar.now
	r.open--
	r.source.Done(q.ID, r.calendar.now)
	r.cfg.Progress(r.log.ended(), r.source.Len())
}

// restart ends the life of an engine and begins another. Its requests are sent
// again from the beginning, as callers do.
func (r *run) restart(p *pod) {
	broken := p.reset()
	r.placer.restart(p)
	for _, q := range broken {
		r.placer.end(q, fleet.Failed)
		again := &request{Request: q.Request, resent: q.resent + 1}
		if err := r.send(again); err != nil {
			panic(fmt.Sprintf("sim: %v", err)) // the fleet has not changed
		}
	}
}

// teller hears what comes out of the engine of a pod.
type reporter struct {
	run *run
	pod *pod
}

func (t reporter) firstToken(q *request) { t.run.placer.firstToken(q) }

func (t reporter) end(q *request) {
	t.run.placer.end(q, fleet.Finished)
	t.run.log.finished(q, t.run.calendar.now)
	t.run.cfg.Each(Served{
		At: q.At.Seconds(), Prompt: q.Length, Cached: q.cached, Output: q.Output,
		TTFT: (q.first - q.At).Seconds(), E2E: (t.run.calendar.now - q.At).Seconds(), Pod: t.pod.name,
	})
	t.run.over(q)
}

func (t reporter) step() { t.run.placer.step(t.pod) }
