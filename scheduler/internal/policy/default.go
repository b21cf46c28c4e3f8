package policy

import "math"

const (
	// stallWeight weighs the time that running requests stand still while the
	// missing tokens are computed.
	stallWeight = 0.01
	// decodeWeight weighs the longer decode in a larger batch against time to
	// the first token. Steps are longer under load for other reasons too, so
	// that more than a little of it costs more time than it gains.
	decodeWeight = 0.05
	// stepShare is what one more request adds to a step: published fits lie
	// between 1/650 and 1/250 of an empty step.
	stepShare = 1.0 / 400
	// horizon is the time in ms that a burst is measured by.
	horizon = 1000
)

// Cost is predicted time in ms. The parts add up to Total.
type Cost struct {
	Total float64
	// Wait until the first own step, Load of host and disk blocks, Prefill of
	// what is missing: together the time to the first token.
	Wait, Load, Prefill float64
	// Miss is the price that others pay for the prefill.
	Miss float64
	// Decode is what the batch costs this request, and this request the
	// batch, beyond the candidate where that is least.
	Decode float64
}

// FirstToken is the predicted time to the first token.
func (c Cost) FirstToken() float64 { return c.Wait + c.Load + c.Prefill }

// Estimate fills r.Costs.
//
// A prefill delays everybody who comes after it. By queueing theory a ms of
// extra work costs them rho/(1-rho) ms, so missing tokens are charged 1 +
// rho/(1-rho) times their prefill: plain time to first token on an idle fleet,
// affinity near saturation. Rho is smoothed and comes too late for a burst, so
// the prefill that already waits, as a share of the next second, counts in its
// place where it is more: a burst of siblings then stays with few owners.
//
// Others are spread over all candidates, so what they pay is charged by the
// candidates' mean speed: how fast a member is believed to be counts once, in
// its own prefill, and no error of that is multiplied near saturation.
func Estimate(r *Round) {
	var waiting float64
	for i := range r.Candidates {
		waiting += r.Candidates[i].Load.WaitMS
	}
	rho := waiting / (horizon * float64(len(r.Candidates)))
	if r.Rho > rho {
		rho = r.Rho
	}
	miss := price(rho) * meanToken(r.Candidates)
	least := math.Inf(1)
	for i := range r.Candidates {
		c := &r.Candidates[i]
		// The last token is computed even if all are cached.
		prefill := c.Speed.Prefill(float64(max(c.Uncached, 1)), float64(c.cached()))
		output := r.Output
		if !(output > 0) {
			output = c.Speed.OutputTokens
		}
		cost := Cost{
			Wait:    c.Load.WaitMS,
			Load:    float64(c.Host)*c.Speed.Load(c.Speed.HostMS) + float64(c.Disk)*c.Speed.Load(c.Speed.DiskMS),
			Prefill: prefill,
			Miss:    miss * float64(max(c.Uncached, 1)),
			Decode: c.Load.Requests * (decodeWeight*output*stepShare*c.Speed.StepMS +
				stallWeight*prefill),
		}
		least = min(least, cost.Decode)
		r.Costs[i] = cost
	}
	for i := range r.Costs {
		c := &r.Costs[i]
		c.Decode -= least
		c.Total = c.Wait + c.Load + c.Prefill + c.Miss + c.Decode
	}
}

// meanToken is the time in ms that all candidates together take to compute as
// many tokens as there are candidates.
func meanToken(list []Candidate) float64 {
	var rate float64
	for i := range list {
		rate += 1 / list[i].Speed.B
	}
	return float64(len(list)) / rate
}

// price is rho/(1-rho), nothing where rho is not known.
func price(rho float64) float64 {
	if !(rho > 0) {
		return 0
	}
	rho = min(rho, 0.9)
	return rho / (1 - rho)
}

// cost is the default policy: the least predicted time.
func cost(r *Round, scores []float64) {
	for i := range scores {
		scores[i] = r.Costs[i].Total
	}
}
