package admission

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// room is a real picker with members that serve models, each of which takes
// one request at a time.
type room struct {
	*Queue
	t      testing.TB
	fleet  *fleet.Fleet
	picker *pick.Picker
	now    time.Time
	got    map[string]Outcome
	order  []string
}

func newRoom(t testing.TB, r Rules) *room {
	t.Helper()
	f := fleet.New(fleet.Config{})
	p, err := pick.New(pick.Config{Fleet: f, Index: index.New(index.Config{})})
	if err != nil {
		t.Fatal(err)
	}
	if r.BudgetMS == 0 {
		r.BudgetMS = 1e-6
	}
	return &room{Queue: New(r, f, p), t: t, fleet: f, picker: p, now: t0, got: make(map[string]Outcome)}
}

// join adds a member that serves models.
func (r *room) join(name string, models ...string) fleet.ID {
	r.t.Helper()
	id, err := r.fleet.Join(name, t0)
	if err != nil {
		r.t.Fatal(err)
	}
	r.fleet.Receive(id, fleet.Info{Name: name, Models: models, BlockSize: 16, Heartbeat: time.Hour},
		&fleet.Load{At: t0, KVUsage: math.NaN(), Totals: fleet.NoTotals()}, t0)
	return id
}

// ask is a request of 1,600 tokens for a model, pinned to members if any are
// named.
func ask(model string, members ...string) *pick.Request {
	q := &pick.Request{Model: model, Reserve: true, Prompt: pick.Prompt{BlockSize: 16, Length: 1600}}
	for _, m := range members {
		q.Candidates = append(q.Candidates, pick.Ref{Member: m})
	}
	return q
}

// fill takes a place.
func (r *room) fill(q *pick.Request) *pick.Decision {
	r.t.Helper()
	d, err := r.Try(q, r.now)
	if err != nil {
		r.t.Fatal(err)
	}
	return d
}

// wait lets a request wait that must.
func (r *room) wait(name string, q *pick.Request, priority int) *Waiter {
	r.t.Helper()
	_, err := r.Try(q, r.now)
	var noRoom *pick.NoRoom
	if !errors.As(err, &noRoom) {
		r.t.Fatalf("%s: %v, want that there is no room", name, err)
	}
	w, err := r.Enter(q, noRoom, priority, 0, r.now, func(o Outcome) {
		if _, twice := r.got[name]; twice {
			r.t.Errorf("%s is done twice", name)
		}
		r.got[name] = o
		if o.Err == nil {
			r.order = append(r.order, name)
		}
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return w
}

func (r *room) pass(poll bool) (passes int) {
	for passes = 1; r.Pass(func() time.Time { return r.now }, poll); passes++ {
		poll = false
	}
	return passes
}

func (r *room) finish(d *pick.Decision) {
	r.t.Helper()
	if d == nil || !r.picker.Report(pick.Report{Decision: d.ID, Outcome: fleet.Finished}, r.now) {
		r.t.Fatalf("%v is not known", d)
	}
}

func TestWhoWaitsGetsAPlaceByRankAndOnce(t *testing.T) {
	r := newRoom(t, Rules{Length: 3})
	r.join("m", "m")
	running := r.fill(ask("m"))
	early, _, gone := r.wait("early", ask("m"), 0), r.wait("urgent", ask("m"), 1), r.wait("gone", ask("m"), 2)
	if _, err := r.Enter(ask("m"), &pick.NoRoom{}, 0, 0, t0, nil); !errors.Is(err, ErrFull) {
		t.Errorf("a fourth: %v", err)
	}
	if !r.Leave(gone) || r.Leave(gone) {
		t.Error("one that waits may leave once")
	}
	for i := range 3 {
		r.pass(true)
		if len(r.order) != i {
			t.Fatalf("%v have a place before one is free", r.order)
		}
		r.finish(running)
		r.pass(false) // the report is reason enough
		if i < 2 {
			running = r.got[r.order[i]].Decision
		} else {
			break
		}
	}
	if want := []string{"urgent", "early"}; !cmp.Equal(r.order, want) || r.Leave(early) {
		t.Errorf("%v, want %v", r.order, want)
	}
	if st := r.Stats(); st.Waiting != 0 || st.Admitted != 2 || st.Cancelled != 1 || st.Refused != 1 {
		t.Errorf("%+v", st)
	}
}

func TestAClosedQueueLetsEverybodyPass(t *testing.T) {
	r := newRoom(t, Rules{Length: 100})
	r.join("m", "m")
	r.fill(ask("m"))
	for i := range 100 {
		r.wait(fmt.Sprint(i), ask("m"), 0)
	}
	r.Set(Rules{})
	r.fill(ask("m"))
	if r.pass(false); len(r.order) != 100 || r.Waiting() != 0 {
		t.Errorf("%d of 100 were let go", len(r.order))
	}
}

// Requests for one model never wait for those of another, as often as its queue
// is full. Other names of a model, and its adapters, share its members and so
// its queue.
func TestModelsDoNotTouchEachOther(t *testing.T) {
	r := newRoom(t, Rules{Length: 10})
	r.join("busy", "a", "alias of a")
	r.join("idle", "b")
	r.fill(ask("a"))
	for i := range 10 {
		r.wait(fmt.Sprint(i), ask("a"), 0)
	}
	if _, err := r.Enter(ask("a"), &pick.NoRoom{}, 0, 0, t0, nil); !errors.Is(err, ErrFull) {
		t.Fatalf("the queue of the busy model: %v", err)
	}
	r.fill(ask("b"))
	r.wait("of b", ask("b"), 0)
	_, err := r.Try(ask("alias of a"), t0)
	var noRoom *pick.NoRoom
	if !errors.As(err, &noRoom) {
		t.Fatalf("another name of the busy model: %v", err)
	}
	if _, err := r.Enter(ask("alias of a"), noRoom, 0, 0, t0, nil); !errors.Is(err, ErrFull) {
		t.Errorf("another name of the busy model: %v", err)
	}
}

// Requests that are pinned to a busy member, however many and however
// important, are not in the way of one that can use an idle member.
func TestPinnedRequestsDoNotHoldOthers(t *testing.T) {
	for _, pinned := range []int{1, 64, 1000} {
		r := newRoom(t, Rules{Length: 2000})
		r.join("busy", "m")
		running := r.fill(ask("m", "busy"))
		for i := range pinned {
			r.wait(fmt.Sprint("pinned ", i), ask("m", "busy"), 1)
		}
		r.wait("free", ask("m"), 0)
		r.pass(true)
		r.join("idle", "m")
		if r.pass(true); !cmp.Equal(r.order, []string{"free"}) {
			t.Errorf("%d pinned: %v got a place, want that free did", pinned, r.order)
		}
		// The next one comes while they wait, and takes one pass.
		r.finish(r.got["free"].Decision)
		r.pass(false)
		r.wait("next", ask("m"), -1)
		if n := r.pass(false); n != 1 || !cmp.Equal(r.order, []string{"free", "next"}) {
			t.Errorf("%d pinned: %v got a place after %d passes", pinned, r.order, n)
		}
		r.finish(running)
		if r.pass(false); len(r.order) != 3 || r.order[2] != "pinned 0" {
			t.Errorf("%d pinned: %v got a place, want the first of the pinned", pinned, r.order)
		}
	}
}

// Each is pinned to a member of its own, more of them than one pass tries: the
// one whose member gets room is found at once, wherever it stands.
func TestTheMemberThatGotRoomFindsItsRequest(t *testing.T) {
	const members = 200
	r := newRoom(t, Rules{Length: 1000})
	var running []*pick.Decision
	for i := range members {
		r.join(fmt.Sprintf("m%03d", i), "m")
	}
	for i := range members {
		running = append(running, r.fill(ask("m", fmt.Sprintf("m%03d", i))))
	}
	for i := range members {
		r.wait(fmt.Sprint(i), ask("m", fmt.Sprintf("m%03d", i)), 0)
	}
	r.pass(true)
	for n, i := range []int{members - 1, 0, members / 2} {
		tries := 0
		r.attempt = func(w *Waiter, room *pick.Admission, now time.Time) verdict {
			tries++
			return r.try(w, room, now)
		}
		r.finish(running[i])
		r.Pass(func() time.Time { return r.now }, false)
		if len(r.order) != n+1 || r.order[n] != fmt.Sprint(i) || tries != 1 {
			t.Errorf("member %d got room: %v got a place after %d tries", i, r.order, tries)
		}
	}
}

// Whoever prefers a busy member that has what it needs is not in the way of
// those behind it that take an idle one, though one pass does not reach them.
func TestThoseBehindAreTriedWhenTheFirstDecline(t *testing.T) {
	b := newBench(t, Rules{Length: 1000})
	for _, m := range []string{"holder", "idle"} {
		id, err := b.fleet.Join(m, t0)
		if err != nil {
			t.Fatal(err)
		}
		b.fleet.Receive(id, fleet.Info{Models: []string{"m"}}, nil, t0)
	}
	for i := range 900 {
		b.push(entry{name: fmt.Sprint(i), slack: none})
	}
	tries, longest := 0, 0
	b.attempt = func(w *Waiter, room *pick.Admission, _ time.Time) verdict {
		tries++
		*room.Among = append(*room.Among, 0, 1)
		if room.Ahead[0].Requests >= 700 { // the wait is longer than what the other has to compute
			return place
		}
		return verdict{noRoom: &pick.NoRoom{SlackMS: none, Adds: fleet.Ahead{Requests: 1}}}
	}
	passes := 1
	for poll := true; b.Pass(func() time.Time { return t0 }, poll) && passes < 100; passes++ {
		longest, tries, poll = max(longest, tries), 0, false
	}
	if st := b.Stats(); st.Admitted != 200 || longest > passWork/tryWork || passes > 50 {
		t.Errorf("%+v after %d passes of %d tries at most: want that 200 got a place", st, passes, longest)
	}
}

// A request whose member leaves, or whose model has none left, learns it at once
// and may be sent again; one that can use others goes there.
func TestWhoseMemberLeavesIsTold(t *testing.T) {
	r := newRoom(t, Rules{Length: 10})
	first, second := r.join("first", "m"), r.join("second", "m")
	r.join("other", "other")
	r.fill(ask("m", "first"))
	d := r.fill(ask("m", "second"))
	r.wait("pinned", ask("m", "first"), 0)
	r.wait("free", ask("m"), 0)
	r.pass(true)
	r.fleet.Leave(first)
	r.pass(true)
	if o, ok := r.got["pinned"]; !ok || !errors.Is(o.Err, pick.ErrNoCandidate) || len(r.got) != 1 {
		t.Errorf("%v, want that the pinned one has no candidate", r.got)
	}
	r.finish(d)
	r.pass(false)
	if r.got["free"].Decision == nil {
		t.Errorf("%v, want that the other has a place", r.got)
	}
	r.wait("last", ask("m"), 0)
	r.fleet.Leave(second)
	r.pass(true)
	if o := r.got["last"]; !errors.Is(o.Err, pick.ErrNoCandidate) || errors.Is(o.Err, pick.ErrModel) || r.Waiting() != 0 {
		t.Errorf("%v, want no candidate", o.Err)
	}
}

// While a request is tried nobody waits for that: others come, go and are
// counted, and one that leaves while it is tried learns it.
func TestNobodyWaitsForAPass(t *testing.T) {
	r := newRoom(t, Rules{Length: 10})
	r.join("busy", "m")
	r.join("idle", "other")
	r.fill(ask("m"))
	first, second := r.wait("first", ask("m"), 0), r.wait("second", ask("m"), 0)
	tried, goOn, passed := make(chan *Waiter), make(chan bool), make(chan bool)
	r.attempt = func(w *Waiter, room *pick.Admission, now time.Time) verdict {
		tried <- w
		<-goOn
		return r.try(w, room, now)
	}
	go func() {
		r.Pass(func() time.Time { return t0 }, true)
		close(passed)
	}()
	if w := <-tried; w != first {
		t.Fatal("the second is tried first")
	}
	r.fill(ask("other"))
	r.wait("third", ask("m"), 0)
	if r.Leave(first) {
		t.Error("one that is being tried left")
	}
	if !r.Leave(second) || r.Stats().Waiting != 2 {
		t.Errorf("%+v: want that the second left", r.Stats())
	}
	close(goOn)
	if w := <-tried; w == second {
		t.Error("one that left is tried")
	}
	<-passed
	if o, ok := r.got["first"]; !ok || !errors.Is(o.Err, errLeft) || r.Stats().Cancelled != 2 {
		t.Errorf("%v: want that the first learns that it left", r.got)
	}
}

// A panic belongs to the request on whose behalf it happened.
func TestAPanicEndsOneRequest(t *testing.T) {
	b := newBench(t, Rules{Length: 10})
	b.push(entry{name: "a"}, entry{name: "b"}, entry{name: "c"})
	b.pass(func(w *Waiter, _ []fleet.Ahead) verdict {
		if b.names[w] == "b" {
			panic("in the picker")
		}
		return place
	})
	var p *Panic
	if err := b.ended["b"]; len(b.ended) != 1 || !errors.As(err, &p) || p.Value != "in the picker" || len(p.Stack) == 0 {
		t.Errorf("%v", b.ended)
	}
	if st := b.Stats(); st.Admitted != 2 || st.Failed != 1 || st.Waiting != 0 {
		t.Errorf("%+v", st)
	}
}

// TestNoRoomIsLeftUnused: whoever can use what, and prefers what: a few polls
// later whoever still waits finds no room behind those before it, each where it
// found none when it was last tried.
func TestNoRoomIsLeftUnused(t *testing.T) {
	const members = 6
	rapid.Check(t, func(r *rapid.T) {
		b := newBench(t, Rules{Length: 1000, QuantumMS: 300})
		for i := range members {
			id, err := b.fleet.Join(fmt.Sprint(i), t0)
			if err != nil {
				r.Fatal(err)
			}
			b.fleet.Receive(id, fleet.Info{Models: []string{"m"}}, nil, t0)
		}
		var free [members]int
		prefers := make(map[*Waiter]int) // the member, over one that is less loaded by up to so many requests
		// best is the member that a request goes to, behind others.
		best := func(w *Waiter, ahead []fleet.Ahead) (member int, room bool) {
			member = -1
			cost := math.Inf(1)
			for _, ref := range w.request.Candidates {
				id := int(ref.Member[0] - '0')
				c := float64(ahead[id].Requests - free[id])
				if id == prefers[w]%members {
					c -= float64(prefers[w] / members)
				}
				if c < cost {
					member, cost = id, c
				}
			}
			return member, free[member] > ahead[member].Requests
		}
		for range rapid.IntRange(1, 4).Draw(r, "rounds") {
			for i := range rapid.IntRange(0, 150).Draw(r, "requests") {
				q := &pick.Request{Model: "m", Tenant: fmt.Sprint(i % 3)}
				kind := rapid.SampledFrom([]string{"012345", "0", "5", "13", "024"}).Draw(r, "candidates")
				for _, id := range kind {
					q.Candidates = append(q.Candidates, pick.Ref{Member: string(id)})
				}
				w, err := b.Enter(q, &pick.NoRoom{SlackMS: none}, rapid.IntRange(-1, 1).Draw(r, "priority"), 0, after(float64(i)), func(Outcome) {})
				if err != nil {
					r.Fatal(err)
				}
				prefers[w] = rapid.IntRange(0, members*100).Draw(r, "prefers")
			}
			free[rapid.IntRange(0, members-1).Draw(r, "member")] += rapid.IntRange(0, 30).Draw(r, "room")
			passes := 0
			b.attempt = func(w *Waiter, room *pick.Admission, _ time.Time) verdict {
				for _, ref := range w.request.Candidates {
					*room.Among = append(*room.Among, fleet.ID(ref.Member[0]-'0'))
				}
				id, fits := best(w, room.Ahead)
				if fits {
					free[id]--
					return place
				}
				return verdict{noRoom: &pick.NoRoom{Member: fleet.ID(id), SlackMS: none, Adds: fleet.Ahead{Requests: 1}}}
			}
			for range 5 {
				for poll := true; b.Pass(func() time.Time { return t0 }, poll); passes++ {
					if poll = false; passes > 500 {
						r.Fatal("the passes do not end")
					}
				}
			}
			m := b.models["m"]
			if m == nil {
				continue
			}
			ahead := make([]fleet.Ahead, members)
			for i, w := range m.waiting {
				id, fits := best(w, ahead)
				if fits {
					r.Fatalf("number %d of %d waits for member %d, which has room for %d behind %d", i, len(m.waiting), id, free[id], ahead[id].Requests)
				}
				ahead[w.awaits].Requests++
			}
		}
	})
}
