package policy

// e2 is Preble's: a prompt of which more is cached than not goes to a member
// that has the most of it (exploit), any other one to the cheapest of all
// (explore). Cheapest is the least of
//
//	L  what the member was sent lately and may have to compute again, and
//	   the decode of its requests
//	M  what would have to be computed again because of what this pushes out
//	P  the prefill of this request's uncached tokens
//
// A prefix that was copied to other members belongs to those, too, and one that
// was moved to them alone.
type e2 struct{ share float64 }

func newE2() *e2 { return &e2{share: 0.5} }

func (e *e2) parameters() []parameter { return []parameter{{"share", &e.share, 0, 1}} }

func (e *e2) score(r *Round, scores []float64) {
	best, length := 0, 0
	for i := range r.Candidates {
		c := &r.Candidates[i]
		best = max(best, c.cached())
		length = max(length, c.cached()+c.Uncached)
	}
	exploit := r.Moved || best > 0 && float64(best) > e.share*float64(length)
	for i := range scores {
		c := &r.Candidates[i]
		scores[i] = c.sharedCost()
		if holds := c.cached() == best && !r.Moved; exploit && !holds && !c.History.Placed {
			scores[i] += last
		}
	}
}

// sharedCost is L + M + P in ms.
func (c *Candidate) sharedCost() float64 {
	s := c.Speed
	return s.Time(c.History.Lately) + c.Load.Requests*s.OutputTokens*s.StepMS +
		s.Time(c.History.Victims) +
		s.Prefill(float64(max(c.Uncached, 1)), float64(c.cached()))
}
