package fleet

import (
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// requestsAt is how many requests a member is believed to have.
func requestsAt(f *Fleet, id ID) int {
	m := f.View().Member(id)
	for i := range f.View().Rows {
		if s := &f.View().Rows[i]; s.ID == id {
			return s.Requests(m.Reserved())
		}
	}
	return -1
}

// Decisions of others come late, and those that another member served are older
// than what was reserved on it meanwhile. Once a sample has seen all of them, the
// sample alone counts.
func TestOlderEntriesAreNotCountedTwice(t *testing.T) {
	old := func(f *Fleet, ids []ID) {
		f.SetCacheState(ids[0], CacheState{Trust: Exact, Epoch: 7})
		f.Adopt(1<<50, "m0", 7, "", Choice{Uncached: 1000, PrefillMS: 100, FirstTokenMS: 100}, t0, after(600*time.Millisecond))
	}
	for name, bring := range map[string]func(f *Fleet, ids []ID, moved Decision){
		"another scheduler's": func(f *Fleet, ids []ID, _ Decision) { old(f, ids) },
		"another member's": func(f *Fleet, ids []ID, d Decision) {
			f.Report(Report{Decision: d, Outcome: FirstToken, Member: "m0"}, after(600*time.Millisecond))
		},
		"one of either, in turn": func(f *Fleet, ids []ID, d Decision) {
			old(f, ids)
			f.Report(Report{Decision: d, Outcome: FirstToken, Member: "m0"}, after(610*time.Millisecond))
		},
	} {
		f, ids := fleetOf(t, Config{}, 2)
		moved := decide(t, f, ids[1], "", after(10*time.Millisecond))
		decide(t, f, ids[0], "", after(500*time.Millisecond))
		bring(f, ids, moved)
		open := reserved(f, ids[0]).Open
		// This sample is too early for the younger one, the next is not.
		f.Receive(ids[0], Info{}, load(after(550*time.Millisecond), open-1, 0), after(620*time.Millisecond))
		if n := requestsAt(f, ids[0]); n != open {
			t.Errorf("%s: %d requests after the first sample, want %d", name, n, open)
		}
		f.Receive(ids[0], Info{}, load(after(5*time.Second), open, 0), after(5*time.Second))
		if n := requestsAt(f, ids[0]); n != open || reserved(f, ids[0]).Unsampled != 0 {
			t.Errorf("%s: %d requests by a sample that has all %d of them: %+v", name, n, open, reserved(f, ids[0]))
		}
	}
}

// entry is a decision of the dumb ledger, which keeps no sums.
type entry struct {
	d          *decision
	at, from   time.Time
	prefilling bool
}

// dumb is what a ledger promises, found anew each time.
type dumb struct {
	entries []entry
	sampled time.Time
	ended   int
}

func (m *dumb) find(d *decision) int {
	return slices.IndexFunc(m.entries, func(e entry) bool { return e.d == d })
}

func (m *dumb) seen(e *entry) bool { return !m.sampled.Before(e.from) }

// sum of the entries, and the oldest that was seen; nil: none.
func (m *dumb) sum() (r Reserved, oldest *decision) {
	r.Ended = m.ended
	for i := range m.entries {
		e := &m.entries[i]
		r.Open++
		r.Share += e.d.share
		seen := m.seen(e)
		if !seen {
			r.Unsampled++
		}
		if e.prefilling {
			r.Prefills++
			r.Tokens += e.d.tokens
			r.PrefillMS += e.d.prefillMS
			if seen {
				r.PrefillsSampled++
			}
		}
		if seen && (oldest == nil || e.at.Before(oldest.at)) {
			oldest = e.d
		}
	}
	return r, oldest
}

// The ledger must say what one says that is searched as a whole each time,
// whatever the order in which decisions come, begin, are computed and end.
func TestLedgerIsThatOfADumbOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var l ledger
		var m dumb
		now := t0
		some := func() *entry { return &m.entries[rapid.IntRange(0, len(m.entries)-1).Draw(t, "which")] }
		for i := range rapid.IntRange(1, 80).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 300).Draw(t, "pass")) * time.Millisecond)
			do := rapid.IntRange(0, 6).Draw(t, "do")
			if len(m.entries) == 0 {
				do %= 3
			}
			switch do {
			case 0, 1:
				// Distinct times, so that there is one oldest.
				at := now.Add(-time.Duration(rapid.IntRange(0, 3000).Draw(t, "age"))*time.Millisecond + time.Duration(i))
				d := &decision{
					at: at, from: at.Add(time.Duration(rapid.IntRange(0, 2500).Draw(t, "lag")) * time.Millisecond),
					tokens: uint64(1 + i), prefillMS: float64(i), share: 0.25, phase: phase(rapid.IntRange(0, 1).Draw(t, "phase")),
				}
				m.entries = append(m.entries, entry{d, d.at, d.from, d.phase == prefilling})
				l.add(d)
			case 2:
				if at := now.Add(-time.Duration(rapid.IntRange(0, 500).Draw(t, "sample")) * time.Millisecond); at.After(m.sampled) {
					m.sampled, m.ended = at, 0
					l.settle(at)
				}
			case 3:
				e := some()
				e.prefilling = false
				l.computed(e.d)
			case 4:
				e := some()
				if now.Before(e.from) {
					e.from = now
				}
				l.begun(e.d, now)
			case 5, 6:
				e, ended := some(), do == 5
				if ended && m.seen(e) {
					m.ended++
				}
				d := e.d
				m.entries = slices.Delete(m.entries, m.find(d), m.find(d)+1)
				l.remove(d, ended)
				if d.sampled || d.prev != nil || d.next != nil {
					t.Fatalf("%+v is not off the ledger", d)
				}
			}
			want, oldest := m.sum()
			got := l.sum
			if math.Abs(got.PrefillMS-want.PrefillMS) > 1e-6 || math.Abs(got.Share-want.Share) > 1e-6 {
				t.Fatalf("%+v, want %+v", got, want)
			}
			got.PrefillMS, got.Share = want.PrefillMS, want.Share
			if got != want {
				t.Fatalf("%+v, want %+v", got, want)
			}
			if l.inSample() != want.Open-want.Unsampled || oldest != nil && l.oldestSampled() != oldest {
				t.Fatalf("%d seen; the oldest is not the oldest", l.inSample())
			}
			var was, turn *decision
			for d := l.first; d != nil; was, d = d, d.next {
				if d.prev != was || was != nil && d.at.Before(was.at) {
					t.Fatal("the list is torn or out of order")
				}
				if turn == nil && d.phase == prefilling {
					turn = d
				}
			}
			if l.last != was {
				t.Fatal("the list has another end")
			}
			if l.turn != turn {
				t.Fatal("it is not the turn of the first that is prefilling")
			}
		}
	})
}

// At the bound, decisions that reserve nothing make room for those that do.
func TestSilentDecisionsGoBeforeReservations(t *testing.T) {
	f, ids := fleetOf(t, Config{MaxDecisions: 8}, 2)
	var released, live []Decision
	for range 4 {
		released = append(released, decide(t, f, ids[0], "", t0))
	}
	f.Sweep(after(2 * time.Second)) // nobody reported: they reserve nothing from here on
	if r := reserved(f, ids[0]); r.Open != 0 || f.Stats().Decisions != 4 {
		t.Fatalf("%+v, %d decisions", r, f.Stats().Decisions)
	}
	for range 8 {
		live = append(live, decide(t, f, ids[1], "", after(2*time.Second)))
	}
	if r := reserved(f, ids[1]); r.Open != 8 {
		t.Errorf("%d of 8 reservations are left, %d evicted", r.Open, f.Stats().Evicted)
	}
	for i, d := range append(released, live...) {
		if _, ok := f.Report(Report{Decision: d, Outcome: Finished}, after(2*time.Second)); ok != (i >= 4) {
			t.Errorf("decision %d of 4 released and 8 live: known %v", i, ok)
		}
	}
}

// An engine takes a request up between two steps and counts what it has at the
// end of each: with long prefills its gauges are up to two of them behind. What
// they cannot have yet is not missing.
func TestLongStepsEndNoReservation(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	long := func(now time.Time, first float64) {
		m := f.View().Member(ids[0])
		f.Decide("", now, func(ID, bool, []Reserved) (Choice, bool) {
			return Choice{Member: m, Uncached: 1000, PrefillMS: 800, FirstTokenMS: first}, true
		})
	}
	long(t0, 800)
	long(after(10*time.Millisecond), 1600)
	// The step of the first is under way, the second waits to be taken up.
	f.Receive(ids[0], Info{}, load(after(750*time.Millisecond), 0, 0), after(750*time.Millisecond))
	if r := reserved(f, ids[0]); r.Open != 2 || r.Tokens != 2000 {
		t.Errorf("before any step ended: %+v", r)
	}
	// The first step has ended with the first alone; the second is computed.
	f.Receive(ids[0], Info{}, load(after(1500*time.Millisecond), 1, 0), after(1500*time.Millisecond))
	if r := reserved(f, ids[0]); r.Open != 2 || r.Tokens != 2000 {
		t.Errorf("after the first step: %+v", r)
	}
	f.Receive(ids[0], Info{}, load(after(2300*time.Millisecond), 2, 0), after(2300*time.Millisecond))
	if r := reserved(f, ids[0]); r.Unsampled != 0 || requestsAt(f, ids[0]) != 2 {
		t.Errorf("after the second step: %+v", r)
	}
}

// A first token says that the request has begun: samples from then on have it.
func TestFirstTokenSaysThatSamplesHaveTheRequest(t *testing.T) {
	f, ids := fleetOf(t, Config{}, 1)
	d := decide(t, f, ids[0], "", t0)
	f.Report(Report{Decision: d, Outcome: FirstToken}, after(50*time.Millisecond))
	f.Receive(ids[0], Info{}, load(after(60*time.Millisecond), 1, 0), after(70*time.Millisecond))
	if n := requestsAt(f, ids[0]); n != 1 {
		t.Errorf("%d requests: %+v", n, reserved(f, ids[0]))
	}
}
