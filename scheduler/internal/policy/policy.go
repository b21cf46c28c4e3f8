// Package policy is arithmetic on candidates: from what each has cached, how
// loaded it is and how fast, to a score. A policy sees all candidates, looks
// nothing up, keeps nothing and draws no random number that it was not given.
// What it wants to know beyond that it says by its Needs, and finds in the
// Round. The registry is the table in named.go; a new policy is one row of it,
// one file and one test.
//
// Every candidate also gets a Cost in ms by part, whatever the policy, so that
// an answer can be explained and compared.
package policy

import (
	"math"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

// Candidate is one member as a policy sees it.
type Candidate struct {
	// GPU, Host, Disk are cached prompt tokens by where they lie; Predicted
	// were sent there by an earlier decision and are not confirmed.
	GPU, Host, Disk, Predicted int
	// Uncached tokens have to be computed.
	Uncached int
	Load     Load
	Speed    *learn.Speed
	// Capacity of the cache in tokens; 0: not known. Room of it holds nothing.
	Capacity, Spare int
	// BlockSize of the member in tokens; 0: not known.
	BlockSize int
	// Draw is what the request's key drew here, the highest first in line:
	// equal for all schedulers, and hardly moved by who else is there. For
	// policies with NeedsOwner or NeedsText.
	Draw uint64
	// Sent are the prompt's tokens that went here before and may still be
	// here, events or not. For policies with NeedsSent.
	Sent int
	// History is what was sent here lately; nil: nothing is known. For policies
	// with NeedsHistory.
	History *History
}

// History is what a member was sent lately.
type History struct {
	// Lately is the prefill of what was sent and may be missed again, Victims
	// that of what this request would push out.
	Lately, Victims learn.Work
	// Placed: the request's prefix was moved or copied to this member.
	Placed bool
}

// cached is the usable prefix.
func (c *Candidate) cached() int { return c.GPU + c.Host + c.Disk + c.Predicted }

// Load is how loaded a candidate is believed to be. Within a round all loads
// stand on the same kind of knowledge.
type Load struct {
	// Requests at the engine.
	Requests float64
	// Waiting requests, those sent since the engine last spoke among them.
	Waiting float64
	// Tokens to be computed before a new request, and how long that takes.
	Tokens, WaitMS float64
	// KVUsage is the share of the cache in use by requests; NaN where it is not
	// known.
	KVUsage float64
	// Blocks of the prompts of open decisions; those that they share count for
	// each. 0 where the block size is not known.
	Blocks float64
	// Last is the number of the decision that chose the member last; 0: none.
	Last uint64

	// What the engine's sample shows beyond what we have sent there: requests, how
	// long those of them take that wait, and the age of the sample in ms.
	others, othersMS, age float64
	// What Relax has put into Requests and WaitMS.
	relaxed, relaxedMS float64
}

// idle tells whether the member has nothing to do as far as anybody has seen.
// What Relax believes to have come to it since was seen by nobody.
func (l *Load) idle() bool {
	return l.Requests-l.relaxed <= 1e-9 && l.WaitMS-l.relaxedMS <= 1e-9
}

// Set makes l the load of a member with these reservations after waitMS of
// reserved prefill. gauges tells to use the engine's sample, of that age in ms; it must be false
// unless every candidate has a recent one, because a sample says more than our
// own counts and would always look worse. Requests that wait at the engine and
// are not ours are taken for mean ones.
func (l *Load) Set(m *fleet.Row, r *fleet.Reserved, waitMS float64, s *learn.Speed, gauges bool, age float64) {
	l.Tokens, l.WaitMS, l.Last = float64(r.Tokens), waitMS, r.Last
	l.others, l.othersMS, l.age, l.relaxed, l.relaxedMS = 0, 0, max(age, 0), 0, 0
	l.Blocks = 0
	if m.BlockSize > 0 {
		l.Blocks = float64(r.Prompt) / float64(m.BlockSize)
	}
	if !gauges {
		l.Requests, l.Waiting, l.KVUsage = float64(r.Open), float64(r.Prefills), math.NaN()
		return
	}
	l.Requests = float64(m.Requests(r))
	l.others = l.Requests - float64(r.Open)
	l.Waiting = float64(max(int(m.Waiting), 0) + r.Prefills - r.PrefillsSampled)
	l.KVUsage = m.KVUsage
	if others := int(m.Waiting) - r.PrefillsSampled; others > 0 {
		l.Tokens += float64(others) * s.PromptTokens
		l.othersMS = float64(others) * s.Prefill(s.PromptTokens, 0)
		l.WaitMS += l.othersMS
	}
}

// Relax lets what samples show beyond what we have sent count the less the older
// they are: others work off what they have and end, and those who come after them
// are spread as all are. What one member has more of them than the mean is halved
// in the time that it takes to serve it. Otherwise one sample that comes at a
// good moment would draw all requests to its member until the next.
func Relax(list []Candidate) {
	var others, othersMS float64
	for i := range list {
		others += list[i].Load.others
		othersMS += list[i].Load.othersMS
	}
	if others == 0 && othersMS == 0 {
		return
	}
	n := float64(len(list))
	others, othersMS = others/n, othersMS/n
	for i := range list {
		c, l := &list[i], &list[i].Load
		if stays := c.Speed.OutputTokens * c.Speed.StepMS; stays > 0 {
			l.relaxed = max(-l.Requests, (others-l.others)*l.age/(l.age+stays))
			l.Requests += l.relaxed
		}
		if works := max(l.othersMS, othersMS); works > 0 {
			l.relaxedMS = (othersMS - l.othersMS) * l.age / (l.age + works)
			l.WaitMS += l.relaxedMS
		}
	}
}

// Round is one choice: what a policy sees.
type Round struct {
	Candidates []Candidate
	// Costs of the candidates, by Estimate.
	Costs []Cost
	// Rho is the share of the candidates' prefill capacity in use, smoothed;
	// NaN: not known.
	Rho float64
	// Reuse is how many prompt tokens are found cached lately for each one that
	// is computed.
	Reuse float64
	// Output tokens that the request is expected to produce; 0: not known.
	Output float64
	// Length of the prompt in tokens; 0: not known.
	Length int
	// Moved: the request's prefix belongs to those only that have it Placed.
	// For policies with NeedsHistory.
	Moved bool
	// SLOs of the candidates, by Measure, and the best Slack by SLO.Group. Empty
	// where nobody wants them. Elapsed is the time in ms since the request came.
	SLOs    []SLO
	Slack   []float64
	Elapsed float64
	// Random number for this round.
	Random uint64
	// Owner is the place of the candidate that has the session, by its name or
	// by what is recognised of the conversation; -1: nobody among them. For
	// policies with NeedsOwner.
	Owner int
	// Left says why a policy that keeps owners left this one. The policy
	// writes it.
	Left Left
}

// ExpectedOutput is how many tokens the request is expected to produce on
// candidate i.
func (r *Round) ExpectedOutput(i int) float64 {
	if r.Output > 0 {
		return r.Output
	}
	return r.Candidates[i].Speed.OutputTokens
}
