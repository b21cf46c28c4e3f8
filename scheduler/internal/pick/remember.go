package pick

import (
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/approx"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/predict"
)

// remember keeps what later decisions, here and at other schedulers, go by.
func (p *Picker) remember(m *draft, r *Request, pol policy.Policy, id fleet.Decision, choice *fleet.Choice, now time.Time) {
	keys, life := p.predict(m, r, id, now)
	if p.outbox != nil {
		p.outbox.Reserve(id, choice, keys, life, now)
	}
	p.send(m, r, now)
	p.estimates.Caches.Decided(int(choice.Cached), int(choice.Uncached))
	p.predicted.Confirm(now)
	if len(m.belongs.texts) > 0 {
		p.recent.add(m.belongs.texts, now)
	}
	p.left[m.left(pol)].Add(1)
	p.hits.prompt.Add(uint64(r.Prompt.length()))
	feasible, routed := m.cached.feasible, m.eligible.list[m.best].cached()
	ideal := max(m.cached.ideal, feasible)
	p.hits.ideal.Add(uint64(ideal))
	p.hits.feasible.Add(uint64(feasible))
	p.hits.routed.Add(uint64(routed))
	p.hits.leastLoad.Add(uint64(m.leastLoad().cached()))
	if p.books != nil {
		p.account(m, r, pol, id, now)
	}
}

// predict notes the blocks of the prompt as predicted where it went, unless all
// of them are there already. It returns their keys, and for how long.
func (p *Picker) predict(m *draft, r *Request, id fleet.Decision, now time.Time) ([]blockkey.Key, time.Duration) {
	c := &m.eligible.list[m.best]
	if c.scope < 0 {
		return nil, 0
	}
	s := &m.keys.scopes[c.scope]
	exact := c.exact(m.eligible.view, now)
	if exact && c.has().depth[index.LaneGPU] >= s.blocks {
		return nil, 0
	}
	s.hash(r, predict.MaxBlocks)
	ms := m.round.Costs[m.best].FirstToken()
	return s.keys, p.predicted.Add(predict.Sent{
		Decision: uint64(id),
		Member:   index.Member(c.member.ID),
		Epoch:    c.member.CacheState.Epoch,
		Keys:     s.keys,
		First:    time.Duration(min(ms, 1e6) * float64(time.Millisecond)),
		Exact:    exact,
	}, now)
}

// send notes where the prompt went, if anyone may want to know that.
func (p *Picker) send(m *draft, r *Request, now time.Time) {
	c := &m.eligible.list[m.best]
	if c.scope < 0 {
		return
	}
	sent, history := p.sent.Wanted.Now(now)
	exact := c.exact(m.eligible.view, now)
	if exact && !sent && !history {
		return
	}
	s := &m.keys.scopes[c.scope]
	s.hash(r, s.blocks)
	p.sent.Add(approx.Prompt{
		Member:       index.Member(c.member.ID),
		Epoch:        c.member.CacheState.Epoch,
		Blocks:       int(min(c.member.Info.Blocks, 1<<31)),
		Lane:         !exact || sent,
		Keys:         s.keys,
		BlockSize:    s.BlockSize,
		Cached:       (c.cached() + c.has().predicted) / s.BlockSize,
		FirstTokenMS: m.round.Costs[m.best].FirstToken(),
	}, now)
}

// left says why the session's last member was left, as the policy says, or for
// those that go by time.
func (m *draft) left(pol policy.Policy) policy.Left {
	if m.round.Left != policy.Stayed || !pol.Times || !m.known || m.eligible.list[m.best].member.ID == m.last {
		return m.round.Left
	}
	if m.eligible.of(m.last) == nil {
		return policy.Gone
	}
	return policy.Slow
}
