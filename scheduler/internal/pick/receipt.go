package pick

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// Decision is the answer to a request.
type Decision struct {
	// ID to name in Report; empty when nothing was reserved.
	ID string
	// Candidates, best first, at most as many as asked for.
	Candidates []Candidate
	// Reason: one sentence, why the first is first. Why is the same in a word.
	Reason string
	Why    Why
	// Policy that was applied.
	Policy string
	// Fallbacks are what was missing where the answer does not stand on exact
	// prefixes; none otherwise.
	Fallbacks []Fallback
	// Model as the request named it, and how many Candidates there were in all.
	Model  string
	Number int
	// PromptTokens; 0: not known.
	PromptTokens int
	// EnginePriority to put into the request where the engine serves by it.
	EnginePriority int64
	// ExpectedOutput tokens that the answer stands on; 0: not known.
	ExpectedOutput int
	// SlackMS is what the predicted time on the first leaves of the target, from
	// when the request came; NaN: no target, or nobody asked.
	SlackMS float64
	// Decode is the member to decode on when the first is to prefill only; nil:
	// the first does both.
	Decode *Candidate
	// Stale: nobody was heard for too long, this is the last known state.
	Stale bool
	// Shadow is what the policy that does not decide would have done.
	Shadow Counterfactual
}

// Candidate is one member of the ranked answer.
type Candidate struct {
	Member *fleet.Member
	// Adapter that the request will use; empty: the base model.
	Adapter string
	Cached  Cached
	// Belief in what this answer says of the member's cache: that in its
	// cache state, or APPROXIMATE where what was sent there stands in for it.
	fleet.Belief
	// Uncached tokens have to be computed.
	Uncached int
	Cost     policy.Cost
	// Age since the member was last heard, LoadAge of its load sample; a
	// negative LoadAge: there is none.
	Age, LoadAge time.Duration
	// Running and Waiting requests as believed now, reservations included.
	Running, Waiting int
	// Pull is from where blocks are quicker pulled than computed; its Member is
	// nil where that is nowhere.
	Pull Pull
}

// Cached is the usable prefix in tokens by where it lies. Host and Disk are
// what comes beyond the tiers before; Predicted what is believed there beyond all
// that is known: sent by an earlier decision and confirmed by no event, or in the
// last known cache state.
type Cached struct{ GPU, Host, Disk, Predicted int }

// Known is what the cache state of the cache promises.
func (c Cached) Known() int { return c.GPU + c.Host + c.Disk }

func (m *draft) receipt(r *Request, pol policy.Policy, now time.Time) *Decision {
	top := r.top()
	order := m.sorted(top)
	if top > 0 && top < len(order) {
		order = order[:top]
	}
	length := r.Prompt.length()
	d := &Decision{
		Candidates:     make([]Candidate, len(order)),
		Policy:         pol.Name,
		Fallbacks:      m.fallbacks(r, pol, now),
		Model:          r.Model,
		Number:         len(m.eligible.list),
		PromptTokens:   length,
		EnginePriority: priority(now, m.round.Costs[m.best]),
		ExpectedOutput: int(m.round.Output),
		SlackMS:        math.NaN(),
		Stale:          m.eligible.view.Stale(now),
	}
	if m.best < len(m.round.SLOs) {
		d.SlackMS = m.round.SLOs[m.best].SlackMS
	}
	for i, at := range order {
		c := &m.eligible.list[at]
		a, has := &d.Candidates[i], c.has()
		*a = Candidate{
			Member:  c.member,
			Adapter: c.adapter,
			Cached:  Cached{has.gpu, has.host, has.disk, has.predicted},
			Cost:    m.round.Costs[at],
			Age:     max(0, now.Sub(c.member.LastHeartbeat)),
			LoadAge: -1,
		}
		a.Belief = c.believe(m.eligible.view, now)
		a.Uncached = max(0, length-a.Cached.Known()-a.Cached.Predicted)
		a.Waiting = min(max(c.member.Load.Waiting, 0), int(c.requests))
		a.Running = int(c.requests) - a.Waiting
		if !c.member.Load.At.IsZero() {
			a.LoadAge = max(0, now.Sub(c.member.Load.At))
		}
	}
	d.Reason, d.Why = m.reason(length, pol), m.why(pol)
	return d
}

// Fallback is one thing that an answer lacks, in a word and in a sentence.
type Fallback struct {
	Kind FallbackKind
	Text string
}

// FallbackKind names what an answer lacks.
type FallbackKind uint8

const (
	// NoTokens: there was no prompt, or nobody turned it into tokens.
	NoTokens FallbackKind = iota + 1
	// NoBlockSize: of no candidate the block size is known.
	NoBlockSize
	// OtherBlockSize: the keys do not fit some candidates.
	OtherBlockSize
	// NotExact: the state of the first candidate's cache is not.
	NotExact
	// Assumed: what was sent to the first candidate stands for that state.
	Assumed
	// NoState: of no candidate's cache anything is known.
	NoState
	// AllFailing: callers reported failures of every candidate.
	AllFailing
	// AllLost: every candidate is silent or out of its agent's reach.
	AllLost
	// AllWithdrawn: every candidate's pod is about to go, or is not ready.
	AllWithdrawn
	// NoHeartbeats: this is the last that was known of anybody.
	NoHeartbeats
)

// Fallback is all that the answer lacks in one sentence; empty: nothing.
func (d *Decision) Fallback() string {
	texts := make([]string, len(d.Fallbacks))
	for i, f := range d.Fallbacks {
		texts[i] = f.Text
	}
	return strings.Join(texts, "; ")
}

// fallbacks names what the answer lacks.
func (m *draft) fallbacks(r *Request, pol policy.Policy, now time.Time) (lacks []Fallback) {
	view := m.eligible.view
	lack := func(kind FallbackKind, text string) { lacks = append(lacks, Fallback{kind, text}) }
	instead := ": load only"
	if pol.Needs&policy.NeedsText != 0 {
		instead = ": by the beginning of the prompt"
	}
	best := &m.eligible.list[m.best]
	belief := best.believe(view, now)
	switch {
	case len(r.Prompt.Tokens) == 0 && r.Prompt.BlockSize == 0:
		why := r.Prompt.Fallback
		if why == "" {
			why = "no tokens in the request"
		}
		lack(NoTokens, why+instead)
	case len(m.keys.scopes) == 0:
		lack(NoBlockSize, "block size of no candidate is known"+instead)
	case belief.Trust == fleet.Exact:
	case best.has().assumed:
		of := view.Believe(best.member, now).Trust
		lack(Assumed, "cache state of the first is "+of.String()+": what was sent there stands for it")
	case m.eligible.blind(now):
		lack(NoState, "no cache state of any candidate: load and earlier decisions only")
	case belief.Reason != "":
		lack(NotExact, "cache state of the first is "+belief.Trust.String()+": "+belief.Reason)
	default:
		lack(NotExact, "cache state of the first is "+belief.Trust.String())
	}
	if m.keys.misfits > 0 {
		lack(OtherBlockSize, fmt.Sprintf("keys for blocks of %d tokens do not fit %d of %d candidates",
			r.Prompt.BlockSize, m.keys.misfits, len(m.eligible.list)))
	}
	switch best.health { // that of all of them: see filter
	case withdrawn:
		lack(AllWithdrawn, "every candidate's pod is about to go or is not ready: the best of them; "+best.member.Withdrawn.String())
	case failing:
		lack(AllFailing, "every candidate failed lately by report: the best of them")
	case unreachable:
		lack(AllLost, "every candidate is silent or out of its agent's reach: the best of them")
	}
	if view.Stale(now) {
		lack(NoHeartbeats, "no heartbeat of any member: last known state")
	}
	return lacks
}

// Why names the kinds of reasons.
type Why uint8

const (
	// WhyCost: its predicted time is the least.
	WhyCost Why = iota
	// WhyNear: it is one of several as good.
	WhyNear
	// WhySession: it is the session's last member among several as good.
	WhySession
	// WhyOnly: there is no other candidate.
	WhyOnly
	// WhyPolicy: by a policy whose score is no time.
	WhyPolicy
)

func (y Why) String() string {
	return [...]string{"cost", "near", "session", "only", "policy"}[y]
}

func (m *draft) why(pol policy.Policy) Why {
	switch {
	case len(m.eligible.list) == 1:
		return WhyOnly
	case !pol.Times:
		return WhyPolicy
	case m.sticky && m.near > 1:
		return WhySession
	case m.near > 1:
		return WhyNear
	}
	return WhyCost
}

// reason says in one sentence why the best is the best.
func (m *draft) reason(length int, pol policy.Policy) string {
	c, cost := &m.eligible.list[m.best], &m.round.Costs[m.best]
	has := c.has()
	b := make([]byte, 0, 256)
	b = append(b, c.member.Info.Name...)
	if length > 0 {
		b = append(b, " has "...)
		b = strconv.AppendInt(b, int64(c.cached()), 10)
		b = append(b, " of "...)
		b = strconv.AppendInt(b, int64(length), 10)
		b = append(b, " tokens cached"...)
		if has.host+has.disk > 0 {
			b = append(b, " ("...)
			b = strconv.AppendInt(b, int64(has.host+has.disk), 10)
			b = append(b, " outside the GPU)"...)
		}
		if has.predicted > 0 {
			b = append(b, " and "...)
			b = strconv.AppendInt(b, int64(has.predicted), 10)
			b = append(b, " under way"...)
		}
		b = append(b, ',')
	}
	b = append(b, " first token expected in "...)
	b = appendMS(b, cost.FirstToken())
	switch m.why(pol) {
	case WhyOnly:
		b = append(b, "; it is the only candidate"...)
	case WhyPolicy:
		b = append(b, "; chosen by "...)
		b = append(b, pol.Name...)
	case WhySession:
		b = append(b, "; last member of the session among "...)
		b = strconv.AppendInt(b, int64(m.near), 10)
		b = append(b, " as good"...)
	case WhyNear:
		b = append(b, "; one of "...)
		b = strconv.AppendInt(b, int64(m.near), 10)
		b = append(b, " as good"...)
	default:
		next := m.order[1]
		b = append(b, "; next is "...)
		b = append(b, m.eligible.list[next].member.Info.Name...)
		b = append(b, " with "...)
		b = strconv.AppendInt(b, int64(m.eligible.list[next].cached()), 10)
		b = append(b, " cached, "...)
		b = appendMS(b, m.round.Costs[next].FirstToken())
	}
	return string(b)
}

func appendMS(b []byte, ms float64) []byte {
	precision := 0
	if ms < 10 {
		precision = 1
	}
	b = strconv.AppendFloat(b, ms, 'f', precision, 64)
	return append(b, " ms"...)
}
