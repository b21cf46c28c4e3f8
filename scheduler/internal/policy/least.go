package policy

// leastRequests takes the member with the fewest requests.
func leastRequests(r *Round, scores []float64) {
	for i := range scores {
		scores[i] = r.Candidates[i].Load.Requests
	}
}

// leastTokens takes the member with the fewest tokens to compute, then the
// fewest requests. It does not look at what is cached.
func leastTokens(r *Round, scores []float64) {
	for i := range scores {
		scores[i] = then(r.Candidates[i].Load.Tokens, r.Candidates[i].Load.Requests)
	}
}

// then orders by first, and where that is equal by second. first is a count.
func then(first, second float64) float64 { return first + second/(second+1)*0.999 }
