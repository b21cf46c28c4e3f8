package pick

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// Peers' bug 9, and their bound of ten holders: the longest prefix of many
// wins, and among equals the least loaded.
func TestAllHoldersAreRanked(t *testing.T) {
	b := newBed(t)
	le := prompt(1, 0, 16*64+1)
	for i := range 32 {
		b.gpu(b.join(fmt.Sprintf("m%02d", i)), le, 2*(i+1))
	}
	d := b.pick(Request{Prompt: tokens(le)})
	if len(d.Candidates) != 32 || first(d) != "m31" || len(cachedBy(d)) != 32 || cachedBy(d)["m00"] != 32 {
		t.Fatalf("%d candidates, first %s", len(d.Candidates), first(d))
	}
	for i := 1; i < len(d.Candidates); i++ {
		if d.Candidates[i-1].Cost.Total > d.Candidates[i].Cost.Total {
			t.Fatalf("not in order at %d", i)
		}
	}
	if d := b.pick(Request{Prompt: tokens(le), Top: 3}); len(d.Candidates) != 3 || first(d) != "m31" {
		t.Fatalf("top 3: %d, first %s", len(d.Candidates), first(d))
	}
}

func TestWithoutTokensLoadDecides(t *testing.T) {
	b := newBed(t)
	b.load(b.join("busy"), 9, 3, t0)
	b.load(b.join("idle"), 1, 0, t0)
	d := b.pick(Request{Prompt: Prompt{Fallback: "no engine renders chats"}})
	if first(d) != "idle" || d.Fallback() != "no engine renders chats: load only" {
		t.Errorf("%s, %q", first(d), d.Fallback())
	}
}

// Peers' bug 22 and 23: a member without a sample is not the idlest, and
// samples count for all candidates or for none.
func TestMissingSampleIsNotIdle(t *testing.T) {
	b := newBed(t)
	m0 := b.join("m0")
	b.join("new")
	b.load(m0, 2, 0, t0)
	d := b.pick(Request{Prompt: tokens(prompt(1, 0, 1000))})
	a, c := d.Candidates[0].Cost.Total, d.Candidates[1].Cost.Total
	if a != c {
		t.Errorf("costs %v and %v differ by a sample that only one has", a, c)
	}
	for _, c := range d.Candidates {
		if (c.LoadAge < 0) != (c.Member.Info.Name == "new") {
			t.Errorf("%s: load age %v", c.Member.Info.Name, c.LoadAge)
		}
	}
}

// Peers' bug 11: misses must not all go to the emptiest. 100 cold prompts at
// once, four members that hold something and a new one.
func TestColdPromptsSpread(t *testing.T) {
	b := newBed(t)
	for i := range 5 {
		id := b.join(fmt.Sprintf("m%d", i))
		if i < 4 {
			for j := range 20 {
				b.gpu(id, prompt(uint32(1000+20*i+j), 0, 1600), 100)
			}
		}
	}
	counts := make(map[string]int)
	for i := range 100 {
		now := t0.Add(time.Duration(i) * time.Millisecond)
		counts[first(b.pickAt(Request{Prompt: tokens(prompt(uint32(i), 0, 4000)), Reserve: true}, now))]++
	}
	low, high := 100, 0
	for i := range 5 {
		n := counts[fmt.Sprintf("m%d", i)]
		low, high = min(low, n), max(high, n)
	}
	if float64(high) > 1.3*float64(low) {
		t.Errorf("from %d to %d a member: %v", low, high, counts)
	}
}

// Near-ties go to the session's last member; a real difference does not.
func TestSessionBreaksNearTies(t *testing.T) {
	b := newBed(t)
	for i := range 8 {
		b.join(fmt.Sprintf("m%d", i))
	}
	want := first(b.pick(Request{Prompt: tokens(prompt(1, 0, 2000)), Session: "s", Reserve: true}))
	now := t0.Add(time.Minute)
	b.fleet.Sweep(now)
	for i := range 20 {
		d := b.pickAt(Request{Prompt: tokens(prompt(uint32(100+i), 0, 2000)), Session: "s"}, now)
		if first(d) != want || !strings.Contains(d.Reason, "session") {
			t.Fatalf("%s, want %s: %s", first(d), want, d.Reason)
		}
	}
	le := prompt(5, 0, 2000)
	other := b.fleet.View().Named("m0").ID
	if want == "m0" {
		other = b.fleet.View().Named("m1").ID
	}
	b.gpu(other, le, 100)
	d := b.pickAt(Request{Prompt: tokens(le), Session: "s"}, now)
	if d.Candidates[0].Member.ID != other {
		t.Errorf("a session keeps from the holder of 1,600 tokens: %s", d.Reason)
	}
}

// Two schedulers agree where nothing tells members apart, and what everybody
// shares does not decide.
func TestReplicasAgreeAndSharedHeadsSpread(t *testing.T) {
	one, two := newBed(t), newBed(t)
	two.seed = 99
	for i := range 8 {
		name := fmt.Sprintf("m%d", i)
		one.gpu(one.join(name), prompt(0, 320, 320), 20)
		name = fmt.Sprintf("m%d", 7-i) // numbers differ
		two.gpu(two.join(name), prompt(0, 320, 320), 20)
	}
	counts := make(map[string]int)
	for i := range 800 {
		r := Request{Prompt: tokens(prompt(uint32(i), 320, 1000))}
		a, b := first(one.pick(r)), first(two.pick(r))
		if a != b {
			t.Fatalf("prompt %d: %s and %s", i, a, b)
		}
		counts[a]++
	}
	for name, n := range counts {
		if n < 60 || n > 150 {
			t.Errorf("%s: %d of 800", name, n)
		}
	}
	if len(counts) != 8 {
		t.Errorf("%v", counts)
	}
}

// Ties without any key are spread too.
func TestTiesSpread(t *testing.T) {
	for _, policy := range []string{"default", "random", "round-robin", "least-requests", "least-tokens"} {
		b := newBed(t)
		for i := range 4 {
			b.join(fmt.Sprintf("m%d", i))
		}
		counts := make(map[string]int)
		for range 400 {
			d := b.pick(Request{Policy: policy, Reserve: true})
			counts[first(d)]++
			b.Report(Report{Decision: d.ID, Outcome: fleet.Cancelled}, t0)
		}
		low, high := 60, 140
		if policy == "round-robin" {
			low, high = 100, 100
		}
		for name, n := range counts {
			if n < low || n > high || len(counts) != 4 {
				t.Errorf("%s: %s has %d of 400", policy, name, n)
			}
		}
	}
}
