package realvllm

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"slices"
)

// Result is what one release of vLLM did beside kvscout.
type Result struct {
	Release string  `json:"release"`
	Wire    Wire    `json:"wire"`
	Phases  []Phase `json:"phases"`
}

// Wire is what a release says by itself.
type Wire struct {
	// Events are "maps", or "arrays of 12" for BlockStored.
	Events string `json:"events,omitempty"`
	// Salted: the events show a request's salt.
	Salted bool `json:"salted"`
	// Told: the engine tells where its events are.
	Told bool `json:"told"`
	// Render and RenderAsked are the status of the render endpoint by default
	// and with --enable-scale-out, where the release has that; 0: not tried.
	Render      int `json:"render,omitempty"`
	RenderAsked int `json:"render_asked,omitempty"`
	// Groups are the KV cache groups that a hybrid model's events name.
	Groups []string `json:"groups,omitempty"`
}

// Phase is one part of a test: requests whose cached tokens were predicted, and
// what the engine then counted.
type Phase struct {
	// Engine is how the engine was started, one of Engines.
	Engine string `json:"engine"`
	Name   string `json:"name"`
	Judged int    `json:"judged"`
	Exact  int    `json:"exact"`
	// Over were predicted more than the engine had, Under less.
	Over  int `json:"over"`
	Under int `json:"under"`
	// Predicted and Cached are tokens of all requests together: what kvscout
	// said, and what the engine counted.
	Predicted int `json:"predicted"`
	Cached    int `json:"cached"`
	// Trust is the least that an answer came with, and Why its reason.
	Trust string `json:"trust,omitempty"`
	Why   string `json:"why,omitempty"`
	// Cannot is why the release was not asked for this.
	Cannot string `json:"cannot,omitempty"`
	// Failed says that something else went wrong.
	Failed bool `json:"failed,omitempty"`
}

// Read reads a result; one that is not there is empty.
func Read(path string) (Result, error) {
	var r Result
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(raw, &r)
}

// Merge puts a newer run's phases in the place of those of the same engines.
func (r *Result) Merge(newer Result) {
	r.Release = newer.Release
	ran := func(engine string) bool {
		return slices.ContainsFunc(newer.Phases, func(p Phase) bool { return p.Engine == engine })
	}
	r.Phases = slices.DeleteFunc(r.Phases, func(p Phase) bool { return ran(p.Engine) })
	r.Phases = append(r.Phases, newer.Phases...)
	slices.SortStableFunc(r.Phases, func(a, b Phase) int { return slices.Index(Engines, a.Engine) - slices.Index(Engines, b.Engine) })
	if ran("full") {
		r.Wire.Events, r.Wire.Salted, r.Wire.Told, r.Wire.Render = newer.Wire.Events, newer.Wire.Salted, newer.Wire.Told, newer.Wire.Render
	}
	if ran("hybrid") {
		r.Wire.Groups = newer.Wire.Groups
	}
	if ran("special") {
		r.Wire.RenderAsked = newer.Wire.RenderAsked
	}
}

// Engines are the ways in which engines are started, in the order of results.
var Engines = []string{"full", "hybrid", "ranks", "offload", "special", "operated", "operated, offload", "hybrid, offload", "prefill", "decode"}

// Write writes the result.
func (r Result) Write(path string) error {
	raw, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(raw, '\n'), 0o644)
}
