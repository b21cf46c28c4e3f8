package fakevllm

import "time"

// Profile is the service curve of one engine: how long a step takes, in
// milliseconds, given what it computes. The fit is linear in new tokens and
// quadratic in context.
type Profile struct {
	// PrefillBase is paid by a step that only prefills.
	PrefillBase float64
	// PerToken is paid for each token computed.
	PerToken float64
	// PerTokenContext is paid for each pair of a new token and a token before it.
	PerTokenContext float64
	// StepFloor is the least time of a step: reading the weights once.
	StepFloor float64
	// PerSequence is paid for each decoding sequence.
	PerSequence float64
	// PerContext is paid for each token of context of the decoding sequences.
	PerContext float64
}

// Qwen32B is Qwen3-32B in bf16 on two H100 with tensor parallelism.
func Qwen32B() Profile {
	return Profile{PerToken: 0.0425, PerTokenContext: 8.86e-7, StepFloor: 11, PerSequence: 0.025, PerContext: 4.53e-5}
}

// Qwen32BBlocks is the KV capacity that goes with Qwen32B, in blocks of 16.
const Qwen32BBlocks = 19208

// work is what one step computes.
type work struct {
	prefillTokens  int
	prefillPairs   float64 // sum of new * (context + new/2)
	decodes        int
	decodeContexts int
}

func (w *work) prefill(tokens, context int) {
	w.prefillTokens += tokens
	w.prefillPairs += float64(tokens) * (float64(context) + float64(tokens)/2)
}

func (w *work) decode(context int) {
	w.decodes++
	w.decodeContexts += context
}

// step is the duration of a step in the engine's own time.
func (p Profile) step(w work) time.Duration {
	linear := p.PerToken * float64(w.prefillTokens)
	if w.decodes == 0 {
		linear += p.PrefillBase
	}
	ms := max(p.StepFloor, linear) + p.PerTokenContext*w.prefillPairs +
		p.PerSequence*float64(w.decodes) + p.PerContext*float64(w.decodeContexts)
	return time.Duration(ms * float64(time.Millisecond))
}
