package policy

// twoChoices draws two members and takes the one with fewer requests.
func twoChoices(r *Round, scores []float64) {
	n := uint64(len(scores))
	first := r.Random % n
	second := first
	if n > 1 {
		second = (first + 1 + (r.Random>>32)%(n-1)) % n
	}
	for i := range scores {
		scores[i] = then(r.Candidates[i].Load.Requests, 0)
		if uint64(i) != first && uint64(i) != second {
			scores[i] += last
		}
	}
}

// last is added to the scores of those that are out of the question: more than
// any count of requests or tokens.
const last = 1e12
