package policy

// prefixHash is consistent hashing with bounded loads: a prompt belongs to the
// first in line by the hash of its beginning, and goes to the next where that
// one has more than factor x the mean of the candidates' requests and more
// than margin above it.
type prefixHash struct{ factor, margin float64 }

func newPrefixHash() *prefixHash { return &prefixHash{factor: 1.25, margin: 4} }

func (h *prefixHash) parameters() []parameter {
	return []parameter{{"factor", &h.factor, 1, 1e9}, {"margin", &h.margin, 1, 1e9}}
}

func (h *prefixHash) score(r *Round, scores []float64) {
	limit := bound(r.Candidates, h.factor, h.margin)
	for i := range scores {
		c := &r.Candidates[i]
		scores[i] = line(c.Draw)
		if c.Load.Requests+1 > limit {
			scores[i]++
		}
	}
}
