package arrival

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
)

// draw is a distribution of lengths or pauses: one value, or a lognormal or
// normal one of which what falls outside the bounds is moved to them.
type draw struct {
	normal             bool
	mean, sd, min, max float64 // mean and sd before the bounds
}

// parseDraw reads 300, 1500~1200:100-10000 (lognormal: mean~sd:min-max) or
// n300~150:10-1000 (normal).
func parseDraw(text string) (draw, error) {
	bad := func() (draw, error) {
		return draw{}, fmt.Errorf("%q: want a number, mean~sd:min-max (lognormal) or nmean~sd:min-max (normal), at most %d", text, maxTokens)
	}
	if v, err := strconv.ParseFloat(text, 64); err == nil {
		if !(v >= 0 && v <= maxTokens) {
			return bad()
		}
		return draw{mean: v, min: v, max: v}, nil
	}
	var d draw
	body, normal := strings.CutPrefix(text, "n")
	d.normal = normal
	mean, body, ok1 := strings.Cut(body, "~")
	sd, body, ok2 := strings.Cut(body, ":")
	low, high, ok3 := strings.Cut(body, "-")
	if !ok1 || !ok2 || !ok3 {
		return bad()
	}
	for _, part := range []struct {
		text string
		to   *float64
	}{{mean, &d.mean}, {sd, &d.sd}, {low, &d.min}, {high, &d.max}} {
		v, err := strconv.ParseFloat(part.text, 64)
		if err != nil || !(v >= 0 && v <= maxTokens) {
			return bad()
		}
		*part.to = v
	}
	if d.min > d.max || (!d.normal && d.mean == 0) {
		return bad()
	}
	return d, nil
}

func (d draw) value(rng *rand.Rand) float64 {
	if d.sd == 0 {
		return min(d.max, max(d.min, d.mean))
	}
	v := rng.NormFloat64()
	if d.normal {
		v = d.mean + d.sd*v
	} else {
		// Mean and sd are the lognormal's own, not its logarithm's.
		s2 := math.Log1p(d.sd * d.sd / (d.mean * d.mean))
		v = math.Exp(math.Log(d.mean) - s2/2 + math.Sqrt(s2)*v)
	}
	return min(d.max, max(d.min, v))
}

// tokens is a value as a length.
func (d draw) tokens(rng *rand.Rand) int { return int(math.Round(d.value(rng))) }
