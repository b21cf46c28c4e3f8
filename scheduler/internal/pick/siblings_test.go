package pick

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// Peers' bug 12: 64 equal prompts at once stay with few owners, because each
// sees what the ones before reserved and sent, and no owner's queue grows
// beyond what computing the prompt elsewhere would cost.
func TestEqualPromptsAtOnceHaveFewOwners(t *testing.T) {
	b := newBed(t)
	for i := range 8 {
		b.join(fmt.Sprintf("m%d", i))
	}
	le := prompt(1, 0, 8000) // 405 ms
	var mu sync.Mutex
	counts := make(map[string]int)
	var wg sync.WaitGroup
	for range 64 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			d := b.pick(Request{Prompt: tokens(le), Reserve: true})
			mu.Lock()
			counts[first(d)]++
			mu.Unlock()
		}()
	}
	wg.Wait()
	for name, n := range counts {
		if wait := b.fleet.View().Named(name).Reserved().Wait(t0); wait > 2*405+100 {
			t.Errorf("%s: %d requests, %v ms", name, n, wait)
		}
	}
	if len(counts) > 6 {
		t.Errorf("the prompt is computed by too many: %v", counts)
	}
}

// A burst of siblings follows its first, before any event, and what is only
// predicted is never called cached.
func TestSiblingsFollowThePrediction(t *testing.T) {
	b := newBed(t)
	for i := range 8 {
		b.join(fmt.Sprintf("m%d", i))
	}
	d := b.pick(Request{Prompt: tokens(prompt(1, 4000, 4100)), Reserve: true})
	owner := first(d)
	b.Report(Report{Decision: d.ID, Outcome: fleet.Finished}, t0)
	sibling := Request{Prompt: tokens(prompt(2, 4000, 4100))}
	d = b.pickAt(sibling, t0.Add(100*time.Millisecond))
	got := d.Candidates[0]
	if first(d) != owner || got.Cached != (Cached{Predicted: 4000}) || got.Uncached != 100 {
		t.Errorf("%s, want %s; %+v", first(d), owner, got.Cached)
	}
	d = b.pickAt(sibling, t0.Add(time.Minute))
	if d.Candidates[0].Cached.Predicted != 0 {
		t.Errorf("a minute later: %+v", d.Candidates[0].Cached)
	}
	// A new incarnation of the engine has nothing of it.
	b.fleet.SetCacheState(b.fleet.View().Named(owner).ID, fleet.CacheState{Trust: fleet.Exact, Epoch: 2})
	for _, c := range b.pickAt(sibling, t0.Add(100*time.Millisecond)).Candidates {
		if c.Cached.Predicted != 0 {
			t.Errorf("in the next epoch: %+v", c.Cached)
		}
	}
	// Facts replace it.
	b.gpu(b.fleet.View().Named(owner).ID, prompt(2, 4000, 4100), 250)
	if c := b.pickAt(sibling, t0.Add(100*time.Millisecond)).Candidates[0].Cached; c != (Cached{GPU: 4000}) {
		t.Errorf("after the events: %+v", c)
	}
	b.Tick(t0.Add(time.Minute))
	if n := b.predicted.Stats().Marks; n != 0 {
		t.Errorf("%d marks are kept", n)
	}
}

// What was given up before its first token may never be computed. Equal prompts
// that were sent after it still will be.
func TestGivenUpPromptsAreNotExpected(t *testing.T) {
	for name, c := range map[string]struct {
		before  []fleet.Outcome
		outcome fleet.Outcome
		sibling bool // another was sent meanwhile
		want    int
	}{
		"cancelled":                         {outcome: fleet.Cancelled, want: 0},
		"failed":                            {outcome: fleet.Failed, want: 0},
		"cancelled, a sibling behind it":    {outcome: fleet.Cancelled, sibling: true, want: 1600},
		"cancelled after its first token":   {before: []fleet.Outcome{fleet.FirstToken}, outcome: fleet.Cancelled, want: 1600},
		"finished":                          {outcome: fleet.Finished, want: 1600},
		"cancelled, and reported once more": {before: []fleet.Outcome{fleet.Cancelled}, outcome: fleet.Cancelled, want: 0},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			b.join("m")
			ask := Request{Prompt: tokens(prompt(1, 0, 1610)), Reserve: true}
			given := b.pick(ask)
			if c.sibling {
				b.pick(ask)
			}
			for _, o := range append(c.before, c.outcome) {
				b.Report(Report{Decision: given.ID, Outcome: o}, t0)
			}
			ask.Reserve = false
			if got := b.pick(ask).Candidates[0].Cached; got != (Cached{Predicted: c.want}) {
				t.Errorf("%+v, want %d expected", got, c.want)
			}
		})
	}
}

func TestWithdrawalsAreBounded(t *testing.T) {
	b := newBed(t)
	for i := range uint64(100_000) {
		b.predicted.Withdraw(i)
	}
	if n := b.predicted.Stats().Withdrawn; n != 1<<14 {
		t.Errorf("%d are remembered", n)
	}
}
