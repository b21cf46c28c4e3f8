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

// rank scores the candidates and finds the best. It reads reservations, so a
// caller who wants to charge the best runs it in fleet.Decide.
func (m *making) rank(pol policy.Policy, sums []fleet.Reserved, now time.Time) {
	var more fleet.Reserved
	for i := range m.eligible.list {
		c := &m.eligible.list[i]
		reserved := sums[c.seat.ID].Expected(now, &more)
		c.requests = int32(c.seat.Requests(reserved))
		m.ranking.round.Candidates[i].Load.Set(c.seat, reserved, reserved.Wait(now), c.speed, m.ranking.gauges, float64(m.ranking.now-c.seat.Sampled)/float64(time.Millisecond))
		if i < len(m.ranking.round.Fits) {
			m.ranking.round.Fits[i].InFlight = reserved.Share
		}
	}
	policy.Relax(m.ranking.round.Candidates)
	m.ahead()
	m.ownLast(pol)
	policy.Estimate(&m.ranking.round)
	policy.Measure(&m.ranking.round)
	m.ranking.choosing = m.choose(pol)
}

// ownLast makes the session's last member the owner, for policies that want one.
func (m *making) ownLast(pol policy.Policy) {
	if m.ranking.known && pol.Needs&policy.NeedsOwner != 0 {
		m.own(m.ranking.last)
	}
}

// choosing is what a policy makes of a round.
type choosing struct {
	best   int
	near   int // candidates whose score is as good as the best
	sticky bool
}

// choose lets a policy score the round and finds the best.
func (m *making) choose(pol policy.Policy) choosing {
	scores := m.ranking.scores
	pol.Score(&m.ranking.round, scores)
	if m.ranking.admission != nil && pol.Times {
		policy.Delay(&m.ranking.round, scores)
	}
	lowest := 0
	for i := range scores {
		if scores[i] < scores[lowest] {
			lowest = i
		}
	}
	limit := scores[lowest]
	if pol.Times {
		limit += max(nearShare*m.ranking.round.Costs[lowest].FirstToken(), nearStep*m.eligible.list[lowest].speed.StepMS)
	}
	found := choosing{best: -1}
	room := m.roomWithin(limit, &pol)
	var weight uint64
	for i := range scores {
		if scores[i] > limit || room && !pol.Room(&m.ranking.round, i, scores[i], m.ranking.admission.BudgetMS) {
			continue
		}
		found.near++
		c := &m.eligible.list[i]
		if pol.Times && m.ranking.known && c.member.ID == m.ranking.last {
			found.best, found.sticky = i, true
		}
		if found.sticky {
			continue
		}
		tie := m.keys.tieOf(c)
		if !pol.Times && pol.Needs == 0 {
			tie = m.ranking.round.Random // nothing about the prompt may help a policy that ignores it
		}
		own := mix(tie ^ c.seat.Hash)
		if found.best < 0 || m.before(i, own, found.best, weight, pol.Times) {
			found.best, weight = i, own
		}
	}
	return found
}

// before tells which of two near-ties wins: less to compute, as the time is
// the same to this request and more is left for others; then the rendezvous
// hash.
func (m *making) before(i int, own uint64, best int, weight uint64, work bool) bool {
	if a, b := m.ranking.round.Candidates[i].Uncached, m.ranking.round.Candidates[best].Uncached; work && a != b {
		return a < b
	}
	return own > weight
}

// choice is what the best candidate is charged.
func (m *making) choice(r *Request) fleet.Choice {
	c, cost := &m.ranking.round.Candidates[m.ranking.best], &m.ranking.round.Costs[m.ranking.best]
	choice := fleet.Choice{
		Member:       m.eligible.list[m.ranking.best].member,
		Session:      r.Session,
		Mark:         m.belongs.mark,
		Uncached:     uint64(max(c.Uncached, 0)),
		PrefillMS:    cost.Load + cost.Prefill,
		FirstTokenMS: cost.FirstToken(),
		Cached:       uint64(c.GPU + c.Host + c.Disk + c.Predicted),
		Anyway:       m.eligible.list[m.ranking.best].doubt != sound,
		EndMS:        cost.FirstToken() + m.ranking.round.ExpectedOutput(m.ranking.best)*c.Speed.StepMS,
		Decode:       r.decode,
		Asked: fleet.Asked{
			Model: r.Model, Tenant: r.Tenant, PromptTokens: r.Prompt.length(),
			Forecast: fleet.Forecast{
				Member: m.eligible.list[m.ranking.best].member.ID, Name: m.eligible.list[m.ranking.best].member.Info.Name, WaitMS: cost.Wait, PrefillMS: cost.Prefill, Host: c.Host, Disk: c.Disk,
			},
		},
	}
	if m.ranking.best < len(m.ranking.round.Fits) {
		f := &m.ranking.round.Fits[m.ranking.best]
		choice.Share, choice.EndMS = f.Share, f.EndMS
	}
	return choice
}

// few is up to how many candidates of an answer are found without sorting all.
const few = 8

// sorted puts the places of the candidates in order, the best first: so many as
// asked for, and one more; 0: all.
func (m *making) sorted(top int) []int32 {
	m.ranking.order = append(slices.Grow(m.ranking.order[:0], len(m.ranking.scores)), int32(m.ranking.best))
	if top == 0 || top > few {
		for i := range m.ranking.scores {
			if i != m.ranking.best {
				m.ranking.order = append(m.ranking.order, int32(i))
			}
		}
		slices.SortFunc(m.ranking.order[1:], func(a, b int32) int {
			return cmp.Or(cmp.Compare(m.ranking.scores[a], m.ranking.scores[b]), cmp.Compare(a, b))
		})
		return m.ranking.order
	}
	worst := math.Inf(1) // of those in order, once they are enough
	for i, score := range m.ranking.scores {
		enough := len(m.ranking.order) > top
		if enough && !(score < worst) || i == m.ranking.best {
			continue
		}
		if !enough {
			m.ranking.order = append(m.ranking.order, 0)
		}
		at := len(m.ranking.order) - 1
		for ; at > 1 && score < m.ranking.scores[m.ranking.order[at-1]]; at-- {
			m.ranking.order[at] = m.ranking.order[at-1]
		}
		m.ranking.order[at] = int32(i)
		worst = m.ranking.scores[m.ranking.order[len(m.ranking.order)-1]]
	}
	return m.ranking.order
}

// priority for an engine that serves the lowest first: arrival in ms, later
// for long prefills, so that short ones pass them and none waits for ever.
func priority(now time.Time, cost policy.Cost) int64 {
	return now.UnixMilli() + int64(math.Round(10*min(cost.Load+cost.Prefill, 1e9)))
}
