package pick

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

const (
	// nearShare of the best score, or nearStep of a step, is no difference: an
	// engine takes up a request between two steps, and no prediction is
	// better than that.
	nearShare, nearStep = 0.02, 0.25
)

// prepare collects what does not change while the fleet is locked.
func (p *Picker) prepare(w *work, r *Request, view *fleet.View, now time.Time) {
	n, length := len(w.candidates), r.Prompt.length()
	w.round.Reuse = math.Float64frombits(p.stock.reuse.Load())
	w.round.Moved = false
	w.round.Output, w.round.Length = float64(r.ExpectedOutput), length
	w.round.Candidates = slices.Grow(w.round.Candidates[:0], n)[:n]
	w.round.Costs = slices.Grow(w.round.Costs[:0], n)[:n]
	w.scores = slices.Grow(w.scores[:0], n)[:n]
	w.gauges = true
	fresh, speeds := view.Since(view.FreshSince(now)), p.speeds.fitted.Load()
	held := p.stock.counted()
	var busy, known float64
	for i := range w.candidates {
		c := &w.candidates[i]
		seat, has := c.seat, c.has()
		c.speed = p.speeds.in(speeds, seat.ID, seat.Hash)
		w.gauges = w.gauges && seat.Running >= 0 && seat.Sampled >= fresh
		if c.speed.Busy >= 0 {
			busy += c.speed.Busy
			known++
		}
		// In place: a literal would be made elsewhere and copied.
		at := &w.round.Candidates[i]
		at.GPU, at.Host, at.Disk, at.Predicted = has.gpu, has.host, has.disk, has.predicted
		at.Uncached = length - has.cached() - has.predicted
		if length == 0 {
			at.Uncached = int(c.speed.PromptTokens) // a mean request
		}
		at.Speed = c.speed
		at.BlockSize = seat.BlockSize
		at.Capacity = seat.Blocks * seat.BlockSize
		at.Room = room(held, seat)
		at.Sent = has.sent
		at.Draw, at.History = 0, nil
	}
	w.round.Rho = busy / known // NaN where nothing is known
}

// rank scores the candidates and finds the best. It reads reservations, so a
// caller who wants to charge the best runs it in fleet.Decide.
func (w *work) rank(pol policy.Policy, sums []fleet.Reserved, now time.Time) {
	var more fleet.Reserved
	for i := range w.candidates {
		c := &w.candidates[i]
		reserved := sums[c.seat.ID].Expected(now, &more)
		c.requests = int32(c.seat.Requests(reserved))
		w.round.Candidates[i].Load.Set(c.seat, reserved, reserved.Wait(now), c.speed, w.gauges)
		if i < len(w.round.Fits) {
			w.round.Fits[i].InFlight = reserved.Share
		}
	}
	w.ahead()
	w.ownLast(pol)
	policy.Estimate(&w.round)
	policy.Measure(&w.round)
	w.choosing = w.choose(pol)
}

// ownLast makes the session's last member the owner, for policies that want one.
func (w *work) ownLast(pol policy.Policy) {
	if w.known && pol.Needs&policy.NeedsOwner != 0 {
		w.own(w.last)
	}
}

// choosing is what a policy makes of a round.
type choosing struct {
	best   int
	near   int // candidates whose score is as good as the best
	sticky bool
}

// choose lets a policy score the round and finds the best.
func (w *work) choose(pol policy.Policy) choosing {
	scores := w.scores
	pol.Score(&w.round, scores)
	if w.room != nil && pol.Times {
		policy.Delay(&w.round, scores)
	}
	lowest := 0
	for i := range scores {
		if scores[i] < scores[lowest] {
			lowest = i
		}
	}
	limit := scores[lowest]
	if pol.Times {
		limit += max(nearShare*w.round.Costs[lowest].FirstToken(), nearStep*w.candidates[lowest].speed.StepMS)
	}
	found := choosing{best: -1}
	room := w.roomWithin(limit, &pol)
	var weight uint64
	for i := range scores {
		if scores[i] > limit || room && !pol.Room(&w.round, i, scores[i], w.room.BudgetMS) {
			continue
		}
		found.near++
		c := &w.candidates[i]
		if pol.Times && w.known && c.member.ID == w.last {
			found.best, found.sticky = i, true
		}
		if found.sticky {
			continue
		}
		tie := w.tieOf(c)
		if !pol.Times && pol.Needs == 0 {
			tie = w.round.Random // nothing about the prompt may help a policy that ignores it
		}
		own := mix(tie ^ c.seat.Hash)
		if found.best < 0 || w.before(i, own, found.best, weight, pol.Times) {
			found.best, weight = i, own
		}
	}
	return found
}

// before tells which of two near-ties wins: less to compute, as the time is
// the same to this request and more is left for others; then the rendezvous
// hash.
func (w *work) before(i int, own uint64, best int, weight uint64, work bool) bool {
	if a, b := w.round.Candidates[i].Uncached, w.round.Candidates[best].Uncached; work && a != b {
		return a < b
	}
	return own > weight
}

// choice is what the best candidate is charged.
func (w *work) choice(r *Request) fleet.Choice {
	c, cost := &w.round.Candidates[w.best], &w.round.Costs[w.best]
	choice := fleet.Choice{
		Member:       w.candidates[w.best].member,
		Session:      r.Session,
		Mark:         w.mark,
		Uncached:     uint64(max(c.Uncached, 0)),
		PrefillMS:    cost.Load + cost.Prefill,
		FirstTokenMS: cost.FirstToken(),
		Cached:       uint64(c.GPU + c.Host + c.Disk + c.Predicted),
		Anyway:       w.candidates[w.best].doubt != sound,
		Decode:       r.decode,
		Asked: fleet.Asked{
			Model: r.Model, Tenant: r.Tenant, PromptTokens: r.Prompt.length(),
			Forecast: fleet.Forecast{
				Member: w.candidates[w.best].member.ID, Name: w.candidates[w.best].member.Info.Name, WaitMS: cost.Wait, PrefillMS: cost.Prefill, Host: c.Host, Disk: c.Disk,
			},
		},
	}
	if w.best < len(w.round.Fits) {
		f := &w.round.Fits[w.best]
		choice.Share, choice.EndMS = f.Share, f.EndMS
	}
	return choice
}

// few is up to how many candidates of an answer are found without sorting all.
const few = 8

// sorted puts the places of the candidates in order, the best first: so many as
// asked for, and one more; 0: all.
func (w *work) sorted(top int) []int32 {
	w.order = append(slices.Grow(w.order[:0], len(w.scores)), int32(w.best))
	if top == 0 || top > few {
		for i := range w.scores {
			if i != w.best {
				w.order = append(w.order, int32(i))
			}
		}
		slices.SortFunc(w.order[1:], func(a, b int32) int {
			return cmp.Or(cmp.Compare(w.scores[a], w.scores[b]), cmp.Compare(a, b))
		})
		return w.order
	}
	worst := math.Inf(1) // of those in order, once they are enough
	for i, score := range w.scores {
		enough := len(w.order) > top
		if enough && !(score < worst) || i == w.best {
			continue
		}
		if !enough {
			w.order = append(w.order, 0)
		}
		at := len(w.order) - 1
		for ; at > 1 && score < w.scores[w.order[at-1]]; at-- {
			w.order[at] = w.order[at-1]
		}
		w.order[at] = int32(i)
		worst = w.scores[w.order[len(w.order)-1]]
	}
	return w.order
}

// priority for an engine that serves the lowest first: arrival in ms, later
// for long prefills, so that short ones pass them and none waits for ever.
func priority(now time.Time, cost policy.Cost) int64 {
	return now.UnixMilli() + int64(math.Round(10*min(cost.Load+cost.Prefill, 1e9)))
}
