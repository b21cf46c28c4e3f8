package fleet

import (
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// decide reserves 1,000 tokens and 100 ms on a member.
func decide(t *testing.T, f *Fleet, id ID, session string, now time.Time) Decision {
	t.Helper()
	m := f.View().Member(id)
	d, ok := f.Decide(session, now, func(ID, bool, []Reserved) (Choice, bool) {
		return Choice{Member: m, Session: session, Uncached: 1000, PrefillMS: 100, FirstTokenMS: 100, Cached: 16}, true
	})
	if !ok {
		t.Fatalf("nothing was reserved on member %d", id)
	}
	return d
}

func load(at time.Time, running, waiting int) *Load {
	return &Load{At: at, Running: running, Waiting: waiting, KVUsage: math.NaN(), Totals: NoTotals()}
}

func reserved(f *Fleet, id ID) *Reserved { return f.View().Member(id).Reserved() }

func TestFirstTokenFreesTokensAndKeepsTheSlot(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	d := decide(t, f, ids[0], "", t0)
	if r := reserved(f, ids[0]); r.Tokens != 1000 || r.Prompt != 1016 || r.Open != 1 || r.Unsampled != 1 || r.Last != 1 {
		t.Fatalf("after a decision: %+v", r)
	}
	if _, ok := f.Report(Report{Decision: d, Outcome: FirstToken}, after(time.Second)); !ok {
		t.Fatal("the decision is not known")
	}
	if r := reserved(f, ids[0]); r.Tokens != 0 || r.Prompt != 1016 || r.Wait(t0) != 0 || r.Open != 1 || r.Unsampled != 1 {
		t.Fatalf("after the first token: %+v", r)
	}
	f.Report(Report{Decision: d, Outcome: Finished}, after(2*time.Second))
	if r := reserved(f, ids[0]); r.Open != 0 || r.Prompt != 0 || r.Unsampled != 0 {
		t.Fatalf("after the end: %+v", r)
	}
	if _, ok := f.Report(Report{Decision: d, Outcome: Finished}, after(2*time.Second)); ok {
		t.Fatal("a closed decision is still known")
	}
}

// Before anybody reports, and when nobody does any more, a prefill is over when
// it was to be; the slot is kept, and a late report is still understood.
func TestWithoutReportsAPrefillEndsWhenItWasTo(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	now := t0
	expect := func(prefills, open int) {
		t.Helper()
		f.Sweep(now)
		if r := reserved(f, ids[0]); r.Prefills != prefills || r.Open != open || r.PrefillMS != 100*float64(prefills) {
			t.Fatalf("%v later: %+v, want %d prefills of %d open", now.Sub(t0), r, prefills, open)
		}
	}
	pass := func(d time.Duration) { now = now.Add(d) }

	d := decide(t, f, ids[0], "", now)
	pass(99 * time.Millisecond)
	expect(1, 1)
	pass(time.Millisecond)
	expect(0, 1)
	pass(time.Minute)
	expect(0, 0)
	if _, ok := f.Report(Report{Decision: d, Outcome: Finished}, now); !ok {
		t.Fatal("a late report is not understood")
	}
	for range maxUnreported { // somebody reports: others are waited for
		decide(t, f, ids[0], "", now)
	}
	pass(time.Second)
	expect(maxUnreported, maxUnreported)
	pass(time.Minute)
	expect(0, 0)
	decide(t, f, ids[0], "", now)
	pass(100 * time.Millisecond)
	expect(0, 1)
}

// Where nobody reports, what is left to compute follows from when requests came
// and what they take. When that turns out to be a twentieth, so does the backlog,
// and what would have been done by now is done; when it turns out to be more, the
// rest takes longer.
func TestBacklogFollowsWhatPrefillsAreBelievedToTake(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	m, wait := f.View().Member(ids[0]), 0.0
	now := t0
	for i := range 20 {
		now = after(time.Duration(i) * 100 * time.Millisecond)
		f.Decide("", now, func(_ ID, _ bool, sums []Reserved) (Choice, bool) {
			wait = sums[ids[0]].Wait(now)
			return Choice{Member: m, Uncached: 1000, PrefillMS: 1000, FirstTokenMS: wait + 1000, EndMS: 60_000}, true
		})
	}
	if r := reserved(f, ids[0]); r.Prefills != 19 || r.Wait(now) < 18_000 {
		t.Fatalf("20 that take a second each, ten a second: %+v", r)
	}
	f.Reprice(ids[0], 0.05, now)
	if r := reserved(f, ids[0]); r.Prefills != 1 || math.Abs(r.Wait(now)-50) > 1e-6 || r.Open != 20 {
		t.Fatalf("20 that take 50 ms each: %+v, %.1f ms left", r, r.Wait(now))
	}
	f.Reprice(ids[0], 4, now.Add(40*time.Millisecond))
	if w := reserved(f, ids[0]).Wait(now.Add(40 * time.Millisecond)); math.Abs(w-160) > 1e-6 {
		t.Errorf("one that takes 200 ms has %.1f ms left", w)
	}
	f.Sweep(now.Add(200 * time.Millisecond))
	if r := reserved(f, ids[0]); r.Prefills != 0 {
		t.Errorf("after its time: %+v", r)
	}
	for _, by := range []float64{0, -1, math.NaN(), math.Inf(1)} {
		f.Reprice(ids[0], by, now)
	}
	f.Reprice(99, 2, now) // nobody
}

// A sample that shows fewer than were believed to wait takes their time with them:
// those behind them come to their turn.
func TestSampleBringsTheRestToItsTurn(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	m := f.View().Member(ids[0])
	for i := range 10 {
		f.Decide("", t0, func(ID, bool, []Reserved) (Choice, bool) {
			return Choice{Member: m, Uncached: 1000, PrefillMS: 1000, FirstTokenMS: float64(1000 * (i + 1)), EndMS: 60_000}, true
		})
	}
	now := after(3 * time.Second)
	f.Sweep(now)
	f.Receive(ids[0], Info{}, load(now, 1, 0), now)
	if w := reserved(f, ids[0]).Wait(now); math.Abs(w-1000) > 1e-6 {
		t.Fatalf("one of ten is left: %.0f ms", w)
	}
	f.Sweep(now.Add(time.Second))
	if r := reserved(f, ids[0]); r.Prefills != 0 || r.Open != 1 {
		t.Errorf("a second later: %+v", r)
	}
}

// A caller that crashed, or a lost report, must not leave load behind.
func TestLostReportsLeaveNoLoad(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	for range 100 {
		decide(t, f, ids[0], "", t0)
	}
	f.Sweep(after(1100 * time.Millisecond))
	if r := reserved(f, ids[0]); r.Open != 100 {
		t.Fatalf("before their time: %+v", r)
	}
	f.Sweep(after(1200 * time.Millisecond))
	if r := reserved(f, ids[0]); r.Open != 0 || r.Tokens != 0 || r.PrefillMS != 0 {
		t.Fatalf("after their time: %+v", r)
	}
	if st := f.Stats(); st.Expired != 100 || st.Decisions != 100 {
		t.Fatalf("%+v, want 100 expired that can still be reported", st)
	}
	f.Sweep(after(longestDecision))
	if st := f.Stats(); st.Decisions != 0 {
		t.Fatalf("%d decisions are kept for ever", st.Decisions)
	}
}

func TestNonsensePredictionsExpireToo(t *testing.T) {
	for _, ms := range []float64{math.NaN(), math.Inf(1), -1, 1e300} {
		f, ids := fleetOf(t, Config{}, 1)
		m := f.View().Member(ids[0])
		f.Decide("", t0, func(ID, bool, []Reserved) (Choice, bool) {
			return Choice{Member: m, Uncached: 1, PrefillMS: ms, FirstTokenMS: ms}, true
		})
		if w := reserved(f, ids[0]).Wait(t0); !(w >= 0) || math.IsInf(w, 0) {
			t.Errorf("%v ms: wait %v", ms, w)
		}
		f.Sweep(after(longestPrefill))
		if r := reserved(f, ids[0]); r.Open != 0 || r.PrefillMS != 0 {
			t.Errorf("%v ms: %+v is left", ms, r)
		}
	}
}

func TestSampleReplacesWhatItContains(t *testing.T) {
	f, ids := fleetOf(t, Config{Settle: 200 * time.Millisecond}, 1)
	f.unreported = 0 // somebody reports
	f.Receive(ids[0], Info{}, load(t0, 0, 0), t0)
	requests := func() int { m := f.View().Member(ids[0]); return f.View().Rows[0].Requests(m.Reserved()) }
	decide(t, f, ids[0], "", after(100*time.Millisecond))
	decide(t, f, ids[0], "", after(500*time.Millisecond))
	if n := requests(); n != 2 {
		t.Fatalf("before the sample: %d requests", n)
	}
	// The sample is of 0.6 s and can contain the first only.
	f.Receive(ids[0], Info{}, load(after(600*time.Millisecond), 1, 0), after(700*time.Millisecond))
	if r := reserved(f, ids[0]); r.Unsampled != 1 || r.PrefillsSampled != 1 || requests() != 2 {
		t.Fatalf("after the sample: %+v, %d requests", r, requests())
	}
	// A sample in which the engine is empty ends what it must have seen.
	f.Receive(ids[0], Info{}, load(after(690*time.Millisecond), 0, 0), after(800*time.Millisecond))
	if r := reserved(f, ids[0]); r.Open != 1 || r.Tokens != 1000 || requests() != 1 {
		t.Fatalf("after the empty sample: %+v, %d requests", r, requests())
	}
	// An older sample that comes late changes nothing.
	f.Receive(ids[0], Info{}, load(after(100*time.Millisecond), 9, 9), after(800*time.Millisecond))
	if n := requests(); n != 1 {
		t.Fatalf("after a late sample: %d requests", n)
	}
}

func TestEndAfterTheSampleIsTakenOffIt(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	d := decide(t, f, ids[0], "", t0)
	f.Receive(ids[0], Info{}, load(after(time.Second), 3, 0), after(time.Second))
	f.Report(Report{Decision: d, Outcome: Finished}, after(1100*time.Millisecond))
	m := f.View().Member(ids[0])
	if n := f.View().Rows[0].Requests(m.Reserved()); n != 2 {
		t.Fatalf("%d requests, want the sample's 3 less the one that ended", n)
	}
}

func TestReservationMovesWithTheRequest(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 2)
	d := decide(t, f, ids[0], "s", t0)
	f.Report(Report{Decision: d, Outcome: FirstToken, Member: "m1", Counts: true, PromptTokens: 100, Cached: 0}, t0)
	if a, b := reserved(f, ids[0]), reserved(f, ids[1]); a.Open != 0 || b.Open != 1 || b.Tokens != 0 {
		t.Fatalf("chosen %+v, served %+v", a, b)
	}
	if last, ok := f.sessions.last("s"); !ok || last != ids[1] {
		t.Fatalf("the session's last member is %d, %v", last, ok)
	}
	if got := f.View().Member(ids[0]).Reported(); got.Requests != 0 {
		t.Fatalf("the prediction for another member was counted: %+v", got)
	}
	f.Report(Report{Decision: d, Outcome: Finished, Member: "nobody"}, t0)
	if b := reserved(f, ids[1]); b.Open != 0 {
		t.Fatalf("served by nobody known: %+v", b)
	}
}

func TestEngineCountsStandBesidePredictionOnce(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	d := decide(t, f, ids[0], "", t0)
	for range 2 {
		f.Report(Report{Decision: d, Outcome: FirstToken, Counts: true, PromptTokens: 1016, Cached: 32}, t0)
	}
	want := Reported{Requests: 1, PromptTokens: 1016, CachedTokens: 32, PredictedTokens: 16}
	if got := f.View().Member(ids[0]).Reported(); got != want {
		t.Fatalf("%+v, want %+v", got, want)
	}
}

func TestWaitShrinksAsTheFirstIsComputed(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	a := decide(t, f, ids[0], "", t0)
	decide(t, f, ids[0], "", t0)
	for _, c := range []struct {
		at   time.Duration
		want float64
	}{{0, 200}, {50 * time.Millisecond, 150}, {90 * time.Millisecond, 110}, {400 * time.Millisecond, 110}} {
		if got := reserved(f, ids[0]).Wait(after(c.at)); got != c.want {
			t.Errorf("after %v: %v ms, want %v", c.at, got, c.want)
		}
	}
	f.Report(Report{Decision: a, Outcome: FirstToken}, after(400*time.Millisecond))
	if got := reserved(f, ids[0]).Wait(after(410 * time.Millisecond)); got != 90 {
		t.Errorf("the second has its turn: %v ms, want 90", got)
	}
}

func TestNewEpochVoidsReservations(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 2)
	f.SetCacheState(ids[0], CacheState{Trust: Exact, Epoch: 1})
	d := decide(t, f, ids[0], "", t0)
	f.SetCacheState(ids[0], CacheState{Trust: Exact, Epoch: 1, Sequence: 5})
	if r := reserved(f, ids[0]); r.Open != 1 {
		t.Fatalf("the same epoch: %+v", r)
	}
	f.SetCacheState(ids[0], CacheState{Trust: Syncing, Epoch: 2})
	if r := reserved(f, ids[0]); r.Open != 0 || r.Tokens != 0 {
		t.Fatalf("the next epoch: %+v", r)
	}
	if _, ok := f.Report(Report{Decision: d, Outcome: Finished}, t0); ok {
		t.Fatal("a void decision is still known")
	}
}

func TestRemovedMemberLeavesNothingBehind(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 2)
	decide(t, f, ids[0], "s", t0)
	decide(t, f, ids[1], "other", t0)
	gone := f.View().Member(ids[0])
	f.Leave(ids[0])
	f.Leave(ids[0])
	if st := f.Stats(); st.Members != 1 || st.Decisions != 1 || st.Sessions != 1 {
		t.Fatalf("left behind: %+v", st)
	}
	v := f.View()
	if v.Member(ids[0]) != nil || v.Named("m0") != nil || len(v.Members) != 1 || len(v.Serving("model")) != 1 {
		t.Fatalf("still seen: %+v", v)
	}
	if _, ok := f.Decide("", t0, func(ID, bool, []Reserved) (Choice, bool) { return Choice{Member: gone}, true }); ok {
		t.Fatal("something was reserved on a member that left")
	}
}

func TestDecisionsAndSessionsAreBounded(t *testing.T) {
	f, ids := fleetOf(t, Config{MaxDecisions: 10, MaxSessions: 5}, 1)
	for i := range 1000 {
		decide(t, f, ids[0], fmt.Sprint(i), after(time.Duration(i)*time.Microsecond))
	}
	st := f.Stats()
	if st.Decisions != 10 || st.Sessions != 5 || st.Evicted != 990 {
		t.Fatalf("%+v", st)
	}
	if r := reserved(f, ids[0]); r.Open != 10 || r.Tokens != 10_000 {
		t.Fatalf("%+v", r)
	}
	for i := range 1000 {
		if _, ok := f.sessions.last(fmt.Sprint(i)); ok != (i >= 995) {
			t.Fatalf("session %d: %v", i, ok)
		}
	}
}

// The published sums must always be those of the open decisions.
func TestSumsAreThoseOfTheOpenDecisions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := New(Config{MaxDecisions: 8})
		now := t0
		var ids []ID
		for i := range 3 {
			id, _ := f.Join(fmt.Sprint(i), now)
			ids = append(ids, id)
		}
		var all []Decision
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 700).Draw(t, "ms")) * time.Millisecond)
			id := rapid.SampledFrom(ids).Draw(t, "member")
			switch rapid.IntRange(0, 5).Draw(t, "do") {
			case 0, 1:
				m := f.View().Member(id)
				d, _ := f.Decide("", now, func(ID, bool, []Reserved) (Choice, bool) {
					ms := rapid.Float64Range(0, 2000).Draw(t, "prefill")
					return Choice{Member: m, Uncached: uint64(ms), PrefillMS: ms, FirstTokenMS: ms}, true
				})
				all = append(all, d)
			case 2, 3:
				if len(all) > 0 {
					f.Report(Report{
						Decision: rapid.SampledFrom(all).Draw(t, "decision"),
						Outcome:  Outcome(rapid.IntRange(1, 4).Draw(t, "outcome")),
						Member:   rapid.SampledFrom([]string{"", "0", "1", "2", "x"}).Draw(t, "served"),
					}, now)
				}
			case 4:
				at := now.Add(-time.Duration(rapid.IntRange(0, 500).Draw(t, "age")) * time.Millisecond)
				f.Receive(id, Info{}, load(at, rapid.IntRange(-1, 5).Draw(t, "running"), rapid.IntRange(-1, 5).Draw(t, "waiting")), now)
			case 5:
				f.SetCacheState(id, CacheState{Epoch: rapid.Uint64Range(1, 2).Draw(t, "epoch")})
			}
			check(t, f)
		}
		f.Sweep(now.Add(longestDecision))
		f.Sweep(now.Add(2 * longestDecision))
		if st := f.Stats(); st.Decisions != 0 {
			t.Fatalf("left: %+v", st)
		}
		check(t, f)
	})
}

func check(t *rapid.T, f *Fleet) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	want := make(map[*slot]Reserved)
	for _, d := range f.open.byID {
		w := want[d.slot]
		if d.phase != released {
			w.Open++
			if !d.sampled {
				w.Unsampled++
			}
		}
		if d.phase == prefilling {
			w.Prefills++
			w.Tokens += d.tokens
			w.PrefillMS += d.prefillMS
			if d.sampled {
				w.PrefillsSampled++
			}
		}
		want[d.slot] = w
	}
	for _, s := range f.names {
		got, w := s.member.Reserved(), want[s]
		if got.Open != w.Open || got.Unsampled != w.Unsampled || got.Prefills != w.Prefills || got.Tokens != w.Tokens ||
			got.PrefillsSampled != w.PrefillsSampled || math.Abs(got.PrefillMS-w.PrefillMS) > 1e-6 || got.Ended < 0 {
			t.Fatalf("member %s: published %+v, open %+v", s.member.Info.Name, got, w)
		}
	}
	if len(f.open.byID) != len(f.open.live)+len(f.open.released) {
		t.Fatalf("%d decisions, %d and %d deadlines", len(f.open.byID), len(f.open.live), len(f.open.released))
	}
}

func TestViewsStayTrueBesideWriters(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 8)
	var writers, readers sync.WaitGroup
	stop := make(chan struct{})
	for w := range 2 {
		writers.Add(1)
		go func() {
			defer writers.Done()
			for i := range 2000 {
				now := after(time.Duration(i) * time.Millisecond)
				id := ids[(i+w)%len(ids)]
				f.Receive(id, Info{Models: []string{"model"}, BlockSize: 16}, load(now, i%7, 0), now)
				f.SetCacheState(id, CacheState{Trust: Exact, Epoch: 1, Sequence: uint64(i)})
				m := f.View().Member(id)
				d, ok := f.Decide("s", now, func(ID, bool, []Reserved) (Choice, bool) { return Choice{Member: m, Uncached: 1, PrefillMS: 1}, true })
				if ok && i%2 == 0 {
					f.Report(Report{Decision: d, Outcome: Finished}, now)
				}
				f.Sweep(now)
			}
		}()
	}
	for range 2 {
		readers.Add(1)
		go func() {
			defer readers.Done()
			for {
				select {
				case <-stop:
					return
				default:
				}
				v := f.View()
				for i, m := range v.Members {
					if v.Named(m.Info.Name) != m || v.Member(m.ID) != m || m.Reserved().Open < 0 {
						t.Errorf("view is torn at %d", i)
						return
					}
				}
			}
		}()
	}
	writers.Wait()
	close(stop)
	readers.Wait()
}
