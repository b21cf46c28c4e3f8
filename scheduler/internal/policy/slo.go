package policy

import "math"

// slo takes the least used of those that have room for the request, on the
// kind of member that leaves it the most time. Another kind is taken where it
// is in time too. It waits otherwise.
func slo(r *Round, scores []float64) {
	pull(r, scores, func(f *SLO) float64 { return f.Used + f.Share })
}

// pull scores by use within a kind of member, the kind with the most slack
// first. A request that finds no room is told so by scores from full on, where
// the fewest requests come first, as they do everywhere if any share is not
// known: 0 would always look best.
func pull(r *Round, scores []float64, use func(*SLO) float64) {
	if !shared(r) {
		leastRequests(r, scores)
		return
	}
	for i := range scores {
		f, l := &r.SLOs[i], &r.Candidates[i].Load
		place, late := r.place(f.Group)
		if f.fits(l) && !late {
			scores[i] = 2*float64(place) + min(use(f), 1)
		} else {
			scores[i] = full + then(l.Requests, f.Used)
		}
	}
}

// shared tells whether all shares are known.
func shared(r *Round) bool {
	if len(r.SLOs) < len(r.Candidates) {
		return false
	}
	for i := range r.SLOs {
		if math.IsNaN(r.SLOs[i].Share) {
			return false
		}
	}
	return true
}

// place is the number of kinds of member with more slack than this one. late
// tells that this one would miss the target, and is not the best there is: the
// best is tried even if late.
func (r *Round) place(group int) (place int, late bool) {
	own := r.Slack[group]
	for g, slack := range r.Slack {
		if slack > own || slack == own && g < group {
			place++
		}
	}
	return place, place > 0 && own < 0
}
