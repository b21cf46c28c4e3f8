// Package chronicle keeps what happened lately, within bounds, for people:
// decisions with what became of them, what changed of members and settings, and
// counts over time. It is told, and asks nobody.
package chronicle

import (
	"sync"
	"sync/atomic"
	"time"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	// maxDecisions are kept, and no more of each second than fit apart.
	maxDecisions = 256
	decisionGap  = 50 * time.Millisecond
	// maxChanges are kept.
	maxChanges = 4096
	// maxPoints are kept, pointGap apart.
	maxPoints = 360
	pointGap  = 10 * time.Second
	// How many are given unless more or less are asked for.
	usualDecisions = 50
	usualChanges   = 500
)

// Chronicle is safe for use by many. What it is given it keeps, and gives others to
// read: nobody may change it.
type Chronicle struct {
	due atomic.Int64 // Unix ns from which the next decision is kept

	mu        sync.Mutex // guards what follows
	decisions ring[*api.RecentDecision]
	byID      map[string]*api.RecentDecision
	changes   ring[*api.Change]
	points    ring[*api.HistoryPoint]
	last      *api.ListMembersResponse
	pointed   time.Time // the last point
}

// New returns an empty Chronicle.
func New() *Chronicle {
	return &Chronicle{
		byID:      make(map[string]*api.RecentDecision),
		decisions: ring[*api.RecentDecision]{most: maxDecisions},
		changes:   ring[*api.Change]{most: maxChanges},
		points:    ring[*api.HistoryPoint]{most: maxPoints},
		last:      &api.ListMembersResponse{},
	}
}

// Due tells whether a decision of now is to be kept, and then no other for a
// while: what nobody keeps need not be made.
func (c *Chronicle) Due(now time.Time) bool {
	due := c.due.Load()
	return now.UnixNano() >= due && c.due.CompareAndSwap(due, now.Add(decisionGap).UnixNano())
}

// Decided keeps a decision that was Due.
func (c *Chronicle) Decided(d *api.RecentDecision) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if gone := c.decisions.add(d); gone != nil {
		delete(c.byID, gone.GetDecisionId())
	}
	c.byID[d.GetDecisionId()] = d
}

// Reported adds what a caller told of a decision, if that is kept. What a report
// leaves out, an earlier one has said.
func (c *Chronicle) Reported(r *api.Report) {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := c.byID[r.GetDecisionId()]
	if d == nil {
		return
	}
	now := &api.Report{DecisionId: r.GetDecisionId(), Outcome: r.GetOutcome(), MemberId: r.GetMemberId(),
		PromptTokens: r.PromptTokens, CachedTokens: r.CachedTokens, OutputTokens: r.OutputTokens, TtftMs: r.TtftMs}
	if was := d.Report; was != nil {
		now.PromptTokens, now.CachedTokens = either(now.PromptTokens, was.PromptTokens), either(now.CachedTokens, was.CachedTokens)
		now.OutputTokens, now.TtftMs = either(now.OutputTokens, was.OutputTokens), either(now.TtftMs, was.TtftMs)
		if now.MemberId == "" {
			now.MemberId = was.MemberId
		}
	}
	d.Report = now
}

func either[T any](a, b *T) *T {
	if a != nil {
		return a
	}
	return b
}

// Decisions are those for a model and a member, the newest first.
func (c *Chronicle) Decisions(model, member string, most int) []*api.RecentDecision {
	if most <= 0 {
		most = usualDecisions
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var list []*api.RecentDecision
	for d := range c.decisions.newest() {
		if len(list) == most {
			break
		}
		if model != "" && d.GetModel() != model || member != "" && chosen(d) != member {
			continue
		}
		list = append(list, &api.RecentDecision{DecisionId: d.DecisionId, RequestId: d.RequestId, Tenant: d.Tenant, Model: d.Model, TimeMs: d.TimeMs,
			Ranking: d.Ranking, Counterfactual: d.Counterfactual, Report: d.Report})
	}
	return list
}

// chosen is the member that a decision is for.
func chosen(d *api.RecentDecision) string {
	if list := d.GetRanking().GetCandidates(); len(list) > 0 {
		return list[0].GetMember().GetId()
	}
	return ""
}

// Members is told how the members are: it keeps what is otherwise than before and,
// now and then, the counts. sums are those that no member has.
func (c *Chronicle) Members(now time.Time, fleet *api.ListMembersResponse, sums *api.HistoryPoint) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, change := range Between(c.last, fleet) {
		change.TimeMs = milliseconds(now)
		c.changes.add(change)
	}
	c.last = fleet
	if now.Sub(c.pointed) < pointGap {
		return
	}
	c.pointed = now
	c.points.add(point(now, fleet, sums))
}

func point(now time.Time, fleet *api.ListMembersResponse, sums *api.HistoryPoint) *api.HistoryPoint {
	p := &api.HistoryPoint{
		TimeMs: milliseconds(now), Decisions: fleet.GetDecisions(),
		ReportedPromptTokens: sums.GetReportedPromptTokens(), PredictedCachedTokens: sums.GetPredictedCachedTokens(), ReportedCachedTokens: sums.GetReportedCachedTokens(),
	}
	for _, m := range fleet.GetMembers() {
		p.RunningRequests += m.GetRunningRequests()
		p.WaitingRequests += m.GetWaitingRequests()
		switch m.GetCacheState().GetTrust() {
		case api.Trust_TRUST_EXACT:
			p.ExactMembers++
		case api.Trust_TRUST_APPROXIMATE:
			p.ApproximateMembers++
		case api.Trust_TRUST_SYNCING:
			p.SyncingMembers++
		default:
			p.UnknownMembers++
		}
	}
	return p
}

// Set keeps that a setting was changed.
func (c *Chronicle) Set(now time.Time, name, from, to string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changes.add(&api.Change{TimeMs: milliseconds(now), What: name, From: from, To: to, Why: "the configuration was read again"})
}

// Changes are the last ones, the newest first.
func (c *Chronicle) Changes(most int) (list []*api.Change) {
	if most <= 0 {
		most = usualChanges
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for change := range c.changes.newest() {
		if len(list) == most {
			break
		}
		list = append(list, change)
	}
	return list
}

// History is the points, the oldest first.
func (c *Chronicle) History() []*api.HistoryPoint {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := make([]*api.HistoryPoint, len(c.points.kept))
	i := len(list)
	for p := range c.points.newest() {
		i--
		list[i] = p
	}
	return list
}

func milliseconds(at time.Time) float64 { return float64(at.UnixMicro()) / 1000 }
