package learn

import "math"

const (
	// guessTokens is the length of the requests that a prior stands for.
	guessTokens = 2000.0
	// guessed observations, off by as much as they are long, stand for how far
	// observations scatter until they have shown it, and for so few the error is
	// taken to be larger than they show: a few may happen to agree.
	guessed, fewSeen = 1, 4
	// independent is how many observations are worth as many at most: those of
	// one time share its load.
	independent = 16
)

// line fits ms = A*requests + B*tokens to prefills, and knows how good it is.
type line struct {
	// Faded sums of the normal equations.
	rr, rt, tt, ry, ty, yy float64
	n                      float64 // observations
}

// add takes an observation: so many requests, with so many tokens in all.
func (l *line) add(w, requests, tokens, ms float64) {
	l.rr += w * requests * requests
	l.rt += w * requests * tokens
	l.tt += w * tokens * tokens
	l.ry += w * requests * ms
	l.ty += w * tokens * ms
	l.yy += w * ms * ms
	l.n++
}

func (l *line) fade(keep float64) {
	for _, sum := range []*float64{&l.rr, &l.rt, &l.tt, &l.ry, &l.ty, &l.yy, &l.n} {
		*sum *= keep
	}
}

// curve solves the fit around a prior that weighs as so many requests of
// guessTokens. It returns the relative variance of the time for a request of so
// many tokens, too: little where observations are many, lie around that length,
// and agree with the fit.
func (l *line) curve(prior Curve, weight, tokens float64) (Curve, float64) {
	rr := l.rr + weight
	tt := l.tt + weight*guessTokens*guessTokens
	ry := l.ry + weight*prior.A
	ty := l.ty + weight*guessTokens*guessTokens*prior.B
	det := rr*tt - l.rt*l.rt
	a, b := (ry*tt-ty*l.rt)/det, (ty*rr-ry*l.rt)/det
	if !(a >= 0) {
		a, b = 0, ty/tt
	}
	if !(b > 0) {
		a, b = ry/rr, prior.B/100
	}
	if !positive(b) || !(a >= 0 && a <= math.MaxFloat64) {
		return prior, math.Inf(1)
	}
	ms := a + b*tokens
	scatter := l.yy - 2*(a*l.ry+b*l.ty) + a*a*l.rr + 2*a*b*l.rt + b*b*l.tt
	scatter = (max(scatter, 0) + guessed*ms*ms) / (l.n + guessed)
	variance := scatter / (ms * ms) * ((tt-2*tokens*l.rt+tokens*tokens*rr)/det + l.n/(l.rr*independent))
	variance *= (1 + fewSeen/l.n) * (1 + fewSeen/l.n)
	if !(variance >= 0) {
		variance = math.Inf(1)
	}
	return Curve{A: a, B: b, C: prior.C}, variance
}
