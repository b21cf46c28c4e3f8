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
	// nearFraction of the best score, or nearStep of a step, is no difference: an
	// engine takes up a request between two steps, and no prediction is
	// better than that.
	nearFraction, nearStep = 0.02, 0.25
)

// rank scores the candidates and finds the best. It reads reservations, so a
// caller who wants to reserve on the best runs it in fleet.Decide.
func (m *draft) rank(r *Request, pol policy.Policy, sums []fleet.Reserved, know func(*Request, fleet.ID, *policy.Candidate), now time.Time) {
	var more fleet.Reserved
	at := m.eligible.view.Since(now)
	for i := range m.eligible.list {
		c := &m.eligible.list[i]
		reserved := sums[c.row.ID].Expected(now, &more)
		c.requests = int32(c.row.Requests(reserved))
		m.round.Candidates[i].Load.Set(c.row, reserved, reserved.Wait(now), c.speed, m.gauges, float64(at-c.row.Sampled)/float64(time.Millisecond))
		if i < len(m.round.SLOs) {
			m.round.SLOs[i].InFlight = reserved.Share
		}
	}
	policy.Relax(m.round.Candidates)
	if know != nil {
		for i := range m.eligible.list {
			know(r, m.eligible.list[i].row.ID, &m.round.Candidates[i])
		}
	}
	m.ahead()
	m.ownLast(pol)
	policy.Estimate(&m.round)
	policy.Measure(&m.round)
	m.choosing = m.choose(pol)
}

// ownLast makes the session's last member the owner, for policies that want one.
func (m *draft) ownLast(pol policy.Policy) {
	if m.known && pol.Needs&policy.NeedsOwner != 0 {
		m.own(m.last)
	}
}

// choosing is what a policy makes of a round.
type choosing struct {
	best   int
	near   int // candidates whose score is as good as the best
	sticky bool
}

// choose lets a policy score the round and finds the best.
func (m *draft) choose(pol policy.Policy) choosing {
	scores := m.scores
	pol.Score(&m.round, scores)
	if m.admission != nil && pol.Times {
		policy.Delay(&m.round, scores)
	}
	lowest := 0
	for i := range scores {
		if scores[i] < scores[lowest] {
			lowest = i
		}
	}
	limit := scores[lowest]
	if pol.Times {
		limit += max(nearFraction*m.round.Costs[lowest].FirstToken(), nearStep*m.eligible.list[lowest].speed.StepMS)
	}
	found := choosing{best: -1}
	room := m.roomWithin(limit, &pol)
	var weight uint64
	for i := range scores {
		if scores[i] > limit || room && !pol.HasRoom(&m.round, i, scores[i], m.admission.BudgetMS) {
			continue
		}
		found.near++
		c := &m.eligible.list[i]
		if pol.Times && m.known && c.member.ID == m.last {
			found.best, found.sticky = i, true
		}
		if found.sticky {
			continue
		}
		tie := m.keys.tieOf(c)
		if !pol.Times && pol.Needs == 0 {
			tie = m.round.Random // nothing about the prompt may help a policy that ignores it
		}
		own := mix(tie ^ c.row.Hash)
		if found.best < 0 || m.before(i, own, found.best, weight, pol.Times) {
			found.best, weight = i, own
		}
	}
	return found
}

// before tells which of two near-ties wins: less to compute, as the time is
// the same to this request and more is left for others; then the rendezvous
// hash.
func (m *draft) before(i int, own uint64, best int, weight uint64, work bool) bool {
	if a, b := m.round.Candidates[i].Uncached, m.round.Candidates[best].Uncached; work && a != b {
		return a < b
	}
	return own > weight
}

// choice is what is reserved on the best candidate.
func (m *draft) choice(r *Request) fleet.Choice {
	c, cost := &m.round.Candidates[m.best], &m.round.Costs[m.best]
	choice := fleet.Choice{
		Member:       m.eligible.list[m.best].member,
		Session:      r.Session,
		Mark:         m.belongs.mark,
		Uncached:     uint64(max(c.Uncached, 0)),
		PrefillMS:    cost.Load + cost.Prefill,
		FirstTokenMS: cost.FirstToken(),
		Cached:       uint64(c.GPU + c.Host + c.Disk + c.Predicted),
		Anyway:       m.eligible.list[m.best].health != healthy,
		EndMS:        cost.FirstToken() + m.round.ExpectedOutput(m.best)*c.Speed.StepMS,
		Decode:       r.decode,
		Asked: fleet.Asked{
			Model: r.Model, Tenant: r.Tenant, PromptTokens: r.Prompt.length(),
			Forecast: fleet.Forecast{
				Member: m.eligible.list[m.best].member.ID, Name: m.eligible.list[m.best].member.Info.Name, WaitMS: cost.Wait, PrefillMS: cost.Prefill, Host: c.Host, Disk: c.Disk,
			},
		},
	}
	// What is under way, or sent, may come in another order than was thought.
	if has := m.eligible.list[m.best].has(); has.predicted == 0 {
		choice.Promised = uint64(has.promised)
	}
	if m.best < len(m.round.SLOs) {
		f := &m.round.SLOs[m.best]
		choice.Share, choice.EndMS = f.Share, f.EndMS
	}
	return choice
}

// few is up to how many candidates of an answer are found without sorting all.
const few = 8

// sorted puts the places of the candidates in order, the best first: so many as
// asked for, and one more; 0: all.
func (m *draft) sorted(top int) []int32 {
	m.order = append(slices.Grow(m.order[:0], len(m.scores)), int32(m.best))
	if top == 0 || top > few {
		for i := range m.scores {
			if i != m.best {
				m.order = append(m.order, int32(i))
			}
		}
		slices.SortFunc(m.order[1:], func(a, b int32) int {
			return cmp.Or(cmp.Compare(m.scores[a], m.scores[b]), cmp.Compare(a, b))
		})
		return m.order
	}
	worst := math.Inf(1) // of those in order, once they are enough
	for i, score := range m.scores {
		enough := len(m.order) > top
		if enough && !(score < worst) || i == m.best {
			continue
		}
		if !enough {
			m.order = append(m.order, 0)
		}
		at := len(m.order) - 1
		for ; at > 1 && score < m.scores[m.order[at-1]]; at-- {
			m.order[at] = m.order[at-1]
		}
		m.order[at] = int32(i)
		worst = m.scores[m.order[len(m.order)-1]]
	}
	return m.order
}

// priority for an engine that serves the lowest first: arrival in ms, later
// for long prefills, so that short ones pass them and none waits for ever.
func priority(now time.Time, cost policy.Cost) int64 {
	return now.UnixMilli() + int64(math.Round(10*min(cost.Load+cost.Prefill, 1e9)))
}
