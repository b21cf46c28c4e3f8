package policy

// random gives every candidate the same chance.
func random(r *Round, scores []float64) {
	x := r.Random
	for i := range scores {
		// SplitMix64: one step of the sequence for each candidate.
		x += 0x9e3779b97f4a7c15
		z := (x ^ x>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		scores[i] = float64((z ^ z>>31) >> 11)
	}
}
