package pick

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// joinBlind adds a member of which there is no cache state.
func (b *bed) joinBlind(name string, blocks uint64) fleet.ID {
	id := b.joinAs(fleet.Info{Name: name, Models: []string{"model"}, BlockSize: 16, Blocks: blocks,
		Adapters: []fleet.Adapter{{Name: "lora"}}})
	b.trust(id, fleet.Unknown)
	return id
}

// serve picks and ends a request, and returns who served it.
func (b *bed) serve(r Request, now time.Time) string {
	b.Helper()
	r.Reserve = true
	d := b.pickAt(r, now)
	b.Report(Report{Decision: d.ID, Outcome: fleet.Finished}, now)
	return first(d)
}

// Members without a cache state are followed by what was sent to them, and the
// answer says so.
func TestWithoutACacheStateWhatWasSentStandsForIt(t *testing.T) {
	b := newBed(t)
	for i := range 4 {
		b.joinBlind(fmt.Sprintf("m%d", i), 1000)
	}
	homes := make(map[uint32]string)
	for seed := range uint32(12) {
		homes[seed] = b.serve(Request{Prompt: tokens(prompt(seed, 0, 2000))}, t0)
	}
	now := t0.Add(2 * time.Minute) // no mark of a prediction is left
	b.fleet.Receive(0, *b.fleet.View().Member(0).Info, nil, now)
	for seed, home := range homes {
		d := b.pickAt(Request{Prompt: tokens(prompt(seed, 0, 2400))}, now)
		c := d.Candidates[0]
		if first(d) != home || c.Cached != (Cached{Predicted: 2000}) || c.Trust != fleet.Approximate {
			t.Errorf("prompt %d: %s, want %s: %+v, %v", seed, first(d), home, c.Cached, c.Trust)
		}
		if !strings.Contains(d.Fallback(), "UNKNOWN: what was sent there stands for it") {
			t.Errorf("fallback %q", d.Fallback())
		}
	}
}

// The mirror holds no more than the engine: what was sent longest ago is gone.
func TestWhatWasSentIsBoundByTheRealCache(t *testing.T) {
	b := newBed(t)
	b.joinBlind("m", 200)
	for seed := range uint32(5) {
		b.serve(Request{Prompt: tokens(prompt(seed, 0, 1600))}, t0) // 100 blocks each
	}
	for seed, want := range []int{0, 0, 0, 1584, 1584} { // the last token is computed
		d := b.pickAt(Request{Prompt: tokens(prompt(uint32(seed), 0, 1600))}, t0.Add(time.Minute))
		if got := d.Candidates[0].Cached.Predicted; got != want {
			t.Errorf("prompt %d: %d, want %d", seed, got, want)
		}
	}
}

func TestAnotherAdapterOrSaltNeverMatches(t *testing.T) {
	b := newBed(t)
	b.joinBlind("m", 1000)
	le := tokens(prompt(1, 0, 1000))
	b.serve(Request{Model: "lora", Salt: "s", Prompt: le}, t0)
	now := t0.Add(time.Minute)
	for _, c := range []struct {
		r    Request
		want int
	}{
		{Request{Model: "lora", Salt: "s"}, 992},
		{Request{Model: "model", Adapter: "lora", Salt: "s"}, 992},
		{Request{Model: "lora"}, 0},
		{Request{Model: "lora", Salt: "t"}, 0},
		{Request{Model: "model", Salt: "s"}, 0},
	} {
		for _, policy := range []string{"default", "approx"} {
			c.r.Prompt, c.r.Policy = le, policy
			if got := b.pickAt(c.r, now).Candidates[0].Cached.Predicted; got != c.want {
				t.Errorf("%s, salt %q, %s: %d, want %d", c.r.Model, c.r.Salt, policy, got, c.want)
			}
		}
	}
}

func TestOneApproximateMemberIsRankedAmongExactOnesAndMarked(t *testing.T) {
	b := newBed(t)
	le := prompt(1, 0, 4000)
	b.gpu(b.join("exact"), le, 50)
	b.join("cold")
	blind := b.joinBlind("blind", 10_000)
	r := Request{Prompt: tokens(le), Reserve: true, Candidates: []Ref{{Member: "blind"}}}
	b.serve(r, t0)
	d := b.pickAt(Request{Prompt: tokens(le)}, t0.Add(time.Minute))
	var order []string
	for _, c := range d.Candidates {
		order = append(order, fmt.Sprint(c.Member.Info.Name, " ", c.Trust, " ", c.Cached.Known(), " ", c.Cached.Predicted))
	}
	want := "blind APPROXIMATE 0 3984, exact EXACT 800 0, cold EXACT 0 0"
	if got := strings.Join(order, ", "); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	// Once it has a cache state, only that counts, and the lane is given back.
	b.trust(blind, fleet.Exact)
	now := t0.Add(time.Minute)
	b.fleet.Receive(blind, *b.fleet.View().Member(blind).Info, nil, now)
	if d := b.pickAt(Request{Prompt: tokens(le)}, now); first(d) != "exact" || d.Fallback() != "" {
		t.Errorf("%s, %q", first(d), d.Fallback())
	}
	b.Tick(now)
	if n := b.index.Count(index.Member(blind), index.LaneApproximate); n != 0 || b.sent.Tracks() {
		t.Errorf("%d blocks are left on its lane", n)
	}
}

// The exact path pays nothing for a mirror that nobody needs.
func TestExactMembersAreNotMirrored(t *testing.T) {
	b := newBed(t)
	id := b.join("m")
	for _, policy := range []string{"default", "session", "weighted", "prefix-hash"} {
		b.serve(Request{Policy: policy, Prompt: tokens(prompt(1, 0, 1000))}, t0)
	}
	if b.sent.Tracks() || b.index.Count(index.Member(id), index.LaneApproximate) != 0 {
		t.Errorf("%+v", b.Stats().Sent)
	}
	// A policy that goes by what was sent starts it, and it stops when that
	// one is not asked for any more.
	b.serve(Request{Policy: "approx", Prompt: tokens(prompt(1, 0, 1000))}, t0)
	if b.index.Count(index.Member(id), index.LaneApproximate) != 62 {
		t.Errorf("%+v", b.Stats().Sent)
	}
	b.Tick(t0.Add(10 * time.Minute))
	if b.sent.Tracks() || b.index.Stats().Memberships != 0 {
		t.Errorf("%+v", b.Stats().Sent)
	}
}

func TestAnotherEpochOrMemberHasNothingOfIt(t *testing.T) {
	b := newBed(t)
	id := b.joinBlind("m", 1000)
	r := Request{Prompt: tokens(prompt(1, 0, 1000))}
	b.serve(r, t0)
	b.fleet.SetCacheState(id, fleet.CacheState{Trust: fleet.Syncing, Epoch: 2})
	now := t0.Add(time.Minute)
	if c := b.pickAt(r, now).Candidates[0]; c.Cached != (Cached{}) || c.Trust != fleet.Syncing {
		t.Errorf("in the next epoch: %+v, %v", c.Cached, c.Trust)
	}
	b.Tick(now)
	if b.sent.Tracks() {
		t.Error("its blocks are kept")
	}
	b.serve(r, now)
	b.fleet.Leave(id)
	b.Tick(now)
	if b.sent.Tracks() {
		t.Error("a member that left is kept")
	}
}

// exact -> what was sent -> the beginning of the prompt -> load, one after the
// other, never an error while a member is there.
func TestTheFallbackChain(t *testing.T) {
	le := prompt(1, 0, 1000)
	for _, c := range []struct {
		name             string
		trust            fleet.Trust
		size             int
		prompt           Prompt
		policy, fallback string
	}{
		{"exact", fleet.Exact, 16, tokens(le), "default", ""},
		{"approximate", fleet.Unknown, 16, tokens(le), "default", "cache state of the first is UNKNOWN: what was sent there stands for it"},
		{"no block size", fleet.Exact, 0, tokens(le), "prefix-hash", "block size of no candidate is known: by the beginning of the prompt"},
		{"text only", fleet.Exact, 16, Prompt{Fallback: "why", Beginnings: Beginnings(nil, "text")}, "prefix-hash", "why: by the beginning of the prompt"},
		{"nothing", fleet.Exact, 16, Prompt{}, "least-requests", "no tokens in the request: load only"},
	} {
		b := newBed(t)
		for i := range 3 {
			id := b.joinAs(fleet.Info{Name: fmt.Sprint("m", i), Models: []string{"model"}, BlockSize: c.size})
			b.trust(id, c.trust)
		}
		b.serve(Request{Prompt: c.prompt}, t0)
		for _, policy := range []string{"default", "longest-prefix", "weighted", "approx", "sticky", "e2", "dynamo-cost", "conductor", "session"} {
			d := b.pick(Request{Prompt: c.prompt, Policy: policy})
			want := c.policy
			if want == "default" {
				want = policy
			}
			if d.Policy != want || d.Fallback() != c.fallback || len(d.Candidates) != 3 {
				t.Errorf("%s, %s: by %s, %q", c.name, policy, d.Policy, d.Fallback())
			}
		}
		// Policies that never looked at prefixes stay.
		if d := b.pick(Request{Prompt: c.prompt, Policy: "round-robin"}); d.Policy != "round-robin" {
			t.Errorf("%s: round-robin became %s", c.name, d.Policy)
		}
	}
}

func TestTwoSchedulersAgreeOnNoMatch(t *testing.T) {
	for _, policy := range []string{"default", "approx", "weighted", "longest-prefix", "sticky", "e2", "dynamo-cost", "conductor", "session", "prefix-hash"} {
		one, two := fleetOf(t, 8, false), fleetOf(t, 8, true)
		two.seed = 77
		counts := make(map[string]int)
		for i := range 200 {
			r := Request{Policy: policy, Prompt: tokens(prompt(uint32(i), 0, 700))}
			a, b := first(one.pick(r)), first(two.pick(r))
			if a != b {
				t.Fatalf("%s, prompt %d: %s and %s", policy, i, a, b)
			}
			counts[a]++
		}
		if len(counts) != 8 {
			t.Errorf("%s: %v", policy, counts)
		}
	}
}

// How long what was just sent is believed follows from when events came.
func TestPredictionsLiveAsLongAsEventsTake(t *testing.T) {
	b := newBed(t)
	id := b.join("m")
	if got := b.Stats().Confirm; got != 2*time.Second {
		t.Fatalf("at first %v", got)
	}
	now := t0
	for i := range 40 {
		le := prompt(uint32(i), 0, 1616)
		d := b.pickAt(Request{Prompt: tokens(le), Reserve: true}, now)
		ms := d.Candidates[0].Cost.FirstToken()
		b.Report(Report{Decision: d.ID, Outcome: fleet.Finished}, now)
		now = now.Add(time.Duration(ms*float64(time.Millisecond)) + 120*time.Millisecond)
		b.Tick(now.Add(-time.Millisecond)) // not yet there
		b.gpu(id, le, 101)
		b.Tick(now)
		now = now.Add(time.Second)
		b.fleet.Receive(id, *b.fleet.View().Member(id).Info, nil, now)
	}
	if got := b.Stats().Confirm; got < 235*time.Millisecond || got > 245*time.Millisecond {
		t.Errorf("events take 120 ms, believed for %v", got)
	}
	le := prompt(1000, 0, 1616)
	ms := b.pickAt(Request{Prompt: tokens(le), Reserve: true}, now).Candidates[0].Cost.FirstToken()
	due := now.Add(time.Duration(ms * float64(time.Millisecond)))
	for after, want := range map[time.Duration]int{200 * time.Millisecond: 1600, 300 * time.Millisecond: 0} {
		if got := b.pickAt(Request{Prompt: tokens(le)}, due.Add(after)).Candidates[0].Cached.Predicted; got != want {
			t.Errorf("%v after the first token is due: %d predicted, want %d", after, got, want)
		}
	}
}

// Events that never come teach nothing and are not waited for.
func TestProbesEnd(t *testing.T) {
	b := newBed(t)
	b.join("m")
	for i := range 100 {
		b.serve(Request{Prompt: tokens(prompt(uint32(i), 0, 400))}, t0)
	}
	if n := b.predicted.Stats().Watched; n != 16 {
		t.Errorf("%d probes are open", n)
	}
	b.Tick(t0.Add(time.Hour))
	if n := b.predicted.Stats().Watched; n != 0 || b.Stats().Confirm != 2*time.Second {
		t.Errorf("%d probes are open, %v", n, b.Stats().Confirm)
	}
}

// Moved pieces are found by prompts that begin with them.
func TestE2FollowsWhatWasMoved(t *testing.T) {
	b := newBed(t)
	for _, name := range []string{"m0", "m1"} {
		b.joinAs(fleet.Info{Name: name, Models: []string{"model"}, BlockSize: 16, Blocks: 100_000})
	}
	// m0 is sent three long prompts again and again, m1 short ones.
	le := func(i int) []byte { return prompt(uint32(i), 0, 1600*(i+1)) }
	for i := range 120 {
		to, p := "m0", le(i%3)
		if i%4 == 3 {
			to, p = "m1", prompt(9, 0, 160)
		}
		b.serve(Request{Policy: "e2", Prompt: tokens(p), Candidates: []Ref{{Member: to}}}, t0)
	}
	for i := range 3 {
		b.gpu(b.fleet.View().Named("m0").ID, le(i), 100*(i+1))
	}
	b.Tick(t0)
	moved := b.Stats().Sent.Moved
	if moved == 0 || moved > 2 {
		t.Fatalf("%+v", b.Stats().Sent)
	}
	var on [2]int
	for i := range 3 {
		if first(b.pickAt(Request{Policy: "e2", Prompt: tokens(append(le(i), prompt(50, 0, 100)...))}, t0)) == "m1" {
			on[1]++
		} else {
			on[0]++
		}
	}
	if on[1] != int(moved) || on[0] != 3-int(moved) {
		t.Errorf("%v, %d pieces were moved", on, moved)
	}
}
