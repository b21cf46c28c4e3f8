package pick

import (
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// Predictions follow what engines find, downwards and back, and reports are held
// against promises as they were without that.
func TestPromisesFollowReportsDownwards(t *testing.T) {
	b := newBed(t)
	id := b.join("m")
	le := prompt(1, 0, 1616)
	b.gpu(id, le, 100)
	now := t0
	serve := func(found func(held int) int) *Decision {
		now = now.Add(time.Minute) // nothing is under way any more
		b.fleet.Receive(id, *b.fleet.View().Member(id).Info, nil, now)
		d := b.pickAt(Request{Prompt: tokens(le), Reserve: true}, now)
		size, cached := uint64(1616), uint64(found(1600))
		b.Report(Report{Decision: d.ID, Outcome: fleet.Finished, PromptTokens: &size, CachedTokens: &cached}, now)
		return d
	}
	var d *Decision
	for range 32 {
		d = serve(func(held int) int { return held - 20 })
	}
	if c := d.Candidates[0]; c.Trust != fleet.Approximate || c.Cached != (Cached{GPU: 1600 - 32}) || c.Uncached != 48 {
		t.Errorf("20 tokens less are found: %+v, %d uncached, %v", c.Cached, c.Uncached, c.Belief)
	}
	// What was just sent is no way around it.
	d = b.pickAt(Request{Prompt: tokens(le)}, now)
	if c := d.Candidates[0].Cached; c != (Cached{GPU: 1600 - 32}) {
		t.Errorf("just after another: %+v", c)
	}
	for range 10 {
		d = serve(func(held int) int { return held })
	}
	if c := d.Candidates[0]; c.Trust != fleet.Exact || c.Cached != (Cached{GPU: 1600}) {
		t.Errorf("all is found again: %+v, %v", c.Cached, c.Belief)
	}
}
