package fleet

import (
	"math"
	"testing"
	"time"
)

// fail decides on a member and reports the failure.
func fail(t *testing.T, f *Fleet, id ID, now time.Time) {
	t.Helper()
	f.Report(Report{Decision: decide(t, f, id, "", now), Outcome: Failed}, now)
}

func out(f *Fleet, id ID, now time.Time) bool {
	return !f.View().Member(id).Failing().Until(now).IsZero()
}

func refused(f *Fleet, id ID, anyway bool, now time.Time) bool {
	m := f.View().Member(id)
	_, ok := f.Decide("", now, func(ID, bool, []Reserved) (Choice, bool) { return Choice{Member: m, Anyway: anyway}, true })
	return !ok
}

func TestThreeFailuresLeaveAMemberOut(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 2)
	for i := range failLimit {
		if out(f, ids[0], t0) {
			t.Fatalf("left out after %d failures", i)
		}
		fail(t, f, ids[0], t0)
	}
	if !out(f, ids[0], t0) || out(f, ids[1], t0) {
		t.Fatal("the failing member must be left out, and no other")
	}
	if !refused(f, ids[0], false, t0) || refused(f, ids[0], true, t0) {
		t.Error("who is left out gets a reservation only anyway")
	}
	if st := f.Stats(); st.Failures != failLimit || st.Paused != 1 {
		t.Errorf("%+v", st)
	}
	if out(f, ids[0], after(failPause)) {
		t.Error("left out for longer than the pause")
	}
}

func TestRareFailuresLeaveNobodyOut(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	for i := range 20 {
		fail(t, f, ids[0], after(time.Duration(i)*(failWindow/2+time.Second)))
	}
	now := after(time.Hour)
	for range 20 {
		fail(t, f, ids[0], now)
		fail(t, f, ids[0], now)
		f.Report(Report{Decision: decide(t, f, ids[0], "", now), Outcome: Finished}, now)
	}
	if out(f, ids[0], now) {
		t.Error("left out though most went well")
	}
}

func TestOneProbeDecidesAfterAPause(t *testing.T) {
	for name, c := range map[string]struct {
		outcome Outcome
		at      time.Duration // after the probe
		out     bool
	}{
		"a first token takes it back":      {FirstToken, time.Second, false},
		"an end takes it back":             {Finished, time.Second, false},
		"a failure leaves it out again":    {Failed, time.Second, true},
		"a cancelled request says nothing": {Cancelled, time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			f, ids := fleetOf(t, Config{}, 1)
			for range failLimit {
				fail(t, f, ids[0], t0)
			}
			start := after(failPause)
			probe := decide(t, f, ids[0], "", start)
			if !refused(f, ids[0], false, start) {
				t.Fatal("a second request goes to a member on probation")
			}
			f.Report(Report{Decision: probe, Outcome: c.outcome}, start.Add(c.at))
			if got := out(f, ids[0], start.Add(c.at)); got != c.out {
				t.Errorf("left out: %v", got)
			}
			if c.outcome == Failed && !out(f, ids[0], start.Add(c.at+2*failPause-1)) {
				t.Error("the second pause is no longer than the first")
			}
		})
	}
}

// Reports are optional.
func TestSilentProbationTakesAMemberBack(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	for range failLimit {
		fail(t, f, ids[0], t0)
	}
	decide(t, f, ids[0], "", after(failPause))
	now := after(failPause + probation)
	if out(f, ids[0], now) {
		t.Fatal("left out after its probation")
	}
	fail(t, f, ids[0], now)
	if out(f, ids[0], now) {
		t.Error("one failure after a probation that went well leaves it out")
	}
}

func TestANewEngineHasNoRecord(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	f.SetCacheState(ids[0], CacheState{Trust: Exact, Epoch: 1})
	for range failLimit {
		fail(t, f, ids[0], t0)
	}
	f.SetCacheState(ids[0], CacheState{Trust: Exact, Epoch: 2})
	if out(f, ids[0], t0) {
		t.Error("left out for what another process did")
	}
}

// What failed elsewhere is not held against the member that was picked.
func TestFailuresCountForWhoServed(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 2)
	other := f.View().Member(ids[1]).Info.Name
	for _, member := range []string{other, "ns_nobody_0"} {
		for range failLimit {
			d := decide(t, f, ids[0], "", t0)
			f.Report(Report{Decision: d, Outcome: Failed, Member: member}, t0)
		}
	}
	if out(f, ids[0], t0) || !out(f, ids[1], t0) {
		t.Error("the failures count for the wrong member")
	}
}

func TestPausesAreBounded(t *testing.T) {
	var b breaker
	now := t0
	for range 20 {
		for range failLimit {
			b.failed(now, now)
		}
		now = b.state.until
		b.reserved(now)
		b.failed(now, now)
	}
	if b.pause != failPauseMax || b.state.until.Sub(now) > failPauseMax {
		t.Errorf("%+v", b)
	}
}

// An engine that was killed fails what was sent to it, and what is sent while the
// next one is being born. As soon as that answers its agent, nothing of this is
// its own.
func TestEngineThatIsBornAnewHasNoRecord(t *testing.T) {
	process := func(start uint64, at time.Time) *Load {
		l := load(at, 1, 0)
		l.ProcessStart = start
		return l
	}
	for name, c := range map[string]struct {
		before, after *Load
		out           bool
	}{
		"another process":                {process(500, t0), process(900, after(time.Second)), false},
		"a clock was set back":           {process(500, t0), process(400, after(time.Second)), false},
		"it answers again":               {&Load{At: t0, Running: -1, Waiting: -1, KVUsage: math.NaN(), Totals: NoTotals(), Unreachable: true}, process(900, after(time.Second)), false},
		"it is the same":                 {process(500, t0), process(500, after(time.Second)), true},
		"it says nothing of its process": {process(500, t0), load(after(time.Second), 0, 0), true},
	} {
		t.Run(name, func(t *testing.T) {
			f, ids := fleetOf(t, Config{}, 1)
			f.Receive(ids[0], Info{}, c.before, t0)
			late := decide(t, f, ids[0], "", after(900*time.Millisecond))
			for range failLimit {
				fail(t, f, ids[0], after(900*time.Millisecond))
			}
			now := after(time.Second)
			if !out(f, ids[0], now) {
				t.Fatal("not left out")
			}
			f.Receive(ids[0], Info{}, c.after, now)
			if out(f, ids[0], now) != c.out {
				t.Fatalf("left out: %v, want %v", !c.out, c.out)
			}
			if c.out {
				return
			}
			// Reports that come late are of the engine that is gone.
			f.Report(Report{Decision: late, Outcome: Failed}, now)
			fail(t, f, ids[0], now)
			fail(t, f, ids[0], now)
			if out(f, ids[0], now) {
				t.Error("left out for what another engine failed")
			}
			fail(t, f, ids[0], now)
			if !out(f, ids[0], now) {
				t.Error("its own failures do not count")
			}
		})
	}
}
