package sim

import (
	"errors"
	"fmt"
	"strings"
)

// Profile is one kind of engine: how long its steps take, and how much KV
// cache it has.
//
// A step that computes new tokens of prompts after ctx that are there, beside
// a batch of decoding requests, takes
//
//	max(StepMS, TokenMS*sum(new)) + PairMS*sum(new*(ctx+new/2)) +
//	SequenceMS*batch + ContextMS*sum(context of the batch)
type Profile struct {
	Name string `json:"name"`
	// StepMS is the least that a step takes, TokenMS a token of prompt, PairMS
	// a token and token before it, SequenceMS a decoding request, ContextMS a
	// token of its context.
	StepMS     float64 `json:"step_ms"`
	TokenMS    float64 `json:"token_ms"`
	PairMS     float64 `json:"pair_ms"`
	SequenceMS float64 `json:"sequence_ms"`
	ContextMS  float64 `json:"context_ms"`
	// KVTokens is the size of the KV cache, KVBytes what a token takes in it.
	KVTokens int `json:"kv_tokens"`
	KVBytes  int `json:"kv_bytes"`
	// HostGBps is the bandwidth from host memory to the engine; 0: 50.
	HostGBps float64 `json:"host_gbps"`
	// StepTokens that a step computes at most; 0: 8,192. Sequences that run at
	// a time; 0: 256.
	StepTokens int `json:"step_tokens"`
	Sequences  int `json:"sequences"`
}

// DefaultEngine is the engine of a Config that names none.
const DefaultEngine = "qwen3-32b-h100-tp2"

// profiles are fits to published kernel times (docs/SIMULATOR.md). The first
// is the default.
var profiles = []Profile{
	{Name: DefaultEngine, StepMS: 11, TokenMS: .0425, PairMS: 8.86e-7, SequenceMS: .025, ContextMS: 4.53e-5, KVTokens: 307_328, KVBytes: 262_144},
	{Name: "qwen3-32b-h100-tp2-kernels", StepMS: 13.4, TokenMS: .0509, PairMS: 1.42e-6, SequenceMS: .025, ContextMS: 4.53e-5, KVTokens: 307_328, KVBytes: 262_144},
	{Name: "llama-3.1-8b-h100", StepMS: 6.3, TokenMS: .0205, PairMS: 7.1e-7, SequenceMS: .010, ContextMS: 4.39e-5, KVTokens: 435_000, KVBytes: 131_072},
	{Name: "llama-3.1-8b-a100", StepMS: 11.2, TokenMS: .0553, PairMS: 2.97e-6, SequenceMS: .027, ContextMS: 8.26e-5, KVTokens: 435_000, KVBytes: 131_072},
	{Name: "llama-3.1-8b-l40s", StepMS: 22.2, TokenMS: .060, PairMS: 3.10e-6, SequenceMS: .032, ContextMS: 1.89e-4, KVTokens: 184_000, KVBytes: 131_072},
	{Name: "qwen3-8b-h100", StepMS: 6.4, TokenMS: .0207, PairMS: 8.0e-7, SequenceMS: .011, ContextMS: 4.93e-5, KVTokens: 384_000, KVBytes: 147_456},
	{Name: "qwen3-32b-a100-tp2", StepMS: 24.5, TokenMS: .1246, PairMS: 5.92e-6, SequenceMS: .080, ContextMS: 8.57e-5, KVTokens: 307_328, KVBytes: 262_144, HostGBps: 25},
	{Name: "llama-3.1-70b-h100-tp4", StepMS: 15.3, TokenMS: .0632, PairMS: 8.8e-7, SequenceMS: .031, ContextMS: 2.84e-5, KVTokens: 461_376, KVBytes: 327_680},
	{Name: "llama-3.1-70b-h100-tp8", StepMS: 9.8, TokenMS: .0386, PairMS: 4.8e-7, SequenceMS: .024, ContextMS: 1.42e-5, KVTokens: 1_350_000, KVBytes: 327_680},
	{Name: "llama-3.1-70b-a100-tp4", StepMS: 27.8, TokenMS: .1535, PairMS: 3.68e-6, SequenceMS: .101, ContextMS: 5.53e-5, KVTokens: 461_376, KVBytes: 327_680, HostGBps: 25},
}

// Engines lists the names of the built-in profiles.
func Engines() []string {
	names := make([]string, len(profiles))
	for i := range profiles {
		names[i] = profiles[i].Name
	}
	return names
}

// ErrEngine says that there is no built-in profile of that name.
var ErrEngine = errors.New("unknown engine")

// Engine returns a built-in profile; the empty name is DefaultEngine.
func Engine(name string) (Profile, error) {
	if name == "" {
		name = DefaultEngine
	}
	for _, p := range profiles {
		if p.Name == name {
			return p, nil
		}
	}
	return Profile{}, fmt.Errorf("engine %q: %w; there are %s", name, ErrEngine, strings.Join(Engines(), ", "))
}

func (p Profile) withDefaults() Profile {
	if p.HostGBps == 0 {
		p.HostGBps = 50
	}
	if p.StepTokens == 0 {
		p.StepTokens = 8192
	}
	if p.Sequences == 0 {
		p.Sequences = 256
	}
	return p
}

// Validate joins all that is wrong with a profile.
func (p Profile) Validate() error {
	var errs []error
	for _, f := range []struct {
		name  string
		value float64
		above bool // must be more than nothing
	}{
		{"step_ms", p.StepMS, true},
		{"token_ms", p.TokenMS, true},
		{"pair_ms", p.PairMS, false},
		{"sequence_ms", p.SequenceMS, false},
		{"context_ms", p.ContextMS, false},
		{"host_gbps", p.HostGBps, false},
		{"kv_tokens", float64(p.KVTokens), true},
		{"kv_bytes", float64(p.KVBytes), false},
		{"step_tokens", float64(p.StepTokens), false},
		{"sequences", float64(p.Sequences), false},
	} {
		if !(f.value >= 0 && f.value <= 1e15) || f.above && f.value == 0 {
			errs = append(errs, fmt.Errorf("engine %q: %s is %v", p.Name, f.name, f.value))
		}
	}
	return errors.Join(errs...)
}

// prefill is what a step computes of prompts.
type prefill struct{ tokens, pairs float64 }

func (w *prefill) add(tokens, context int) {
	n := float64(tokens)
	w.tokens += n
	w.pairs += n * (float64(context) + n/2)
}

// ms is the time of so many steps in a row: the first computes w, and each one
// token for every request of a batch that begins with that many tokens of
// context in all.
func (p *Profile) ms(w prefill, batch, context, steps int) float64 {
	k, n := float64(steps), float64(batch)
	decode := p.SequenceMS*n + p.ContextMS*float64(context)
	first := max(p.StepMS, p.TokenMS*w.tokens) + p.PairMS*w.pairs
	return first + (k-1)*p.StepMS + k*decode + p.ContextMS*n*k*(k-1)/2
}
