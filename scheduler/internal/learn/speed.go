package learn

import "math"

// Curve is the time of a prefill: A + B*new + C*new*(ctx + new/2) ms, where
// new tokens are computed after ctx that are cached.
type Curve struct {
	A float64 // ms a request
	B float64 // ms a token
	C float64 // ms a token and token of context
}

// Prefill returns the time in ms; nothing to compute takes none.
func (c Curve) Prefill(new, ctx float64) float64 {
	if !(new > 0) {
		return 0
	}
	return c.A + c.B*new + c.C*new*(ctx+new/2)
}

// Work is prefill in parts, so that any member's curve gives its time.
type Work struct{ Requests, Tokens, Pairs float64 }

// Time of so much work in ms.
func (c Curve) Time(w Work) float64 { return c.A*w.Requests + c.B*w.Tokens + c.C*w.Pairs }

// busySeconds is the time that so many requests and tokens occupy the engine.
// The fixed part is not counted: requests share it.
func (c Curve) busySeconds(requests, tokens float64) float64 {
	if requests == 0 {
		return 0
	}
	return (c.Prefill(tokens/requests, 0) - c.A) * requests / 1000
}

// Speed is what a member is believed to take.
type Speed struct {
	Curve
	// HostMS and DiskMS are what loading a token from there takes.
	HostMS, DiskMS float64
	// StepMS is one step of decoding, on average lately. StepBaseMS and
	// StepRequestMS tell what it would be for any number of requests.
	StepMS, StepBaseMS, StepRequestMS float64
	// OverheadMS is what callers saw beyond the prediction, by their reports. It
	// may be negative.
	OverheadMS float64
	// PromptTokens computed, and OutputTokens, of a mean request.
	PromptTokens, OutputTokens float64
	// Busy is the share of time spent in prefill; NaN: not known.
	Busy float64
	// Learned from this member's own samples.
	Learned bool
}

// Prior is the speed of a member of which nothing is known: a mid-size model
// on a current accelerator, within a factor of ten of most.
func Prior() Speed {
	return Speed{
		Curve:  Curve{A: 5, B: 0.05},
		HostMS: 0.005,
		DiskMS: 0.04,
		StepMS: 10, StepBaseMS: 10, StepRequestMS: 10 * batchShare,
		PromptTokens: 1000,
		OutputTokens: 250,
		Busy:         math.NaN(),
	}
}

// Load returns the ms that a token takes to be loaded from a tier whose load
// time is tierMS: never more than computing it does.
func (s *Speed) Load(tierMS float64) float64 { return min(tierMS, s.B) }
