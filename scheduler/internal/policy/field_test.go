package policy

import (
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

// scores of a round by a policy's name.
func scores(t *testing.T, name string, r *Round) []float64 {
	t.Helper()
	p, err := Named(name)
	if err != nil {
		t.Fatal(err)
	}
	Estimate(r)
	s := make([]float64, len(r.Candidates))
	p.Score(r, s)
	return s
}

// cached of a prompt of 8,000 tokens.
func cached(gpu int, l Load) Candidate {
	return Candidate{GPU: gpu, Uncached: 8000 - gpu, Load: l, Speed: speed(), BlockSize: 16, Sent: gpu}
}

// Every score is computed by hand from the policy's formula.
func TestScoresOfTheField(t *testing.T) {
	nan := math.NaN()
	for _, c := range []struct {
		policy string
		round  *Round
		want   []float64
	}{
		// (3*match + 2*queue + 2*free)/7, the lower the better: 1 - that.
		{"weighted", round(0,
			cached(8000, Load{Waiting: 4, KVUsage: 0.9}), // 3*1 + 2*0 + 2*0.1 = 3.2
			cached(4000, Load{Waiting: 2, KVUsage: 0.5}), // 3*0.5 + 2*0.5 + 2*0.5 = 3.5
			cached(0, Load{Waiting: 0, KVUsage: 0}),      // 0 + 2 + 2 = 4
		), []float64{1 - 3.2/7, 1 - 3.5/7, 1 - 4.0/7}},
		{"weighted:prefix=1,queue=1,kv=1", round(0,
			cached(8000, Load{Waiting: 4, KVUsage: 0.9}),
			cached(0, Load{Waiting: 0, KVUsage: 0.2}),
		), []float64{1 - 1.1/3, 1 - 1.8/3}},
		// Equal queues count 1. An unknown usage counts for nobody: (3*match + 2)/5.
		{"approx", round(0,
			cached(8000, Load{Waiting: 4, KVUsage: nan}),
			cached(2000, Load{Waiting: 4, KVUsage: 0}),
		), []float64{0, 1 - 2.75/5}},
		// tokens that wait and those of this request; cold ones stay out.
		{"sticky", round(0,
			cached(6400, Load{Tokens: 9000}),
			cached(8000, Load{Tokens: 9000}),
			cached(6399, Load{Tokens: 0}),
		), []float64{10_600, 9000, 1601 + last}},
		// 286,705 tokens at 15,928 a second take 18,000.06 ms more than none.
		{"sticky", round(0,
			cached(8000, Load{Tokens: 286_705}),
			cached(0, Load{Tokens: 0}),
		), []float64{286_705, 8000}},
		{"sticky", round(0,
			cached(8000, Load{Tokens: 286_703}),
			cached(0, Load{Tokens: 0}),
		), []float64{286_703, 8000 + last}},
		{"sticky:warm=0.5,tau=100,rate=1000", round(0,
			cached(4000, Load{Tokens: 101}),
			cached(3999, Load{Tokens: 0}),
		), []float64{4101, 4001}},
		// (tokens + prompt - credit)/16 + blocks; host counts 3/4, disk 1/4.
		{"dynamo-cost", round(0,
			cached(8000, Load{Tokens: 1600, Blocks: 50}),
			cached(0, Load{Tokens: 0, Blocks: 10}),
			Candidate{Host: 4000, Disk: 4000, Speed: speed(), BlockSize: 16},
		), []float64{150, 510, 250}},
		// 1/(1 + 1*(1600 - 0)/8000) of the credit: 8000/1.2 = 6666.7 tokens.
		{"dynamo-cost:decay=1,request=2,scale=2", round(0,
			cached(8000, Load{Tokens: 1600, Requests: 3}),
			cached(0, Load{}),
		), []float64{2*(9600-8000/1.2)/16 + 6, 1000}},
		// 0.1 ms a token, 0.01 ms a copied one. The second copies 8000 - 1000
		// tokens instead of computing them, and computes the last one.
		{"conductor", round(0,
			cached(8000, Load{WaitMS: 500}),
			cached(1000, Load{WaitMS: 100}),
			cached(4000, Load{WaitMS: 20}), // half of the best: not copied
		), []float64{500.1, 100 + 70 + 0.1, 420}},
		{"conductor:transfer=0.02,threshold=1", round(0,
			cached(6000, Load{}),
			cached(4000, Load{}),
		), []float64{200, 40 + 200}},
		// L: 1000 tokens may be missed again, 100 ms, and two requests of 100
		// tokens at 10 ms; M: 50 ms; P: what is uncached.
		{"e2", round(0,
			Candidate{Uncached: 8000, Speed: speed(), Load: Load{Requests: 2},
				History: &History{Lately: work(1, 1000, 0), Victims: work(1, 500, 0)}},
			Candidate{GPU: 3999, Uncached: 4001, Speed: speed()},
		), []float64{100 + 2000 + 50 + 800, 400.1}},
		// Most of it is cached: the cheaper of those that have the most.
		{"e2", round(0,
			cached(4016, Load{Requests: 2}),
			cached(4016, Load{Requests: 1}),
			cached(4000, Load{}),
			cached(0, Load{}),
		), []float64{2398.4, 1398.4, 400 + last, 800 + last}},
	} {
		c.round.Length = 8000
		if diff := cmp.Diff(c.want, scores(t, c.policy, c.round), cmpopts.EquateApprox(1e-12, 1e-9)); diff != "" {
			t.Errorf("%s:\n%s", c.policy, diff)
		}
	}
}

// Each term of E2 on its own, with a curve that has all parts: A = 5 ms a
// request, B = 0.1 ms a token, C = 1 us a pair.
func TestEachTermOnAGoldenTable(t *testing.T) {
	s := speed()
	s.Curve = learn.Curve{A: 5, B: 0.1, C: 1e-3}
	for name, c := range map[string]struct {
		in   Candidate
		want float64
	}{
		"P":              {Candidate{Uncached: 1000}, 5 + 100 + 500},         // 1e-3 * 1000 * 500
		"P with context": {Candidate{GPU: 600, Uncached: 400}, 5 + 40 + 320}, // 1e-3 * 400 * 800
		"P of nothing":   {Candidate{GPU: 1000}, 5 + 0.1 + 1e-3*1000.5},      // the last token
		"L lately":       {Candidate{Uncached: 1000, History: &History{Lately: work(2, 500, 1e4)}}, 605 + 10 + 50 + 10},
		"L decode":       {Candidate{Uncached: 1000, Load: Load{Requests: 3}}, 605 + 3*100*10},
		"M":              {Candidate{Uncached: 1000, History: &History{Victims: work(1, 100, 1e3)}}, 605 + 5 + 10 + 1},
	} {
		c.in.Speed = s
		if got := scores(t, "e2", round(0, c.in)); math.Abs(got[0]-c.want) > 1e-9 {
			t.Errorf("%s: %v, want %v", name, got[0], c.want)
		}
	}
}

// E2 goes to a holder if more of the prompt is cached than not.
func TestHalfOfThePromptDecides(t *testing.T) {
	for gpu, want := range map[int]int{5100: 0, 4900: 1} {
		holder := Candidate{GPU: gpu, Uncached: 10_000 - gpu, Load: Load{Requests: 5}, Speed: speed()}
		idle := Candidate{Uncached: 10_000, Speed: speed()}
		if got := best(t, "e2", round(0, holder, idle)); !cmp.Equal(got, []int{want}) {
			t.Errorf("%d of 10,000 tokens cached: %v, want %d", gpu, got, want)
		}
	}
}

func TestPopularVictimsMakeAMemberDearer(t *testing.T) {
	a := Candidate{Uncached: 1000, Speed: speed()}
	b := a
	b.History = &History{Victims: work(4, 4000, 0)}
	if got := best(t, "e2", round(0, b, a)); !cmp.Equal(got, []int{1}) {
		t.Errorf("%v", got)
	}
}

func TestMovedPrefixBelongsToItsNewMembers(t *testing.T) {
	holder, copy := cached(8000, Load{Requests: 1}), cached(0, Load{})
	copy.History = &History{Placed: true}
	r := round(0, holder, copy, cached(0, Load{}))
	if got := best(t, "e2", r); !cmp.Equal(got, []int{1}) {
		t.Errorf("copied: %v", got)
	}
	r.Candidates[1].Load.Requests = 9
	if got := best(t, "e2", r); !cmp.Equal(got, []int{0}) {
		t.Errorf("copied, and the copy is dear: %v", got)
	}
	r.Moved = true
	if got := best(t, "e2", r); !cmp.Equal(got, []int{1}) {
		t.Errorf("moved: %v", got)
	}
}

func TestTwoChoicesTakeTheLessLoadedOfTwo(t *testing.T) {
	counts := make([]int, 5)
	for i := range 5000 {
		r := round(0, slices.Repeat([]Candidate{{Speed: speed()}}, 5)...)
		for j := range r.Candidates {
			r.Candidates[j].Load.Requests = float64(j)
		}
		r.Random = uint64(i)*0x9e3779b97f4a7c15 ^ uint64(i)<<17
		counts[best(t, "p2c", r)[0]]++
	}
	// The k-th of five wins if the other one is above it: (4-k)/10.
	for k, n := range counts {
		if want := 5000 * (4 - k) / 10; n < want-200 || n > want+200 {
			t.Errorf("member with %d requests: %d times, want about %d", k, n, want)
		}
	}
	one := round(0, Candidate{Speed: speed()})
	if got := best(t, "p2c", one); !cmp.Equal(got, []int{0}) {
		t.Errorf("one candidate: %v", got)
	}
}

func sessionRound(c ...Candidate) *Round {
	r := round(0, c...)
	for i := range r.Candidates {
		r.Candidates[i].Draw = uint64(i) << 60 // the last is the first in line
	}
	return r
}

func TestSessionStaysUnlessTheGuardSaysSo(t *testing.T) {
	wait := func(ms float64) Candidate { return cached(0, Load{WaitMS: ms, KVUsage: math.NaN()}) } // prefill 800 ms
	free := func(ms float64) Candidate { return cached(0, Load{WaitMS: ms, KVUsage: 0.59}) }
	crowd := func(n float64) Candidate { return cached(0, Load{Requests: n, KVUsage: math.NaN()}) }
	for name, c := range map[string]struct {
		candidates []Candidate
		owner      int
		want       int
		left       Left
	}{
		"no session: the first in line":             {[]Candidate{wait(0), wait(0), wait(400)}, -1, 2, Stayed},
		"no session, the first in line is slow":     {[]Candidate{wait(0), wait(0), wait(1300)}, -1, 1, Stayed},
		"499 ms are no reason":                      {[]Candidate{wait(499), wait(0), wait(0)}, 0, 0, Stayed},
		"501 ms are, and 1.63 times":                {[]Candidate{wait(501), wait(0), wait(10)}, 0, 1, Slow},
		"501 ms of 10,000 are not":                  {[]Candidate{wait(10_501), wait(10_000), wait(10_000)}, 0, 0, Stayed},
		"its cache is full":                         {[]Candidate{cached(8000, Load{KVUsage: 0.95}), free(0), free(5)}, 0, 1, Full},
		"all caches are nearly full":                {[]Candidate{cached(8000, Load{KVUsage: 0.95}), cached(0, Load{KVUsage: 0.6}), wait(0)}, 0, 0, Stayed},
		"its cache is nearly full":                  {[]Candidate{cached(8000, Load{KVUsage: 0.94}), free(0), free(0)}, 0, 0, Stayed},
		"8 more than the mean of 1/3":               {[]Candidate{crowd(7), crowd(0), crowd(0)}, 0, 0, Stayed},
		"beyond 8 more than the mean":               {[]Candidate{crowd(12), crowd(0), crowd(1)}, 0, 1, Crowded},
		"beyond one and a half times the mean":      {[]Candidate{crowd(63), crowd(30), crowd(30)}, 0, 1, Crowded},
		"not beyond one and a half times the mean":  {[]Candidate{crowd(59), crowd(30), crowd(30)}, 0, 0, Stayed},
		"all alike full: nobody else is any better": {[]Candidate{cached(8000, Load{KVUsage: 1}), cached(0, Load{KVUsage: 1})}, 0, 0, Stayed},
	} {
		r := sessionRound(c.candidates...)
		r.Owner = c.owner
		if got := best(t, "session", r); got[0] != c.want || r.Left != c.left {
			t.Errorf("%s: %v (%v), want %d (%v)", name, got, r.Left, c.want, c.left)
		}
	}
}

func TestPrefixHashKeepsTheBound(t *testing.T) {
	crowd := func(n ...float64) *Round {
		r := sessionRound(make([]Candidate, len(n))...)
		for i := range n {
			r.Candidates[i].Load.Requests, r.Candidates[i].Speed = n[i], speed()
		}
		return r
	}
	for _, c := range []struct {
		policy string
		round  *Round
		want   int
	}{
		{"prefix-hash", crowd(0, 0, 0), 2},
		{"prefix-hash", crowd(0, 0, 4), 2},                      // 4 + 1 <= (4 + 1)/3 + 4
		{"prefix-hash", crowd(0, 0, 6), 1},                      // 6 + 1 >  (6 + 1)/3 + 4
		{"prefix-hash", crowd(30, 30, 37), 2},                   // 38 <= 1.25 * 98/3 = 40.8
		{"prefix-hash", crowd(30, 30, 44), 1},                   // 45 >  1.25 * 105/3 = 43.75
		{"prefix-hash:factor=1,margin=1", crowd(0, 1, 1), 2},    // 1 + 1 <= 3/3 + 1
		{"prefix-hash:factor=2,margin=1", crowd(30, 30, 44), 2}, // 45 <= 2 * 35
	} {
		if got := best(t, c.policy, c.round); !cmp.Equal(got, []int{c.want}) {
			t.Errorf("%s: %v, want %d", c.policy, got, c.want)
		}
	}
}

// Whatever the load, somebody is within the bound.
func TestSomebodyIsAlwaysWithinTheBound(t *testing.T) {
	for n := 1; n < 400; n += 7 {
		list := make([]Candidate, n)
		for i := range list {
			list[i].Load.Requests = float64(i * i % 13)
		}
		limit, free := bound(list, 1, 1), false
		for i := range list {
			free = free || list[i].Load.Requests+1 <= limit
		}
		if !free {
			t.Errorf("%d candidates: bound %v", n, limit)
		}
	}
}

func TestBadNamesAreNamed(t *testing.T) {
	for name, want := range map[string]string{
		"best":                       "best",
		"weighted:prefx=1":           "prefx",
		"weighted:prefix":            "prefix",
		"weighted:prefix=NaN":        "prefix",
		"weighted:prefix=-1":         "from 0 to",
		"weighted:prefix=1,,":        "parameters are prefix, queue, kv",
		"session:full=2":             "full",
		"least-requests:x=1":         "no parameters",
		"default:x=1":                "no parameters",
		"prefix-hash:margin=0.5":     "margin",
		strings.Repeat("long", 1000): "longlong",
	} {
		_, err := Named(name)
		if err == nil || !errors.Is(err, ErrUnknown) && !errors.Is(err, ErrParameter) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40s: %v", name, err)
		}
		if err != nil && len(err.Error()) > 400 {
			t.Errorf("%.40s: an error of %d bytes", name, len(err.Error()))
		}
	}
	for _, name := range Names() {
		p, err := Named(name)
		if err != nil || p.Name != name {
			t.Errorf("%s: %q, %v", name, p.Name, err)
		}
	}
	if p, err := Named("weighted: prefix = 1 , kv=0"); err != nil || p.Name != "weighted" {
		t.Errorf("%q, %v", p.Name, err)
	}
}

func work(requests, tokens, pairs float64) learn.Work {
	return learn.Work{Requests: requests, Tokens: tokens, Pairs: pairs}
}

// Every policy is explained.
func TestDocsNameEveryPolicy(t *testing.T) {
	page, err := os.ReadFile("../../../docs/POLICIES.md")
	if err != nil {
		t.Fatal(err)
	}
	headings := ""
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, "## ") {
			headings += strings.ReplaceAll(line[3:len(line)-1], ",", " ") + " "
		}
	}
	for _, name := range Names() {
		if !slices.Contains(strings.Fields(headings), name) {
			t.Errorf("docs/POLICIES.md has no heading with %s", name)
		}
	}
}
