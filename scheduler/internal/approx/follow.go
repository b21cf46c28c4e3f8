package approx

import (
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

// wantedFor is how long what was sent is noted after somebody wanted it, and
// wantedStep how much of that has to have passed to be worth a note.
const wantedFor, wantedStep = 10 * time.Minute, time.Second

// Wanted remembers until when somebody wants to know what was sent to members
// that have an exact cache state. Of the others it is wanted always.
type Wanted struct{ sent, history atomic.Pointer[time.Time] }

// Note says what is wanted now.
func (w *Wanted) Note(sent, history bool, now time.Time) {
	note := func(until *atomic.Pointer[time.Time]) {
		end := now.Add(wantedFor)
		if was := until.Load(); was == nil || end.Sub(*was) >= wantedStep {
			until.Store(&end)
		}
	}
	if sent {
		note(&w.sent)
	}
	if history {
		note(&w.history)
	}
}

// Now tells what is wanted.
func (w *Wanted) Now(now time.Time) (sent, history bool) {
	wanted := func(until *time.Time) bool { return until != nil && until.After(now) }
	return wanted(w.sent.Load()), wanted(w.history.Load())
}

// Tick keeps what is noted in step with the fleet: members that left or began
// a new epoch are forgotten, and those that have an exact cache state, unless
// it is wanted of them, too. Where history is wanted, the members of each model
// are evened out by their curves.
func (x *Mirror) Tick(view *fleet.View, curve func(*fleet.Member) learn.Curve, now time.Time) {
	if !x.Tracks() {
		return
	}
	x.Expire(now)
	sent, history := x.Wanted.Now(now)
	for _, id := range x.Members() {
		m := view.Member(fleet.ID(id))
		if m == nil || !x.Follows(id, m.CacheState.Epoch) {
			x.Forget(id)
			continue
		}
		trust := view.Believe(m, now).Trust
		if trust == fleet.Exact && !sent && !history {
			x.Forget(id)
		} else {
			x.Lane(id, sent || trust != fleet.Exact)
		}
	}
	if !history {
		return
	}
	byModel := make(map[string][]*fleet.Member)
	for _, m := range view.Members {
		if !m.Load.Sleeping && !view.Silent(m, now) {
			byModel[m.Info.Model()] = append(byModel[m.Info.Model()], m)
		}
	}
	for _, list := range byModel {
		ids, curves := make([]index.Member, len(list)), make([]learn.Curve, len(list))
		for i, m := range list {
			ids[i], curves[i] = index.Member(m.ID), curve(m)
		}
		x.Balance(ids, curves, now)
	}
}
