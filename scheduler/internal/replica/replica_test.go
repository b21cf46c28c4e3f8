package replica

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/outbox"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/predict"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func connect(t *testing.T, s *broker.Broker) *nats.Conn {
	t.Helper()
	closed := make(chan struct{})
	conn, err := nats.Connect(s.URL(), nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); <-closed })
	return conn
}

const members = 8

func name(i int) string { return fmt.Sprintf("ns_pod%d_0", i) }

// scout is one scheduler's picker among replicas.
type scout struct {
	t     *testing.T
	fleet *fleet.Fleet
	*pick.Picker
	predicted *predict.Blocks
	outbox    *outbox.Outbox
	replica   *Replica
}

func newScout(t *testing.T, s *broker.Broker, instance uint32) *scout {
	t.Helper()
	c := &scout{t: t, fleet: fleet.New(fleet.Config{Seed: [32]byte{byte(instance)}})}
	now := time.Now()
	for i := range members {
		id, err := c.fleet.Join(name(i), now)
		if err != nil {
			t.Fatal(err)
		}
		c.fleet.Receive(id, fleet.Info{Models: []string{"m"}, BlockSize: 16},
			&fleet.Load{At: now, Running: 0, Waiting: 0, KVUsage: math.NaN(), Totals: fleet.NoTotals()}, now)
		c.fleet.SetCacheState(id, fleet.CacheState{Trust: fleet.Exact, Epoch: 7})
	}
	var err error
	x := index.New(index.Config{})
	c.predicted, c.outbox = predict.New(x), outbox.New()
	if c.Picker, err = pick.New(pick.Config{Fleet: c.fleet, Index: x, Predicted: c.predicted, Outbox: c.outbox, Seed: uint64(instance)}); err != nil {
		t.Fatal(err)
	}
	cfg := Config{Pool: "default", Fleet: c.fleet, Predicted: c.predicted, Outbox: c.outbox}
	if s == nil {
		c.replica = &Replica{cfg: cfg}
		return c
	}
	cfg.Conn = connect(t, s)
	if c.replica, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.replica.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return c
}

// pair is two schedulers that have heard each other.
func pair(t *testing.T) (a, b *scout, s *broker.Broker) {
	t.Helper()
	s = broker.New(t, nil)
	a, b = newScout(t, s, 1), newScout(t, s, 2)
	await.True(t, "the two hear each other", func() bool { return a.replica.Stats().Peers == 1 && b.replica.Stats().Peers == 1 })
	return a, b, s
}

func request(seed, tokens uint32) *pick.Request {
	var le []byte
	for i := range tokens {
		le = binary.LittleEndian.AppendUint32(le, seed<<16+i)
	}
	return &pick.Request{Model: "m", Reserve: true, Prompt: pick.Prompt{Tokens: le}}
}

func (c *scout) pick(r *pick.Request) *pick.Decision { return c.pickAt(r, time.Now()) }

func (c *scout) pickAt(r *pick.Request, now time.Time) *pick.Decision {
	d, err := c.Pick(r, now)
	if err != nil {
		c.t.Error(err)
		return &pick.Decision{Candidates: make([]pick.Candidate, 1)}
	}
	return d
}

func (c *scout) reserved(member string) *fleet.Reserved {
	return c.fleet.View().Named(member).Reserved()
}

func first(d *pick.Decision) string { return d.Candidates[0].Member.Info.Name }

func TestOthersKnowOfReservationsAndTheirEnd(t *testing.T) {
	a, b, _ := pair(t)
	d := a.pick(request(1, 8000))
	await.True(t, "the other has the reservation", func() bool {
		r := b.reserved(first(d))
		return r.Open == 1 && r.Tokens == 8000 && r.PrefillMS == a.reserved(first(d)).PrefillMS
	})
	if n := a.reserved(first(d)).Open; n != 1 || a.replica.Stats().Reservations != 0 {
		t.Errorf("its own echo is reserved: %d open, %+v", n, a.replica.Stats())
	}
	a.Report(pick.Report{Decision: d.ID, Outcome: fleet.FirstToken}, time.Now())
	await.True(t, "the first token is known", func() bool { r := b.reserved(first(d)); return r.Open == 1 && r.Tokens == 0 })
	// A caller may report to any of them.
	if !b.Report(pick.Report{Decision: d.ID, Outcome: fleet.Finished}, time.Now()) {
		t.Error("the other does not know the decision")
	}
	await.True(t, "the end is known", func() bool { return a.reserved(first(d)).Open == 0 && b.reserved(first(d)).Open == 0 })
	if n := a.fleet.Stats().Decisions + b.fleet.Stats().Decisions; n != 0 {
		t.Errorf("%d decisions are left", n)
	}
}

// A pair of members is one decision: the others reserve the second one with its
// slot, and both with the share that the request takes of a member.
func TestOthersKnowOfSharesAndOfTheMemberThatDecodes(t *testing.T) {
	a, b, _ := pair(t)
	view := a.fleet.View()
	for i := range members {
		m := view.Members[i]
		info := *m.Info
		info.Labels = map[string]string{fleet.RoleLabel: []string{"prefill", "decode"}[i%2]}
		a.fleet.Receive(m.ID, info, nil, time.Now())
	}
	if err := a.Use(pick.Policies{Disaggregate: 1000}); err != nil {
		t.Fatal(err)
	}
	r := request(1, 8000)
	r.Targets, r.ExpectedOutput = policy.Targets{TPOT: 100}, 100
	d := a.pick(r)
	if d.Decode == nil {
		t.Fatal("no pair was chosen")
	}
	prefills, decodes := first(d), d.Decode.Member.Info.Name
	own := [2]fleet.Reserved{*a.reserved(prefills), *a.reserved(decodes)}
	if own[0].Share <= 0 || own[1].Open != 1 {
		t.Fatalf("%+v: nothing is shown", own)
	}
	await.True(t, "the other has the reservations of both", func() bool {
		p, q := b.reserved(prefills), b.reserved(decodes)
		return p.Tokens == 8000 && p.Open == 1 && q.Tokens == 0 && q.Open == 1 && p.Share == own[0].Share && q.Share == own[1].Share
	})
	a.Report(pick.Report{Decision: d.ID, Outcome: fleet.Finished}, time.Now())
	await.True(t, "the end is known", func() bool {
		return b.reserved(prefills).Open+b.reserved(decodes).Open == 0 && b.reserved(prefills).Share == 0
	})
}

func TestOthersKnowWhatWillBeCached(t *testing.T) {
	a, b, _ := pair(t)
	r := request(1, 8000)
	d := a.pick(r)
	ask := *r
	ask.Reserve = false
	await.True(t, "the other predicts it there", func() bool {
		c := b.pick(&ask).Candidates[0]
		return c.Member.Info.Name == first(d) && c.Cached.Predicted >= 7800
	})
	before := b.predicted.Stats().Marks
	a.Report(pick.Report{Decision: d.ID, Outcome: fleet.Cancelled}, time.Now())
	await.True(t, "the other knows that it was given up", func() bool { return b.predicted.Stats().Withdrawn == 1 })
	for _, c := range b.pick(&ask).Candidates {
		if c.Cached.Predicted != 0 || before == 0 {
			t.Errorf("%s: %+v of %d marks", c.Member.Info.Name, c.Cached, before)
		}
	}
}

func TestFailuresAreKnownToAll(t *testing.T) {
	a, b, _ := pair(t)
	for range 3 {
		d := a.pick(request(1, 800))
		a.Report(pick.Report{Decision: d.ID, Outcome: fleet.Failed, Member: name(3)}, time.Now())
	}
	await.True(t, "both leave it out", func() bool {
		now := time.Now()
		return !a.fleet.View().Named(name(3)).Failing().Until(now).IsZero() && !b.fleet.View().Named(name(3)).Failing().Until(now).IsZero()
	})
}

// outcome of a burst: requests by member, and those whose prompt nobody has.
type outcome struct {
	requests map[string]int
	cold     int
}

// burst sends 64 requests at one moment, by turns to the schedulers. It is one
// moment to all of them, however busy this machine is.
func burst(scouts []*scout, ask func(i int) *pick.Request) outcome {
	o := outcome{requests: make(map[string]int)}
	var mu sync.Mutex
	var all sync.WaitGroup
	start, now := make(chan struct{}), time.Now()
	for i := range 64 {
		all.Add(1)
		go func() {
			defer all.Done()
			r := ask(i)
			<-start
			d := scouts[i%len(scouts)].pickAt(r, now)
			mu.Lock()
			defer mu.Unlock()
			o.requests[first(d)]++
			if d.Candidates[0].Cached.Predicted == 0 {
				o.cold++
			}
		}()
	}
	close(start)
	all.Wait()
	return o
}

// Equal long prompts stay with few owners, whoever decides: each further owner
// computes them once more. Equal short ones are spread, since they take no time.
func TestBurstOfEqualRequestsStaysTogether(t *testing.T) {
	for _, c := range []struct {
		tokens                uint32
		owners, cold, largest int
	}{{200, members, 64, 14}, {20000, 4, 4, 64}} {
		for n := 1; n <= 2; n++ {
			scouts := []*scout{newScout(t, nil, 1)}
			if n == 2 {
				a, b, _ := pair(t)
				scouts = []*scout{a, b}
			}
			o := burst(scouts, func(int) *pick.Request { return request(1, c.tokens) })
			largest := 0
			for _, n := range o.requests {
				largest = max(largest, n)
			}
			if len(o.requests) > c.owners || o.cold > c.cold || largest > c.largest {
				t.Errorf("%d tokens, %d schedulers: %+v", c.tokens, n, o)
			}
		}
	}
}

// Of eight members seven have six requests waiting. Two schedulers that decide
// at one moment, before one could tell the other, must not both fill the idle
// member up.
func TestBurstOverTwoSchedulersDoesNotHerd(t *testing.T) {
	loaded := func(scouts ...*scout) []*scout {
		now := time.Now()
		for _, c := range scouts {
			for i := range members {
				m := c.fleet.View().Named(name(i))
				load := &fleet.Load{At: now, Waiting: 6, KVUsage: math.NaN(), Totals: fleet.NoTotals()}
				if i == 0 {
					load.Waiting = 0
				}
				c.fleet.Receive(m.ID, *m.Info, load, now)
			}
		}
		return scouts
	}
	ask := func(i int) *pick.Request { return request(uint32(i+1), 1000) }
	one := burst(loaded(newScout(t, nil, 1)), ask).requests[name(0)]
	a, b, _ := pair(t)
	two := burst(loaded(a, b), ask).requests[name(0)]
	apart := burst(loaded(newScout(t, nil, 1), newScout(t, nil, 2)), ask).requests[name(0)]
	t.Logf("requests at the idle member: one scheduler %d, two %d, two that do not know of each other %d", one, two, apart)
	if two > one+3 {
		t.Errorf("two schedulers send %d requests to the idle member, one sends %d", two, one)
	}
}

// send publishes a message of a third scheduler.
func send(t *testing.T, s *broker.Broker, p *pb.Picks) {
	t.Helper()
	data, err := proto.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	sendBytes(t, s, data)
}

func sendBytes(t *testing.T, s *broker.Broker, data []byte) {
	t.Helper()
	conn := connect(t, s)
	if err := conn.Publish("kvscout.v1.default.picks", data); err != nil {
		t.Fatal(err)
	}
	if err := conn.Flush(); err != nil {
		t.Fatal(err)
	}
}

func reservation(decision uint64, age uint32) *pb.Reservation {
	return &pb.Reservation{Decision: decision, Member: name(0), Epoch: 7, AgeMs: age, UncachedTokens: 1000, PrefillMs: 50, FirstTokenMs: 5000}
}

func TestBadNewsChangeNothing(t *testing.T) {
	srv := broker.New(t, nil)
	a := newScout(t, srv, 1)
	good := func(sequence uint64, reservations ...*pb.Reservation) *pb.Picks {
		return &pb.Picks{Version: protocol.Version, Sender: 99, Sequence: sequence, Reservations: reservations}
	}
	await.True(t, "it hears", func() bool {
		send(t, srv, &pb.Picks{Version: protocol.Version, Sender: 98, Sequence: uint64(time.Now().UnixNano())})
		return a.replica.Stats().Peers == 1
	})
	other := reservation(4, 0)
	other.Epoch = 8
	nobody := reservation(5, 0)
	nobody.Member = "ns_nobody_0"
	send(t, srv, good(1, reservation(1, 0), reservation(1, 0), reservation(3, 2001), other, nobody))
	send(t, srv, good(1, reservation(6, 0)))
	send(t, srv, good(5))
	sendBytes(t, srv, []byte("nonsense"))
	endless := reservation(7, 0)
	endless.PrefillMs = math.NaN()
	send(t, srv, good(6, endless))
	v2 := good(6, reservation(8, 0))
	v2.Version++
	send(t, srv, v2)
	await.True(t, "all were refused but the first", func() bool {
		st := a.replica.Stats()
		return st.Reservations == 1 && st.Unknown == 3 && st.Stale == 2 && st.Lost >= 3 && st.Malformed == 3
	})
	if r := a.reserved(name(0)); r.Open != 1 || r.Tokens != 1000 {
		t.Errorf("%+v", r)
	}
	// Nobody reports it: it ends by itself.
	a.fleet.Sweep(time.Now().Add(time.Hour))
	if r := a.reserved(name(0)); r.Open != 0 || r.Tokens != 0 {
		t.Errorf("left: %+v", r)
	}
}

func TestWithoutPeersNothingIsPublished(t *testing.T) {
	a := newScout(t, broker.New(t, nil), 1)
	for range 100 {
		a.pick(request(1, 800))
	}
	var n outbox.Pending
	a.outbox.Take(&n)
	if len(n.Reservations) != 0 || a.replica.Stats().Peers != 0 {
		t.Errorf("%d reservations are kept for nobody", len(n.Reservations))
	}
}

func TestNewsAreBoundedAndInOrder(t *testing.T) {
	a := newScout(t, nil, 1)
	a.replica.share(1)
	const picks = 5000
	for range picks {
		d := a.pick(request(1, 800))
		a.Report(pick.Report{Decision: d.ID, Outcome: fleet.Finished}, time.Now())
	}
	var n outbox.Pending
	a.outbox.Take(&n)
	list := messagesOf(&n, time.Now())
	reservations, ends := 0, 0
	for _, p := range list {
		p.Version, p.Sender, p.Sequence = protocol.Version, 1, 1
		data, err := proto.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := protocol.ReadPicks(data); err != nil {
			t.Fatal(err)
		}
		if ends > 0 && len(p.Reservations) > 0 {
			t.Fatal("an end comes before a reservation")
		}
		reservations, ends = reservations+len(p.Reservations), ends+len(p.Ends)
	}
	if reservations != 4096 || ends != 4096 || a.outbox.Dropped() != 2*(picks-4096) {
		t.Errorf("%d reservations, %d ends, %d dropped", reservations, ends, a.outbox.Dropped())
	}
	a.outbox.Take(&n)
	if len(n.Reservations)+len(n.Ends) != 0 {
		t.Error("news are told twice")
	}
}

// A session that one scheduler diverted is found by the other where it went, and
// so is one that a caller took elsewhere.
func TestOthersKnowWhereASessionWent(t *testing.T) {
	a, b, _ := pair(t)
	// All are near ties for short prompts: the session's last member decides.
	ask := func(c *scout, seed uint32, not ...string) *pick.Decision {
		r := request(seed, 200)
		r.Session = "s"
		for _, name := range not {
			r.Exclude = append(r.Exclude, pick.Ref{Member: name})
		}
		return c.pick(r)
	}
	last := ""
	for turn := uint32(1); turn <= 10; turn++ {
		from, to := a, b
		if turn%2 == 0 {
			from, to = b, a
		}
		var not []string
		if last != "" {
			not = []string{last} // it is diverted
		}
		d := ask(from, 2*turn, not...)
		last = first(d)
		from.Report(pick.Report{Decision: d.ID, Outcome: fleet.Finished}, time.Now())
		await.True(t, "the other has reservation and end", func() bool {
			return to.replica.Stats().Reservations >= uint64(turn+1)/2 && to.fleet.Stats().Decisions == 0
		})
		r := request(2*turn+1, 200)
		r.Session, r.Reserve = "s", false
		if got := first(to.pick(r)); got != last {
			t.Fatalf("turn %d: one scheduler sent the session to %s, the other would to %s", turn, last, got)
		}
	}
	// The caller sent it to another member than was chosen.
	d := ask(a, 100)
	served := name(0)
	if first(d) == served {
		served = name(1)
	}
	a.Report(pick.Report{Decision: d.ID, Outcome: fleet.Finished, Member: served}, time.Now())
	await.True(t, "the other knows who served it", func() bool {
		r := request(101, 200)
		r.Session, r.Reserve = "s", false
		return first(b.pick(r)) == served
	})
}

// An older decision that comes late does not take a session back.
func TestTheLatestDecisionHasTheSession(t *testing.T) {
	a := newScout(t, nil, 1)
	r := request(1, 200)
	r.Session = "s"
	d := a.pick(r)
	a.Report(pick.Report{Decision: d.ID, Outcome: fleet.Finished}, time.Now())
	want := first(d)
	other := name(0)
	if other == want {
		other = name(1)
	}
	late := &outbox.Reservation{Decision: 9, Member: other, Epoch: 7, At: time.Now().Add(-time.Second), Amounts: fleet.Choice{Mark: fleet.SessionMark("s")}}
	if !a.replica.adopt(late, time.Now()) {
		t.Fatal("not adopted")
	}
	a.Report(pick.Report{Decision: "9", Outcome: fleet.Finished}, time.Now())
	next := request(2, 200)
	next.Session = "s"
	if got := first(a.pick(next)); got != want {
		t.Errorf("%s, the latest was %s", got, want)
	}
}
