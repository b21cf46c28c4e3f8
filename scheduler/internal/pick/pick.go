// Package pick makes a decision of a request. The order of the steps is in try,
// and what they find out in a draft; each is in the file of what it finds out:
//
//	eligible   who may serve the request
//	keys       the prompt as blocks of the sizes and roots that they have
//	cached     how much of it each has, or was just sent; credit: what that counts
//	gather     what policies see of each besides load; slo: whether it is in time
//	affinity   where the request belongs; history: what was sent there lately
//	rank       load, predicted time, score, ties; while the fleet is locked
//	remember   what later decisions go by, here and at other schedulers
//	account    where each token of the prompt is, for the books
//	receipt    the answer and why; shadow: what another policy would do
//
// split comes before them where members have roles, report after them.
//
// The package is pure: now is passed in, and only differences to other times
// that were passed in count, but for the priority that is given to engines: that
// is wall time, which schedulers have in common. Nothing here runs by itself.
// Tick takes what has to happen from time to time.
//
// Only a mistake of the caller is an error, or that nobody is left who could
// serve the request. What is missing otherwise (tokens, a cache state, load, a
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

	"github.com/kvscout/kvscout/scheduler/internal/approx"
	"github.com/kvscout/kvscout/scheduler/internal/books"
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
	// Books of what became of prompt tokens; nil: nobody keeps any.
	Books *books.Books
	Policies
	// Seed of the random numbers that break ties and feed the random policy.
	Seed uint64
	// Know, if set, puts right what is believed of a candidate, by what only a
	// simulation can know; nil in a scheduler.
	Know func(*Request, fleet.ID, *policy.Candidate)
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
	recent    recentPrompts
	// How they are made.
	usual    atomic.Pointer[Policies]
	policies policies
	seed     uint64
	know     func(*Request, fleet.ID, *policy.Candidate)
	turn     atomic.Uint64
	scratch  sync.Pool // of *draft
	// Who hears of them, and counts; see Stats.
	outbox     *outbox.Outbox
	books      *books.Books
	left       [policy.LeftReasons]atomic.Uint64
	hits       hitTokens
	unmeasured atomic.Uint64
}

// New returns a Picker, or an error if there is no such policy.
func New(cfg Config) (*Picker, error) {
	p := &Picker{estimates: estimate.New(), fleet: cfg.Fleet, index: cfg.Index, predicted: cfg.Predicted, outbox: cfg.Outbox, books: cfg.Books, seed: cfg.Seed, know: cfg.Know}
	if err := p.Use(cfg.Policies); err != nil {
		return nil, err
	}
	if p.predicted == nil {
		p.predicted = predict.New(cfg.Index)
	}
	p.sent = approx.New(approx.Config{Index: cfg.Index})
	p.scratch.New = func() any { return new(draft) }
	return p, nil
}

// Pick ranks the candidates of a request. With r.Reserve it reserves on the first
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
	m := p.scratch.Get().(*draft)
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
	p.measureSLOs(&m.ranking, m.eligible.list, r, needs)
	p.belong(m, r, pol.Needs, now)
	// The best by load as of now, and its reservation.
	id, choice, ok, noRoom := p.reserve(m, r, pol, now)
	switch {
	case noRoom != nil:
		m.among(r)
		return nil, nil, noRoom
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

// draft is a decision in the making: what the steps find out, in their order.
// It is used again.
type draft struct {
	eligible eligible
	keys     keys
	cached   cached
	belongs  belonging
	ranking
}

func (m *draft) release() {
	m.eligible.release()
	m.keys.release()
	m.cached.release()
	m.belongs.texts = m.belongs.texts[:0]
	m.ranking.release()
}

// reserve ranks the candidates while the fleet is locked, so that nothing is
// reserved between, and reserves on the first if the request says so. noRoom:
// the request should wait. Not ok: the first left, or is left out by now.
func (p *Picker) reserve(m *draft, r *Request, pol policy.Policy, now time.Time) (id fleet.Decision, choice fleet.Choice, ok bool, noRoom *NoRoom) {
	rank := func(last fleet.ID, known bool, reserved []fleet.Reserved) (fleet.Choice, bool) {
		m.last, m.known = last, known
		m.rank(r, pol, reserved, p.know, now)
		noRoom, choice = m.noRoom(&pol), m.choice(r)
		return choice, noRoom == nil
	}
	if !r.Reserve {
		p.fleet.Peek(r.Session, rank)
		return 0, choice, true, noRoom
	}
	id, ok = p.fleet.Decide(r.Session, now, rank)
	return id, choice, ok, noRoom
}

// belong finds out where a request belongs, as far as a policy asks for that.
func (p *Picker) belong(m *draft, r *Request, needs policy.Needs, now time.Time) {
	if r.Reserve {
		p.sent.Wanted.Note(needs&policy.NeedsSent != 0, needs&policy.NeedsHistory != 0, now)
	}
	p.affinity(m, r, needs, now)
	if needs&policy.NeedsHistory != 0 {
		p.history(m, r)
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
