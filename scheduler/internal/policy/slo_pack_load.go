package policy

// sloPackLoad fills one member to its capacity before it takes the next, so
// that the others are free for what is urgent, or can be shut down.
func sloPackLoad(r *Round, scores []float64) {
	pull(r, scores, func(f *SLO) float64 { return 1 - (f.Used + f.Share) })
}
