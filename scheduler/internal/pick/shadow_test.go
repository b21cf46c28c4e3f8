package pick

import (
	"errors"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// shaded is a fleet where the default policy and least-requests disagree: the
// owner of the prompt is busy.
func shaded(t *testing.T) (*bed, Request) {
	b := newBed(t)
	owner, idle := b.join("owner"), b.join("idle")
	p := prompt(1, 0, 32000)
	b.gpu(owner, p, 1900)
	b.load(owner, 2, 0, t0)
	b.load(idle, 0, 0, t0)
	return b, Request{Prompt: tokens(p)}
}

func TestShadowDecidesNothing(t *testing.T) {
	b, r := shaded(t)
	before := b.pick(r)
	if before.Shadow != (Counterfactual{}) {
		t.Errorf("a shadow without a policy: %+v", before.Shadow)
	}
	if err := b.Use(Policies{Shadow: "least-requests"}); err != nil {
		t.Fatal(err)
	}
	after := b.pick(r)
	want, got := before.Candidates, after.Candidates
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(Candidate{}, "Member")); diff != "" || first(after) != "owner" || before.Reason != after.Reason {
		t.Errorf("another answer with a shadow (%s): %s", after.Reason, diff)
	}
	r.Reserve = true
	b.pick(r)
	if m := b.fleet.View().Named("idle"); m.Reserved().Open != 0 {
		t.Error("the shadow's choice was reserved")
	}
}

func TestShadowSaysWhatItWouldHaveChanged(t *testing.T) {
	b, r := shaded(t)
	if err := b.Use(Policies{Shadow: "least-requests"}); err != nil {
		t.Fatal(err)
	}
	d := b.pick(r)
	s := d.Shadow
	chosen, other := d.Candidates[0], d.Candidates[1]
	if s.Policy != "least-requests" || s.Member.Info.Name != "idle" || s.Same || s.CachedTokens != -1900*16 ||
		s.FirstTokenMS != other.Cost.FirstToken()-chosen.Cost.FirstToken() || s.TotalMS != other.Cost.Total-chosen.Cost.Total || !(s.FirstTokenMS > 100) {
		t.Errorf("%+v", s)
	}
	if err := b.Use(Policies{Shadow: "default"}); err != nil {
		t.Fatal(err)
	}
	if s := b.pick(r).Shadow; !s.Same || s.FirstTokenMS != 0 || s.CachedTokens != 0 {
		t.Errorf("beside itself: %+v", s)
	}
}

func TestExplainShowsBothRankings(t *testing.T) {
	b, r := shaded(t)
	r.Top, r.Reserve, r.Model = 1, true, "model"
	d, other, err := b.Explain(&r, "least-requests", t0)
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Candidates) != 2 || len(other.Candidates) != 2 || first(d) != "owner" || first(other) != "idle" || d.ID != "" {
		t.Fatalf("%s; %s", d.Reason, other.Reason)
	}
	if d.Policy != "default" || other.Policy != "least-requests" || d.Shadow.Policy != other.Policy {
		t.Error(d.Policy, other.Policy)
	}
	parts := func(list []Candidate) map[string]Candidate {
		m := make(map[string]Candidate)
		for _, c := range list {
			if s := c.Cost.Wait + c.Cost.Load + c.Cost.Prefill + c.Cost.Miss + c.Cost.Evict + c.Cost.Decode; math.Abs(s-c.Cost.Total) > 1e-9 {
				t.Errorf("%s: parts %v, total %v", c.Member.Info.Name, s, c.Cost.Total)
			}
			m[c.Member.Info.Name] = c
		}
		return m
	}
	if diff := cmp.Diff(parts(d.Candidates), parts(other.Candidates), cmpopts.IgnoreFields(Candidate{}, "Member")); diff != "" {
		t.Errorf("the same moment is told in two ways: %s", diff)
	}
	if b.fleet.Stats().Decisions != 0 {
		t.Error("explaining reserves something")
	}
	if _, other, err := b.Explain(&r, "", t0); err != nil || other != nil {
		t.Errorf("without a second policy: %v, %v", other, err)
	}
}

func TestUnknownPoliciesAreRefusedWhole(t *testing.T) {
	b, r := shaded(t)
	for _, bad := range []Policies{{Policy: "least-requests", Shadow: "nonsense"}, {Policy: "nonsense", Shadow: "random"}} {
		if err := b.Use(bad); !errors.Is(err, ErrPolicy) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	if d := b.pick(r); d.Policy != "default" || d.Shadow.Policy != "" {
		t.Errorf("a refused change is in force: %s, shadow %q", d.Policy, d.Shadow.Policy)
	}
	r.Model = "model"
	if _, _, err := b.Explain(&r, "nonsense", t0); !errors.Is(err, ErrPolicy) {
		t.Error(err)
	}
	if _, err := New(Config{Fleet: fleet.New(fleet.Config{}), Policies: Policies{Shadow: "nonsense"}}); !errors.Is(err, ErrPolicy) {
		t.Error(err)
	}
}
