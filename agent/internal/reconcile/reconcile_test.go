package reconcile

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// engine computes requests in steps of 10 ms, as vLLM does: blocks are announced
// when they are full, a prompt counts with its first token, a lookup when it is
// admitted.
type engine struct {
	r         *rand.Rand
	blockSize int
	rate      float64 // requests a second
	longest   int     // prompt
	hits      bool
	aborts    float64 // share of requests
	unlooked  float64 // share of requests that look nothing up
	chunk     int     // prompt tokens in a step
	mute      bool    // its events get lost

	counters Counters
	flow     Flow
	running  []*request
}

type request struct {
	prompt, output, hit int
	computed, announced int
	generated           int
	abortAt             int // tokens computed; 0: never
}

const step = 10 * time.Millisecond

func (e *engine) step() {
	if e.r.Float64() < e.rate*step.Seconds() {
		q := &request{prompt: 1 + e.r.IntN(e.longest), output: 1 + e.r.IntN(60)}
		if e.hits {
			q.hit = e.r.IntN(q.prompt) / e.blockSize * e.blockSize
		}
		q.computed, q.announced = q.hit, q.hit
		if e.r.Float64() < e.aborts {
			q.abortAt = q.hit + 1 + e.r.IntN(q.prompt-q.hit+q.output)
		}
		if e.r.Float64() >= e.unlooked {
			e.counters.Admitted += float64(q.prompt - q.hit)
		}
		e.running = append(e.running, q)
	}
	budget := e.chunk
	left := e.running[:0]
	inUse := 0
	for _, q := range e.running {
		n := min(1, budget)
		if q.computed < q.prompt {
			n = min(q.prompt-q.computed, budget)
		}
		budget -= n
		q.computed += n
		if full := q.computed / e.blockSize * e.blockSize; full > q.announced {
			if !e.mute {
				e.flow.Store(0, e.blockSize, full-q.announced, true)
			}
			q.announced = full
		}
		if q.abortAt > 0 && q.computed >= q.abortAt {
			continue
		}
		if n > 0 && q.computed >= q.prompt {
			if q.generated == 0 {
				e.counters.Prompt += float64(q.prompt - q.hit)
				e.counters.Requests++
			}
			q.generated++
			e.counters.Generated++
		}
		if q.generated < q.output {
			left = append(left, q)
			inUse += (q.computed + e.blockSize - 1) / e.blockSize * e.blockSize
		}
	}
	e.running = left
	e.counters.Running, e.counters.InUse = float64(len(left)), float64(inUse)
	e.counters.Usage = float64(inUse) / 1e6
	e.counters.Looked, e.counters.MaxRequest = true, 100_000
}

// watcher polls one engine and hears the stream of another, which may be the same.
type watcher struct {
	check      Check
	now        time.Time
	every      time.Duration
	answer     time.Duration // that a poll takes
	eventsLate int           // steps
	pageLate   int
	whole      bool

	polled  time.Time
	flows   []Totals
	pages   []Counters
	skipped int
}

func (w *watcher) observe(counters Counters, stream *engine) Finding {
	w.now = w.now.Add(step)
	w.flows = append(w.flows, stream.flow.Totals(0, stream.blockSize))
	w.pages = append(w.pages, counters)
	if w.skipped > 0 {
		w.skipped--
		return Finding{}
	}
	flow := w.flows[max(0, len(w.flows)-1-w.eventsLate)]
	page := w.pages[max(0, len(w.pages)-1-w.pageLate)]
	w.check.Announce(w.now, flow)
	every := w.every
	if w.check.Hurries() {
		every = min(every, 200*time.Millisecond)
	}
	if w.now.Sub(w.polled) >= every {
		w.polled = w.now
		w.check.Observe(w.now.Add(-w.answer), w.now, page, flow, w.whole)
	}
	return w.check.Settle(w.now, flow)
}

var start = time.Unix(1_000_000, 0)

// TestAnEnginesOwnStreamIsNeverSuspected plays engines of all kinds, late events,
// late counters, aborts, prompts without a lookup and a check that begins late.
func TestAnEnginesOwnStreamIsNeverSuspected(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := &engine{
			r:         rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1)),
			blockSize: rapid.SampledFrom([]int{1, 16, 32, 528}).Draw(t, "block size"),
			rate:      rapid.SampledFrom([]float64{.2, 2, 20, 80}).Draw(t, "rate"),
			longest:   rapid.SampledFrom([]int{20, 400, 3000, 50_000}).Draw(t, "longest prompt"),
			hits:      rapid.Bool().Draw(t, "hits"),
			aborts:    rapid.SampledFrom([]float64{0, .1, .9}).Draw(t, "aborts"),
			unlooked:  rapid.SampledFrom([]float64{0, .3, 1}).Draw(t, "without lookup"),
			chunk:     rapid.SampledFrom([]int{64, 512, 8192}).Draw(t, "chunk"),
		}
		if e.unlooked > 0 {
			e.aborts = 0 // nothing tells of an abort then
		}
		for range rapid.SampledFrom([]int{0, 500}).Draw(t, "steps before") {
			e.step()
		}
		w := &watcher{
			now:        start,
			every:      time.Duration(rapid.IntRange(20, 1100).Draw(t, "poll ms")) * time.Millisecond,
			answer:     time.Duration(rapid.IntRange(1, 40).Draw(t, "answer ms")) * time.Millisecond,
			eventsLate: rapid.IntRange(0, 8).Draw(t, "events late"),
			pageLate:   rapid.IntRange(0, 8).Draw(t, "page late"),
		}
		w.whole = e.counters.Requests == 0 && e.counters.Admitted == 0
		quiet := rapid.IntRange(500, 2000).Draw(t, "quiet from")
		for i := range 3000 {
			if i == quiet {
				e.rate = 0
			}
			e.step()
			if found := w.observe(e.counters, e); found.Kind != None {
				t.Fatalf("step %d: %+v; %+v, %+v", i, found, e.counters, e.flow.Totals(0, e.blockSize))
			}
		}
	})
}

// TestAnotherEnginesStreamIsFound is a check that hears a neighbour, in all
// mixes of what the two do.
func TestAnotherEnginesStreamIsFound(t *testing.T) {
	for _, c := range []struct {
		name        string
		ours, other float64 // requests a second
		kind        Kind    // None: either
		before      int     // steps that both have behind them
		within      time.Duration
		computed    float64 // or after so many tokens
	}{
		{name: "ours idle", other: 5, kind: Foreign},
		{name: "other idle", ours: 5, kind: Missing},
		{name: "ours slow, other idle", ours: .5, kind: Missing, computed: 2000},
		{name: "other more", ours: 2, other: 8, kind: Foreign},
		{name: "ours more", ours: 8, other: 2, kind: Missing},
		{name: "both alike", ours: 3, other: 3, within: 20 * time.Second},
		{name: "both alike, late", ours: 3, other: 3, before: 2000, within: 20 * time.Second},
		{name: "ours idle, with a past", other: 5, before: 500, kind: Foreign},
		{name: "other idle, with a past", ours: 5, before: 500, kind: Missing},
	} {
		for _, every := range []time.Duration{50 * time.Millisecond, time.Second} {
			for seed := range uint64(5) {
				t.Run(fmt.Sprintf("%s, poll %v, seed %d", c.name, every, seed), func(t *testing.T) {
					of := func(n uint64, rate float64) *engine {
						return &engine{r: rand.New(rand.NewPCG(seed, n)), blockSize: 16, rate: rate, longest: 1500, hits: true, chunk: 2048}
					}
					ours, other := of(1, c.ours), of(2, c.other)
					for range c.before {
						ours.step()
						other.step()
					}
					w := &watcher{now: start, every: every, answer: 3 * time.Millisecond, whole: c.before == 0}
					w.check.Announce(start.Add(-time.Second), other.flow.Totals(0, 16))
					within := c.within
					if within == 0 {
						within = 5 * time.Second
					}
					began, did := w.now, ours.counters.computed()
					first := time.Time{} // that either computed something
					for w.now.Sub(began) < 2*time.Minute {
						ours.step()
						other.step()
						found := w.observe(ours.counters, other)
						if first.IsZero() && (len(ours.running) > 0 || len(other.running) > 0) {
							first = w.now
						}
						if found.Kind == None {
							continue
						}
						took, computed := w.now.Sub(first), ours.counters.computed()-did
						if took > within && (c.computed == 0 || computed > c.computed+1500) {
							t.Errorf("found after %v, %v tokens", took, computed)
						}
						if c.kind != None && found.Kind != c.kind {
							t.Errorf("found %+v", found)
						}
						return
					}
					t.Fatal("never found")
				})
			}
		}
	}
}

// pair are two engines that do alike: as many requests a second, of equal lengths.
func pair(seed uint64, rate float64, longest int) (ours, other *engine) {
	of := func(n uint64) *engine {
		return &engine{r: rand.New(rand.NewPCG(seed, n)), blockSize: 16, rate: rate, longest: longest, hits: true, chunk: 2048}
	}
	return of(1), of(2)
}

// TestEquallyBusyEnginesAreToldApart says how soon two engines with independent
// requests at one rate have drifted apart by more than may be under way.
func TestEquallyBusyEnginesAreToldApart(t *testing.T) {
	const pairs = 100
	for _, c := range []struct {
		rate   float64 // of requests of 375 computed tokens on average, a second
		before int     // steps that both have behind them
		half   float64 // of the pairs are told apart after so many seconds
		nearly float64 // 99 of 100 are
	}{
		{1, 0, 5, 15}, {3, 0, 5, 15}, {10, 0, 5, 30}, {30, 0, 8, 45},
		{1, 2000, 6, 20}, {3, 2000, 6, 25}, {10, 2000, 9, 40}, {30, 2000, 15, 90},
	} {
		var took []float64
		for seed := range uint64(pairs) {
			ours, other := pair(seed, c.rate, 1500)
			for range c.before {
				ours.step()
				other.step()
			}
			w := &watcher{now: start, every: time.Second, answer: 3 * time.Millisecond, whole: c.before == 0}
			w.check.Announce(start.Add(-time.Second), other.flow.Totals(0, 16))
			first := time.Time{} // that either computed something
			for found := (Finding{}); found.Kind == None && w.now.Sub(start) < 2*time.Minute; {
				ours.step()
				other.step()
				if found = w.observe(ours.counters, other); first.IsZero() && len(ours.running)+len(other.running) > 0 {
					first = w.now
				}
			}
			took = append(took, w.now.Sub(first).Seconds())
		}
		slices.Sort(took)
		half, nearly := took[pairs/2], took[pairs*99/100-1]
		t.Logf("%2.0f requests a second, %4d steps before: half after %.1f s, 90 of 100 after %.1f s, 99 after %.1f s", c.rate, c.before, half, took[pairs*9/10-1], nearly)
		if half > c.half || nearly > c.nearly {
			t.Errorf("want %v s and %v s", c.half, c.nearly)
		}
	}
}

// TestStreamThatFallsSilentIsFound is an engine whose publisher dies after it
// has worked for a minute: no gap tells of it.
func TestStreamThatFallsSilentIsFound(t *testing.T) {
	for _, rate := range []float64{1, 20} {
		e := &engine{r: rand.New(rand.NewPCG(1, 1)), blockSize: 16, rate: rate, longest: 1500, chunk: 2048}
		w := &watcher{now: start, every: time.Second, answer: 3 * time.Millisecond, whole: true}
		for i := range 20_000 {
			e.mute = i >= 6000
			e.step()
			if found := w.observe(e.counters, e); found.Kind != None {
				took := time.Duration(i-6000) * step
				if found.Kind != Missing || took < 0 || took > 5*time.Second {
					t.Errorf("%v a second: %+v after %v", rate, found, took)
				}
				break
			}
			if i == 19_999 {
				t.Errorf("%v a second: never found", rate)
			}
		}
	}
}

// TestDifferenceMustLast is a stream that is late for a second, once.
func TestDifferenceMustLast(t *testing.T) {
	e := &engine{r: rand.New(rand.NewPCG(1, 1)), blockSize: 16, rate: 20, longest: 1500, chunk: 2048}
	w := &watcher{now: start, every: 50 * time.Millisecond, answer: 3 * time.Millisecond, whole: true}
	for i := range 6000 {
		w.eventsLate, w.pageLate = 0, 0
		switch i % 1000 {
		case 200:
			w.skipped = 100 // nobody looked
		default:
			if n := i % 1000; n >= 500 && n < 600 {
				w.eventsLate = n - 500
			} else if n >= 800 && n < 900 {
				w.pageLate = n - 800
			}
		}
		e.step()
		if found := w.observe(e.counters, e); found.Kind != None {
			t.Fatalf("step %d: %+v", i, found)
		}
	}
}

// TestNewProcessIsMeasuredFromItsBeginning is an engine that begins anew while
// the stream of another goes on.
func TestNewProcessIsMeasuredFromItsBeginning(t *testing.T) {
	e := &engine{r: rand.New(rand.NewPCG(1, 1)), blockSize: 16, rate: 5, longest: 1500, chunk: 2048}
	w := &watcher{now: start, every: 200 * time.Millisecond, answer: 3 * time.Millisecond, whole: true}
	for range 1000 {
		e.step()
		if found := w.observe(e.counters, e); found.Kind != None {
			t.Fatalf("%+v", found)
		}
	}
	anew := &engine{r: rand.New(rand.NewPCG(2, 2)), blockSize: 16, rate: 5, longest: 1500, chunk: 2048}
	for range 500 {
		anew.step()
		if found := w.observe(anew.counters, e); found.Kind == Missing {
			return
		}
	}
	t.Error("its work was never missed")
}

// TestAStreamThatFitsAgreesAgain is a stream that was taken for another's: it is
// believed again if it is the engine's, and hardly ever if it is that of one which
// does alike.
func TestAStreamThatFitsAgreesAgain(t *testing.T) {
	const pairs = 20
	for _, rate := range []float64{1, 3, 30} {
		for _, longest := range []int{300, 1500, 8000} {
			for _, foreign := range []bool{false, true} {
				agreed := 0
				var took []time.Duration
				for seed := range uint64(pairs) {
					ours, other := pair(seed, rate, longest)
					if !foreign {
						other = ours
					}
					w := &watcher{now: start, every: time.Second, answer: 3 * time.Millisecond}
					for w.now.Sub(start) < time.Minute && !w.check.Agrees() {
						ours.step()
						if foreign {
							other.step()
						}
						if w.observe(ours.counters, other).Kind != None {
							w.check.Reset()
						}
					}
					took = append(took, w.now.Sub(start))
					if w.check.Agrees() {
						agreed++
					}
				}
				slices.Sort(took)
				t.Logf("%2.0f requests a second, prompts up to %d, foreign %v: %d of %d agree, half of them after %v", rate, longest, foreign, agreed, pairs, took[pairs/2].Round(time.Second))
				if foreign && agreed > 1 || !foreign && agreed < pairs {
					t.Errorf("%2.0f requests a second, prompts up to %d, foreign %v: %d of %d agree", rate, longest, foreign, agreed, pairs)
				}
			}
		}
	}
}

// TestWhoOversleepsIsLessCertain is an agent without time, which reads its own
// engine's events late and wakes up late, too.
func TestWhoOversleepsIsLessCertain(t *testing.T) {
	for _, c := range []struct {
		late  int // steps, of events
		by    time.Duration
		found bool
	}{
		{90, 0, true}, {90, 100 * time.Millisecond, false}, // up to maxLag
		{400, 100 * time.Millisecond, true}, {400, 2 * time.Second, false}, // nothing follows
	} {
		e := &engine{r: rand.New(rand.NewPCG(1, 1)), blockSize: 16, rate: 20, longest: 1500, chunk: 2048}
		w := &watcher{now: start, every: 200 * time.Millisecond, answer: 3 * time.Millisecond, whole: true}
		found := false
		for i := range 4000 {
			e.step()
			w.eventsLate = max(0, min(i%1000-200, c.late, 999-i%1000))
			if w.eventsLate > 0 {
				w.check.Overslept(c.by)
			}
			found = found || w.observe(e.counters, e).Kind != None
		}
		if found != c.found {
			t.Errorf("%+v: found %v", c, found)
		}
	}
}

// TestCountersThatAllowMore are the reasons for which an engine may announce
// more than it counts, and each is bounded.
func TestCountersThatAllowMore(t *testing.T) {
	base := Counters{Prompt: 1000, Generated: 100, Requests: 10, Admitted: 1000, Looked: true, MaxRequest: 4000}
	for _, c := range []struct {
		name    string
		fresh   float64
		change  func(*Counters)
		foreign bool
	}{
		{"what was computed", 1000, func(*Counters) {}, false},
		{"more than that", 2000, func(*Counters) {}, true},
		{"in flight or aborted", 2000, func(c *Counters) { c.Admitted = 2000 }, false},
		{"brought in by a connector", 2000, func(c *Counters) { c.External = 1000 }, false},
		{"preempted", 4000, func(c *Counters) { c.Preempted = 1 }, false},
		{"preempted, and too much", 6000, func(c *Counters) { c.Preempted = 1 }, true},
		{"being computed again in a full pool", 2000, func(c *Counters) { c.Usage, c.InUse = .9, 1000 }, false},
		{"being computed again after a reset", 2000, func(c *Counters) { c.Resets, c.InUse = 1, 1000 }, false},
		{"in use explains nothing for ever", 2000, func(c *Counters) { c.Usage, c.InUse = .1, 1000 }, true},
		{"without lookups, in flight", 3000, func(c *Counters) { c.Looked, c.InUse = false, 1000 }, false},
		{"without lookups, too much", 8000, func(c *Counters) { c.Looked, c.InUse = false, 1000 }, true},
		{"prompts that are not looked up", 3000, func(c *Counters) { c.Admitted, c.InUse = 0, 1000 }, false},
		{"preempted, of unknown length", 9000, func(c *Counters) { c.Preempted, c.MaxRequest = 1, 0 }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			counters := base
			c.change(&counters)
			var check Check
			now := start
			var found Finding
			for range 130 {
				flow := Totals{Most: max(c.fresh, 1000), Fresh: c.fresh, BlockSize: 16}
				check.Announce(now, flow)
				now = now.Add(100 * time.Millisecond)
				check.Observe(now.Add(-time.Millisecond), now, counters, flow, true)
				if f := check.Settle(now, flow); f.Kind != None {
					found = f
				}
			}
			if (found.Kind == Foreign) != c.foreign || found.Kind == Missing {
				t.Errorf("%+v", found)
			}
		})
	}
}

func TestFlowCountsWholeBlocksByGroup(t *testing.T) {
	var f Flow
	if got := f.Totals(0, 0); got != (Totals{BlockSize: 16}) {
		t.Errorf("empty: %+v", got)
	}
	if got := f.Totals(0, 528); got.BlockSize != 528 {
		t.Errorf("empty: %+v", got)
	}
	f.Store(0, 96, 960, true)
	f.Store(1, 96, 960, true)
	f.Store(1, 32, 32, true)   // a part of a block
	f.Store(1, 96, 96, false)  // may be a repetition
	f.Store(-1, 16, 999, true) // no group
	f.Store(maxGroups, 16, 999, true)
	f.Store(2, 0, 999, true) // a placeholder
	if got, want := f.Totals(0, 16), (Totals{Most: 1056, Fresh: 960, BlockSize: 96}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := f.Totals(3, 16); got.Fresh != 960-3*96 {
		t.Errorf("with repeated blocks: %+v", got)
	}
	if got := f.Totals(1000, 16); got.Fresh != 0 {
		t.Errorf("with more repeated than announced: %+v", got)
	}
}

// TestTrailBoundsWhatWasKnown holds both sides of a moment, in bounded memory.
func TestTrailBoundsWhatWasKnown(t *testing.T) {
	var tr trail
	of := func(n int) Totals { return Totals{Most: float64(n)} }
	if _, ok := tr.at(start); ok {
		t.Error("something was known before all")
	}
	for i := range 10 * trailPoints {
		tr.add(start.Add(time.Duration(i)*10*time.Millisecond), of(i))
	}
	if len(tr.points) > trailPoints {
		t.Errorf("%d points", len(tr.points))
	}
	last := 10*trailPoints - 1
	for back := range 300 {
		when := start.Add(time.Duration(last-back) * 10 * time.Millisecond)
		before, ok := tr.at(when)
		if !ok || before.Most > float64(last-back) || before.Most < float64(last-back-6) {
			t.Fatalf("%d steps ago: %v, %v", back, before.Most, ok)
		}
		if after := tr.from(when, of(last)); after.Most < float64(last-back) || after.Most > float64(last-back+6) {
			t.Fatalf("%d steps ago: %v", back, after.Most)
		}
	}
	if _, ok := tr.at(start); ok {
		t.Error("what is too long ago is known")
	}
}
