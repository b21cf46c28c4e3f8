package learn

import "math"

const (
	// lonely is the largest number of requests of an observation that is one of
	// a prefill by itself: the sums of more do not tell what each read.
	lonely = 2
	// enoughLone observations show what context costs.
	enoughLone = 20
	// loneTokens and lonePairs bring the three unknowns to one scale.
	loneTokens, lonePairs = 2000.0, loneTokens * loneTokens / 2
)

// lone is the fit of a whole Curve to prefills that were alone, around the
// linear fit: what the data do not tell apart stays linear.
type lone struct {
	xx [3][3]float64 // sums of products of requests, tokens and pairs
	xy [3]float64    // and of these with ms
	n  float64
}

// add takes requests alike, with so many tokens computed and cached each.
func (l *lone) add(w, requests, tokens, cached, ms float64) {
	x := [3]float64{requests, requests * tokens / loneTokens, requests * tokens * (cached + tokens/2) / lonePairs}
	for i := range x {
		for j := range x {
			l.xx[i][j] += w * x[i] * x[j]
		}
		l.xy[i] += w * x[i] * ms
	}
	l.n++
}

func (l *lone) fade(keep float64) {
	for i := range l.xx {
		for j := range l.xx[i] {
			l.xx[i][j] *= keep
		}
		l.xy[i] *= keep
	}
	l.n *= keep
}

// curve returns the fit, or the linear one where too little was seen or the
// data say what cannot be.
func (l *lone) curve(linear Curve) Curve {
	if l.n < enoughLone {
		return linear
	}
	a, y := l.xx, l.xy
	for i, v := range [3]float64{linear.A, linear.B * loneTokens, 0} {
		const weight = 0.01 // of the linear fit: it only breaks ties
		a[i][i] += weight
		y[i] += weight * v
	}
	v, ok := solve(a, y)
	if ok && v[0] < 0 {
		// Scatter takes the fixed part, which is small, below nothing: the best fit
		// without one.
		a[0], a[1][0], a[2][0], y[0] = [3]float64{1}, 0, 0, 0
		v, ok = solve(a, y)
	}
	c := Curve{A: v[0], B: v[1] / loneTokens, C: v[2] / lonePairs}
	if !ok || !(c.A >= 0) || !positive(c.B) || !(c.C >= 0) || c.A > math.MaxFloat32 {
		return linear
	}
	return c
}

// solve is Gaussian elimination with pivots.
func solve(a [3][3]float64, y [3]float64) (x [3]float64, ok bool) {
	for i := range a {
		pivot := i
		for j := i + 1; j < len(a); j++ {
			if math.Abs(a[j][i]) > math.Abs(a[pivot][i]) {
				pivot = j
			}
		}
		a[i], a[pivot] = a[pivot], a[i]
		y[i], y[pivot] = y[pivot], y[i]
		if !(math.Abs(a[i][i]) > 1e-12) {
			return x, false
		}
		for j := i + 1; j < len(a); j++ {
			f := a[j][i] / a[i][i]
			for k := i; k < len(a); k++ {
				a[j][k] -= f * a[i][k]
			}
			y[j] -= f * y[i]
		}
	}
	for i := len(a) - 1; i >= 0; i-- {
		x[i] = y[i]
		for j := i + 1; j < len(a); j++ {
			x[i] -= a[i][j] * x[j]
		}
		x[i] /= a[i][i]
	}
	return x, true
}
