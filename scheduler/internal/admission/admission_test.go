package admission

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

var (
	t0   = time.Unix(1_700_000_000, 0)
	none = math.NaN()
)

func after(s float64) time.Time { return t0.Add(time.Duration(s * float64(time.Second))) }

// entry is a request of a test.
type entry struct {
	name, model, tenant string
	priority            int
	bytes               int64
	came                time.Time
	slack               float64 // ms
	candidates          []pick.Ref
}

// bench is a queue whose tries are the test's own: no picker decides.
type bench struct {
	*Queue
	t     testing.TB
	names map[*Waiter]string
	ended map[string]error // of those that did not get a place, by name
}

func newBench(t testing.TB, r Rules) *bench {
	return &bench{New(r, fleet.New(fleet.Config{}), nil), t, make(map[*Waiter]string), make(map[string]error)}
}

func (b *bench) enter(e entry) (*Waiter, error) {
	if e.model == "" {
		e.model = "m"
	}
	if e.came.IsZero() {
		e.came = t0
	}
	r := &pick.Request{Model: e.model, Tenant: e.tenant, Candidates: e.candidates}
	w, err := b.Enter(r, &pick.NoRoom{SlackMS: e.slack}, e.priority, e.bytes, e.came, func(o Outcome) {
		if o.Err != nil {
			b.ended[e.name] = o.Err
		}
	})
	if err == nil {
		b.names[w] = e.name
	}
	return w, err
}

func (b *bench) push(list ...entry) {
	b.t.Helper()
	for _, e := range list {
		if _, err := b.enter(e); err != nil {
			b.t.Fatal(err)
		}
	}
}

// pass tries all who wait, however many passes that takes.
func (b *bench) pass(try func(w *Waiter, ahead []fleet.Ahead) verdict) {
	b.attempt = func(w *Waiter, room *pick.Admission, _ time.Time) verdict {
		if room == nil {
			room = &pick.Admission{}
		}
		return try(w, room.Ahead)
	}
	for more := b.Pass(func() time.Time { return t0 }, true); more; {
		more = b.Pass(func() time.Time { return t0 }, false)
	}
}

// wait is that a request waits on, as it was.
func wait(w *Waiter) verdict { return verdict{noRoom: &pick.NoRoom{SlackMS: w.slackMS}} }

var place = verdict{decision: &pick.Decision{}, workMS: 100}

// admit gives so many a place, in the order in which they are tried.
func (b *bench) admit(n int) (names []string) {
	b.pass(func(w *Waiter, _ []fleet.Ahead) verdict {
		if len(names) == n {
			return wait(w)
		}
		names = append(names, b.names[w])
		return place
	})
	return names
}

// The order of urgency, worked out by hand: came + slack, within 0 and 10 s.
func TestUrgencyOnAGoldenScript(t *testing.T) {
	for _, c := range []struct {
		name string
		list []entry
		want string
	}{
		{"without targets by arrival", []entry{
			{name: "b", came: after(2), slack: none}, {name: "a", came: after(1), slack: none}, {name: "c", came: after(3), slack: none},
		}, "a b c"},
		{"the least slack first", []entry{
			{name: "relaxed", slack: 5000}, {name: "urgent", slack: 100}, {name: "usual", slack: 1000},
		}, "urgent usual relaxed"},
		{"what has waited has less left", []entry{
			{name: "new", came: after(3), slack: 1000}, {name: "old", slack: 3900}, {name: "older", came: after(-1), slack: 4800},
		}, "older old new"},
		{"who is late is due since it came", []entry{
			{name: "later", came: after(1), slack: -60_000}, {name: "late", slack: -1}, {name: "in time", slack: 500},
		}, "late in time later"},
		{"equals by arrival", []entry{
			{name: "1", slack: 500}, {name: "2", slack: 500}, {name: "3", slack: 500},
		}, "1 2 3"},
		{"endless slack counts as none", []entry{
			{name: "b", came: after(1), slack: math.Inf(1)}, {name: "a", slack: none}, {name: "z", slack: math.Inf(-1)},
		}, "z a b"},
	} {
		b := newBench(t, Rules{Length: 100})
		b.push(c.list...)
		if got := strings.Join(b.admit(-1), " "); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// Peers' bug 19: one request without a target made all wait in order of arrival.
func TestMixedSLOAndNoSLOKeepsSlackOrder(t *testing.T) {
	b := newBench(t, Rules{Length: 100})
	b.push(
		entry{name: "none", slack: none},
		entry{name: "far", came: after(1), slack: 8000},
		entry{name: "near", came: after(2), slack: 500},
		entry{name: "none too", came: after(3), slack: none},
		entry{name: "nearest", came: after(2), slack: 100},
	)
	if got := strings.Join(b.admit(-1), ", "); got != "nearest, near, far, none, none too" {
		t.Error(got)
	}
}

// Peers' bug 24: who is cancelled leaves at once.
func TestTenThousandCancelsLeaveAnEmptyQueue(t *testing.T) {
	b := newBench(t, Rules{Length: 10_000})
	waiters := make([]*Waiter, 10_000)
	for i := range waiters {
		w, err := b.enter(entry{tenant: fmt.Sprint(i % 17), came: after(float64(i % 100)), slack: float64(i%7) * 100, bytes: 100})
		if err != nil {
			t.Fatal(err)
		}
		waiters[i] = w
	}
	m := b.models["m"]
	if _, err := b.enter(entry{tenant: "0"}); !errors.Is(err, ErrFull) {
		t.Fatalf("one more: %v", err)
	}
	for i := range waiters {
		if w := waiters[(i*7919)%10_000]; !b.Leave(w) || b.Leave(w) {
			t.Fatalf("cancel %d", i)
		}
	}
	if st := b.Stats(); st.Waiting != 0 || st.Bytes != 0 || st.Cancelled != 10_000 || len(m.tenants)+len(m.classes)+len(m.most)+m.fresh+m.unknown != 0 {
		t.Errorf("%+v, %d tenants, %d classes", st, len(m.tenants), len(m.classes))
	}
	if got := b.admit(-1); got != nil || len(b.models) != 0 {
		t.Errorf("admitted %v, %d models are remembered", got, len(b.models))
	}
	b.push(entry{name: "next", slack: none})
	if got := b.admit(-1); !cmp.Equal(got, []string{"next"}) {
		t.Errorf("after all that: %v", got)
	}
}

// Whatever the targets, nobody is passed by one that came more than Age later.
func TestNobodyIsPassedByOneThatCameMuchLater(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		b := newBench(t, Rules{Age: 5 * time.Second, Length: 100})
		n := rapid.IntRange(2, 60).Draw(r, "n")
		for i := range n {
			slack := rapid.SampledFrom([]float64{none, -1e9, 0, 100, 4000, 1e9, math.Inf(1)}).Draw(r, "slack")
			b.push(entry{name: fmt.Sprint(i), came: after(float64(i)), slack: slack})
		}
		place := make(map[string]int)
		for i, name := range b.admit(-1) {
			place[name] = i
		}
		for i := range n {
			for j := i + 6; j < n; j++ {
				if place[fmt.Sprint(j)] < place[fmt.Sprint(i)] {
					r.Fatalf("%d, which came %d s later, passed %d", j, j-i, i)
				}
			}
		}
	})
}

func TestAStepOfPriorityIsWorthOneAge(t *testing.T) {
	b := newBench(t, Rules{Age: 5 * time.Second, Length: 100})
	b.push(
		entry{name: "usual"},
		entry{name: "important", came: after(4), priority: 1},
		entry{name: "too late", came: after(6), priority: 1},
		entry{name: "background", came: after(-4.5), priority: -1},
		entry{name: "old background", came: after(-6), priority: -1},
		entry{name: "boundless", came: after(400), priority: math.MaxInt32},
		entry{name: "bottomless", came: after(-400), priority: math.MinInt32},
	)
	want := "boundless, important, old background, usual, background, too late, bottomless"
	if got := strings.Join(b.admit(-1), ", "); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestTenantsShareFairly(t *testing.T) {
	b := newBench(t, Rules{QuantumMS: 200, Length: 100})
	for i := range 50 {
		b.push(entry{name: "flood", tenant: "flood", came: after(float64(i) / 100)})
	}
	for i := range 10 {
		b.push(entry{name: "small", tenant: "small", came: after(1 + float64(i)/100)})
	}
	// 100 ms each: the flood may be 200 ms ahead, then they take turns.
	got := b.admit(23)
	counts := map[string]int{}
	for i, name := range got {
		counts[name]++
		if ahead := counts["flood"] - counts["small"]; ahead > 3 && counts["small"] < 10 {
			t.Fatalf("after %d: %v", i+1, counts)
		}
	}
	if counts["small"] != 10 {
		t.Errorf("%v of %v", counts, got)
	}
	if rest := b.admit(-1); len(rest) != 37 {
		t.Errorf("%d are left for the flood alone", len(rest))
	}
}

// A tenant that comes back has no credit for the time when it did not wait.
func TestSilenceGivesNoCredit(t *testing.T) {
	b := newBench(t, Rules{QuantumMS: 100, Length: 100})
	for range 30 {
		b.push(entry{name: "a", tenant: "a"})
	}
	b.admit(20)
	for range 10 {
		b.push(entry{name: "b", tenant: "b"})
	}
	got := strings.Join(b.admit(8), "")
	if n := strings.Count(got, "a"); n < 3 || n > 5 {
		t.Errorf("%s: want turns", got)
	}
}

// However many tenants come, one that has had its turn gets another.
func TestNewTenantsDoNotKeepOthersFromTheirTurn(t *testing.T) {
	b := newBench(t, Rules{QuantumMS: 100, Length: 100})
	for range 5 {
		b.push(entry{name: "steady", tenant: "steady"})
	}
	// In front of each place that becomes free stand the same tenant and, each
	// once, three others whose turn it is.
	got := 0
	for i := range 40 {
		for b.Waiting() < 8 && got < 5 {
			b.push(entry{name: "new", tenant: fmt.Sprint(i, b.Waiting()), came: after(float64(i))})
		}
		for _, name := range b.admit(1) {
			if name == "steady" {
				got++
			}
		}
	}
	if got != 5 {
		t.Errorf("%d of 5 requests were served beside 35 of others", got)
	}
}

// A tenant that is ahead still gets what nobody else can use.
func TestFairnessLeavesNoRoomUnused(t *testing.T) {
	b := newBench(t, Rules{QuantumMS: 100, Length: 100})
	for i := range 10 {
		b.push(entry{name: "a", tenant: "a", came: after(float64(i))})
		b.push(entry{name: "b", tenant: "b", came: after(float64(i)), candidates: []pick.Ref{{Member: "other"}}})
	}
	let := 0
	b.pass(func(w *Waiter, _ []fleet.Ahead) verdict {
		if len(w.request.Candidates) > 0 {
			return wait(w)
		}
		let++
		return verdict{decision: &pick.Decision{}, workMS: 1000}
	})
	if let != 10 {
		t.Errorf("%d of 10 were let go", let)
	}
}

// Peers' bug 20: the queue does not lock up behind a request that is larger
// than the budget, and small ones do not keep it waiting for ever.
func TestWhoNeedsAWholeMemberGetsItWhenItHasDrained(t *testing.T) {
	b := newBench(t, Rules{Length: 100})
	f := b.fleet
	if _, err := f.Join("member", t0); err != nil {
		t.Fatal(err)
	}
	b.push(entry{name: "large", slack: none})
	open := 3 // requests at the only member, which has room for four small ones
	for pass := range 20 {
		b.push(entry{name: "small", came: after(float64(pass + 1)), slack: none})
		served := ""
		b.pass(func(w *Waiter, ahead []fleet.Ahead) verdict {
			load := open + ahead[0].Requests
			if b.names[w] == "large" && load > 0 || load >= 4 {
				return verdict{noRoom: &pick.NoRoom{SlackMS: none, Adds: fleet.Ahead{Requests: 4}}}
			}
			open++
			if b.names[w] == "large" {
				open += 3
			}
			served = b.names[w]
			return verdict{decision: &pick.Decision{}}
		})
		if served == "large" {
			if pass != 3 {
				t.Errorf("served in pass %d, want 3: as soon as the others have ended", pass)
			}
			return
		}
		if served != "" {
			t.Fatalf("pass %d: a small one slipped past the large one", pass)
		}
		open--
	}
	t.Error("the large request waits for ever")
}

func TestBytesBoundTheQueueButForOne(t *testing.T) {
	b := newBench(t, Rules{Length: 100, Bytes: 100})
	b.push(entry{bytes: 1000, slack: none})
	if _, err := b.enter(entry{bytes: 1}); !errors.Is(err, ErrFull) {
		t.Errorf("%v", err)
	}
	if st := b.Stats(); st.Refused != 1 || st.Waiting != 1 {
		t.Errorf("%+v", st)
	}
}

// Models have bounds of their own, and together they take no more than twice
// the memory of one, which leaves some for each.
func TestModelsBoundEachOtherByMemoryAlone(t *testing.T) {
	b := newBench(t, Rules{Length: 100, Bytes: 1000})
	counts := make(map[string]int)
	for m := range 6 {
		model := fmt.Sprint(m)
		for {
			if _, err := b.enter(entry{model: model, bytes: 10, slack: none}); err != nil {
				break
			}
			counts[model]++
		}
		if st := b.Stats(); st.Bytes > 2000 {
			t.Fatalf("%d bytes wait", st.Bytes)
		}
	}
	if !cmp.Equal(counts, map[string]int{"0": 100, "1": 50, "2": 25, "3": 13, "4": 6, "5": 3}) {
		t.Errorf("%v of 10 bytes may wait", counts)
	}
}

// Whoever fills a queue gives way to others, the last in rank first, down to
// what they have; to itself it does not.
func TestNobodyFillsTheQueueForOthers(t *testing.T) {
	b := newBench(t, Rules{Length: 100})
	for i := range 100 {
		b.push(entry{name: fmt.Sprint("flood ", i), tenant: "flood", came: after(float64(i))})
	}
	if _, err := b.enter(entry{tenant: "flood"}); !errors.Is(err, ErrFull) {
		t.Fatalf("one more of the flood: %v", err)
	}
	for i := range 50 {
		if _, err := b.enter(entry{name: "other", tenant: "other", came: after(200)}); err != nil {
			t.Fatalf("number %d of another tenant: %v", i, err)
		}
		if err := b.ended[fmt.Sprint("flood ", 99-i)]; !errors.Is(err, ErrFull) {
			t.Fatalf("number %d of another tenant: the last of the flood ended with %v", i, err)
		}
	}
	if _, err := b.enter(entry{tenant: "other"}); !errors.Is(err, ErrFull) {
		t.Errorf("beyond half of the queue: %v", err)
	}
	if _, err := b.enter(entry{tenant: "third"}); err != nil {
		t.Errorf("a third tenant: %v", err)
	}
	if st := b.Stats(); st.Waiting != 100 || st.Displaced != 51 || st.Refused != 2 {
		t.Errorf("%+v", st)
	}
	// By memory as well.
	b = newBench(t, Rules{Length: 100, Bytes: 1000})
	for range 10 {
		b.push(entry{name: "flood", tenant: "flood", bytes: 100})
	}
	if _, err := b.enter(entry{tenant: "other", bytes: 250}); err != nil || b.Stats().Displaced != 3 {
		t.Errorf("%v, %+v: want that three gave way", err, b.Stats())
	}
	if _, err := b.enter(entry{tenant: "large", bytes: 900}); !errors.Is(err, ErrFull) || b.Stats().Displaced != 3 {
		t.Errorf("%v, %+v: nobody gives way to one that takes more", err, b.Stats())
	}
}

// TestQueueLosesNobody: whatever happens, each request waits, or ended in one
// way, and those who wait are in order.
func TestQueueLosesNobody(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		b := newBench(t, Rules{Length: 20, Bytes: 300, QuantumMS: 500})
		for i := range 4 {
			id, err := b.fleet.Join(fmt.Sprint(i), t0)
			if err != nil {
				r.Fatal(err)
			}
			b.fleet.Receive(id, fleet.Info{Models: []string{"a", "b"}}, nil, t0)
		}
		waiting := make(map[*Waiter]bool)
		now := 0.0
		r.Repeat(map[string]func(*rapid.T){
			"push": func(r *rapid.T) {
				now++
				var w *Waiter
				q := &pick.Request{
					Model: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(r, "model"), Tenant: rapid.SampledFrom([]string{"", "x", "y"}).Draw(r, "tenant"),
					Candidates: make([]pick.Ref, rapid.IntRange(0, 2).Draw(r, "class")),
				}
				w, err := b.Enter(q, &pick.NoRoom{SlackMS: rapid.Float64Range(-1e4, 1e5).Draw(r, "slack")}, rapid.IntRange(-2, 2).Draw(r, "priority"),
					rapid.Int64Range(0, 100).Draw(r, "bytes"), after(now), func(o Outcome) {
						if !waiting[w] {
							r.Fatal("done twice, or without waiting")
						}
						delete(waiting, w)
					})
				if err == nil {
					waiting[w] = true
				} else if !errors.Is(err, ErrFull) {
					r.Fatal(err)
				}
			},
			"cancel": func(r *rapid.T) {
				for w := range waiting {
					if !b.Leave(w) || b.Leave(w) {
						r.Fatal("one that waits leaves once")
					}
					delete(waiting, w)
					break
				}
			},
			"set": func(r *rapid.T) {
				b.Set(Rules{Length: rapid.IntRange(0, 30).Draw(r, "length"), Bytes: 300, QuantumMS: rapid.SampledFrom([]float64{100, 500}).Draw(r, "quantum"), Age: time.Duration(rapid.IntRange(1, 9).Draw(r, "age")) * time.Second})
			},
			"pass": func(r *rapid.T) {
				b.attempt = func(w *Waiter, room *pick.Admission, _ time.Time) verdict {
					if !waiting[w] {
						r.Fatal("tried without waiting")
					}
					switch what := rapid.IntRange(0, 5).Draw(r, "verdict"); {
					case what == 0 && !b.Leave(w):
						return wait(w)
					case what == 1:
						return verdict{err: errors.New("gone")}
					case what <= 3 || room == nil:
						return verdict{decision: &pick.Decision{}, workMS: rapid.Float64Range(-1, 1e4).Draw(r, "work")}
					}
					for id := range fleet.ID(4) {
						*room.Among = append(*room.Among, id)
					}
					return verdict{noRoom: &pick.NoRoom{Member: fleet.ID(rapid.IntRange(0, 3).Draw(r, "member")), SlackMS: rapid.Float64Range(-1e4, 1e5).Draw(r, "new slack")}}
				}
				b.Pass(func() time.Time { return t0 }, rapid.Bool().Draw(r, "poll"))
			},
			"": func(r *rapid.T) {
				lines, bytes := 0, int64(0)
				for _, m := range b.models {
					if !slices.IsSortedFunc(m.waiting, func(a, b *Waiter) int { return a.key.compare(b.key) }) {
						r.Fatal("out of order")
					}
					fresh, unknown, size, requests := 0, 0, int64(0), 0
					for _, w := range m.waiting {
						if w.fresh {
							fresh++
						}
						if w.key.turn != w.tenant.turn || m.tenants[w.tenant.name] != w.tenant {
							r.Fatalf("a request is in turn %d, its tenant in %d", w.key.turn, w.tenant.turn)
						}
						size += w.bytes
					}
					for _, c := range m.classes {
						if !m.knowsLocked(c) {
							unknown++
						}
					}
					for _, n := range m.most {
						requests += n.requests
					}
					if fresh != m.fresh || unknown != m.unknown || size != m.bytes || requests != len(m.waiting) || int(m.waits.Load()) != len(m.waiting) {
						r.Fatalf("%d fresh of %d, %d unknown of %d, %d bytes of %d, %d of tenants", fresh, m.fresh, unknown, m.unknown, size, m.bytes, requests)
					}
					lines += len(m.waiting)
					bytes += size
				}
				st := b.Stats()
				if st.Waiting != len(waiting) || lines != len(waiting) || st.Bytes != bytes ||
					st.Pushed != uint64(st.Waiting)+st.Admitted+st.Failed+st.Cancelled+st.Displaced {
					r.Fatalf("%+v, %d in lines, %d wait", st, lines, len(waiting))
				}
			},
		})
	})
}

func TestBoundsChangeForThoseWhoWait(t *testing.T) {
	b := newBench(t, Rules{Length: 2, Age: time.Second})
	b.push(entry{name: "old", slack: none}, entry{name: "urgent", came: after(3), slack: 0})
	b.Set(Rules{Length: 1, Age: 10 * time.Second})
	if _, err := b.enter(entry{came: after(4)}); !errors.Is(err, ErrFull) {
		t.Errorf("beyond the new length: %v", err)
	}
	if got := b.admit(2); !cmp.Equal(got, []string{"urgent", "old"}) {
		t.Errorf("%v: the new age is not in force", got)
	}
	if st := b.Stats(); st.Waiting != 0 || st.Refused != 1 {
		t.Errorf("%+v", st)
	}
}

// Names of tenants that come and go are not remembered.
func TestInventedTenantsAreForgotten(t *testing.T) {
	b := newBench(t, Rules{Length: 10, QuantumMS: 1})
	b.push(entry{name: "stays", tenant: "stays", candidates: []pick.Ref{{Pod: "busy"}}, came: after(-100)})
	for i := range 10_000 {
		b.push(entry{tenant: fmt.Sprint(i)})
		b.pass(func(w *Waiter, _ []fleet.Ahead) verdict {
			if len(w.request.Candidates) > 0 {
				return wait(w)
			}
			return verdict{decision: &pick.Decision{}, workMS: float64(i)}
		})
	}
	if n := len(b.models["m"].tenants); n > maxIdle+10 {
		t.Errorf("%d tenants are remembered", n)
	}
}
