package sim

// Served is a request that was served to its end, as a log of an engine's
// front end would have it.
type Served struct {
	At     float64 `json:"at"`     // s since the start
	Prompt int     `json:"prompt"` // tokens
	Cached int     `json:"cached"` // tokens of the prompt that were not computed
	Output int     `json:"output"` // tokens
	TTFT   float64 `json:"ttft"`   // s
	E2E    float64 `json:"e2e"`    // s
	Pod    string  `json:"pod"`
}
