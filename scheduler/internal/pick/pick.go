// Package pick makes a decision of a request. The order of the steps is here,
// each in its file: filter (who may serve it), match (how much of the prompt
// each has cached, and what was just sent there), rank (predicted time, ties)
// and the receipt that explains the choice. Choosing and charging the chosen
// are one step under the fleet's lock.
//
// The package is pure: now is passed in, nothing here runs by itself. Tick
// takes what has to happen from time to time.
//
// Only a mistake of the caller is an error, or that nobody is left who could
// serve the request. What is missing otherwise (tokens, a picture, load, a
// speed) makes the answer poorer, and Decision.Fallback says so.
package pick

import (
	"cmp"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/approx"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/profile"
)

// Config of a Picker.
type Config struct {
	Fleet *fleet.Fleet
	Index *index.Index
	Policies
	// Seed of the random numbers that break ties and feed the random policy.
	Seed uint64
}

// Policies that a picker uses. They can be changed while it runs.
type Policies struct {
	// Policy for requests that name none; policy.Default when empty.
	Policy string
	// Allowed names what requests may name besides Policy and Shadow, without
	// parameters, which they may choose; empty: every policy.
	Allowed []string
	// Shadow is asked about the same requests and does not decide; empty: none.
	Shadow string
	// Targets of requests that have none and whose profile has none.
	Targets policy.Targets
	// Disaggregate from so many tokens on that the member that is to decode
	// would have to compute; 0: never.
	Disaggregate int
	// PullMS is the time in ms that a token takes from one member to another;
	// 0: members do not pull.
	PullMS float64
}

// Check says whether there are such policies.
func (p Policies) Check() error {
	if _, err := policy.Named(p.Policy); err != nil {
		return err
	}
	if _, err := policy.Named(p.Shadow); err != nil {
		return fmt.Errorf("shadow: %w", err)
	}
	for _, name := range p.Allowed {
		pol, err := policy.Named(name)
		if err == nil && pol.Name != name {
			err = fmt.Errorf("%.80q: want the name of a policy without parameters", name)
		}
		if err != nil {
			return fmt.Errorf("allowed: %w", err)
		}
	}
	return nil
}

// Picker is safe for concurrent use.
type Picker struct {
	fleet    *fleet.Fleet
	index    *index.Index
	usual    atomic.Pointer[Policies]
	seed     uint64
	turn     atomic.Uint64
	scratch  sync.Pool // of *work
	policies policies
	forecast forecast
	seen     seen
	delay    delay
	mirror   *approx.Mirror
	wanted   wanted
	speeds   speeds
	stock    stock
	outbox   outbox
	left     [policy.LeftReasons]atomic.Uint64
	ladder   ladder
	outputs  outputs
	profiles atomic.Pointer[profile.Set]

	unmeasured atomic.Uint64 // see Stats
}

// New returns a Picker, or an error if there is no such policy.
func New(cfg Config) (*Picker, error) {
	p := &Picker{fleet: cfg.Fleet, index: cfg.Index, seed: cfg.Seed}
	if err := p.Use(cfg.Policies); err != nil {
		return nil, err
	}
	p.mirror = approx.New(approx.Config{Index: cfg.Index})
	p.speeds.prior = learn.Prior()
	p.outbox.wake = make(chan struct{}, 1)
	p.scratch.New = func() any { return new(work) }
	return p, nil
}

// Use changes the policies for requests that come from now on.
func (p *Picker) Use(policies Policies) error {
	if err := policies.Check(); err != nil {
		return err
	}
	p.usual.Store(&policies)
	return nil
}

// Pick ranks the candidates of a request. With r.Reserve it charges the first
// of them and names the decision; without, it changes nothing at all, and says
// what the next Pick would be. It keeps nothing of r.
func (p *Picker) Pick(r *Request, now time.Time) (*Decision, error) {
	d, _, err := p.decide(r, p.usual.Load().Shadow, false, now)
	return d, err
}

// decide makes a decision; with explain also that of the shadow.
func (p *Picker) decide(r *Request, shadow string, explain bool, now time.Time) (d, other *Decision, err error) {
	usual := p.usual.Load()
	if err := usual.allows(r.Policy); err != nil {
		return nil, nil, err
	}
	pol, err := p.policies.named(cmp.Or(r.Policy, usual.Policy), r.Reserve)
	if err != nil {
		return nil, nil, err
	}
	var second *policy.Policy
	if shadow != "" {
		found, err := p.policies.named(shadow, r.Reserve)
		if err != nil {
			return nil, nil, fmt.Errorf("shadow: %w", err)
		}
		second = &found
	}
	if err := r.check(); err != nil {
		return nil, nil, err
	}
	attempt := func(r *Request) (d, other *Decision, err error) {
		for {
			d, other, err := p.try(r, pol, second, explain, now)
			if d != nil || err != nil {
				return d, other, err
			}
		}
	}
	if p.fleet.View().Roles() {
		return p.split(r, attempt)
	}
	return attempt(r)
}

// try makes one attempt. It returns neither decision nor error if the chosen
// member left meanwhile, or is left out: the next view is without it.
func (p *Picker) try(r *Request, pol policy.Policy, shadow *policy.Policy, explain bool, now time.Time) (d, other *Decision, err error) {
	view := p.fleet.View()
	w := p.scratch.Get().(*work)
	defer func() {
		w.release()
		p.scratch.Put(w)
	}()
	if err := w.filter(r, view, now); err != nil {
		return nil, nil, err
	}
	if err := p.match(w, r, now); err != nil {
		return nil, nil, err
	}
	pol = w.substitute(pol, r)
	if shadow != nil {
		*shadow = w.substitute(*shadow, r)
	}
	p.expect(r, w.round.Random)
	p.prepare(w, r, view, now)
	needs := pol.Needs
	if shadow != nil {
		needs |= shadow.Needs
	}
	p.fit(w, r, needs)
	p.facts(w, r, pol.Needs, now)
	var full *Full
	var choice fleet.Choice
	var id fleet.Decision
	choose := func(last fleet.ID, known bool, reserved []fleet.Reserved) (fleet.Choice, bool) {
		w.last, w.known = last, known
		w.rank(pol, reserved, now)
		full, choice = w.full(&pol), w.choice(r)
		return choice, full == nil
	}
	if r.Reserve {
		var ok bool
		id, ok = p.fleet.Decide(r.Session, now, choose)
		if full == nil && !ok {
			return nil, nil, nil
		}
	} else {
		p.fleet.Look(r.Session, choose)
	}
	if full != nil {
		w.among(r)
		return nil, nil, full
	}
	if r.Reserve {
		keys, life := p.predict(w, r, now)
		p.outbox.charge(id, &choice, keys, life, now)
		p.send(w, r, now)
		p.stock.decided(int(choice.Cached), int(choice.Uncached))
		p.delay.look(p.index, 1, now)
	}
	d = w.receipt(r, pol, view, now)
	w.pulls(d, p.usual.Load().PullMS)
	if r.Reserve {
		p.keep(w, r, pol, now)
		d.ID = strconv.FormatUint(uint64(id), 16)
	}
	if shadow != nil {
		p.facts(w, r, shadow.Needs, now)
		d.Shadow = w.shade(*shadow)
		if explain {
			other = w.receipt(r, *shadow, view, now)
		}
	}
	return d, other, nil
}

// facts finds out what a policy asks for beyond load and cached tokens.
func (p *Picker) facts(w *work, r *Request, needs policy.Needs, now time.Time) {
	if r.Reserve {
		p.wanted.note(needs, now)
	}
	p.affinity(w, r, needs, now)
	if needs&policy.NeedsHistory != 0 {
		p.history(w, r)
	}
}

// Ladder is how much of prompts was found cached, in tokens.
type Ladder struct {
	// Prompt tokens; Ideal, the longest prefixes that any member had; Feasible,
	// the longest that a candidate had; Routed, those of the members chosen.
	Prompt, Ideal, Feasible, Routed uint64
}

// ladder is a Ladder in the making.
type ladder struct{ prompt, ideal, feasible, routed atomic.Uint64 }

// keep remembers what later decisions go by, and counts.
func (p *Picker) keep(w *work, r *Request, pol policy.Policy, now time.Time) {
	if len(w.texts) > 0 {
		p.seen.add(w.texts, now)
	}
	p.left[w.left(pol)].Add(1)
	p.ladder.prompt.Add(uint64(r.Prompt.length()))
	p.ladder.ideal.Add(uint64(max(w.ideal, w.feasible)))
	p.ladder.feasible.Add(uint64(w.feasible))
	p.ladder.routed.Add(uint64(w.candidates[w.best].cached()))
}

// left says why the session's last member was left, as the policy says, or for
// those that go by time.
func (w *work) left(pol policy.Policy) policy.Left {
	if w.round.Left != policy.Stayed || !pol.Times || !w.known || w.candidates[w.best].member.ID == w.last {
		return w.round.Left
	}
	if w.candidate(w.last) == nil {
		return policy.Gone
	}
	return policy.Slow
}

// Stats counts what happened since New.
type Stats struct {
	// Unmeasured counts the candidates whose profile says nothing of the
	// request's lengths.
	Unmeasured uint64
	// Left counts the decisions that left the session's last member, or what a
	// policy takes for that, by reason; at 0 all others.
	Left [policy.LeftReasons]uint64
	// Confirm is how long after its first token is due what was just sent is
	// believed without an event.
	Confirm time.Duration
	// Sent is what was noted of prompts for members without an exact picture,
	// and for policies that go by it.
	Sent approx.Stats
	// Ladder of the requests that were picked.
	Ladder Ladder
}

// Stats returns the counts.
func (p *Picker) Stats() Stats {
	s := Stats{Unmeasured: p.unmeasured.Load(), Confirm: p.delay.confirm(), Sent: p.mirror.Stats()}
	for i := range p.left {
		s.Left[i] = p.left[i].Load()
	}
	s.Ladder = Ladder{
		Prompt: p.ladder.prompt.Load(), Ideal: p.ladder.ideal.Load(),
		Feasible: p.ladder.feasible.Load(), Routed: p.ladder.routed.Load(),
	}
	return s
}

// Report tells what became of a decision. It returns false if the decision is
// not, or no longer, known.
func (p *Picker) Report(r Report, now time.Time) bool {
	id, err := strconv.ParseUint(r.Decision, 16, 64)
	if err != nil {
		return false
	}
	report := fleet.Report{
		Decision: fleet.Decision(id),
		Outcome:  r.Outcome,
		Member:   r.Member,
	}
	if r.PromptTokens != nil && r.CachedTokens != nil {
		report.Counts, report.PromptTokens, report.Cached = true, *r.PromptTokens, *r.CachedTokens
	}
	asked, known := p.fleet.Report(report, now)
	if known {
		p.outbox.end(&report)
		p.speeds.served(&r, &asked.Forecast)
	}
	if known && r.OutputTokens > 0 && r.Outcome == fleet.Finished {
		p.outputs.observe(asked, r.OutputTokens, now)
	}
	return known
}

// Tick learns from the load samples that have come, and drops predictions that
// ran out. Call it about every half second.
func (p *Picker) Tick(now time.Time) {
	view := p.fleet.View()
	p.speeds.learn(view, now)
	p.stock.count(view, p.index, now)
	p.forecast.expire(now)
	p.delay.look(p.index, probes, now)
	p.outputs.publish(now)
	p.follow(view, now)
}
