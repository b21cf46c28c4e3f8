package queue

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
)

var (
	t0   = time.Unix(1_700_000_000, 0)
	none = math.NaN()
)

func after(s float64) time.Time { return t0.Add(time.Duration(s * float64(time.Second))) }

func push(t testing.TB, q *Queue[string], list ...*Ticket[string]) {
	t.Helper()
	for _, k := range list {
		if k.Model == "" {
			k.Model = "m"
		}
		if err := q.Push(k); err != nil {
			t.Fatal(err)
		}
	}
}

// admit lets so many go, in the order in which they are tried.
func admit(q *Queue[string], n int) (names []string) {
	q.Pass(func(t *Ticket[string], _ map[fleet.ID]fleet.Ahead) Verdict {
		if len(names) == n {
			return Verdict{SlackMS: t.SlackMS}
		}
		names = append(names, t.Value)
		return Verdict{Done: true, WorkMS: 100}
	})
	return names
}

// The order of urgency, worked out by hand: came + slack, within 0 and 10 s.
func TestUrgencyOnAGoldenScript(t *testing.T) {
	for _, c := range []struct {
		name string
		list []*Ticket[string]
		want string
	}{
		{"without targets by arrival", []*Ticket[string]{
			{Value: "b", Came: after(2), SlackMS: none}, {Value: "a", Came: after(1), SlackMS: none}, {Value: "c", Came: after(3), SlackMS: none},
		}, "a b c"},
		{"the least slack first", []*Ticket[string]{
			{Value: "relaxed", Came: t0, SlackMS: 5000}, {Value: "urgent", Came: t0, SlackMS: 100}, {Value: "usual", Came: t0, SlackMS: 1000},
		}, "urgent usual relaxed"},
		{"what has waited has less left", []*Ticket[string]{
			{Value: "new", Came: after(3), SlackMS: 1000}, {Value: "old", Came: t0, SlackMS: 3900}, {Value: "older", Came: after(-1), SlackMS: 4800},
		}, "older old new"},
		{"who is late is due since it came", []*Ticket[string]{
			{Value: "later", Came: after(1), SlackMS: -60_000}, {Value: "late", Came: t0, SlackMS: -1}, {Value: "in time", Came: t0, SlackMS: 500},
		}, "late in time later"},
		{"equals by arrival", []*Ticket[string]{
			{Value: "1", Came: t0, SlackMS: 500}, {Value: "2", Came: t0, SlackMS: 500}, {Value: "3", Came: t0, SlackMS: 500},
		}, "1 2 3"},
		{"endless slack counts as none", []*Ticket[string]{
			{Value: "b", Came: after(1), SlackMS: math.Inf(1)}, {Value: "a", Came: t0, SlackMS: none}, {Value: "z", Came: t0, SlackMS: math.Inf(-1)},
		}, "z a b"},
	} {
		q := New[string](Config{})
		push(t, q, c.list...)
		if got := strings.Join(admit(q, -1), " "); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// Peers' bug 19: one request without a target made all wait in order of arrival.
func TestMixedSLOAndNoSLOKeepsSlackOrder(t *testing.T) {
	q := New[string](Config{})
	push(t, q,
		&Ticket[string]{Value: "none", Came: t0, SlackMS: none},
		&Ticket[string]{Value: "far", Came: after(1), SlackMS: 8000},
		&Ticket[string]{Value: "near", Came: after(2), SlackMS: 500},
		&Ticket[string]{Value: "none too", Came: after(3), SlackMS: none},
		&Ticket[string]{Value: "nearest", Came: after(2), SlackMS: 100},
	)
	if got := strings.Join(admit(q, -1), ", "); got != "nearest, near, far, none, none too" {
		t.Error(got)
	}
}

// Peers' bug 24: who is cancelled leaves at once.
func TestTenThousandCancelsLeaveAnEmptyQueue(t *testing.T) {
	q := New[string](Config{Length: 10_000})
	tickets := make([]*Ticket[string], 10_000)
	for i := range tickets {
		tickets[i] = &Ticket[string]{Tenant: fmt.Sprint(i % 17), Came: after(float64(i % 100)), SlackMS: float64(i%7) * 100, Bytes: 100}
		push(t, q, tickets[i])
	}
	if err := q.Push(&Ticket[string]{Model: "m"}); !errors.Is(err, ErrFull) {
		t.Fatalf("one more: %v", err)
	}
	for i := range tickets {
		if k := tickets[(i*7919)%10_000]; !q.Cancel(k) || q.Cancel(k) {
			t.Fatalf("cancel %d", i)
		}
	}
	if st := q.Stats(); st.Waiting != 0 || st.Bytes != 0 || st.Cancelled != 10_000 || len(q.tenants) != 0 {
		t.Errorf("%+v, %d tenants", st, len(q.tenants))
	}
	if got := admit(q, -1); got != nil {
		t.Errorf("admitted %v", got)
	}
	push(t, q, &Ticket[string]{Value: "next", SlackMS: none})
	if got := admit(q, -1); !cmp.Equal(got, []string{"next"}) {
		t.Errorf("after all that: %v", got)
	}
}

// Whatever the targets, nobody is passed by one that came more than Age later.
func TestNobodyIsPassedByOneThatCameMuchLater(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		q := New[string](Config{Age: 5 * time.Second, Length: 100})
		n := rapid.IntRange(2, 60).Draw(r, "n")
		for i := range n {
			slack := rapid.SampledFrom([]float64{none, -1e9, 0, 100, 4000, 1e9, math.Inf(1)}).Draw(r, "slack")
			push(t, q, &Ticket[string]{Value: fmt.Sprint(i), Came: after(float64(i)), SlackMS: slack})
		}
		place := make(map[string]int)
		for i, name := range admit(q, -1) {
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
	q := New[string](Config{Age: 5 * time.Second})
	push(t, q,
		&Ticket[string]{Value: "usual", Came: t0, SlackMS: 0},
		&Ticket[string]{Value: "important", Came: after(4), SlackMS: 0, Priority: 1},
		&Ticket[string]{Value: "too late", Came: after(6), SlackMS: 0, Priority: 1},
		&Ticket[string]{Value: "background", Came: after(-4.5), SlackMS: 0, Priority: -1},
		&Ticket[string]{Value: "old background", Came: after(-6), SlackMS: 0, Priority: -1},
		&Ticket[string]{Value: "boundless", Came: after(400), SlackMS: 0, Priority: math.MaxInt32},
		&Ticket[string]{Value: "bottomless", Came: after(-400), SlackMS: 0, Priority: math.MinInt32},
	)
	want := "boundless, important, old background, usual, background, too late, bottomless"
	if got := strings.Join(admit(q, -1), ", "); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestTenantsShareFairly(t *testing.T) {
	q := New[string](Config{QuantumMS: 200})
	for i := range 50 {
		push(t, q, &Ticket[string]{Value: "flood", Tenant: "flood", Came: after(float64(i) / 100), SlackMS: 0})
	}
	for i := range 10 {
		push(t, q, &Ticket[string]{Value: "small", Tenant: "small", Came: after(1 + float64(i)/100), SlackMS: 0})
	}
	// 100 ms each: the flood may be 200 ms ahead, then they take turns.
	got := admit(q, 23)
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
	if rest := admit(q, -1); len(rest) != 37 {
		t.Errorf("%d are left for the flood alone", len(rest))
	}
}

// A tenant that comes back has no credit for the time when it did not wait.
func TestSilenceGivesNoCredit(t *testing.T) {
	q := New[string](Config{QuantumMS: 100})
	for range 30 {
		push(t, q, &Ticket[string]{Value: "a", Tenant: "a", Came: t0, SlackMS: 0})
	}
	admit(q, 20)
	for range 10 {
		push(t, q, &Ticket[string]{Value: "b", Tenant: "b", Came: t0, SlackMS: 0})
	}
	got := strings.Join(admit(q, 8), "")
	if n := strings.Count(got, "a"); n < 3 || n > 5 {
		t.Errorf("%s: want turns", got)
	}
}

// A tenant that is ahead still gets what nobody else can use.
func TestFairnessLeavesNoRoomUnused(t *testing.T) {
	q := New[string](Config{QuantumMS: 100})
	for i := range 10 {
		push(t, q, &Ticket[string]{Value: "a", Tenant: "a", Came: after(float64(i)), SlackMS: 0})
		push(t, q, &Ticket[string]{Value: "b", Tenant: "b", Model: "other", Came: after(float64(i)), SlackMS: 0})
	}
	var got []string
	q.Pass(func(k *Ticket[string], _ map[fleet.ID]fleet.Ahead) Verdict {
		if k.Model == "other" {
			return Verdict{SlackMS: 0}
		}
		got = append(got, k.Value)
		return Verdict{Done: true, WorkMS: 1000}
	})
	if len(got) != 10 {
		t.Errorf("%d of 10 were let go", len(got))
	}
}

// Peers' bug 20: the queue does not lock up behind a request that is larger
// than the budget, and small ones do not keep it waiting for ever.
func TestWhoNeedsAWholeMemberGetsItWhenItHasDrained(t *testing.T) {
	q := New[string](Config{})
	push(t, q, &Ticket[string]{Value: "large", Came: t0, SlackMS: none})
	open := 3 // requests at the only member, which has room for four small ones
	for pass := range 20 {
		push(t, q, &Ticket[string]{Value: "small", Came: after(float64(pass + 1)), SlackMS: none})
		served := ""
		q.Pass(func(k *Ticket[string], ahead map[fleet.ID]fleet.Ahead) Verdict {
			load := open + ahead[0].Requests
			if k.Value == "large" && load > 0 || load >= 4 {
				return Verdict{SlackMS: none, Adds: fleet.Ahead{Requests: 4}}
			}
			open++
			if k.Value == "large" {
				open += 3
			}
			served = k.Value
			return Verdict{Done: true}
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

func TestWindowBoundsAPassByModel(t *testing.T) {
	q := New[string](Config{Window: 3})
	for i := range 10 {
		push(t, q, &Ticket[string]{Model: "full", Came: after(float64(i)), SlackMS: none})
	}
	push(t, q, &Ticket[string]{Value: "free", Model: "free", Came: after(99), SlackMS: none})
	tried, let := 0, ""
	q.Pass(func(k *Ticket[string], _ map[fleet.ID]fleet.Ahead) Verdict {
		if k.Model == "free" {
			let = k.Value
			return Verdict{Done: true}
		}
		tried++
		return Verdict{SlackMS: none}
	})
	if tried != 3 || let != "free" {
		t.Errorf("%d tried of the model that is full, %q let go", tried, let)
	}
}

func TestBytesBoundTheQueueButForOne(t *testing.T) {
	q := New[string](Config{Bytes: 100})
	push(t, q, &Ticket[string]{Bytes: 1000, SlackMS: none})
	if err := q.Push(&Ticket[string]{Model: "m", Bytes: 1}); !errors.Is(err, ErrFull) {
		t.Errorf("%v", err)
	}
	if st := q.Stats(); st.Refused != 1 || st.Waiting != 1 {
		t.Errorf("%+v", st)
	}
}

// TestQueueLosesNobody: whatever happens, each request is waiting, admitted or
// cancelled, and in order of its rank within its tenant.
func TestQueueLosesNobody(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		q := New[string](Config{Length: 40, Window: 5})
		waiting := make(map[*Ticket[string]]bool)
		now := 0.0
		r.Repeat(map[string]func(*rapid.T){
			"push": func(r *rapid.T) {
				now++
				k := &Ticket[string]{
					Model: rapid.SampledFrom([]string{"a", "b"}).Draw(r, "model"), Tenant: rapid.SampledFrom([]string{"", "x", "y"}).Draw(r, "tenant"),
					Priority: rapid.IntRange(-2, 2).Draw(r, "priority"), Came: after(now), SlackMS: rapid.Float64Range(-1e4, 1e5).Draw(r, "slack"),
				}
				if err := q.Push(k); (err != nil) != (len(waiting) == 40) {
					r.Fatalf("%d wait: %v", len(waiting), err)
				} else if err == nil {
					waiting[k] = true
				}
			},
			"cancel": func(r *rapid.T) {
				for k := range waiting {
					if !q.Cancel(k) {
						r.Fatal("a waiting request could not be cancelled")
					}
					delete(waiting, k)
					break
				}
			},
			"pass": func(r *rapid.T) {
				q.Pass(func(k *Ticket[string], _ map[fleet.ID]fleet.Ahead) Verdict {
					if !waiting[k] {
						r.Fatal("tried without waiting")
					}
					if rapid.Bool().Draw(r, "done") {
						delete(waiting, k)
						return Verdict{Done: true, WorkMS: rapid.Float64Range(-1, 1e4).Draw(r, "work")}
					}
					return Verdict{Member: fleet.ID(rapid.IntRange(0, 3).Draw(r, "member")), SlackMS: rapid.Float64Range(-1e4, 1e5).Draw(r, "new slack")}
				})
			},
			"": func(r *rapid.T) {
				lines := 0
				for _, n := range q.tenants {
					if !slices.IsSortedFunc(n.line, before) {
						r.Fatal("a line is out of order")
					}
					lines += len(n.line)
				}
				if st := q.Stats(); st.Waiting != len(waiting) || lines != len(waiting) || len(q.tenants) > 80 {
					r.Fatalf("%+v, %d in lines, %d wait, %d tenants", st, lines, len(waiting), len(q.tenants))
				}
			},
		})
	})
}

func TestBoundsChangeForThoseWhoWait(t *testing.T) {
	q := New[string](Config{Length: 2, Age: time.Second})
	push(t, q, &Ticket[string]{Value: "old", Came: t0, SlackMS: none}, &Ticket[string]{Value: "urgent", Came: after(3), SlackMS: 0})
	q.Bound(Config{Length: 1, Age: 10 * time.Second})
	if err := q.Push(&Ticket[string]{Value: "more", Came: after(4)}); !errors.Is(err, ErrFull) {
		t.Errorf("beyond the new length: %v", err)
	}
	if got := admit(q, 2); !cmp.Equal(got, []string{"urgent", "old"}) {
		t.Errorf("%v: the new age is not in force", got)
	}
	if st := q.Stats(); st.Waiting != 0 || st.Refused != 1 {
		t.Errorf("%+v", st)
	}
}
