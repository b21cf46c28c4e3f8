package pick

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// twins are two schedulers that see the same fleet.
func twins(t testing.TB, p Policies) [2]*bed {
	var list [2]*bed
	for i := range list {
		b := newBed(t)
		if err := b.Use(p); err != nil {
			t.Fatal(err)
		}
		for m := range 5 {
			id := b.join(fmt.Sprintf("m%d", m))
			if m < 3 {
				b.gpu(id, prompt(1, 0, 800), 10*(m+1))
			} else {
				b.trust(id, fleet.Syncing)
			}
			b.load(id, m, 0, t0)
		}
		list[i] = b
	}
	return list
}

// answered is all that an answer says but the number of the decision, which is
// secret, and where things lie in memory.
func answered(d *Decision) string {
	s := fmt.Sprintf("%s %v %s %q %d %d %d %v %s %v %v %d", d.Reason, d.Why, d.Policy, d.Fallback(), d.Number, d.PromptTokens,
		d.EnginePriority, d.ExpectedOutput, d.Shadow.Policy, d.Shadow.FirstTokenMS, d.Shadow.TotalMS, d.Shadow.CachedTokens)
	for i := range d.Candidates {
		c := &d.Candidates[i]
		s += fmt.Sprintf("\n%s %+v %v %d %+v %v %v %d %d", c.Member.Info.Name, c.Cached, c.Trust, c.Uncached, c.Cost, c.Age, c.LoadAge, c.Running, c.Waiting)
	}
	return s
}

// Whatever is asked with Score and Explain between Picks, by whichever policy:
// the Picks get the same answers, and nothing is counted or remembered.
func TestPeekingChangesNothing(t *testing.T) {
	names := append(policy.Names(), "weighted:prefix=2", "session:gap=100", "")
	rapid.Check(t, func(t *rapid.T) {
		usual := Policies{Policy: rapid.SampledFrom(names).Draw(t, "usual"), Shadow: rapid.SampledFrom(names).Draw(t, "shadow")}
		pair := twins(&quiet{}, usual)
		now := t0
		var open [2][]string
		for i := range rapid.IntRange(1, 25).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 200).Draw(t, "pass")) * time.Millisecond)
			r := Request{
				Model: "model", Prompt: tokens(prompt(uint32(rapid.IntRange(1, 3).Draw(t, "prompt")), 200, 800)),
				Session: rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "session"),
			}
			switch rapid.IntRange(0, 5).Draw(t, "do") {
			case 0, 1, 2:
				r.Policy = rapid.SampledFrom(names).Draw(t, "policy")
				ask := r
				if rapid.Bool().Draw(t, "explain") {
					if _, _, err := pair[1].Explain(&ask, rapid.SampledFrom(names).Draw(t, "other"), now); err != nil {
						t.Fatal(err)
					}
				} else if _, err := pair[1].Pick(&ask, now); err != nil {
					t.Fatal(err)
				}
			case 3, 4:
				var said [2]string
				for i, b := range pair {
					mine := r
					mine.Reserve = true
					d, err := b.Pick(&mine, now)
					if err != nil {
						t.Fatal(err)
					}
					said[i] = answered(d)
					open[i] = append(open[i], d.ID)
				}
				if said[0] != said[1] {
					t.Fatalf("step %d: without peeking\n%s\nand with\n%s", i, said[0], said[1])
				}
			case 5:
				for i, b := range pair {
					if n := len(open[i]); n > 0 {
						b.Report(Report{Decision: open[i][n/2], Outcome: fleet.Finished, OutputTokens: 10}, now)
					}
					b.Tick(now)
				}
			}
			a, b := pair[0], pair[1]
			if a.Stats() != b.Stats() || a.fleet.Stats() != b.fleet.Stats() {
				t.Fatalf("step %d: without peeking\n%+v %+v\nand with\n%+v %+v", i, a.Stats(), a.fleet.Stats(), b.Stats(), b.fleet.Stats())
			}
			s0, h0 := a.sent.Wanted.Now(now)
			if s1, h1 := b.sent.Wanted.Now(now); s0 != s1 || h0 != h1 {
				t.Fatalf("step %d: Picks note what is sent: without peeking %v %v, with %v %v", i, s0, h0, s1, h1)
			}
			if n, m := a.policies.count.Load(), b.policies.count.Load(); n != m {
				t.Fatalf("step %d: %d policies are kept, without peeking %d", i, m, n)
			}
		}
	})
}

// quiet is a test that cannot fail: what it would say is said by its owner.
type quiet struct{ testing.TB }

func (*quiet) Helper()           {}
func (*quiet) Fatal(args ...any) { panic(fmt.Sprint(args...)) }

func TestOnlyAllowedPoliciesCanBeNamed(t *testing.T) {
	b := newBed(t)
	b.join("m")
	ask := func(name string) error {
		_, err := b.Pick(&Request{Model: "model", Policy: name}, t0)
		return err
	}
	explain := func(name string) error {
		_, _, err := b.Explain(&Request{Model: "model"}, name, t0)
		return err
	}
	if ask("e2") != nil || explain("e2") != nil {
		t.Error("without a list every policy is allowed")
	}
	if err := b.Use(Policies{Policy: "session:gap=100", Shadow: "random", Allowed: []string{"weighted", "default"}}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "default", "weighted", "weighted:prefix=2", "random", "session:gap=100"} {
		if err := errors.Join(ask(name), explain(name)); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"e2", "session", "session:gap=1", "what"} {
		if !errors.Is(ask(name), ErrNotAllowed) || !errors.Is(explain(name), ErrNotAllowed) {
			t.Errorf("%q: %v, %v", name, ask(name), explain(name))
		}
	}
	for _, wrong := range []string{"what", "", "weighted:prefix=2"} {
		if err := b.Use(Policies{Allowed: []string{wrong}}); err == nil {
			t.Errorf("a list with %q was taken", wrong)
		}
	}
}
