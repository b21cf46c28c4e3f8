package reconcile

import "time"

const (
	// nearStep and farStep are the times between two moments of a row, rowLength how
	// many it has.
	nearStep  = 400 * time.Millisecond
	farStep   = 4 * time.Second
	rowLength = 24
)

// row holds moments from which growth is measured whether or not the engine was
// idle at them. One side may have been late at any of them. So a difference counts
// if it shows against confirmPolls of them in a row that are confirm apart, as
// it must show in as many polls.
type row struct{ anchors []anchor } // oldest first

func (r *row) add(o *observation, quiet bool, step time.Duration) {
	n := len(r.anchors)
	if n > 0 && o.at.Sub(r.anchors[n-1].at) < step {
		return
	}
	if n == rowLength {
		r.anchors = r.anchors[:copy(r.anchors, r.anchors[1:])]
	}
	r.anchors = append(r.anchors, anchorAt(o, quiet))
}

// differs gives the difference that shows against enough moments in a row, and by
// how many tokens at least.
func (r *row) differs(o *observation) (Kind, float64) {
	for i := range r.anchors {
		r.anchors[i].note(o)
	}
	if n := r.least(o, (*anchor).missing); n > 0 {
		return Missing, n
	}
	if n := r.least(o, (*anchor).foreign); n > 0 {
		return Foreign, n
	}
	return None, 0
}

// least is 0 if too few moments in a row show it.
func (r *row) least(o *observation, difference func(*anchor, *observation) float64) float64 {
	first, least := 0, 0.
	for i := range r.anchors {
		a := &r.anchors[i]
		n := difference(a, o)
		switch {
		case n <= 0:
			first, least = i+1, 0
			continue
		case i == first:
			least = n
		}
		least = min(least, n)
		if i-first+1 >= confirmPolls && a.at.Sub(r.anchors[first].at) >= confirm {
			return least
		}
	}
	return 0
}
