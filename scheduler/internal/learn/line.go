package learn

import "math"

const (
	// guessTokens is the length of the requests that a prior stands for.
	guessTokens = 2000.0
	// guessed observations, off by as much as they are long, stand for how far
	// observations scatter until somebody has shown it. Of few the error is taken
	// to be larger than they show: they are not even as a fit wants them.
	guessed, fewSeen = 1, 4
	// independent is how many observations are worth as many at most: those of
	// one time share its load. What others of the model show of the scatter
	// stands for as many.
	independent = 16
)

// line fits ms = A*requests + B*tokens to prefills, and knows how good it is.
type line struct {
	// Faded sums of the normal equations.
	rr, rt, tt, ry, ty, yy float64
	n                      float64 // observations
}

// scatter is how far observations lie from their fit: the mean of the squares,
// relative to what a request takes, and of how many.
type scatter struct{ square, n float64 }

// guess is the scatter where nothing was seen.
var guess = scatter{square: 1}

// join adds the scatter of others.
func (s *scatter) join(o scatter) {
	if n := s.n + o.n; n > 0 {
		s.square = (s.square*(s.n+guessed) + o.square*o.n) / (n + guessed)
		s.n = n
	}
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
// and agree with the fit. around is the scatter that observations are taken to
// have; own is theirs.
func (l *line) curve(prior Curve, weight, tokens float64, around scatter) (c Curve, variance float64, own scatter) {
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
		return prior, math.Inf(1), scatter{}
	}
	c = Curve{A: a, B: b, C: prior.C}
	if l.n == 0 {
		return c, math.Inf(1), scatter{}
	}
	ms := a + b*tokens
	squares := l.yy - 2*(a*l.ry+b*l.ty) + a*a*l.rr + 2*a*b*l.rt + b*b*l.tt
	squares = max(squares, 0) / (ms * ms)
	stands := min(guessed+around.n, independent)
	variance = (squares + stands*around.square) / (l.n + stands) * ((tt-2*tokens*l.rt+tokens*tokens*rr)/det + l.n/(l.rr*independent))
	variance *= (1 + fewSeen/l.n) * (1 + fewSeen/l.n)
	if !(variance >= 0) {
		return c, math.Inf(1), scatter{}
	}
	return c, variance, scatter{squares / l.n, l.n}
}
