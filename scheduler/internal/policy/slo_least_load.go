package policy

// sloLeastLoad takes the least used, whether there is room or not.
func sloLeastLoad(r *Round, scores []float64) {
	if !shared(r) {
		leastRequests(r, scores)
		return
	}
	for i := range scores {
		scores[i] = r.SLOs[i].Used
	}
}
