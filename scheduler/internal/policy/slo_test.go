package policy

import (
	"fmt"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var nan = math.NaN()

// measured is a kind of member that serves so many requests of 1 s at a time.
func measured(group int, at float64) SLO {
	return SLO{Group: group, RPS: at, E2E: 1000, TTFT: nan, TPOT: nan}
}

// fitting is a round of idle members of these kinds for a prompt of 1,000
// tokens (100 ms) and 100 of output (10 ms each).
func withSLOs(kinds ...SLO) *Round {
	r := &Round{Output: 100, SLOs: kinds, Slack: make([]float64, 4), Length: 1000, Rho: nan}
	for range kinds {
		r.Candidates = append(r.Candidates, Candidate{Uncached: 1000, Speed: speed()})
	}
	r.Costs = make([]Cost, len(kinds))
	return r
}

// winner scores a round and returns the first of the lowest; -1: no room.
func winner(t *testing.T, name string, r *Round) int {
	t.Helper()
	p, err := Named(name)
	if err != nil {
		t.Fatal(err)
	}
	Estimate(r)
	Measure(r)
	s := make([]float64, len(r.Candidates))
	p.Score(r, s)
	best := 0
	for i := range s {
		if math.IsNaN(s[i]) || math.IsInf(s[i], 0) {
			t.Fatalf("%s: score %v", name, s)
		}
		if s[i] < s[best] {
			best = i
		}
	}
	if !p.HasRoom(r, best, s[best], 0) {
		return -1
	}
	return best
}

// place lets a policy place requests until it finds no room, or so many.
func placed(t *testing.T, name string, r *Round, requests int) []int {
	t.Helper()
	counts := make([]int, len(r.SLOs))
	for range requests {
		at := winner(t, name, r)
		if at < 0 {
			break
		}
		counts[at]++
		r.SLOs[at].InFlight += r.SLOs[at].Share
		r.Candidates[at].Load.Requests++
	}
	return counts
}

func TestPackFillsOneMemberToOneFirstAndLeastSpreads(t *testing.T) {
	members := func() *Round { return withSLOs(measured(0, 4), measured(0, 4), measured(0, 4)) }
	for _, c := range []struct {
		policy   string
		requests int
		want     []int
	}{
		{"slo-pack-load", 3, []int{3, 0, 0}},
		{"slo-pack-load", 4, []int{4, 0, 0}},
		{"slo-pack-load", 6, []int{4, 2, 0}},
		{"slo", 3, []int{1, 1, 1}},
		{"slo-least-load-pulling", 7, []int{3, 2, 2}},
		{"slo-least-load", 7, []int{3, 2, 2}},
	} {
		if got := placed(t, c.policy, members(), c.requests); !cmp.Equal(got, c.want) {
			t.Errorf("%s, %d requests: %v, want %v", c.policy, c.requests, got, c.want)
		}
	}
}

func TestPullNeverExceedsOne(t *testing.T) {
	for _, name := range []string{"slo", "slo-pack-load", "slo-least-load-pulling"} {
		// 3.7 at a time are 3 requests.
		r := withSLOs(measured(0, 4), measured(0, 3.7), measured(0, 1))
		if got, want := placed(t, name, r, 100), []int{4, 3, 1}; !cmp.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
		for i := range r.SLOs {
			if used := r.SLOs[i].InFlight; used > 1+1e-9 {
				t.Errorf("%s: member %d is used %.3f", name, i, used)
			}
		}
	}
	if got := placed(t, "slo-least-load", withSLOs(measured(0, 4), measured(0, 4)), 20); !cmp.Equal(got, []int{10, 10}) {
		t.Errorf("slo-least-load waits: %v", got)
	}
}

// Peers' bug 20: a request that is larger than any member runs where nobody is.
func TestOneLargerThanAMemberRunsOnAnIdleOne(t *testing.T) {
	for _, name := range []string{"slo", "slo-pack-load", "default"} {
		r := withSLOs(measured(0, 0.4))
		if got := placed(t, name, r, 3); !cmp.Equal(got, []int{1}) {
			t.Errorf("%s: %v, want one", name, got)
		}
	}
}

// The kinds of member are tried from the one with the most slack on; any but
// the first only if it is in time.
func TestKindOfMemberWithMostSlackComesFirst(t *testing.T) {
	// Kind 0 takes 50 ms a token, so 5,100 ms; kind 1 10 ms, so 1,100 ms.
	kinds := func(e2e float64) *Round {
		slow, quick := measured(0, 2), measured(1, 2)
		slow.TPOT = 50
		r := withSLOs(slow, quick)
		for i := range r.SLOs {
			r.SLOs[i].Targets = Targets{E2E: e2e}
		}
		return r
	}
	for _, c := range []struct {
		name string
		e2e  float64
		want []int
	}{
		{"both in time: the quick one, then the slow one", 6000, []int{2, 2}},
		{"the slow one is late: wait for the quick one", 2000, []int{0, 2}},
		{"both late: the quick one all the same", 500, []int{0, 2}},
		{"no target: any", 0, []int{2, 2}},
	} {
		for _, name := range []string{"slo", "slo-pack-load"} {
			if got := placed(t, name, kinds(c.e2e), 10); !cmp.Equal(got, c.want) {
				t.Errorf("%s, %s: %v, want %v", c.name, name, got, c.want)
			}
		}
	}
	if got := winner(t, "slo", kinds(6000)); got != 1 {
		t.Errorf("both in time: first %d, want the quick one", got)
	}
}

func TestSlackByTarget(t *testing.T) {
	// First token after 100 ms, end after 1,100 ms.
	for _, c := range []struct {
		targets Targets
		elapsed float64
		want    float64
	}{
		{Targets{}, 0, nan},
		{Targets{TTFT: 500}, 0, 400},
		{Targets{TTFT: 500}, 450, -50},
		{Targets{TPOT: 20}, 0, 900},
		{Targets{TPOT: 20, TTFT: 500}, 0, 1400},
		{Targets{TPAT: 2}, 0, 1100},
		{Targets{E2E: 1000}, 0, -100},
		{Targets{TTFT: -1, TPOT: nan, TPAT: nan, E2E: nan}, 0, nan},
	} {
		r := withSLOs(measured(0, 1))
		r.SLOs[0].Targets, r.Elapsed = c.targets, c.elapsed
		Estimate(r)
		Measure(r)
		if got := r.SLOs[0].SlackMS; !cmp.Equal(got, c.want, cmpopts.EquateNaNs(), cmpopts.EquateApprox(0, 1e-9)) {
			t.Errorf("%+v after %v ms: %v, want %v", c.targets, c.elapsed, got, c.want)
		}
	}
}

// Peers' bug 18: a number that says nothing falls back, and never refuses all.
func TestBadCellsFallBackAndNeverRefuseAll(t *testing.T) {
	for _, bad := range []float64{nan, math.Inf(1), math.Inf(-1), 0, -3} {
		for name, of := range map[string]func(*SLO){
			"rps": func(f *SLO) { f.RPS = bad }, "e2e": func(f *SLO) { f.E2E = bad },
			"ttft": func(f *SLO) { f.TTFT = bad }, "tpot": func(f *SLO) { f.TPOT = bad },
		} {
			for _, pol := range []string{"slo", "slo-pack-load", "slo-least-load"} {
				for _, targets := range []Targets{{}, {TPOT: 50}, {TTFT: 100}, {TPOT: 1}} {
					f := measured(0, 4)
					of(&f)
					f.Targets = targets
					r := withSLOs(f, f)
					if got := winner(t, pol, r); got < 0 {
						t.Errorf("%s=%v, %s, %+v: refused by an idle fleet", name, bad, pol, targets)
					}
				}
			}
		}
	}
	// Without any share the fewest requests decide.
	f := measured(0, nan)
	r := withSLOs(f, f, measured(0, 4))
	r.Candidates[0].Load.Requests, r.Candidates[2].Load.Requests = 2, 1
	for _, pol := range []string{"slo", "slo-pack-load", "slo-least-load"} {
		if got := winner(t, pol, r); got != 1 {
			t.Errorf("%s: member %d, want the one with the fewest requests", pol, got)
		}
	}
}

func TestShareIsLearnedWhereNothingWasMeasured(t *testing.T) {
	for _, c := range []struct {
		target   Targets
		requests float64
		share    float64
		used     float64
	}{
		// A step takes 10 ms, each request adds 100/100 + 10/400 = 1.025 ms.
		{Targets{TPOT: 20.25}, 0, 0.1, 0},
		{Targets{TPOT: 20.25}, 5, 1.0 / 15, 5.0 / 15},
		{Targets{TPOT: 5}, 5, 1, 5}, // too slow as it is: nobody more
		{Targets{E2E: 100 + 2025}, 0, 0.1, 0},
		{Targets{TTFT: 500}, 3, nan, nan}, // nothing limits the steps
	} {
		f := measured(0, nan)
		f.Targets = c.target
		r := withSLOs(f)
		r.Candidates[0].Load.Requests = c.requests
		Estimate(r)
		Measure(r)
		got := [2]float64{r.SLOs[0].Share, r.SLOs[0].Used}
		if want := [2]float64{c.share, c.used}; !cmp.Equal(got, want, cmpopts.EquateNaNs(), cmpopts.EquateApprox(1e-9, 1e-9)) {
			t.Errorf("%+v beside %v requests: %v, want %v", c.target, c.requests, got, want)
		}
	}
}

func TestRoomByBudget(t *testing.T) {
	p, err := Named("default")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		load   Load
		budget float64
		want   bool
	}{
		{Load{}, 0, true}, // idle: even what is larger than the budget
		{Load{Requests: 1, WaitMS: 50}, 200, true},
		{Load{Requests: 1, WaitMS: 150}, 200, false}, // 100 of its own
		{Load{Requests: 9}, 100, true},
		{Load{WaitMS: 1}, 100, false},
	} {
		r := withSLOs(measured(0, nan))
		r.Candidates[0].Load = c.load
		Estimate(r)
		Measure(r)
		if got := p.HasRoom(r, 0, 0, c.budget); got != c.want {
			t.Errorf("%+v, budget %v: %v", fmt.Sprintf("%+v", c.load), c.budget, got)
		}
	}
}

// Two of ten requests too many wait for a fifth of the time that one takes.
func TestTheWaitForAShareIsTime(t *testing.T) {
	f := measured(0, 10)
	f.InFlight = 1.1
	r := withSLOs(f, measured(0, 10))
	for i := range r.Candidates {
		r.Candidates[i].Load.Requests = 11
	}
	Estimate(r)
	Measure(r)
	got := []float64{5, 5}
	Delay(r, got)
	if want := []float64{5 + 0.2*1100, 5}; !cmp.Equal(got, want, cmpopts.EquateApprox(0, 1e-9)) {
		t.Errorf("%v, want %v", got, want)
	}
}
