package policy

import (
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

// speed that one can check by hand: 0.1 ms a token, 10 ms a step.
func speed() *learn.Speed {
	return &learn.Speed{
		Curve: learn.Curve{B: 0.1}, HostMS: 0.01, DiskMS: 0.5,
		StepMS: 10, StepBaseMS: 10, StepRequestMS: 0.025,
		PromptTokens: 1000, OutputTokens: 100, Busy: math.NaN(),
	}
}

func round(rho float64, c ...Candidate) *Round {
	return &Round{Candidates: c, Costs: make([]Cost, len(c)), Rho: rho}
}

func TestCostByPart(t *testing.T) {
	for _, c := range []struct {
		name string
		rho  float64
		in   []Candidate
		want []Cost
	}{
		{"idle: the prefill of what is missing", 0,
			[]Candidate{
				{Uncached: 8000, Speed: speed()},
				{GPU: 6000, Uncached: 2000, Speed: speed()},
				{GPU: 8000, Speed: speed()},
			},
			[]Cost{{Total: 800, Prefill: 800}, {Total: 200, Prefill: 200}, {Total: 0.1, Prefill: 0.1}},
		},
		{"half busy, a backlog of one mean request: a miss costs half as much again", 0.5,
			[]Candidate{{GPU: 6000, Uncached: 2000, Load: Load{WaitMS: 100}, Speed: speed()}},
			[]Cost{{Total: 400, Wait: 100, Prefill: 200, Miss: 100}},
		},
		{"half busy, no backlog: nobody pays for a miss", 0.5,
			[]Candidate{{GPU: 6000, Uncached: 2000, Speed: speed()}},
			[]Cost{{Total: 200, Prefill: 200}},
		},
		{"the backlog of all counts, five mean requests each", 0.5,
			[]Candidate{
				{Uncached: 2000, Load: Load{WaitMS: 1000}, Speed: speed()},
				{Uncached: 1000, Speed: speed()},
			},
			[]Cost{{Total: 1700, Wait: 1000, Prefill: 200, Miss: 500}, {Total: 350, Prefill: 100, Miss: 250}},
		},
		{"beyond nine tenths the price grows with the backlog alone", 2,
			[]Candidate{{Uncached: 2000, Load: Load{WaitMS: 100}, Speed: speed()}},
			[]Cost{{Total: 1200, Wait: 100, Prefill: 200, Miss: 900}},
		},
		{"rho unknown: a backlog of half a second stands for half busy", math.NaN(),
			[]Candidate{{Uncached: 2000, Load: Load{WaitMS: 500}, Speed: speed()}},
			[]Cost{{Total: 1200, Wait: 500, Prefill: 200, Miss: 500}},
		},
		{"host is loaded, a disk slower than computing is no better than that", 0,
			[]Candidate{
				{Host: 1000, Uncached: 2000, Speed: speed()},
				{Disk: 1000, Uncached: 2000, Speed: speed()},
			},
			[]Cost{{Total: 210, Load: 10, Prefill: 200}, {Total: 300, Load: 100, Prefill: 200}},
		},
		{"others pay by the mean speed", 0.5,
			[]Candidate{
				{Uncached: 2000, Load: Load{WaitMS: 100}, Speed: speed()},
				{Uncached: 2000, Load: Load{WaitMS: 100}, Speed: &learn.Speed{Curve: learn.Curve{B: 0.3}, PromptTokens: 1000}},
			},
			// Half a mean request waits, and two tokens take 1/(10+3.33) s: 0.15 ms a token.
			[]Cost{{Total: 375, Wait: 100, Prefill: 200, Miss: 75}, {Total: 775, Wait: 100, Prefill: 600, Miss: 75}},
		},
		{"a full cache loses what it takes, a roomy one what does not fit", 0,
			[]Candidate{
				{Uncached: 2000, Capacity: 9000, Speed: speed()},
				{Uncached: 2000, Capacity: 9000, Spare: 1500, Speed: speed()},
				{Uncached: 2000, Capacity: 9000, Spare: 5000, Speed: speed()},
			},
			// Three cached for each computed, half of that at the tail: 1.5 tokens a token.
			[]Cost{{Total: 500, Prefill: 200, Evict: 300}, {Total: 275, Prefill: 200, Evict: 75}, {Total: 200, Prefill: 200}},
		},
		{"memory that others hold is waited for, and paid for the more the less is left", 0,
			[]Candidate{
				{Uncached: 2000, Capacity: 10_000, Spare: 2000, Load: Load{KVUsage: 0.8, Tokens: 2000}, Speed: speed()},
				{Uncached: 2000, Capacity: 10_000, Spare: 2000, Load: Load{KVUsage: 0.8}, Speed: speed()},
				{Uncached: 2000, Capacity: 10_000, Spare: 2000, Load: Load{KVUsage: 0.4}, Speed: speed()},
			},
			// A request holds its memory for 100 steps of 10.025 ms, and nine fit:
			// a token costs 0.10025 ms times u^4/(1-u), u at most 0.97.
			[]Cost{
				{Total: 1202.5 + 200.5*0.88529281/0.03, Wait: 1002.5, Prefill: 200, Miss: 200.5 * 0.88529281 / 0.03},
				{Total: 200 + 200.5*0.4096/0.2, Prefill: 200, Miss: 200.5 * 0.4096 / 0.2},
				{Total: 200 + 200.5*0.0256/0.6, Prefill: 200, Miss: 200.5 * 0.0256 / 0.6},
			},
		},
		{"memory that one does not tell of counts for none", 0,
			[]Candidate{
				{Uncached: 2000, Capacity: 10_000, Spare: 2000, Load: Load{KVUsage: 0.9}, Speed: speed()},
				{Uncached: 2000, Capacity: 10_000, Spare: 2000, Load: Load{KVUsage: math.NaN()}, Speed: speed()},
			},
			[]Cost{{Total: 200, Prefill: 200}, {Total: 200, Prefill: 200}},
		},
		{"decode is what a member costs more than the least", 0,
			[]Candidate{
				{Uncached: 2000, Load: Load{Requests: 10}, Speed: speed()},
				{Uncached: 2000, Load: Load{Requests: 30}, Speed: speed()},
			},
			// A request adds 0.02*100*10/400 = 0.05 and 0.01*200 = 2 ms.
			[]Cost{{Total: 200, Prefill: 200}, {Total: 241, Prefill: 200, Decode: 41}},
		},
	} {
		r := round(c.rho, c.in...)
		if c.in[0].Capacity > 0 {
			r.Reuse = 3
		}
		Estimate(r)
		if diff := cmp.Diff(c.want, r.Costs, cmpopts.EquateApprox(0, 1e-9)); diff != "" {
			t.Errorf("%s:\n%s", c.name, diff)
		}
	}
}

// best returns the places of the lowest scores.
func best(t *testing.T, name string, r *Round) []int {
	t.Helper()
	p, err := Named(name)
	if err != nil {
		t.Fatal(err)
	}
	Estimate(r)
	scores := make([]float64, len(r.Candidates))
	p.Score(r, scores)
	var at []int
	low := math.Inf(1)
	for i, s := range scores {
		if s < low {
			at, low = at[:0], s
		}
		if s == low {
			at = append(at, i)
		}
	}
	return at
}

func TestPolicies(t *testing.T) {
	candidates := []Candidate{
		{Uncached: 8000, Load: Load{Requests: 2, Tokens: 500, WaitMS: 50, Last: 4}, Speed: speed()},
		{GPU: 8000, Uncached: 1, Load: Load{Requests: 9, Tokens: 4000, WaitMS: 400, Last: 3}, Speed: speed()},
		{GPU: 8000, Uncached: 1, Load: Load{Requests: 5, Tokens: 9000, WaitMS: 900, Last: 2}, Speed: speed()},
		{Uncached: 8000, Load: Load{Requests: 3, Tokens: 500, WaitMS: 50, Last: 9}, Speed: speed()},
	}
	for name, want := range map[string][]int{
		"":               {1},
		"default":        {1},
		"round-robin":    {2},
		"least-requests": {0},
		"least-tokens":   {0},
		"longest-prefix": {2},
	} {
		if got := best(t, name, round(0, candidates...)); !cmp.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	if _, err := Named("best"); !errors.Is(err, ErrUnknown) {
		t.Errorf("unknown policy: %v", err)
	}
}

// Peers' bug 9: the longest prefix wins, and load breaks ties.
func TestLoadBreaksTies(t *testing.T) {
	a := Candidate{GPU: 4000, Uncached: 100, Load: Load{Requests: 3}, Speed: speed()}
	b := Candidate{GPU: 4000, Uncached: 100, Load: Load{Requests: 2}, Speed: speed()}
	for _, name := range []string{"default", "longest-prefix"} {
		if got := best(t, name, round(0, a, b)); !cmp.Equal(got, []int{1}) {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// Peers' bug 25: by min-max one request would weigh as much as any number of
// cached tokens. And a tiny shared prefix does not outweigh a queue.
func TestMagnitudesAreKept(t *testing.T) {
	holder := Candidate{GPU: 4096, Uncached: 100, Load: Load{Requests: 1}, Speed: speed()}
	idle := Candidate{Uncached: 4196, Speed: speed()}
	if got := best(t, "default", round(0, idle, holder)); !cmp.Equal(got, []int{1}) {
		t.Errorf("one request against 4,096 cached tokens: %v", got)
	}
	holder = Candidate{GPU: 32, Uncached: 4164, Load: Load{Requests: 8, WaitMS: 400}, Speed: speed()}
	if got := best(t, "default", round(0.8, idle, holder)); !cmp.Equal(got, []int{0}) {
		t.Errorf("32 cached tokens against a queue: %v", got)
	}
}

// Peers' bug 26: when all queue alike, the owner keeps its requests: the price
// of a miss grows with saturation.
func TestOwnerKeepsItsRequestsAtSaturation(t *testing.T) {
	owner := Candidate{GPU: 4000, Uncached: 1000, Load: Load{Requests: 20, WaitMS: 800}, Speed: speed()}
	other := Candidate{Uncached: 5000, Load: Load{Requests: 20}, Speed: speed()}
	if got := best(t, "default", round(0, owner, other)); !cmp.Equal(got, []int{1}) {
		t.Errorf("half the fleet is free: %v, want the quicker", got)
	}
	if got := best(t, "default", round(0.9, owner, other)); !cmp.Equal(got, []int{0}) {
		t.Errorf("saturated fleet: %v, want the owner", got)
	}
}

func TestRandomIsEvenAndRepeatable(t *testing.T) {
	counts := make([]int, 5)
	for i := range 5000 {
		r := round(0, slices.Repeat([]Candidate{{Speed: speed()}}, 5)...)
		r.Random = uint64(i)
		at := best(t, "random", r)
		if len(at) != 1 || !cmp.Equal(at, best(t, "random", r)) {
			t.Fatalf("not repeatable: %v", at)
		}
		counts[at[0]]++
	}
	for i, n := range counts {
		if n < 850 || n > 1150 {
			t.Errorf("candidate %d: %d of 5,000", i, n)
		}
	}
}

// Peers' bugs 22 and 23: engine values count for all or for none.
func TestLoadCountsEngineValuesForAllOrNone(t *testing.T) {
	f := fleet.New(fleet.Config{})
	now := time.Unix(1_700_000_000, 0)
	id, _ := f.Join("m", now)
	f.Receive(id, fleet.Info{BlockSize: 16}, &fleet.Load{At: now, Running: 7, Waiting: 3, Totals: fleet.NoTotals()}, now)
	m := &f.View().Rows[0]
	r := fleet.Reserved{Tokens: 500, Prompt: 800, Open: 2, Unsampled: 1, PrefillsSampled: 1, Last: 9}
	for _, c := range []struct {
		gauges bool
		want   Load
	}{
		{false, Load{Requests: 2, Tokens: 500, WaitMS: 50, KVUsage: math.NaN(), Blocks: 50, Last: 9}},
		// Two of the three that wait are not ours: 1,000 tokens and 100 ms each.
		{true, Load{Requests: 11, Waiting: 2, Tokens: 2500, WaitMS: 250, KVUsage: 0, Blocks: 50, Last: 9}},
	} {
		var got Load
		got.Set(m, &r, 50, speed(), c.gauges, 0)
		if diff := cmp.Diff(c.want, got, cmpopts.EquateApprox(0, 1e-9), cmpopts.EquateNaNs(), cmpopts.IgnoreUnexported(Load{})); diff != "" {
			t.Errorf("gauges %v:\n%s", c.gauges, diff)
		}
	}
}

// A sample that comes at a good moment must not draw all requests to its member
// until the next: what it shows of others counts the less the older it is.
func TestOldSamplesCountLess(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	s := speed()
	stays := s.OutputTokens * s.StepMS
	between := func(age float64) (requests, waitMS float64) {
		f := fleet.New(fleet.Config{})
		list := make([]Candidate, 2)
		for i, load := range []fleet.Load{{Running: 20}, {Running: 100, Waiting: 5}} {
			load.At, load.Totals = now, fleet.NoTotals()
			id, _ := f.Join(string(rune('a'+i)), now)
			f.Receive(id, fleet.Info{}, &load, now)
			list[i].Speed = s
			list[i].Load.Set(&f.View().Rows[i], &fleet.Reserved{}, 7, s, true, age)
		}
		Relax(list)
		return list[1].Load.Requests - list[0].Load.Requests, list[1].Load.WaitMS - list[0].Load.WaitMS
	}
	works := 5 * s.Prefill(s.PromptTokens, 0)
	for _, q := range []struct{ age, requests, waitMS float64 }{
		{0, 85, works},
		{stays, 42.5, works * (1 - stays/(stays+works)) / 1},
	} {
		requests, waitMS := between(q.age)
		if math.Abs(requests-q.requests) > 1e-6 {
			t.Errorf("after %v ms: %v requests apart, want %v", q.age, requests, q.requests)
		}
		if q.age == 0 && math.Abs(waitMS-q.waitMS) > 1e-6 || waitMS > q.waitMS*1.5 || waitMS < 0 {
			t.Errorf("after %v ms: %v ms apart, want about %v", q.age, waitMS, q.waitMS)
		}
	}
}

// An engine that was idle when it was last seen has room, whatever others do.
func TestIdleEnginesHaveRoomBesideBusyOnes(t *testing.T) {
	list := make([]Candidate, 2)
	for i, m := range []fleet.Row{{}, {Running: 50, Waiting: 5}} {
		list[i].Speed = speed()
		list[i].Load.Set(&m, &fleet.Reserved{}, 0, list[i].Speed, true, 500)
	}
	Relax(list)
	r := &Round{Candidates: list, Costs: make([]Cost, 2)}
	Estimate(r)
	p, _ := Named("default")
	for i, want := range []bool{true, false} {
		if got := p.HasRoom(r, i, r.Costs[i].Total, 1e-6); got != want {
			t.Errorf("candidate %d: room %v, want %v", i, got, want)
		}
	}
}

// Peers' bug 18: whatever comes in, costs and scores can be compared.
func TestScoresAreNumbers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		any := rapid.Float64Range(0, 1e9)
		tokens := rapid.IntRange(0, 1<<21)
		r := &Round{
			Rho:    rapid.OneOf(rapid.Float64(), rapid.Just(math.NaN())).Draw(t, "rho"),
			Output: rapid.OneOf(any, rapid.Just(math.NaN())).Draw(t, "output"),
		}
		for range rapid.IntRange(1, 9).Draw(t, "n") {
			s := speed()
			s.A, s.B, s.StepMS = any.Draw(t, "a"), any.Draw(t, "b"), any.Draw(t, "step")
			r.Candidates = append(r.Candidates, Candidate{
				GPU: tokens.Draw(t, "gpu"), Host: tokens.Draw(t, "host"), Uncached: tokens.Draw(t, "uncached"),
				Load:  Load{Requests: any.Draw(t, "requests"), Tokens: any.Draw(t, "tokens"), WaitMS: any.Draw(t, "wait")},
				Speed: s,
				Draw:  rapid.Uint64().Draw(t, "draw"), Sent: tokens.Draw(t, "sent"),
				History: &History{Lately: work(1, any.Draw(t, "lately"), any.Draw(t, "pairs"))},
			})
			usage := rapid.OneOf(rapid.Float64Range(0, 1), rapid.Just(math.NaN()))
			r.Candidates[len(r.Candidates)-1].Load.KVUsage = usage.Draw(t, "usage")
		}
		r.Owner = rapid.IntRange(-1, len(r.Candidates)-1).Draw(t, "owner")
		r.Length = tokens.Draw(t, "length")
		r.Costs = make([]Cost, len(r.Candidates))
		Estimate(r)
		scores := make([]float64, len(r.Candidates))
		for _, name := range Names() {
			p, _ := Named(name)
			p.Score(r, scores)
			for i, s := range scores {
				c := r.Costs[i]
				sum := c.Wait + c.Load + c.Prefill + c.Miss + c.Evict + c.Decode
				if !(s >= 0 && s <= math.MaxFloat64) || math.Abs(sum-c.Total) > 1e-9*c.Total {
					t.Fatalf("%s: score %v, cost %+v", name, s, c)
				}
			}
		}
	})
}
