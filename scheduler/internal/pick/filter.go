package pick

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/profile"
)

// work is what one decision needs while it is made. It is used again.
type work struct {
	view       *fleet.View // of the decision
	candidates []candidate
	shares     []share // of those that have something; candidates point to them
	scopes     []scope
	at         []int32 // by member number: its place in candidates plus one
	held       index.Answer
	ends       []index.End
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
	lost       bool  // all candidates are silent or out of reach
	gauges     bool
	ideal      int      // longest prefix in tokens that any member has, candidate or not
	feasible   int      // longest that a candidate has
	keyless    bool     // some candidate's blocks have no keys here
	tie        uint64   // decides between equal candidates without keys; 0: all have keys
	last       fleet.ID // member of the session's last request
	known      bool     // there is one
	only, not  names    // Request.Candidates and Exclude
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
	least bool             // what is credited is a lower bound
	end   int              // blocks to where a hit ends; only where the member's rule has ends
	// cached tokens by tier, and those beyond that are only predicted
	gpu, host, disk, predicted int
	sent                       int  // tokens that went there before, and may still be there
	assumed                    bool // predicted stands on what was sent
	last                       bool // predicted stands on the last known picture
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
	clear(w.candidates) // members that left are not to be kept, and zeros are filled in
	w.candidates, w.shares = w.candidates[:0], w.shares[:0]
	for i := range w.scopes {
		w.scopes[i].release()
	}
	w.scopes = w.scopes[:0]
	w.texts = w.texts[:0]
	w.misfits, w.failing, w.lost, w.keyless, w.ideal, w.feasible = 0, false, false, false, 0, 0
	w.room, w.view = nil, nil
	w.only.release()
	w.not.release()
	clear(w.groups) // profiles that were replaced are not to be kept
}

// filter collects who may serve the request.
func (w *work) filter(r *Request, view *fleet.View, now time.Time) error {
	w.view = view
	if len(view.Members) == 0 {
		return ErrNoMembers
	}
	services := view.Serving(r.Model)
	if len(services) == 0 {
		return fmt.Errorf("model %q: %w; served are %s", r.Model, ErrModel, listed(view.Names()))
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
	lists := len(r.Candidates)+len(r.Exclude) > 0 || r.not != nil
	w.only.add(r.Candidates)
	w.not.add(r.Exclude)
	w.candidates = slices.Grow(w.candidates, len(services))
	if missing := view.IDs() - len(w.at); missing > 0 {
		w.at = append(w.at, make([]int32, missing)...)
	}
	least, most := lost, sound
	length, tooLong := 0, r.Prompt.length() > view.ShortestContext()
	if tooLong {
		length = r.Prompt.length()
	}
	var served, asleep, excluded, short, longest int
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
		if lists && !w.admits(r, m.Info) {
			if w.not.name(m.Info) {
				excluded++
			}
			continue
		}
		if tooLong && m.Info.MaxModelLen > 0 && length > m.Info.MaxModelLen {
			short++
			longest = max(longest, m.Info.MaxModelLen)
			continue
		}
		if seat.Sleeping {
			asleep++
			continue
		}
		d := doubtOf(seat)
		least, most = min(least, d), max(most, d)
		// In place, where zeros are: a literal would be made elsewhere and copied.
		w.candidates = w.candidates[:len(w.candidates)+1]
		c := &w.candidates[len(w.candidates)-1]
		c.seat, c.member, c.adapter, c.scope, c.doubt = seat, m, adapter, -1, d
		w.at[seat.ID] = int32(len(w.candidates))
	}
	// A candidate that is failing or silent is better than none.
	w.failing, w.lost = least == failing && len(w.candidates) > 0, least == lost && len(w.candidates) > 0
	if least < most {
		clear(w.at)
		kept := w.candidates[:0]
		for i := range w.candidates {
			if c := &w.candidates[i]; c.doubt == least {
				kept = append(kept, *c)
				w.at[c.seat.ID] = int32(len(kept))
			}
		}
		clear(w.candidates[len(kept):])
		w.candidates = kept
	}
	switch {
	case served == 0:
		return fmt.Errorf("adapter %q of model %q: %w", r.Adapter, r.Model, ErrAdapter)
	case len(w.candidates) == 0 && short > 0 && short+asleep+excluded == served:
		return fmt.Errorf("the prompt has %d tokens, model %q takes %d at most: %w", length, r.Model, longest, ErrPrompt)
	case len(w.candidates) == 0:
		return fmt.Errorf("model %q: %d members, of which %d excluded by the request, %d asleep, %d with a shorter context than the prompt, %d not among the request's candidates or roles: %w",
			r.Model, served, excluded, asleep, short, served-excluded-asleep-short, ErrNoCandidate)
	}
	w.shares = slices.Grow(w.shares, len(w.candidates))
	return nil
}

// admits says whether the request's own lists let a member in.
func (w *work) admits(r *Request, i *fleet.Info) bool {
	return (len(r.Candidates) == 0 || w.only.name(i)) && !w.not.name(i) && (r.not == nil || *r.not != i.Role())
}

const (
	// maxListed names are in an error, and maxListedBytes of them.
	maxListed, maxListedBytes = 10, 400
)

// listed are names for an error, as many as fit.
func listed(names []string) string {
	var b strings.Builder
	for i, n := range names {
		if i == maxListed || b.Len()+len(n) > maxListedBytes {
			fmt.Fprintf(&b, " and %d more", len(names)-i)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%q", n)
	}
	return b.String()
}
