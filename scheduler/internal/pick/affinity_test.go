package pick

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// fleetOf joins so many members, the last first if backwards: their numbers
// differ from one scheduler to the other.
func fleetOf(t testing.TB, n int, backwards bool) *bed {
	b := newBed(t)
	for i := range n {
		if backwards {
			i = n - 1 - i
		}
		b.join(fmt.Sprintf("m%03d", i))
	}
	return b
}

func TestOneKeyOneMemberOverRestartsAndReplicas(t *testing.T) {
	one, two := fleetOf(t, 10, false), fleetOf(t, 10, true)
	for _, r := range []Request{
		{Policy: "session", Session: "alice"},
		{Policy: "session", Session: "bob", Prompt: tokens(prompt(1, 0, 500))},
		{Policy: "prefix-hash", Prompt: tokens(prompt(2, 0, 500))},
		{Policy: "prefix-hash", Prompt: Prompt{Beginnings: Beginnings(nil, "You are a helpful assistant.")}},
	} {
		r.Reserve = true
		want := ""
		for i := range 1000 {
			b := one
			switch {
			case i%2 == 1:
				b = two
			case i%100 == 0: // the first scheduler starts again
				one = fleetOf(t, 10, false)
				b = one
			}
			d := b.pickAt(r, t0.Add(time.Duration(i)*time.Second/100))
			if want == "" {
				want = first(d)
			}
			if first(d) != want {
				t.Fatalf("%s, request %d: %s, want %s", r.Policy, i, first(d), want)
			}
			b.Report(Report{Decision: d.ID, Outcome: fleet.Finished}, t0)
		}
	}
}

func TestLosingOneOfTenMembersMovesATenthOfTheKeys(t *testing.T) {
	for _, pol := range []string{"session", "prefix-hash"} {
		b := fleetOf(t, 10, false)
		moved, lost := 0, 0
		for i := range 2000 {
			r := Request{Policy: pol, Session: fmt.Sprint(i), Prompt: tokens(prompt(uint32(i), 0, 300))}
			before := first(b.pick(r))
			r.Exclude = []Ref{{Member: "m003"}}
			after := first(b.pick(r))
			if before == "m003" {
				lost++
			}
			if before != after {
				moved++
			}
		}
		if moved != lost || moved < 140 || moved > 260 {
			t.Errorf("%s: %d of 2,000 keys moved, %d were on the member", pol, moved, lost)
		}
	}
}

func TestNoMemberIsAboveItsBoundWhileOneIsFree(t *testing.T) {
	for pol, limit := range map[string]func(mean float64) float64{
		"session":     func(mean float64) float64 { return max(1.5*mean, mean+8) },
		"prefix-hash": func(mean float64) float64 { return max(1.25*mean, mean+4) },
	} {
		b := fleetOf(t, 10, false)
		counts := make(map[string]int)
		for i := range 1000 {
			// Half of them belong together.
			r := Request{Policy: pol, Session: fmt.Sprint(i % 50), Prompt: tokens(prompt(uint32(i), 0, 300)), Reserve: true}
			if i%2 == 0 {
				r.Session, r.Prompt = "hot", tokens(prompt(7, 0, 300))
			}
			name := first(b.pick(r))
			counts[name]++
			if got, most := float64(counts[name]), limit(float64(i+1)/10); got > most {
				t.Fatalf("%s: %s has %v of %d requests, at most %v are within its bound", pol, name, got, i+1, most)
			}
		}
	}
}

func TestAHotPrefixIsHeldByFewOfManyAndTakesNone(t *testing.T) {
	b := fleetOf(t, 300, false)
	holders := make(map[string]bool)
	open := make([]string, 0, 400)
	most := 0
	for i := range 8000 {
		r := Request{Policy: "prefix-hash", Prompt: tokens(prompt(uint32(i), 0, 300)), Reserve: true}
		if i%4 == 0 {
			r.Prompt = tokens(prompt(1, 250, 300))
		}
		d := b.pick(r)
		if i%4 == 0 {
			holders[first(d)] = true
		}
		most = max(most, d.Candidates[0].Member.Reserved().Open)
		// 400 requests are open at a time: 1.3 a member.
		if open = append(open, d.ID); len(open) > 400 {
			b.Report(Report{Decision: open[0], Outcome: fleet.Finished}, t0)
			open = open[1:]
		}
	}
	if len(holders) < 2 || len(holders) > 60 || most > 6 {
		t.Errorf("%d of 300 hold the prefix, at most %d requests at a time", len(holders), most)
	}
}

func TestPromptsEqualIn100AndDifferentIn500CharactersSeparate(t *testing.T) {
	b := fleetOf(t, 20, false)
	system := strings.Repeat("s", 100)
	homes := make(map[string]bool)
	for app := range 20 {
		// The prompts of an application share 500 characters.
		text := system + strings.Repeat(fmt.Sprintf("<%02d>", app), 200)
		mine := make(map[string]bool)
		for i := range 10 {
			r := Request{Policy: "prefix-hash", Prompt: Prompt{Beginnings: Beginnings(nil, text[:600]+strings.Repeat(fmt.Sprint(i), 600))}, Reserve: true}
			d := b.pick(r)
			b.Report(Report{Decision: d.ID, Outcome: fleet.Finished}, t0)
			if i > 0 { // the first has nobody to follow
				mine[first(d)] = true
			}
			homes[first(d)] = true
		}
		if len(mine) != 1 {
			t.Errorf("application %d is on %d members", app, len(mine))
		}
	}
	if len(homes) < 10 {
		t.Errorf("all on %d of 20 members", len(homes))
	}
}

// Peers' bug 16: a name and a number run together on a ring, so that pod1 and
// 11 is pod11 and 1. And texts do not run together either.
func TestNamesAndNumbersDoNotCollide(t *testing.T) {
	b := newBed(t)
	for _, name := range []string{"pod1", "pod11", "pod111", "pod2", "pod12"} {
		b.join(name)
	}
	counts := make(map[string]int)
	for i := range 5000 {
		counts[first(b.pick(Request{Policy: "session", Session: fmt.Sprint("1", i)}))]++
	}
	for name, n := range counts {
		if n < 850 || n > 1150 {
			t.Errorf("%s: %d of 5,000", name, n)
		}
	}
	seen := make(map[uint64]string)
	for _, r := range []Request{
		{Model: "a", Adapter: "bc"}, {Model: "ab", Adapter: "c"}, {Model: "abc"}, {Model: "a", Salt: "bc"}, {Model: "a", Adapter: "b", Salt: "c"},
	} {
		k := scopeKey(&r, 7)
		if other, ok := seen[k]; ok {
			t.Errorf("%+v meets %s", r, other)
		}
		seen[k] = fmt.Sprintf("%+v", r)
	}
}

func TestBeginningsOfAText(t *testing.T) {
	long := strings.Repeat("日本語テキスト", 300) // 2,100 characters, three bytes each
	all := Beginnings(nil, long)
	if len(all) != 3 || len(Beginnings(nil, "")) != 0 {
		t.Fatalf("%d keys", len(all))
	}
	runes := []rune(long)
	for i, n := range beginnings {
		if got := Beginnings(nil, string(runes[:n])); len(got) != i+1 || got[i] != all[i] {
			t.Errorf("the first %d characters: %v, want %v", n, got, all[:i+1])
		}
		if got := Beginnings(nil, string(runes[:n-1])); len(got) != i+1 || got[i] == all[i] {
			t.Errorf("one less than %d characters have the same key", n)
		}
	}
	if a, b := Beginnings(nil, long[:600]+"a"), Beginnings(nil, long[:600]+"b"); a[0] != b[0] || a[1] == b[1] {
		t.Errorf("%v and %v", a, b)
	}
}

// A conversation without a name is recognised by its blocks, and by what it
// was when they are evicted.
func TestConversationsAreRecognisedBeyondEviction(t *testing.T) {
	b := fleetOf(t, 8, false)
	owners := make(map[uint32]string)
	for seed := range uint32(40) {
		d := b.pick(Request{Policy: "session", Prompt: tokens(prompt(seed, 320, 2000)), Reserve: true})
		owners[seed] = first(d)
		b.Report(Report{Decision: d.ID, Outcome: fleet.Finished}, t0)
	}
	used := make(map[string]bool)
	later := t0.Add(time.Hour) // no prediction is left, and no block came
	for seed, owner := range owners {
		used[owner] = true
		d := b.pickAt(Request{Policy: "session", Prompt: tokens(prompt(seed, 320, 2600))}, later)
		if first(d) != owner {
			t.Errorf("conversation %d: %s, want %s", seed, first(d), owner)
		}
	}
	if len(used) < 5 {
		t.Errorf("conversations that share a system prompt are on %d of 8 members", len(used))
	}
	// Who holds most of it owns it, whoever was last.
	b.gpu(b.fleet.View().Named("m000").ID, prompt(3, 320, 2000), 125)
	if d := b.pickAt(Request{Policy: "session", Prompt: tokens(prompt(3, 320, 2600))}, later); first(d) != "m000" {
		t.Errorf("the holder is m000: %s", first(d))
	}
}

func TestAFailedMemberIsNotOfferedAgain(t *testing.T) {
	b := fleetOf(t, 5, false)
	for _, name := range policy.Names() {
		r := Request{Policy: name, Session: "s", Prompt: tokens(prompt(1, 0, 1000))}
		for range 4 {
			d := b.pick(r)
			for _, c := range d.Candidates {
				for _, e := range r.Exclude {
					if e.Member == c.Member.Info.Name {
						t.Fatalf("%s: %s has failed", name, e.Member)
					}
				}
			}
			r.Exclude = append(r.Exclude, Ref{Member: first(d)})
		}
	}
}

// Each session that leaves its member is counted with the reason.
func TestBrokenSessionsAreCountedByReason(t *testing.T) {
	b := fleetOf(t, 3, false)
	r := Request{Policy: "session", Session: "s", Prompt: tokens(prompt(1, 0, 4000)), Reserve: true}
	owner := first(b.pick(r))
	id := b.fleet.View().Named(owner).ID
	b.load(id, 0, 0, t0)
	want, now := [policy.LeftReasons]uint64{1}, t0
	check := func(why policy.Left, d *Decision, stays bool) {
		t.Helper()
		want[why]++
		if got := b.Stats().Left; got != want || (first(d) == owner) != stays {
			t.Errorf("%s: %v, want %v; %s, the owner is %s", why, got, want, first(d), owner)
		}
		// The session goes back for the next case.
		m := b.fleet.View().Member(id)
		b.fleet.Decide("s", now, func(fleet.ID, bool, []fleet.Reserved) (fleet.Choice, bool) {
			return fleet.Choice{Member: m, Session: "s"}, true
		})
	}
	check(policy.Stayed, b.pick(r), true)
	excluded := r
	excluded.Exclude = []Ref{{Member: owner}}
	check(policy.Gone, b.pick(excluded), false)
	// All have fresh samples from here on.
	others := func(usage float64, running int, now time.Time) {
		for _, m := range b.fleet.View().Members {
			l := fleet.Load{At: now, Running: 1, KVUsage: 0.1, Totals: fleet.NoTotals()}
			if m.ID == id {
				l.Running, l.KVUsage = running, usage
			}
			b.fleet.Receive(m.ID, *m.Info, &l, now)
		}
	}
	now = now.Add(time.Second)
	others(0.99, 1, now)
	check(policy.Full, b.pickAt(r, now), false)
	now = now.Add(time.Second)
	others(0.5, 40, now)
	check(policy.Crowded, b.pickAt(r, now), false)
	now = now.Add(time.Second)
	others(0.5, 1, now)
	m := b.fleet.View().Member(id)
	b.fleet.Decide("", now, func(fleet.ID, bool, []fleet.Reserved) (fleet.Choice, bool) {
		return fleet.Choice{Member: m, Uncached: 60_000, PrefillMS: 3000, FirstTokenMS: 3000}, true
	})
	check(policy.Slow, b.pickAt(r, now), false)
}
