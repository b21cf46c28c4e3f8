package policy

// longestPrefix takes the member with the most cached tokens, then the fewest
// requests, however long the queue there is. It is here to be compared with.
func longestPrefix(r *Round, scores []float64) {
	for i := range scores {
		scores[i] = then(float64(r.Candidates[i].Uncached), r.Candidates[i].Load.Requests)
	}
}
