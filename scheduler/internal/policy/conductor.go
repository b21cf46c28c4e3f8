package policy

// conductor predicts the time to the first token where a member may also copy
// the prefix from the one that has most of it: where that is more than
// threshold times its own, the copy of the rest is charged instead of its
// prefill. Without engines that copy, or at an endless threshold, it is the
// plain predicted time.
type conductor struct{ threshold, transfer float64 }

func newConductor() *conductor { return &conductor{threshold: 2, transfer: 0} }

func (c *conductor) parameters() []parameter {
	return []parameter{
		{"threshold", &c.threshold, 1, 1e9},
		// transfer in ms a token; 0: as long as a load from host memory.
		{"transfer", &c.transfer, 0, 1e6},
	}
}

func (c *conductor) score(r *Round, scores []float64) {
	best := 0
	for i := range r.Candidates {
		best = max(best, r.Candidates[i].cached())
	}
	for i := range scores {
		m := &r.Candidates[i]
		scores[i] = r.Costs[i].FirstToken()
		own := m.cached()
		if best == own || float64(best) <= c.threshold*float64(own) {
			continue
		}
		token := c.transfer
		if token == 0 {
			token = m.Speed.HostMS
		}
		missing := max(m.Uncached-(best-own), 1)
		scores[i] = r.Costs[i].Wait + r.Costs[i].Load + token*float64(best-own) + m.Speed.Prefill(float64(missing), float64(best))
	}
}
