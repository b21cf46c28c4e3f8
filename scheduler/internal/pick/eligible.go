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
	view      *fleet.View
	list      []candidate
	at        []int32 // by member number: its place in list plus one
	only, not names   // Request.Candidates and Exclude
}

// candidate is one eligible member. The steps that follow add what they find
// out.
type candidate struct {
	row     *fleet.Row
	member  *fleet.Member // of the row
	adapter string
	health  health
	hidden  bool // what it holds of such a prompt is not told

	scope    int32        // by keys: in scopes; -1: its blocks have no keys here
	prefix   *prefix      // by cached: what it has of the prompt; nil: nothing
	speed    *learn.Speed // by ranking, as what follows
	requests int32        // at the engine, as believed when scored
}

// health says why a candidate should rather not be chosen.
type health uint8

const (
	healthy     health = iota
	withdrawn          // its pod is about to go, or does not serve
	failing            // callers reported failures
	unreachable        // silent, or out of its agent's reach
)

func (e *eligible) release() {
	clear(e.at)
	clear(e.list) // members that left are not to be kept, and zeros are filled in
	e.list, e.view = e.list[:0], nil
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
	healthOf := func(s *fleet.Row) health {
		switch {
		case s.Unreachable || s.LastHeartbeat < before:
			return unreachable
		case anyFailing && !s.Member.Failing().Until(now).IsZero():
			return failing
		case s.Withdrawn != fleet.InService:
			return withdrawn
		}
		return healthy
	}
	lists := len(r.Candidates)+len(r.Exclude) > 0 || r.not != nil
	e.only.add(r.Candidates)
	e.not.add(r.Exclude)
	e.list = slices.Grow(e.list, len(services))
	if missing := view.IDs() - len(e.at); missing > 0 {
		e.at = append(e.at, make([]int32, missing)...)
	}
	best, worst := unreachable, healthy
	length, tooLong := 0, r.Prompt.length() > view.ShortestContext()
	if tooLong {
		length = r.Prompt.length()
	}
	var served, asleep, unlisted, excluded, short, longest int
	for _, s := range services {
		row := &view.Rows[s.Position]
		m := row.Member
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
		if row.Sleeping {
			asleep++
			continue
		}
		d := healthOf(row)
		best, worst = min(best, d), max(worst, d)
		// In place, where zeros are: a literal would be made elsewhere and copied.
		e.list = e.list[:len(e.list)+1]
		c := &e.list[len(e.list)-1]
		c.row, c.member, c.adapter, c.scope, c.health = row, m, adapter, -1, d
		e.at[row.ID] = int32(len(e.list))
	}
	// A candidate that is withdrawn, failing or silent is better than none.
	if best < worst {
		clear(e.at)
		kept := e.list[:0]
		for i := range e.list {
			if c := &e.list[i]; c.health == best {
				kept = append(kept, *c)
				e.at[c.row.ID] = int32(len(kept))
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
