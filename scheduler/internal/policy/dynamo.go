package policy

// dynamo adds blocks: those to be prefilled, less a credit for those that are
// cached by where they lie, and those that running requests occupy. Blocks to
// be computed and blocks that lie there count alike.
type dynamo struct{ overlap, decay, host, disk, scale, request float64 }

func newDynamo() *dynamo {
	return &dynamo{overlap: 1, decay: 0, host: 0.75, disk: 0.25, scale: 1, request: 0}
}

func (d *dynamo) parameters() []parameter {
	return []parameter{
		{"overlap", &d.overlap, 0, 1e6}, {"decay", &d.decay, 0, 1e6}, {"host", &d.host, 0, 1e6},
		{"disk", &d.disk, 0, 1e6}, {"scale", &d.scale, 0, 1e6}, {"request", &d.request, 0, 1e6},
	}
}

func (d *dynamo) score(r *Round, scores []float64) {
	least := r.Candidates[0].Load.Tokens
	for i := range r.Candidates {
		least = min(least, r.Candidates[i].Load.Tokens)
	}
	for i := range scores {
		c := &r.Candidates[i]
		size := float64(max(c.BlockSize, 1))
		prompt := float64(max(c.Uncached, 0) + c.cached())
		// Where more prefill waits than at the least loaded, a hit is worth
		// less by the share of that in the prompt.
		worth := 1 / (1 + d.decay*(c.Load.Tokens-least)/max(prompt, 1))
		credit := d.overlap*worth*float64(c.GPU+c.Predicted) + d.host*float64(c.Host) + d.disk*float64(c.Disk)
		prefill := max(c.Load.Tokens+prompt-credit, 0) / size
		scores[i] = d.scale*prefill + c.Load.Blocks + d.request*c.Load.Requests
	}
}
