// Package pick makes a decision of a request. The order of the steps is here, in
// try; each is in the file of what it finds out:
//
//	eligible   who may serve the request
//	keys       the prompt as blocks of the sizes and roots that they have
//	cached     how much of it each has, or was just sent
//	gather     what policies see of each besides load, and how it fits
//	affinity   where the request belongs, history what was sent there lately
//	rank       load, predicted time, score, ties; while the fleet is locked
//	receipt    the answer and why; shadow: what another policy would do
//
// split comes before them where members have roles.
//
// The package is pure: now is passed in, and only differences to other times
// that were passed in count, but for the priority that is given to engines: that
// is wall time, which schedulers have in common. Nothing here runs by itself.
// Tick takes what has to happen from time to time.
//
// Only a mistake of the caller is an error, or that nobody is left who could
// serve the request. What is missing otherwise (tokens, a picture, load, a
// speed) makes the answer poorer, and Decision.Fallbacks say so.
package pick

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/approx"
	"github.com/kvscout/kvscout/scheduler/internal/estimate"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
	"github.com/kvscout/kvscout/scheduler/internal/outbox"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/predict"
	"github.com/kvscout/kvscout/scheduler/internal/profile"
)

// Config of a Picker.
type Config struct {
	Fleet *fleet.Fleet
	Index *index.Index
	// Predicted blocks, if others predict some, too; nil: the picker's own.
	Predicted *predict.Blocks
	// Outbox of what other schedulers have to know; nil: there are none.
	Outbox *outbox.Outbox
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
	// What decisions go by.
	fleet     *fleet.Fleet
	index     *index.Index
	predicted *predict.Blocks
	sent      *approx.Mirror
	estimates *estimate.Estimates
	profiles  atomic.Pointer[profile.Set]
	seen      seen
	// How they are made.
	usual    atomic.Pointer[Policies]
	policies policies
	seed     uint64
	turn     atomic.Uint64
	scratch  sync.Pool // of *making
	// Who hears of them, and counts; see Stats.
	outbox     *outbox.Outbox
	left       [policy.LeftReasons]atomic.Uint64
	ladder     ladder
	unmeasured atomic.Uint64
}

// New returns a Picker, or an error if there is no such policy.
func New(cfg Config) (*Picker, error) {
	p := &Picker{estimates: estimate.New(), fleet: cfg.Fleet, index: cfg.Index, predicted: cfg.Predicted, outbox: cfg.Outbox, seed: cfg.Seed}
	if err := p.Use(cfg.Policies); err != nil {
		return nil, err
	}
	if p.predicted == nil {
		p.predicted = predict.New(cfg.Index)
	}
	p.sent = approx.New(approx.Config{Index: cfg.Index})
	p.scratch.New = func() any { return new(making) }
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
	m := p.scratch.Get().(*making)
	defer func() {
		m.release()
		p.scratch.Put(m)
	}()
	// Who may serve the request, what of its prompt they can have cached, and
	// what they have.
	if err := m.eligible.filter(r, p.fleet.View(), now); err != nil {
		if errors.Is(err, ErrModel) && p.fleet.Departed(r.Model, now) {
			err = fmt.Errorf("model %q: %w", r.Model, ErrGone)
		}
		return nil, nil, err
	}
	if err := m.keys.cut(r, m.eligible.list); err != nil {
		return nil, nil, err
	}
	p.match(&m.cached, &m.eligible, &m.keys, r, now)
	random := p.random(r)
	m.keys.breakTies(r, random)
	p.expect(r, random)
	// What policies see of them besides load.
	pol = m.keys.substitute(pol, r)
	needs := pol.Needs
	if shadow != nil {
		*shadow = m.keys.substitute(*shadow, r)
		needs |= shadow.Needs
	}
	p.gather(&m.ranking, &m.eligible, r, random, now)
	p.fit(&m.ranking, m.eligible.list, r, needs)
	p.belong(m, r, pol.Needs, now)
	// The choice, by load as of now, and its reservation.
	id, choice, ok, full := p.choose(m, r, pol, now)
	switch {
	case full != nil:
		m.among(r)
		return nil, nil, full
	case !ok:
		return nil, nil, nil
	case r.Reserve:
		p.remember(m, r, pol, id, &choice, now)
	}
	// What is said of it.
	d = m.receipt(r, pol, now)
	m.pulls(d, p.usual.Load().PullMS)
	if r.Reserve {
		d.ID = strconv.FormatUint(uint64(id), 16)
	}
	if shadow != nil {
		p.belong(m, r, shadow.Needs, now)
		d.Shadow = m.shade(*shadow)
		if explain {
			other = m.receipt(r, *shadow, now)
		}
	}
	return d, other, nil
}

// making is a decision in the making: what the steps find out, in their order.
// It is used again.
type making struct {
	eligible eligible
	keys     keys
	cached   cached
	belongs  belonging
	ranking  ranking
}

func (m *making) release() {
	m.eligible.release()
	m.keys.release()
	m.cached.release()
	m.belongs.texts = m.belongs.texts[:0]
	m.ranking.release()
}

// choose ranks the candidates while the fleet is locked, so that nobody is
// charged between, and charges the first if the request reserves. full: the
// request should wait. Not ok: the first left, or is left out by now.
func (p *Picker) choose(m *making, r *Request, pol policy.Policy, now time.Time) (id fleet.Decision, choice fleet.Choice, ok bool, full *Full) {
	rank := func(last fleet.ID, known bool, reserved []fleet.Reserved) (fleet.Choice, bool) {
		m.ranking.last, m.ranking.known = last, known
		m.rank(pol, reserved, now)
		full, choice = m.full(&pol), m.choice(r)
		return choice, full == nil
	}
	if !r.Reserve {
		p.fleet.Look(r.Session, rank)
		return 0, choice, true, full
	}
	id, ok = p.fleet.Decide(r.Session, now, rank)
	return id, choice, ok, full
}

// belong finds out where a request belongs, as far as a policy asks for that.
func (p *Picker) belong(m *making, r *Request, needs policy.Needs, now time.Time) {
	if r.Reserve {
		p.sent.Wanted.Note(needs&policy.NeedsSent != 0, needs&policy.NeedsHistory != 0, now)
	}
	p.affinity(m, r, needs, now)
	if needs&policy.NeedsHistory != 0 {
		p.history(m, r)
	}
}

// remember keeps what later decisions, here and at other schedulers, go by.
func (p *Picker) remember(m *making, r *Request, pol policy.Policy, id fleet.Decision, choice *fleet.Choice, now time.Time) {
	keys, life := p.predict(m, r, now)
	if p.outbox != nil {
		p.outbox.Reserve(id, choice, keys, life, now)
	}
	p.send(m, r, now)
	p.estimates.Caches.Decided(int(choice.Cached), int(choice.Uncached))
	p.predicted.Confirm(now)
	if len(m.belongs.texts) > 0 {
		p.seen.add(m.belongs.texts, now)
	}
	p.left[m.left(pol)].Add(1)
	p.ladder.prompt.Add(uint64(r.Prompt.length()))
	feasible, routed := m.cached.feasible, m.eligible.list[m.ranking.best].cached()
	ideal := max(m.cached.ideal, feasible)
	p.ladder.ideal.Add(uint64(ideal))
	p.ladder.feasible.Add(uint64(feasible))
	p.ladder.routed.Add(uint64(routed))
	p.ladder.unavailable.Add(uint64(ideal - feasible))
	p.ladder.diverted.Add(uint64(max(feasible-routed, 0)))
}

// predict notes the blocks of the prompt as predicted where it went, unless all
// of them are there already. It returns their keys, and for how long.
func (p *Picker) predict(m *making, r *Request, now time.Time) ([]blockkey.Key, time.Duration) {
	c := &m.eligible.list[m.ranking.best]
	if c.scope < 0 {
		return nil, 0
	}
	s := &m.keys.scopes[c.scope]
	if c.cached() >= (s.blocks-1)*s.BlockSize {
		return nil, 0
	}
	s.hash(r, predict.MaxBlocks)
	ms := m.ranking.round.Costs[m.ranking.best].FirstToken()
	return s.keys, p.predicted.Add(predict.Sent{
		Member: index.Member(c.member.ID),
		Epoch:  c.member.Picture.Epoch,
		Keys:   s.keys,
		First:  time.Duration(min(ms, 1e6) * float64(time.Millisecond)),
		Exact:  c.exact(m.eligible.view, now),
	}, now)
}

// Ladder is how much of prompts was found cached, in tokens.
type Ladder struct {
	// Prompt tokens; Ideal, the longest prefixes that any member had; Feasible,
	// the longest that a candidate had; Routed, those of the members chosen.
	Prompt, Ideal, Feasible, Routed uint64
	// Unavailable tokens are lost from Ideal to Feasible, Diverted ones from there
	// to Routed. They are counted, as a difference of counters may fall.
	Unavailable, Diverted uint64
}

// ladder is a Ladder in the making.
type ladder struct{ prompt, ideal, feasible, routed, unavailable, diverted atomic.Uint64 }

// left says why the session's last member was left, as the policy says, or for
// those that go by time.
func (m *making) left(pol policy.Policy) policy.Left {
	if m.ranking.round.Left != policy.Stayed || !pol.Times || !m.ranking.known || m.eligible.list[m.ranking.best].member.ID == m.ranking.last {
		return m.ranking.round.Left
	}
	if m.eligible.of(m.ranking.last) == nil {
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
	s := Stats{Unmeasured: p.unmeasured.Load(), Confirm: p.predicted.Stats().Confirm, Sent: p.sent.Stats()}
	for i := range p.left {
		s.Left[i] = p.left[i].Load()
	}
	s.Ladder = Ladder{
		Prompt: p.ladder.prompt.Load(), Ideal: p.ladder.ideal.Load(),
		Feasible: p.ladder.feasible.Load(), Routed: p.ladder.routed.Load(),
		Unavailable: p.ladder.unavailable.Load(), Diverted: p.ladder.diverted.Load(),
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
		if p.outbox != nil {
			p.outbox.End(&report)
		}
		p.learn(&r, &asked, now)
	}
	return known
}

// learn takes the time to the first token that a caller saw, if the member that
// was picked served the request to its end, or to that token, and the length of
// the output.
func (p *Picker) learn(r *Report, asked *fleet.Asked, now time.Time) {
	f := &asked.Forecast
	if r.TTFTMS != 0 && f.Name != "" && (r.Member == "" || r.Member == f.Name) &&
		(r.Outcome == fleet.FirstToken || r.Outcome == fleet.Finished) {
		p.estimates.Speeds.Served(f, r.TTFTMS)
	}
	if r.OutputTokens > 0 && r.Outcome == fleet.Finished {
		p.estimates.Outputs.Observe(asked, r.OutputTokens, now)
	}
}

// Tick learns from the load samples that have come, and drops what ran out.
// Call it about every half second.
func (p *Picker) Tick(now time.Time) {
	view := p.fleet.View()
	p.estimates.Tick(view, p.index, now, func(id fleet.ID, by float64) { p.fleet.Reprice(id, by, now) })
	p.predicted.Tick(now)
	p.sent.Tick(view, func(m *fleet.Member) learn.Curve { return p.estimates.Speeds.Of(m).Curve }, now)
}

// Speed is what decisions reckon with for a member.
func (p *Picker) Speed(m *fleet.Member) learn.Speed { return *p.estimates.Speeds.Of(m) }
