package learn

import (
	"cmp"
	"math"
	"slices"
	"time"
)

const (
	// alike is the difference, as a logarithm, that fits of equal engines may
	// have whatever the number of their observations: they are not equally
	// busy.
	alike = 0.1
	// manyErrors is the number of standard errors from which on a member's own
	// fit counts for more than its model's.
	manyErrors = 2.5
	// ownWeight and poolWeight are the numbers of requests that the prior of a
	// fit counts as: a guess, or what the model's members show.
	ownWeight, poolWeight = 0.1, 1
	// guessedRequests of the prior's lengths stand for a model of which none
	// has ended: short ones end first.
	guessedRequests = 10
)

// pool is what the members of one model show together. Lengths are those of its
// requests, wherever they went; members may differ in how fast they are.
type pool struct {
	members []*fit
	speed   Speed   // of a member that has shown nothing
	line    Curve   // the linear fit, which members are held against
	scatter scatter // of what all have shown
	total   float64
}

// settle finds the middle of what each member shows, by the evidence of each.
func (p *pool) settle() {
	var prompt, output, step average
	var all steps
	for _, f := range p.members {
		prompt.join(f.prompt)
		output.join(f.output)
		step.join(f.step)
		all.join(&f.steps)
	}
	s := Prior()
	s.PromptTokens = prompt.around(s.PromptTokens, guessedRequests)
	s.OutputTokens = output.around(s.OutputTokens, guessedRequests)
	s.StepMS = step.or(s.StepMS)
	s.StepBaseMS, s.StepRequestMS = all.fit(s.StepMS)
	p.speed, p.line, p.total = s, s.Curve, 0
	p.scatter = guess
	for _, f := range p.members {
		_, _, own := f.line.curve(Prior().Curve, ownWeight, s.PromptTokens, guess)
		p.scatter.join(own)
	}
	m := newMiddle(len(p.members))
	lines, own := make([]Curve, len(p.members)), make([]Speed, len(p.members))
	for i, f := range p.members {
		var variance float64
		lines[i], variance, _ = f.line.curve(Prior().Curve, ownWeight, s.PromptTokens, p.scatter)
		own[i] = f.beside(s)
		own[i].Curve = f.lone.curve(lines[i])
		m.weights[i] = f.evidence(variance)
		p.total += m.weights[i]
	}
	if !(p.total > 0) {
		return
	}
	p.line.A = m.of(func(i int) float64 { return lines[i].A })
	p.line.B = m.of(func(i int) float64 { return lines[i].B })
	p.speed.A = m.of(func(i int) float64 { return own[i].A })
	p.speed.B = m.of(func(i int) float64 { return own[i].B })
	p.speed.C = m.of(func(i int) float64 { return own[i].C })
	p.speed.HostMS = m.of(func(i int) float64 { return own[i].HostMS })
	p.speed.DiskMS = m.of(func(i int) float64 { return own[i].DiskMS })
	p.speed.OverheadMS = m.of(func(i int) float64 { return own[i].OverheadMS })
}

// evidence is the weight of what a member shows among the others, by the
// variance of its fit; none without observations.
func (f *fit) evidence(variance float64) float64 {
	if f.line.n == 0 {
		return 0
	}
	return 1 / (variance + alike*alike)
}

// of returns the speed of a member.
func (p *pool) of(f *fit, now time.Time) Speed {
	s := f.beside(p.speed)
	if own, share := p.apart(f); share > 0 {
		own = f.lone.curve(own)
		base, request := f.steps.fit(s.StepMS)
		for _, part := range []struct {
			of  *float64
			own float64
		}{{&s.A, own.A}, {&s.B, own.B}, {&s.C, own.C}, {&s.StepBaseMS, base}, {&s.StepRequestMS, request}} {
			*part.of += share * (part.own - *part.of)
		}
	}
	s.Learned = f.requests >= enough
	s.Busy = math.NaN()
	if b, ok := f.busy.share(now); ok {
		s.Busy = min(b, maxBusy)
	}
	return s
}

// apart is a member's own fit, and how much of its difference from the others is
// believed. That goes by the standard error of the logarithm: nothing of a
// difference of less than one, most of one of manyErrors and more.
func (p *pool) apart(f *fit) (own Curve, share float64) {
	tokens := p.speed.PromptTokens
	own, variance, _ := f.line.curve(p.line, poolWeight, tokens, p.scatter)
	weight := f.evidence(variance)
	if weight == 0 {
		return own, 0
	}
	difference := math.Log(own.Prefill(tokens, 0) / p.line.Prefill(tokens, 0))
	// The member is itself a part of what it is held against.
	square := (variance + alike*alike) * (1 - min(weight/p.total, 0.5))
	z := difference * difference / (square * manyErrors * manyErrors)
	share = z * z / (z*z + 1)
	if !(share >= 0) {
		return own, 0
	}
	return own, share
}

// middle finds weighted medians: half of the weight lies on either side of them,
// between two values by how far each is from that.
type middle struct {
	weights, values []float64
	order           []int
}

func newMiddle(n int) *middle {
	return &middle{make([]float64, n), make([]float64, n), make([]int, n)}
}

// of returns the median of the values; some weight is above zero.
func (m *middle) of(value func(i int) float64) float64 {
	half := 0.0
	for i := range m.order {
		m.order[i], m.values[i] = i, value(i)
		half += m.weights[i] / 2
	}
	slices.SortFunc(m.order, func(a, b int) int { return cmp.Compare(m.values[a], m.values[b]) })
	median, sum, before := 0.0, 0.0, 0.0
	for _, i := range m.order {
		w, v := m.weights[i], m.values[i]
		if w == 0 {
			continue
		}
		at := sum + w/2
		if at >= half {
			if sum > 0 {
				v = median + (v-median)*(half-before)/(at-before)
			}
			return v
		}
		median, sum, before = v, sum+w, at
	}
	return median
}
