// Package policy is arithmetic on candidates: from what each has cached, how
// loaded it is and how fast, to a score. A policy sees all candidates, looks
// nothing up, keeps nothing and draws no random number that it was not given.
// The registry is the switch in Named; a new policy is one case, one file and
// one test.
//
// Every candidate also gets a Cost in ms by part, whatever the policy, so that
// an answer can be explained and compared.
package policy

import (
	"errors"
	"fmt"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

// ErrUnknown says that no policy has the name asked for.
var ErrUnknown = errors.New("unknown policy")

// Default is the policy of requests that name none.
const Default = "default"

// Candidate is one member as a policy sees it.
type Candidate struct {
	// GPU, Host, Disk are cached prompt tokens by where they lie; Predicted
	// were sent there by an earlier decision and are not confirmed.
	GPU, Host, Disk, Predicted int
	// Uncached tokens have to be computed.
	Uncached int
	Load     Load
	Speed    *learn.Speed
}

// cached is the usable prefix.
func (c *Candidate) cached() int { return c.GPU + c.Host + c.Disk + c.Predicted }

// Load is how loaded a candidate is believed to be. Within a round all loads
// stand on the same kind of knowledge.
type Load struct {
	// Requests at the engine.
	Requests float64
	// Tokens to be computed before a new request, and how long that takes.
	Tokens, WaitMS float64
	// Last is the number of the decision that chose the member last; 0: none.
	Last uint64
}

// LoadOf is the load of a member with these reservations after waitMS of
// reserved prefill. gauges tells to use the engine's sample; it must be false
// unless every candidate has a recent one, because a sample says more than our
// own counts and would always look worse. Requests that wait at the engine and
// are not ours are taken for mean ones.
func LoadOf(m *fleet.Member, r fleet.Reserved, waitMS float64, s *learn.Speed, gauges bool) Load {
	l := Load{
		Requests: float64(r.Open),
		Tokens:   float64(r.Tokens),
		WaitMS:   waitMS,
		Last:     r.Last,
	}
	if !gauges {
		return l
	}
	l.Requests = float64(m.Requests(r))
	if others := m.Load.Waiting - r.PrefillsSeen; others > 0 {
		l.Tokens += float64(others) * s.PromptTokens
		l.WaitMS += float64(others) * s.Prefill(s.PromptTokens, 0)
	}
	return l
}

// Round is one choice: what a policy sees.
type Round struct {
	Candidates []Candidate
	// Costs of the candidates, by Estimate.
	Costs []Cost
	// Rho is the share of the candidates' prefill capacity in use, smoothed;
	// NaN: not known.
	Rho float64
	// Output tokens that the request is expected to produce; 0: not known.
	Output float64
	// Random number for this round.
	Random uint64
}

// Policy is one way to rank.
type Policy struct {
	Name string
	// Score writes one number for each candidate; the lowest wins.
	Score func(r *Round, scores []float64)
	// Times tells that scores are predicted ms, where a small difference
	// means nothing. Otherwise only equal scores are ties.
	Times bool
}

// Named returns the policy with that name; the empty name is Default.
func Named(name string) (Policy, error) {
	switch name {
	case "", Default:
		return Policy{Name: Default, Score: cost, Times: true}, nil
	case "random":
		return Policy{Name: name, Score: random}, nil
	case "round-robin":
		return Policy{Name: name, Score: roundRobin}, nil
	case "least-requests":
		return Policy{Name: name, Score: leastRequests}, nil
	case "least-tokens":
		return Policy{Name: name, Score: leastTokens}, nil
	case "longest-prefix":
		return Policy{Name: name, Score: longestPrefix}, nil
	}
	return Policy{}, fmt.Errorf("policy %q: %w", name, ErrUnknown)
}
