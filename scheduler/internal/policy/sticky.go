package policy

import "math"

// sticky keeps to members that have nearly all of the prompt until they are
// saturated: those that have at least the share warm of it are the only ones
// in question, unless the best of them would be ready more than tau ms after
// the best of the others, a queue being worked off at rate tokens a second.
// Among those in question the one with the fewest tokens to compute wins, this
// request's among them.
type sticky struct{ warm, tau, rate float64 }

func newSticky() *sticky { return &sticky{warm: 0.8, tau: 18_000, rate: 15_928} }

func (s *sticky) parameters() []parameter {
	return []parameter{{"warm", &s.warm, 0, 1}, {"tau", &s.tau, 0, 1e9}, {"rate", &s.rate, 1, 1e9}}
}

func (s *sticky) score(r *Round, scores []float64) {
	warm, cold := math.Inf(1), math.Inf(1)
	for i := range r.Candidates {
		c := &r.Candidates[i]
		if s.isWarm(r, c) {
			warm = min(warm, c.Load.Tokens)
		} else {
			cold = min(cold, c.Load.Tokens)
		}
	}
	keep := !math.IsInf(warm, 1) && !(1000*(warm-cold)/s.rate > s.tau)
	for i := range scores {
		c := &r.Candidates[i]
		scores[i] = c.Load.Tokens + float64(max(c.Uncached, 0))
		if keep && !s.isWarm(r, c) {
			scores[i] += last
		}
	}
}

func (s *sticky) isWarm(r *Round, c *Candidate) bool {
	return r.Length > 0 && float64(c.cached()) >= s.warm*float64(r.Length)
}
