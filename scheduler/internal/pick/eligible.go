package pick

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

// eligible are the members that may serve a request.
type eligible struct {
	view *fleet.View
	list []candidate
	at   []int32 // by member number: its place in list plus one
	// doubt that all of them are under: nobody better is left.
	doubt     doubt
	only, not names // Request.Candidates and Exclude
}

// candidate is one eligible member. The steps that follow add what they find
// out.
type candidate struct {
	seat    *fleet.Seat
	member  *fleet.Member // of the seat
	adapter string
	doubt   doubt

	scope    int32        // by keys: in scopes; -1: its blocks have no keys here
	share    *share       // by cached: what it has of the prompt; nil: nothing
	speed    *learn.Speed // by ranking, as what follows
	requests int32        // at the engine, as believed when scored
}

// doubt says why a candidate should rather not be chosen.
type doubt uint8

const (
	sound   doubt = iota
	failing       // callers reported failures
	lost          // silent, or out of its agent's reach
)

func (e *eligible) release() {
	clear(e.at)
	clear(e.list) // members that left are not to be kept, and zeros are filled in
	e.list, e.view, e.doubt = e.list[:0], nil, sound
	e.only.release()
	e.not.release()
}

// of is the candidate with that number, or nil.
func (e *eligible) of(id fleet.ID) *candidate {
	if int(id) >= len(e.at) || e.at[id] == 0 {
		return nil
	}
	return &e.list[e.at[id]-1]
}

// filter finds who may serve the request.
func (e *eligible) filter(r *Request, view *fleet.View, now time.Time) error {
	e.view = view
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
	e.only.add(r.Candidates)
	e.not.add(r.Exclude)
	e.list = slices.Grow(e.list, len(services))
	if missing := view.IDs() - len(e.at); missing > 0 {
		e.at = append(e.at, make([]int32, missing)...)
	}
	least, most := lost, sound
	length, tooLong := 0, r.Prompt.length() > view.ShortestContext()
	if tooLong {
		length = r.Prompt.length()
	}
	var served, asleep, unlisted, excluded, short, longest int
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
		if lists && !e.admits(r, m.Info) {
			switch {
			case e.not.name(m.Info):
				excluded++
			case len(r.Candidates) > 0 && !e.only.name(m.Info):
				unlisted++
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
		e.list = e.list[:len(e.list)+1]
		c := &e.list[len(e.list)-1]
		c.seat, c.member, c.adapter, c.scope, c.doubt = seat, m, adapter, -1, d
		e.at[seat.ID] = int32(len(e.list))
	}
	// A candidate that is failing or silent is better than none.
	e.doubt = least
	if least < most {
		clear(e.at)
		kept := e.list[:0]
		for i := range e.list {
			if c := &e.list[i]; c.doubt == least {
				kept = append(kept, *c)
				e.at[c.seat.ID] = int32(len(kept))
			}
		}
		clear(e.list[len(kept):])
		e.list = kept
	}
	switch {
	case served == 0:
		return fmt.Errorf("adapter %q of model %q: %w", r.Adapter, r.Model, ErrAdapter)
	case len(e.list) == 0 && short > 0 && short+asleep+excluded == served:
		return fmt.Errorf("the prompt has %d tokens, model %q takes %d at most: %w", length, r.Model, longest, ErrPrompt)
	case len(e.list) == 0:
		why := ErrNoCandidate
		if excluded+unlisted == served {
			why = ErrExcluded
		}
		return fmt.Errorf("model %q: %d members, of which %d excluded by the request, %d not among its candidates, %d asleep, %d with a shorter context than the prompt, %d of another role: %w",
			r.Model, served, excluded, unlisted, asleep, short, served-excluded-unlisted-asleep-short, why)
	}
	return nil
}

// admits says whether the request's own lists let a member in.
func (e *eligible) admits(r *Request, i *fleet.Info) bool {
	return (len(r.Candidates) == 0 || e.only.name(i)) && !e.not.name(i) && (r.not == nil || *r.not != i.Role())
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
