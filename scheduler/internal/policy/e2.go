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
	answer, token := meanAnswer(r.Candidates)
	for i := range scores {
		c := &r.Candidates[i]
		s := c.Speed
		h := c.History
		if h == nil {
			h = &nothing
		}
		scores[i] = s.Time(h.Lately) + c.Load.Requests*answer*(s.B/token) + s.Time(h.Victims) +
			s.Prefill(float64(max(c.Uncached, 1)), float64(c.cached()))
		if holds := c.cached() == best && !r.Moved; exploit && !holds && !h.Placed {
			scores[i] += last
		}
	}
}

var nothing History

// meanAnswer is the time of a mean answer, summed over the candidates, and of
// a token in prefill, likewise, in ms. How long answers are is a matter of the
// prompts, and the time between tokens depends on the load, which counts
// already: what is a member's own in it is taken to be as in its prefill, which
// is a share of the sum and never overflows.
func meanAnswer(list []Candidate) (answer, token float64) {
	var output, step float64
	for i := range list {
		s := list[i].Speed
		output += s.OutputTokens
		step += s.StepMS
		token += s.B
	}
	if token <= 0 {
		return 0, 1
	}
	return output / float64(len(list)) * step, token
}
