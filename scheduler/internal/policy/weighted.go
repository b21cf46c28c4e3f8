package policy

import "math"

// weights adds up three shares: of the prompt that is cached, of the span
// between the longest and the shortest queue, and of the cache that is free.
// The highest sum wins. It is here to be compared with: shares have no unit,
// and one request more may outweigh any number of cached tokens.
type weights struct{ prefix, queue, kv float64 }

func newWeights() *weights { return &weights{prefix: 3, queue: 2, kv: 2} }

func (w *weights) parameters() []parameter {
	return []parameter{{"prefix", &w.prefix, 0, 1e6}, {"queue", &w.queue, 0, 1e6}, {"kv", &w.kv, 0, 1e6}}
}

// exact goes by what the members hold.
func (w *weights) exact(r *Round, scores []float64) {
	w.score(r, scores, (*Candidate).cached)
}

// approximate goes by what they were sent.
func (w *weights) approximate(r *Round, scores []float64) {
	w.score(r, scores, func(c *Candidate) int { return c.Sent })
}

func (w *weights) score(r *Round, scores []float64, matched func(*Candidate) int) {
	low, high, known := math.Inf(1), 0.0, true
	for i := range r.Candidates {
		l := &r.Candidates[i].Load
		low, high = min(low, l.Waiting), max(high, l.Waiting)
		known = known && l.KVUsage >= 0
	}
	kv := w.kv
	if !known {
		kv = 0 // it counts for all or for none
	}
	sum := w.prefix + w.queue + kv
	for i := range scores {
		c := &r.Candidates[i]
		s := w.queue
		if high > low {
			s *= (high - c.Load.Waiting) / (high - low)
		}
		if r.Length > 0 {
			s += w.prefix * min(float64(matched(c))/float64(r.Length), 1)
		}
		if kv > 0 {
			s += kv * (1 - c.Load.KVUsage)
		}
		scores[i] = 0
		if sum > 0 {
			scores[i] = 1 - s/sum
		}
	}
}
