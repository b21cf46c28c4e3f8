package learn

import "math"

// batchShare is what one more request adds to a step before that is learned:
// published fits lie between 1/650 and 1/250 of an empty step.
const batchShare = 1.0 / 400

// steps fits a step of decoding: Base + Request for each request running. What
// the length of their contexts adds cannot be told from totals: it is in both.
type steps struct{ nn, nb, bb, ny, by float64 }

func (s *steps) add(ms, batch, n float64) {
	w := math.Sqrt(min(n, 1000))
	s.nn += w
	s.nb += w * batch
	s.bb += w * batch * batch
	s.ny += w * ms
	s.by += w * batch * ms
}

// join adds what another fit has seen.
func (s *steps) join(o *steps) {
	s.nn += o.nn
	s.nb += o.nb
	s.bb += o.bb
	s.ny += o.ny
	s.by += o.by
}

func (s *steps) fade(keep float64) {
	for _, sum := range []*float64{&s.nn, &s.nb, &s.bb, &s.ny, &s.by} {
		*sum *= keep
	}
}

// fit returns both around what is usual for a mean step: ms and nothing learned
// of the batch. Where the batch never changed only their sum is known.
func (s *steps) fit(mean float64) (base, request float64) {
	usual := mean * batchShare
	if s.nn <= 0 {
		return mean, usual
	}
	// The slope is tied to the usual one as by a few observations that are ten
	// requests apart; the base is free.
	const tie = 300
	spread := s.bb - s.nb*s.nb/s.nn
	request = (s.by - s.nb*s.ny/s.nn + tie*usual) / (spread + tie)
	request = max(request, 0)
	base = (s.ny - request*s.nb) / s.nn
	if !(base > 0) || !(request <= math.MaxFloat32) {
		return mean, usual
	}
	return base, request
}
