package fleet

import (
	"maps"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// View is the fleet at one moment. It is never edited.
type View struct {
	// Members by name.
	Members []*Member
	// Rows of the members, in the same order.
	Rows []Row

	cfg             *Config
	failing         *atomic.Int32
	cut             *atomic.Bool
	origin          time.Time
	roster          *roster
	newest, resumed time.Time
}

// roster says who serves what, as positions in Members. Views share it while
// neither the members nor what they serve changes.
type roster struct {
	serving map[string][]Service
	names   map[string]int32
	byID    []int32 // position plus one; 0: no member
	roles   bool    // some member is not for both parts of a request
	context int     // the shortest that a member has
}

// Service is one member that answers to a model name.
type Service struct {
	// Position in View.Members.
	Position int32
	// Adapter: the name is that of an adapter and not of the base model.
	Adapter bool
}

// View returns the fleet as it is. It costs one atomic load while nothing
// has changed since the last call.
func (f *Fleet) View() *View {
	if !f.stale.Load() {
		return f.view.Load()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.stale.Load() {
		return f.view.Load()
	}
	if f.roster == nil {
		f.roster = f.rosterLocked()
	}
	v := &View{
		Members: slices.Clone(f.members),
		Rows:    slices.Clone(f.rows),
		cfg:     &f.cfg,
		failing: &f.failing,
		cut:     &f.cut,
		origin:  f.origin,
		roster:  f.roster,
		newest:  f.newest,
		resumed: f.resumed,
	}
	f.view.Store(v)
	f.stale.Store(false)
	return v
}

// Member returns the member with that number, or nil.
func (v *View) Member(id ID) *Member {
	if int(id) >= len(v.roster.byID) || v.roster.byID[id] == 0 {
		return nil
	}
	return v.Members[v.roster.byID[id]-1]
}

// IDs is above the number of every member.
func (v *View) IDs() int { return len(v.roster.byID) }

// Named returns the member with that name, or nil.
func (v *View) Named(name string) *Member {
	if i, ok := v.roster.names[name]; ok {
		return v.Members[i]
	}
	return nil
}

// Roles tells whether any member is there for one part of requests only.
func (v *View) Roles() bool { return v.roster.roles }

// Serving lists who answers to a model name, base model or adapter. The slice
// is the view's.
func (v *View) Serving(name string) []Service { return v.roster.serving[name] }

// ShortestContext is how many tokens every member takes that says how many.
func (v *View) ShortestContext() int { return v.roster.context }

// Names lists what members answer to, in order.
func (v *View) Names() []string { return slices.Sorted(maps.Keys(v.roster.serving)) }

// Since is a time as Rows have it; the zero time is before all others.
func (v *View) Since(t time.Time) time.Duration { return t.Sub(v.origin) }

// Failing tells whether callers reported failures of any member lately.
func (v *View) Failing() bool { return v.failing.Load() > 0 }

// Silent tells whether the member was not heard for too long while the wire
// was alive. It is not eligible then, if there is another.
func (v *View) Silent(m *Member, now time.Time) bool {
	return m.LastHeartbeat.Before(v.SilentBefore(now))
}

// SilentBefore is the time before which a member must have been heard last to
// be silent. It is zero, and nobody is silent, while nothing at all is heard and
// until everybody had the time to speak again.
func (v *View) SilentBefore(now time.Time) time.Time {
	since := v.FreshSince(now)
	if v.Stale(now) || v.resumed.After(since) {
		return time.Time{}
	}
	return since
}

// Stale tells that nothing at all was heard for too long: the wire is gone, and
// everything here is the last that was known.
func (v *View) Stale(now time.Time) bool {
	return len(v.Members) > 0 && now.Sub(v.newest) > v.cfg.Silence
}

// FreshSince is the time from which on a load sample is recent enough to be
// compared with those of others.
func (v *View) FreshSince(now time.Time) time.Time { return now.Add(-v.cfg.Silence) }

func (f *Fleet) rosterLocked() *roster {
	r := &roster{
		serving: make(map[string][]Service),
		names:   make(map[string]int32, len(f.members)),
		byID:    make([]int32, len(f.slots)),
		context: math.MaxInt,
	}
	for i, m := range f.members {
		at, info := int32(i), m.Info
		r.names[info.Name] = at
		r.roles = r.roles || info.Role() != Both
		if info.MaxModelLen > 0 {
			r.context = min(r.context, info.MaxModelLen)
		}
		r.byID[m.ID] = at + 1
		for j, name := range info.Models {
			if !slices.Contains(info.Models[:j], name) {
				r.serving[name] = append(r.serving[name], Service{Position: at})
			}
		}
		for j := range info.Adapters {
			// A base model of the same name wins, as it does in the engine.
			name := info.Adapters[j].Name
			if list := r.serving[name]; len(list) == 0 || list[len(list)-1].Position != at {
				r.serving[name] = append(list, Service{Position: at, Adapter: true})
			}
		}
	}
	return r
}

// replaceLocked lets the next view show m for the slot.
func (f *Fleet) replaceLocked(s *slot, m *Member) {
	s.member = m
	f.members[s.position] = m
	f.rows[s.position].set(m, f.origin)
	f.stale.Store(true)
}

func (f *Fleet) insertLocked(s *slot) {
	at, _ := slices.BinarySearchFunc(f.members, s.member.Info.Name, func(m *Member, name string) int {
		return strings.Compare(m.Info.Name, name)
	})
	f.members = slices.Insert(f.members, at, s.member)
	f.rows = slices.Insert(f.rows, at, Row{})
	f.rows[at].set(s.member, f.origin)
	f.renumberLocked(at)
}

func (f *Fleet) removeLocked(s *slot) {
	f.members = slices.Delete(f.members, s.position, s.position+1)
	f.rows = slices.Delete(f.rows, s.position, s.position+1)
	f.renumberLocked(s.position)
}

// renumberLocked follows a change in the order from a position on.
func (f *Fleet) renumberLocked(from int) {
	for i, m := range f.members[from:] {
		f.slots[m.ID].position = from + i
	}
	f.roster = nil
	f.stale.Store(true)
}
