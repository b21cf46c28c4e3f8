package pick

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/profile"
)

// work is what one decision needs while it is made. It is used again.
type work struct {
	candidates []candidate
	shares     []share // of those that have something; candidates point to them
	scopes     []scope
	at         []int32 // by member number: its place in candidates plus one
	held       index.Answer
	sent       sighting
	round      policy.Round
	scores     []float64
	order      []int32
	marks      []uint64 // where a conversation may have ended before
	mark       uint64   // by which this one can be recognised; 0: none
	owners     []index.Member
	histories  []policy.History
	texts      []uint64 // keys of the prompt's beginnings
	groups     []*profile.Profile
	room       *Room // nil: the request may not wait
	misfits    int   // candidates with blocks of another size than the keys'
	failing    bool  // all candidates are left out for failures
	gauges     bool
	ideal      int      // longest prefix in tokens that any member has, candidate or not
	feasible   int      // longest that a candidate has
	keyless    bool     // some candidate's blocks have no keys here
	tie        uint64   // decides between equal candidates without keys; 0: all have keys
	last       fleet.ID // member of the session's last request
	known      bool     // there is one
	choosing
}

// candidate is one member in the making of a decision.
type candidate struct {
	seat     *fleet.Seat
	member   *fleet.Member // of the seat
	adapter  string
	speed    *learn.Speed
	share    *share // nil: it has nothing
	scope    int32  // in work.scopes; -1: its blocks have no keys here
	requests int32  // at the engine, as believed when scored
	doubt    doubt
}

// share is what a candidate has of the prompt.
type share struct {
	depth [index.Lanes]int // leading blocks that it holds
	// cached tokens by tier, and those beyond that are only predicted
	gpu, host, disk, predicted int
	sent                       int  // tokens that went there before, and may still be there
	assumed                    bool // predicted stands on what was sent
}

func (s *share) cached() int { return s.gpu + s.host + s.disk }

// none of the prompt; not to be changed.
var none share

// has is what the candidate has of the prompt; not to be changed.
func (c *candidate) has() *share {
	if c.share == nil {
		return &none
	}
	return c.share
}

// shareOf is the candidate's, to be changed.
func (w *work) shareOf(c *candidate) *share {
	if c.share == nil {
		w.shares = append(w.shares, share{}) // never beyond its capacity: see filter
		c.share = &w.shares[len(w.shares)-1]
	}
	return c.share
}

func (c *candidate) cached() int { return c.has().cached() }

// doubt says why a candidate should rather not be chosen.
type doubt uint8

const (
	sound   doubt = iota
	failing       // callers reported failures
	lost          // silent, or out of its agent's reach
)

func (w *work) release() {
	clear(w.at)
	clear(w.candidates) // members that left are not to be kept, and add takes zeros
	w.candidates, w.shares = w.candidates[:0], w.shares[:0]
	for i := range w.scopes {
		w.scopes[i].release()
	}
	w.scopes = w.scopes[:0]
	w.texts = w.texts[:0]
	w.misfits, w.failing, w.keyless, w.ideal, w.feasible = 0, false, false, 0, 0
	w.room = nil
	clear(w.groups) // profiles that were replaced are not to be kept
}

// add appends a candidate in place: it is large, and a copy of it is dear. It is
// zero.
func (w *work) add() *candidate {
	n := len(w.candidates)
	if n == cap(w.candidates) {
		w.candidates = slices.Grow(w.candidates, n+64)
	}
	w.candidates = w.candidates[:n+1]
	return &w.candidates[n]
}

// filter collects who may serve the request.
func (w *work) filter(r *Request, view *fleet.View, now time.Time) error {
	if len(view.Members) == 0 {
		return ErrNoMembers
	}
	services := view.Serving(r.Model)
	if len(services) == 0 {
		return fmt.Errorf("model %q: %w", r.Model, ErrModel)
	}
	before, anyFailing := view.Since(view.SilentBefore(now)), view.Failing()
	doubtOf := func(s *fleet.Seat) doubt {
		switch {
		case s.Unreachable || s.Heard < before:
			return lost
		case anyFailing && !s.Member.Failing().Until(now).IsZero():
			return failing
		}
		return sound
	}
	least, most := lost, sound
	var served, asleep int
	for _, s := range services {
		seat := &view.Seats[s.Position]
		m := seat.Member
		adapter := r.Adapter
		switch {
		case s.Adapter && (adapter == "" || adapter == r.Model):
			adapter = r.Model
		case s.Adapter || adapter != "" && !m.HasAdapter(adapter):
			continue
		}
		served++
		if len(r.Candidates) > 0 && !named(r.Candidates, m.Info) || len(r.Exclude) > 0 && named(r.Exclude, m.Info) {
			continue
		}
		if r.not != nil && *r.not == m.Info.Role() {
			continue
		}
		if seat.Sleeping {
			asleep++
			continue
		}
		d := doubtOf(seat)
		least, most = min(least, d), max(most, d)
		c := w.add()
		c.seat, c.member, c.adapter, c.scope, c.doubt = seat, m, adapter, -1, d
	}
	// A candidate that is failing or silent is better than none.
	w.failing = least == failing && len(w.candidates) > 0
	if least < most {
		kept := w.candidates[:0]
		for i := range w.candidates {
			if c := &w.candidates[i]; c.doubt == least {
				kept = append(kept, *c)
			}
		}
		clear(w.candidates[len(kept):])
		w.candidates = kept
	}
	switch {
	case served == 0:
		return fmt.Errorf("adapter %q of model %q: %w", r.Adapter, r.Model, ErrAdapter)
	case len(w.candidates) == 0:
		return fmt.Errorf("model %q: %d members, %d asleep, others not among the request's candidates: %w",
			r.Model, served, asleep, ErrNoCandidate)
	}
	w.shares = slices.Grow(w.shares, len(w.candidates))
	for i := range w.candidates {
		id := int(w.candidates[i].seat.ID)
		for id >= len(w.at) {
			w.at = append(w.at, 0)
		}
		w.at[id] = int32(i) + 1
	}
	return nil
}
