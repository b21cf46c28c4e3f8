package policy

import "math"

const (
	// stallWeight weighs the time that running requests stand still while the
	// missing tokens are computed.
	stallWeight = 0.01
	// decodeWeight weighs the longer decode in a larger batch against time to
	// the first token. Steps are longer under load for other reasons too, so
	// that more than a little of it costs more time than it gains.
	decodeWeight = 0.02
	// crowd is the share of those who come while there is a backlog that has to
	// wait for it: the others find a member that is free.
	crowd = 0.5
	// tailWeight is the worth of a cached token that is next to be evicted, as a
	// share of the mean cached token's.
	tailWeight = 0.5
	// horizon in ms, over which a backlog tells how busy a fleet is.
	horizon = 1000
	// maxRho and maxUsage keep the price of a miss finite.
	maxRho, maxUsage = 0.9, 0.97
)

// Cost is predicted time in ms. The parts add up to Total.
type Cost struct {
	Total float64
	// Wait until the first own step, Load of host and disk blocks, Prefill of
	// what is missing: together the time to the first token.
	Wait, Load, Prefill float64
	// Miss is the price that others pay for the prefill.
	Miss float64
	// Evict is what will be computed again because this request pushes it out.
	Evict float64
	// Decode is what the batch costs this request, and this request the
	// batch, beyond the candidate where that is least.
	Decode float64
}

// FirstToken is the predicted time to the first token.
func (c Cost) FirstToken() float64 { return c.Wait + c.Load + c.Prefill }

// Estimate fills r.Costs.
//
// A prefill delays everybody who comes until the backlog is worked off. With
// rate requests a ms and member, and a backlog of so many ms each, of which
// 1-rho is worked off in a ms, that are rate*backlog/(1-rho) requests: so often
// is a ms of missing prefill charged again. Nothing on an idle fleet, affinity
// near saturation and in a burst.
//
// What is missing also takes memory for as long as the request runs; where that
// is scarce, it is what others wait for. And it takes the place of what is
// cached, unless the member has room: a cached token saves as many as are found
// cached for each one that is computed.
//
// Others are spread over all candidates, so what they pay is charged by the
// candidates' mean speed: how fast a member is believed to be counts once, in
// its own prefill, and no error of that is multiplied near saturation.
func Estimate(r *Round) {
	token := meanToken(r.Candidates)
	miss := price(r) * token
	evict := tailWeight * max(r.Reuse, 0) * token
	memory := memoryKnown(r.Candidates)
	least := math.Inf(1)
	for i := range r.Candidates {
		c := &r.Candidates[i]
		// The last token is computed even if all are cached.
		missing := float64(max(c.Uncached, 1))
		prefill := c.Speed.Prefill(missing, float64(c.cached()))
		output := r.ExpectedOutput(i)
		cost := &r.Costs[i] // written in place: a copy of it would wait for the stores
		cost.Wait, cost.Miss = c.Load.WaitMS, miss*missing
		if memory {
			cost.Wait += c.memoryWait(missing)
			cost.Miss += c.memoryPrice() * missing
		}
		cost.Load = 0
		if c.Host+c.Disk > 0 {
			cost.Load = float64(c.Host)*c.Speed.Load(c.Speed.HostMS) + float64(c.Disk)*c.Speed.Load(c.Speed.DiskMS)
		}
		cost.Prefill = prefill
		cost.Evict = evict * max(0, missing-float64(c.Spare))
		cost.Decode = c.Load.Requests * (decodeWeight*output*c.Speed.StepRequestMS + stallWeight*prefill)
		least = min(least, cost.Decode)
	}
	for i := range r.Costs {
		c := &r.Costs[i]
		c.Decode -= least
		c.Total = c.Wait + c.Load + c.Prefill + c.Miss + c.Evict + c.Decode
	}
}

// memoryKnown tells whether the use of memory is known of all. Otherwise it
// counts for none: who does not say would look best.
func memoryKnown(list []Candidate) bool {
	for i := range list {
		if c := &list[i]; !(c.Load.KVUsage >= 0) || c.Capacity <= 0 {
			return false
		}
	}
	return true
}

// memoryWait is the time in ms until running requests have given back the
// cache memory that a request needs to begin. Every one that ends lets one that
// waits begin.
func (c *Candidate) memoryWait(missing float64) float64 {
	used := c.Load.KVUsage * float64(c.Capacity)
	if used+c.Load.Tokens+missing <= float64(c.Capacity) {
		return 0
	}
	return (c.Load.Waiting + 1) / c.running() * c.residence()
}

// residence is the time in ms for which a request holds its memory.
func (c *Candidate) residence() float64 {
	return c.Speed.OutputTokens * (c.Speed.StepBaseMS + c.Speed.StepRequestMS*c.running())
}

// running is the number of requests that hold memory, one at least.
func (c *Candidate) running() float64 { return max(c.Load.Requests-c.Load.Waiting, 1) }

// memoryPrice is what holding a token costs those who come after, in ms: the
// share of the member's memory that it takes, for as long as a request holds
// it, times the number that wait where so much is in use. By Sakasegawa's
// approximation these are u^sqrt(2(n+1))/(1-u) with room for n requests: hardly
// anybody before memory is nearly full.
func (c *Candidate) memoryPrice() float64 {
	capacity := float64(c.Capacity)
	u := min(c.Load.KVUsage+c.Load.Tokens/capacity, maxUsage)
	requests := capacity / max(c.Speed.PromptTokens+c.Speed.OutputTokens, 1)
	return power(u, int(math.Sqrt(2*(requests+1)))) / (1 - u) * c.residence() / capacity
}

// power is u to the n for a small n.
func power(u float64, n int) float64 {
	p := 1.0
	for ; n > 0; n >>= 1 {
		if n&1 == 1 {
			p *= u
		}
		u *= u
	}
	return p
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

// price is what a ms of prefill costs those who come after, in ms. Where rho is
// not known the backlog as a share of the next second stands for it.
func price(r *Round) float64 {
	var backlog, mean float64
	for i := range r.Candidates {
		c := &r.Candidates[i]
		backlog += c.Load.WaitMS
		mean += c.Speed.Prefill(c.Speed.PromptTokens, 0)
	}
	if !(mean > 0) {
		return 0
	}
	rho := r.Rho
	if math.IsNaN(rho) {
		rho = backlog / (horizon * float64(len(r.Candidates)))
	}
	rho = min(max(rho, 0), maxRho)
	// Requests a ms and member are rho/mean; both sums are over all members.
	return crowd * rho / (1 - rho) * backlog / mean
}

// cost is the default policy: the least predicted time.
func cost(r *Round, scores []float64) {
	for i := range scores {
		scores[i] = r.Costs[i].Total
	}
}
