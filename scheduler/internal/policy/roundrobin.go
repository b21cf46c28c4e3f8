package policy

// roundRobin takes the member whose turn was longest ago. Unlike a counter
// modulo the number of candidates it stays even when requests of several
// models, or with different exclusions, alternate.
func roundRobin(r *Round, scores []float64) {
	for i := range scores {
		scores[i] = float64(r.Candidates[i].Load.Last)
	}
}
