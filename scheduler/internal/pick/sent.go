package pick

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/approx"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// wantedFor is how long what was sent is noted for a policy after a request
// that named it.
const wantedFor = 10 * time.Minute

// wanted remembers which policies need what was sent. Members without an exact
// picture need it always.
type wanted struct{ sent, history atomic.Int64 } // Unix nanoseconds until when

func (o *wanted) note(needs policy.Needs, now time.Time) {
	until := now.Add(wantedFor).UnixNano()
	if needs&policy.NeedsSent != 0 {
		o.sent.Store(until)
	}
	if needs&policy.NeedsHistory != 0 {
		o.history.Store(until)
	}
}

func (o *wanted) now(at time.Time) (sent, history bool) {
	return o.sent.Load() > at.UnixNano(), o.history.Load() > at.UnixNano()
}

// send notes where the prompt went, if anyone may want to know that.
func (p *Picker) send(w *work, r *Request, now time.Time) {
	c := &w.candidates[w.best]
	if c.scope < 0 {
		return
	}
	sent, history := p.wanted.now(now)
	exact := w.exact(c, now)
	if exact && !sent && !history {
		return
	}
	s := &w.scopes[c.scope]
	s.hash(r, s.blocks)
	p.mirror.Add(approx.Prompt{
		Member:       index.Member(c.member.ID),
		Epoch:        c.member.Picture.Epoch,
		Blocks:       int(min(c.member.Info.Blocks, 1<<31)),
		Lane:         !exact || sent,
		Keys:         s.keys,
		BlockSize:    s.BlockSize,
		Cached:       (c.cached() + c.has().predicted) / s.BlockSize,
		FirstTokenMS: w.round.Costs[w.best].FirstToken(),
	}, now)
}

// history tells the policy what the candidates were sent lately, what the
// request would push out, and whom its prefix was moved or copied to.
func (p *Picker) history(w *work, r *Request) {
	n := len(w.candidates)
	w.histories = slices.Grow(w.histories[:0], n)[:n]
	clear(w.histories)
	for i := range w.histories {
		w.round.Candidates[i].History = &w.histories[i]
	}
	for i := range w.scopes {
		s := &w.scopes[i]
		s.hash(r, s.blocks)
		var moved bool
		w.owners, moved = p.mirror.Owners(s.keys, w.owners[:0])
		for _, id := range w.owners {
			if c := w.candidate(fleet.ID(id)); c != nil && int(c.scope) == i {
				w.round.Candidates[w.at[id]-1].History.Placed = true
				w.round.Moved = w.round.Moved || moved
			}
		}
	}
	at := func(id index.Member) *policy.Candidate {
		if w.candidate(fleet.ID(id)) == nil {
			return nil
		}
		return &w.round.Candidates[w.at[id]-1]
	}
	p.mirror.Histories(func(id index.Member) int {
		if c := at(id); c != nil && c.BlockSize > 0 {
			return max(c.Uncached, 0) / c.BlockSize
		}
		return 0
	}, func(id index.Member, h approx.History) {
		if c := at(id); c != nil {
			c.History.Lately, c.History.Victims = h.Lately, h.Victims
		}
	})
}

// follow keeps what is noted in step with the fleet: members that left or began
// a new epoch are forgotten, and those that have an exact picture, unless a
// policy asks.
func (p *Picker) follow(view *fleet.View, now time.Time) {
	if !p.mirror.Tracks() {
		return
	}
	p.mirror.Expire(now)
	sent, history := p.wanted.now(now)
	for _, id := range p.mirror.Members() {
		m := view.Member(fleet.ID(id))
		if m == nil || !p.mirror.Follows(id, m.Picture.Epoch) {
			p.mirror.Forget(id)
			continue
		}
		trust := view.Believe(m, now).Trust
		if trust == fleet.Exact && !sent && !history {
			p.mirror.Forget(id)
		} else {
			p.mirror.Lane(id, sent || trust != fleet.Exact)
		}
	}
	if history {
		p.balance(view, now)
	}
}

// balance evens out the members of each model.
func (p *Picker) balance(view *fleet.View, now time.Time) {
	byModel := make(map[string][]index.Member)
	for _, m := range view.Members {
		if m.Load.Sleeping || view.Silent(m, now) {
			continue
		}
		byModel[m.Info.Model()] = append(byModel[m.Info.Model()], index.Member(m.ID))
	}
	var curves []learn.Curve
	for _, list := range byModel {
		curves = curves[:0]
		for _, id := range list {
			curves = append(curves, p.speeds.of(view.Member(fleet.ID(id))).Curve)
		}
		p.mirror.Balance(list, curves, now)
	}
}
