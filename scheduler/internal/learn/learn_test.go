package learn

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var t0 = time.Unix(1_700_000_000, 0)

// engine counts as an engine of a known curve would.
type engine struct {
	Curve
	at time.Time
	t  Totals
}

func newEngine(c Curve) *engine { return &engine{Curve: c, at: t0} }

func (e *engine) serve(c *Curves, member uint32, requests int, tokens float64) {
	e.at = e.at.Add(time.Second)
	e.count(requests, tokens, 0, e.Prefill(tokens, 0))
	c.Observe(member, "model", e.at, e.t)
}

// count lets requests begin and end, with so many tokens computed and cached each.
func (e *engine) count(requests int, tokens, cached, ms float64) {
	n := float64(requests)
	e.t.PromptTokens += n * (tokens + cached)
	e.t.CachedTokens += n * cached
	e.t.Requests += n
	e.t.ComputedTokens += n * tokens
	e.t.PromptLength += n * (tokens + cached)
	e.t.OutputLength += n * 100
	e.t.PrefillSeconds += n * ms / 1000
}

func near(t *testing.T, what string, got, want, share float64) {
	t.Helper()
	if !(math.Abs(got-want) <= share*math.Abs(want)) {
		t.Errorf("%s: got %v, want %v within %v", what, got, want, share)
	}
}

func TestTwoSpeedsAreLearnedWithin200Requests(t *testing.T) {
	var c Curves
	slow, fast := newEngine(Curve{A: 20, B: 0.3}), newEngine(Curve{A: 6, B: 0.1})
	for i := range 101 {
		tokens := float64(100 + 379*i%6000)
		slow.serve(&c, 0, 2, tokens)
		fast.serve(&c, 1, 2, tokens)
	}
	s := c.Fit(slow.at)
	near(t, "slow", s[0].Prefill(4000, 0), slow.Prefill(4000, 0), 0.1)
	near(t, "fast", s[1].Prefill(4000, 0), fast.Prefill(4000, 0), 0.1)
	near(t, "slow, few tokens", s[0].Prefill(50, 0), slow.Prefill(50, 0), 0.3)
}

func TestNewMemberTakesTheMedianOfItsModel(t *testing.T) {
	var c Curves
	var at time.Time
	for i, b := range []float64{0.1, 0.2, 0.9} {
		e := newEngine(Curve{B: b})
		for n := range 100 {
			e.serve(&c, uint32(i), 2, float64(500+n*40))
		}
		at = e.at
	}
	c.Observe(3, "model", at, Totals{})
	c.Observe(4, "other", at, Totals{})
	s := c.Fit(at)
	near(t, "same model", s[3].B, 0.2, 0.1)
	near(t, "other model", s[4].B, Prior().B, 0.001)
	if s[3].Learned || !s[0].Learned {
		t.Errorf("learned: new %v, old %v; want false, true", s[3].Learned, s[0].Learned)
	}
}

// all totals are v.
func all(v float64) Totals {
	return Totals{Begun{v, v}, Stepped{v, v}, Ended{v, v, v, v, v}, v}
}

// Peers' bug 18: no value may come out of nonsense but the prior.
func TestNonsenseTeachesNothing(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for name, end := range map[string]Totals{
		"nan":      all(nan),
		"infinite": all(inf),
		"zero":     all(0),
		"negative": all(-1),
	} {
		var c Curves
		c.Observe(0, "model", t0, Totals{})
		c.Observe(0, "model", t0.Add(time.Second), end)
		s := c.Fit(t0.Add(time.Second))[0]
		near(t, name, s.B, Prior().B, 1e-9)
		near(t, name, s.StepMS, Prior().StepMS, 0)
	}
}

func TestRestartStartsANewDifference(t *testing.T) {
	var c Curves
	e := newEngine(Curve{B: 0.1})
	for range 50 {
		e.serve(&c, 0, 2, 3000)
	}
	before := c.Fit(e.at)[0].B
	e.t = Totals{}
	e.serve(&c, 0, 1, 10)
	near(t, "after a restart", c.Fit(e.at)[0].B, before, 1e-6)
}

func TestBusyIsSmoothedAndAges(t *testing.T) {
	var c Curves
	e := newEngine(Curve{B: 0.1})
	e.serve(&c, 0, 1, 5000)
	e.serve(&c, 0, 1, 5000)
	if b := c.Fit(e.at)[0].Busy; b > 0.1 {
		t.Errorf("busy after one second: %v", b)
	}
	for range 200 {
		e.serve(&c, 0, 1, 5000)
	}
	near(t, "half busy", c.Fit(e.at)[0].Busy, 0.5, 0.1)
	if b := c.Fit(e.at.Add(time.Minute))[0].Busy; !math.IsNaN(b) {
		t.Errorf("busy without samples for a minute: %v, want unknown", b)
	}
}

func TestSpeedsAreAlwaysUsable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var c Curves
		at := t0
		value := rapid.OneOf(rapid.Float64(), rapid.Float64Range(0, 1e6), rapid.Just(math.NaN()))
		for range rapid.IntRange(1, 30).Draw(t, "samples") {
			at = at.Add(time.Duration(rapid.Int64Range(-1e9, 5e9).Draw(t, "step")))
			v := func() float64 { return value.Draw(t, "v") }
			c.Observe(0, "model", at, Totals{Begun{v(), v()}, Stepped{v(), v()}, Ended{v(), v(), v(), v(), v()}, v()})
		}
		s := c.Fit(at)[0]
		for _, v := range []float64{s.A, s.B, s.StepMS, s.PromptTokens, s.OutputTokens, s.Prefill(1000, 1000), s.StepBaseMS, s.StepRequestMS, s.HostMS, s.DiskMS} {
			if !(v >= 0 && v <= math.MaxFloat64) {
				t.Fatalf("unusable speed %+v", s)
			}
		}
		if !(s.B > 0) || s.Busy > maxBusy {
			t.Fatalf("unusable speed %+v", s)
		}
	})
}

// An engine counts a prefill's time with all that shared its steps: most
// observations of a busy one are far too slow.
func TestSharedStepsDoNotMakeAnEngineSlow(t *testing.T) {
	var c Curves
	quiet, busy := newEngine(Curve{A: 5, B: 0.05}), newEngine(Curve{A: 5, B: 0.05})
	for i := range 300 {
		tokens := float64(500 + 379*i%9000)
		quiet.serve(&c, 0, 1, tokens)
		busy.t.PrefillSeconds += busy.Prefill(tokens, 0) / 1000 * float64(i%4)
		busy.serve(&c, 1, 1, tokens)
	}
	s := c.Fit(quiet.at)
	if q, b := s[0].Prefill(4000, 0), s[1].Prefill(4000, 0); b > 1.5*q {
		t.Errorf("4,000 tokens take %v on the quiet, %v on the busy engine", q, b)
	}
}

// Who is thought slow gets no requests, and without requests no observation
// could tell otherwise.
func TestAvoidedMemberComesBackToTheMedian(t *testing.T) {
	var c Curves
	engines := []*engine{newEngine(Curve{B: 0.05}), newEngine(Curve{B: 0.05}), newEngine(Curve{B: 0.05}), newEngine(Curve{B: 0.15})}
	for i := range 1200 {
		for m, e := range engines {
			if requests := 1; m < 3 || i < 20 {
				e.serve(&c, uint32(m), requests, float64(500+379*i%9000))
			} else {
				e.at = e.at.Add(time.Second)
				c.Observe(uint32(m), "model", e.at, e.t)
			}
		}
		if s := c.Fit(engines[0].at); i == 20 && s[3].B < 0.12 {
			t.Errorf("learned %v of 0.15 from 20 requests", s[3].B)
		}
	}
	near(t, "after 20 minutes without a request", c.Fit(engines[0].at)[3].B, 0.05, 0.2)
}

// alone serves one request at a time, so that each is seen by itself.
func (e *engine) alone(c *Curves, member uint32, tokens, cached float64) {
	e.at = e.at.Add(time.Second)
	e.count(1, tokens, cached, e.Prefill(tokens, cached))
	c.Observe(member, "model", e.at, e.t)
}

func TestContextIsLearnedWhereItShows(t *testing.T) {
	var c Curves
	e := newEngine(Curve{A: 10, B: 0.08, C: 4e-6})
	for i := range 100 {
		e.alone(&c, 0, float64(200+997*i%20000), float64(1013*i%30000))
	}
	s := c.Fit(e.at)[0]
	for _, q := range [][2]float64{{1000, 0}, {20000, 0}, {4000, 20000}, {500, 30000}} {
		near(t, "prefill", s.Prefill(q[0], q[1]), e.Prefill(q[0], q[1]), 0.1)
	}
	// Equal requests do not tell context from tokens: the fit stays linear.
	var same Curves
	e = newEngine(Curve{A: 10, B: 0.08, C: 4e-6})
	for range 100 {
		e.alone(&same, 0, 4000, 0)
	}
	s = same.Fit(e.at)[0]
	near(t, "what was seen", s.Prefill(4000, 0), e.Prefill(4000, 0), 0.1)
	near(t, "what was not", s.Prefill(1000, 0), e.Prefill(1000, 0), 0.5)
}

// Where the fixed part is small, scatter takes the best fit of it below nothing as
// often as not. What context costs is learned all the same.
func TestContextIsLearnedWhereThereIsNoFixedPart(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		var c Curves
		e := newEngine(Curve{B: 0.04, C: 9e-7})
		for range 200 {
			tokens := 200 * math.Exp(6*r.Float64()) // up to 80,000
			e.at = e.at.Add(time.Second)
			e.count(1, tokens, 0, e.Prefill(tokens, 0)*(1+0.1*r.Float64()))
			c.Observe(0, "model", e.at, e.t)
		}
		s := c.Fit(e.at)[0]
		for _, tokens := range []float64{2000, 7000, 27_000, 80_000} {
			near(t, "prefill", s.Prefill(tokens, 0), 1.05*e.Prefill(tokens, 0), 0.1)
		}
	}
}

// What an engine counts as requests begin and with every token is not of those
// that ended since: whatever it says teaches nothing of them.
func TestRequestsUnderWayTeachNothingOfThoseThatEnded(t *testing.T) {
	var quiet, busy Curves
	a, b := newEngine(Curve{A: 10, B: 0.08}), newEngine(Curve{A: 10, B: 0.08})
	for i := range 100 {
		tokens := float64(200 + 997*i%20000)
		a.alone(&quiet, 0, tokens, 0)
		b.t.PromptTokens += float64(7919 * i % 50000) // of requests still running
		b.t.CachedTokens += float64(7919 * i % 30000)
		b.t.InterTokenCount += 1000
		b.t.InterTokenSeconds += 10
		b.alone(&busy, 0, tokens, 0)
	}
	x, y := quiet.Fit(a.at)[0], busy.Fit(b.at)[0]
	if x.Curve != y.Curve || x.PromptTokens != y.PromptTokens || x.OutputTokens != y.OutputTokens {
		t.Errorf("requests under way change %+v to %+v", x, y)
	}
}

// A sample that leaves out what is counted at one moment is passed over by it:
// the next difference spans both, and so do all of its totals.
func TestALeftOutMomentIsCaughtUp(t *testing.T) {
	var whole, torn Curves
	a, b := newEngine(Curve{A: 10, B: 0.08}), newEngine(Curve{A: 10, B: 0.08})
	nan := math.NaN()
	for i := range 200 {
		tokens := float64(200 + 997*(i/2)%20000)
		b.count(1, tokens, 0, b.Prefill(tokens, 0))
		b.at = b.at.Add(time.Second)
		sample := b.t
		if i%2 == 0 {
			sample.Ended = Ended{nan, nan, nan, nan, nan}
		} else {
			a.at = a.at.Add(time.Second)
			a.serve(&whole, 0, 2, tokens)
		}
		torn.Observe(0, "model", b.at, sample)
	}
	x, y := whole.Fit(a.at)[0], torn.Fit(b.at)[0]
	near(t, "prefill", y.Prefill(6000, 0), x.Prefill(6000, 0), 1e-6)
	near(t, "prompt", y.PromptTokens, x.PromptTokens, 1e-6)
}

// loaded serves requests whose prefills take as long as those that share their
// steps make them: once to four times their own time.
func (e *engine) loaded(c *Curves, member uint32, r *rand.Rand) {
	tokens := 200 + 12000*r.Float64()
	e.at = e.at.Add(time.Second)
	e.count(1, tokens, 0, e.Prefill(tokens, 0)*(1+3*math.Pow(r.Float64(), 4)))
	c.Observe(member, "model", e.at, e.t)
}

// Equal engines are equal whatever their load makes of their observations. While
// they have only a few each, one of thousands of fits may be taken for more than
// it is, and not for twice as much.
func TestWithoutEvidenceMembersAreEqual(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 0))
		var c Curves
		var list []*engine
		for range 8 {
			list = append(list, newEngine(Curve{A: 5, B: 0.08}))
		}
		for i := range 300 {
			for m, e := range list {
				if m == 0 && i%10 > 0 {
					continue // it has served few
				}
				e.loaded(&c, uint32(m), r)
			}
			low, high := math.Inf(1), 0.0
			for _, s := range c.Fit(list[1].at) {
				ms := s.Prefill(4000, 0) + s.OutputTokens*s.StepRequestMS
				low, high = min(low, ms), max(high, ms)
			}
			most := 1.15
			if i < 20 {
				most = 2
			}
			if high > most*low {
				t.Fatalf("seed %d: after %d requests equal engines take %.1f to %.1f ms", seed, i+1, low, high)
			}
		}
	}
}

// One that is three times slower is told from the others by 25 requests, among
// many as well as among two, and however few it serves compared with them.
func TestEvidenceTellsMembersApart(t *testing.T) {
	for _, members := range []int{2, 8, 100} {
		r := rand.New(rand.NewPCG(uint64(members), 0))
		var c Curves
		list := []*engine{newEngine(Curve{A: 15, B: 0.24})}
		for range members - 1 {
			list = append(list, newEngine(Curve{A: 5, B: 0.08}))
		}
		for i := range 100 {
			for m, e := range list {
				if m > 0 || i%4 == 0 {
					e.loaded(&c, uint32(m), r)
				}
			}
		}
		s := c.Fit(list[0].at)
		if ratio := s[0].Prefill(4000, 0) / s[1].Prefill(4000, 0); ratio < 2.2 || ratio > 4 {
			t.Errorf("among %d: 3 times slower, believed %.2f", members, ratio)
		}
	}
}

func TestStepsAreLearnedByBatch(t *testing.T) {
	var c Curves
	e := newEngine(Curve{B: 0.1})
	for i := range 200 {
		batch := float64(1 + i*7%64)
		e.at = e.at.Add(time.Second)
		e.t.InterTokenCount += 100
		e.t.InterTokenSeconds += 100 * (12 + 0.25*batch) / 1000
		e.t.Running = batch
		c.Observe(0, "model", e.at, e.t)
		e.at = e.at.Add(time.Second) // the gauge is taken at both ends
		e.t.InterTokenCount += 100
		e.t.InterTokenSeconds += 100 * (12 + 0.25*batch) / 1000
		c.Observe(0, "model", e.at, e.t)
	}
	s := c.Fit(e.at)[0]
	near(t, "base", s.StepBaseMS, 12, 0.1)
	near(t, "for each request", s.StepRequestMS, 0.25, 0.2)
	if s := new(Curves); len(s.Fit(t0)) != 0 {
		t.Error("speeds of nobody")
	}
}

func TestReportsTellOverheadAndLoading(t *testing.T) {
	var c Curves
	at := t0
	for m := range uint32(3) {
		e := newEngine(Curve{A: 5, B: 0.1})
		for i := range 20 {
			e.serve(&c, m, 1, float64(500+100*i))
		}
		at = e.at
	}
	before := c.Fit(at)[1]
	for i := range 40 {
		noise := float64(i%5 - 2)
		if i%8 == 0 {
			noise = 3000 // somebody's network
		}
		c.Report(0, Served{TTFTMS: 100 + 15 + noise, WaitMS: 40, PrefillMS: 60})
		c.Report(0, Served{TTFTMS: 100 + 15 + noise + 0.02*2000, WaitMS: 40, PrefillMS: 60, Host: 2000})
	}
	for _, bad := range []float64{math.NaN(), math.Inf(1), -5, 0, 1e12} {
		for range 100 {
			c.Report(1, Served{TTFTMS: bad, WaitMS: 1, PrefillMS: 1})
			c.Report(1, Served{TTFTMS: 10, WaitMS: math.NaN(), PrefillMS: 1})
		}
	}
	c.Report(99, Served{TTFTMS: 1})
	s := c.Fit(at)
	near(t, "overhead", s[0].OverheadMS, 15, 0.1)
	near(t, "host", s[0].HostMS, 0.02, 0.1)
	near(t, "disk", s[0].DiskMS, Prior().DiskMS, 0)
	if s[1].OverheadMS != before.OverheadMS || s[1].HostMS != before.HostMS {
		t.Errorf("nonsense was learned: %+v", s[1])
	}
}

func TestJumpsTeachNothing(t *testing.T) {
	var c Curves
	e := newEngine(Curve{A: 5, B: 0.1})
	for i := range 50 {
		e.serve(&c, 0, 2, float64(500+100*i))
	}
	want := c.Fit(e.at)[0].Curve
	e.t.PrefillSeconds += 1e6
	e.serve(&c, 0, 1, 1000)
	got := c.Fit(e.at)[0]
	near(t, "after a jump", got.Prefill(4000, 0), want.Prefill(4000, 0), 0.01)
}
