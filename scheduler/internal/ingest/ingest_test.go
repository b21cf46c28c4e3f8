package ingest

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func connect(t testing.TB, s *broker.Broker) *nats.Conn {
	closed := make(chan struct{})
	conn, err := nats.Connect(s.URL(), nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond),
		nats.ReconnectJitter(0, 0), nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); <-closed })
	return conn
}

// stand is an Ingest on a real server.
type stand struct {
	t      testing.TB
	server *broker.Broker
	index  *index.Index
	fleet  *fleet.Fleet
	in     *Ingest
	stop   func()
}

func newStand(t testing.TB, s *broker.Broker, cfg fleet.Config) *stand {
	st := &stand{t: t, server: s, index: index.New(index.Config{}), fleet: fleet.New(cfg)}
	var err error
	st.in, err = New(Config{Conn: connect(t, s), Pool: "test", Index: st.index, Fleet: st.fleet, Workers: 2})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- st.in.Run(ctx) }()
	st.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(st.stop)
	await.True(t, "subscribed", func() bool { return st.in.subscriptions.Load() != nil })
	if err := st.in.cfg.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	return st
}

func (st *stand) member(name string) *fleet.Member { return st.fleet.View().Named(name) }

func (st *stand) trust(name string) fleet.Trust {
	if m := st.member(name); m != nil {
		return m.CacheState.Trust
	}
	return fleet.Unknown
}

// exact waits until the member is EXACT at the agent's sequence and compares.
func (st *stand) exact(a *wireAgent) {
	st.t.Helper()
	await.True(st.t, "EXACT at the agent's sequence", func() bool {
		m := st.member(a.name)
		return m != nil && m.CacheState.Trust == fleet.Exact && m.CacheState.Epoch == a.epoch && m.CacheState.Sequence == a.sequence
	})
	m := st.member(a.name)
	held := a.held(a.now)
	for l, want := range held[:protocol.Lanes] {
		if got := st.index.Count(index.Member(m.ID), index.Lane(l)); uint64(got) != want.Count || m.CacheState.Held[l] != want.Count {
			st.t.Fatalf("lane %d: %d blocks, cache state says %d, agent %d", l, got, m.CacheState.Held[l], want.Count)
		}
	}
}

// wireAgent is a simAgent on a connection of its own. Its calls are the
// test's; only snapshots are answered in the background.
type wireAgent struct {
	t    testing.TB
	conn *nats.Conn
	sub  protocol.Subjects
	mu   sync.Mutex // guards simAgent against the answers
	*simAgent
}

func newWireAgent(t testing.TB, s *broker.Broker, name string, epoch uint64) *wireAgent {
	sub, err := protocol.NewSubjects("test")
	if err != nil {
		t.Fatal(err)
	}
	return &wireAgent{t: t, conn: connect(t, s), sub: sub, simAgent: newSimAgent(name, rand.New(rand.NewPCG(epoch, 5)), epoch)}
}

func (a *wireAgent) listen() *wireAgent {
	_, err := a.conn.Subscribe(a.sub.Snapshot(a.name), func(m *nats.Msg) {
		a.mu.Lock()
		defer a.mu.Unlock()
		for _, c := range a.chunks() {
			a.send(m.Reply, c)
		}
	})
	if err == nil {
		err = a.conn.Flush()
	}
	if err != nil {
		a.t.Fatal(err)
	}
	return a
}

func (a *wireAgent) send(subject string, m proto.Message) {
	data, err := proto.Marshal(m)
	if err == nil {
		err = a.conn.Publish(subject, data)
	}
	if err != nil {
		a.t.Errorf("publish: %v", err)
	}
}

func (a *wireAgent) say() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.send(a.sub.Load(a.name), a.heartbeat())
}

func (a *wireAgent) tell() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.send(a.sub.Blocks(a.name), a.delta())
}

// lose makes a change that nobody hears.
func (a *wireAgent) lose() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.delta()
}

func TestFollowsFromTheBeginningWithoutASnapshot(t *testing.T) {
	s := broker.New(t, nil)
	st := newStand(t, s, fleet.Config{})
	var agents []*wireAgent
	for i := range 5 {
		a := newWireAgent(t, s, fmt.Sprintf("ns_uid-%d_%d", i, i%2), 10+uint64(i))
		agents = append(agents, a)
		a.say()
		for range 50 {
			a.tell()
		}
		a.say()
	}
	for _, a := range agents {
		st.exact(a)
	}
	if got := st.in.Stats(); got.Snapshots+got.FailedSnapshots != 0 || got.Members != 5 || got.Syncing != 0 || got.Deltas != 250 {
		t.Errorf("%+v", got)
	}
	m := st.member("ns_uid-1_1")
	if m.Info.Namespace != "ns" || m.Info.PodUID != "uid-1" || m.Info.Rank != 1 || m.Info.Model() != "m" || m.Info.BlockSize != 16 {
		t.Errorf("%+v", m.Info)
	}
}

func TestLateSchedulerAsksAndKeepsUp(t *testing.T) {
	s := broker.New(t, nil)
	a := newWireAgent(t, s, "ns_uid_0", 10).listen()
	for range 40 {
		a.tell()
	}
	st := newStand(t, s, fleet.Config{})
	a.say()
	for range 200 {
		a.tell()
	}
	a.say()
	st.exact(a)
	if got := st.in.Stats(); got.Snapshots == 0 || got.InFlight != 0 {
		t.Errorf("%+v", got)
	}
}

func TestNobodyAnswersThenSomebodyDoes(t *testing.T) {
	s := broker.New(t, nil)
	st := newStand(t, s, fleet.Config{})
	a := newWireAgent(t, s, "ns_uid_0", 10)
	a.lose()
	a.say()
	await.True(t, "no responders", func() bool { return st.in.Stats().NoResponders > 0 })
	if st.trust(a.name) != fleet.Syncing {
		t.Error("not SYNCING")
	}
	a.listen()
	st.exact(a)
}

func TestGapForgetsAtOnceAndResyncs(t *testing.T) {
	s := broker.New(t, nil)
	st := newStand(t, s, fleet.Config{})
	a := newWireAgent(t, s, "ns_uid_0", 10)
	a.say()
	for range 10 {
		a.tell()
	}
	st.exact(a)
	a.lose()
	a.tell()
	await.True(t, "out of step", func() bool { return st.in.Stats().Gaps == 1 && st.trust(a.name) == fleet.Syncing })
	if n := st.index.Stats().Memberships; n != 0 {
		t.Errorf("%d memberships of a suspect cache state", n)
	}
	a.listen()
	st.exact(a)
}

func TestRestartOfTheEngine(t *testing.T) {
	s := broker.New(t, nil)
	st := newStand(t, s, fleet.Config{})
	a := newWireAgent(t, s, "ns_uid_0", 10)
	a.say()
	for range 10 {
		a.tell()
	}
	st.exact(a)
	a.mu.Lock()
	a.restart(20)
	a.mu.Unlock()
	a.say()
	st.exact(a)
	a.tell()
	st.exact(a)
	if got := st.in.Stats(); got.Snapshots != 0 || got.Epochs != 2 {
		t.Errorf("%+v", got)
	}
}

func TestLeavingMemberIsForgotten(t *testing.T) {
	s := broker.New(t, nil)
	st := newStand(t, s, fleet.Config{})
	a := newWireAgent(t, s, "ns_uid_0", 10)
	a.say()
	for range 10 {
		a.tell()
	}
	st.exact(a)
	a.send(a.sub.Load(a.name), &pb.Heartbeat{Header: a.header(), Leaving: true})
	await.True(t, "gone", func() bool { return st.member(a.name) == nil })
	if got := st.in.Stats(); got.Members != 0 || st.index.Stats().Memberships != 0 {
		t.Errorf("%+v, %+v", got, st.index.Stats())
	}
	a.tell() // nobody's
	a.say()
	await.True(t, "back", func() bool { return st.member(a.name) != nil })
}

func TestSilentMemberIsForgottenWhileOthersSpeak(t *testing.T) {
	s := broker.New(t, nil)
	st := newStand(t, s, fleet.Config{Silence: 6 * time.Second, Grace: 7 * time.Second})
	silent, alive := newWireAgent(t, s, "ns_silent_0", 10), newWireAgent(t, s, "ns_alive_0", 11)
	silent.say()
	silent.tell()
	st.exact(silent)
	await.True(t, "gone", func() bool {
		alive.say()
		return st.member(silent.name) == nil
	})
	st.exact(alive)
	if n := st.in.Stats().Members; n != 1 {
		t.Errorf("%d members", n)
	}
}

func TestLostServerIsNoReasonToForget(t *testing.T) {
	s := broker.New(t, nil)
	st := newStand(t, s, fleet.Config{})
	a := newWireAgent(t, s, "ns_uid_0", 10)
	a.say()
	for range 20 {
		a.tell()
	}
	st.exact(a)
	before := st.index.Stats().Memberships
	s.Stop()
	await.True(t, "disconnected", func() bool { return !st.in.cfg.Conn.IsConnected() })
	if st.trust(a.name) != fleet.Exact || st.index.Stats().Memberships != before {
		t.Error("forgotten while nothing can be heard")
	}
	s.Start()
	await.True(t, "in doubt", func() bool { return st.trust(a.name) == fleet.Syncing })
	if st.index.Stats().Memberships != before {
		t.Error("forgotten when the connection came back")
	}
	await.True(t, "agent connected", a.conn.IsConnected)
	a.say()
	st.exact(a)
	if got := st.in.Stats(); got.Resyncs+got.Snapshots != 0 {
		t.Errorf("%+v", got)
	}
}

func TestBadMessagesAreCountedAndChangeNothing(t *testing.T) {
	s := broker.New(t, nil)
	st := newStand(t, s, fleet.Config{})
	a := newWireAgent(t, s, "ns_uid_0", 10)
	a.say()
	for range 10 {
		a.tell()
	}
	st.exact(a)
	other := a.heartbeat()
	other.Header.Version = 2
	a.send(a.sub.Load(a.name), other)
	liar := a.heartbeat()
	liar.Header.Sequence += 5
	a.send(a.sub.Load("ns_victim_0"), liar)
	a.send(a.sub.Blocks(a.name), &pb.Delta{Header: &pb.Header{Version: 1, Member: "ns_victim_0", Epoch: 99, Sequence: 1}})
	for subject, data := range map[string][]byte{
		a.sub.Blocks(a.name):                  make([]byte, protocol.MaxMessage+1),
		a.sub.Load(a.name):                    []byte("garbage"),
		"kvscout.v1.test.blocks.a_b.c.0":      nil,
		st.in.inbox + ".ns_uid_0.notanumber":  nil,
		st.in.inbox + ".ns_stranger_0.1":      []byte("x"),
		st.in.inbox + ".ns_uid_0.1":           []byte("x"),
		"kvscout.v1.test.snapshot.ns.uid.0":   []byte("x"),
		"kvscout.v1.elsewhere.blocks.a.b_c.0": []byte("x"),
	} {
		if err := a.conn.Publish(subject, data); err != nil {
			t.Fatal(err)
		}
	}
	a.tell()
	await.True(t, "counted", func() bool {
		got := st.in.Stats()
		return got.WrongVersion == 1 && got.WrongMember == 2 && got.Malformed == 5
	})
	st.exact(a)
	if got := st.in.Stats(); got.Resyncs != 0 || got.Members != 1 {
		t.Errorf("%+v", got)
	}
	d := a.delta()
	d.Changes = append(d.Changes, &pb.Change{})
	a.send(a.sub.Blocks(a.name), d)
	await.True(t, "contradiction", func() bool { return st.trust(a.name) == fleet.Syncing })
}

func TestFullFleetRefuses(t *testing.T) {
	s := broker.New(t, nil)
	st := newStand(t, s, fleet.Config{MaxMembers: 2})
	for i := range 3 {
		newWireAgent(t, s, fmt.Sprintf("ns_uid-%d_0", i), 10).say()
	}
	await.True(t, "refused", func() bool { return st.in.Stats().RefusedMembers == 1 })
	if got := st.in.Stats(); got.Members != 2 {
		t.Errorf("%+v", got)
	}
}

// TestStrangersAreNotRemembered is a bus on which ever new members announce
// themselves to a fleet that is full.
func TestStrangersAreNotRemembered(t *testing.T) {
	const strangers = 20_000
	in := &Ingest{cfg: Config{Log: slog.New(slog.DiscardHandler), Index: index.New(index.Config{}), Fleet: fleet.New(fleet.Config{MaxMembers: 1})}}
	w := newWorker(in)
	agent := newSimAgent("", rand.New(rand.NewPCG(1, 5)), 1)
	announce := func(name string) {
		agent.name = name
		data, err := proto.Marshal(agent.heartbeat())
		if err != nil {
			t.Fatal(err)
		}
		w.handle(item{kind: isHeartbeat, name: name, data: data}, start)
		w.handle(item{kind: isDelta, name: name, data: data}, start)
	}
	announce("ns_first_0")
	before := heap()
	for i := range strangers {
		announce(fmt.Sprintf("ns_uid-%d_0", i))
	}
	if grown := heap() - before; grown > 1<<20 {
		t.Errorf("%d bytes stay of %d strangers", grown, strangers)
	}
	runtime.KeepAlive(w)
	if got := in.Stats(); got.Members != 1 || got.RefusedMembers != strangers || len(w.members) != 1 {
		t.Errorf("%d followed, %+v", len(w.members), got)
	}
}

// TestMessagesInTheClientAreBounded is a process that gets no processor while
// its agents go on: what does not fit is dropped and counted, and the gap heals.
func TestMessagesInTheClientAreBounded(t *testing.T) {
	s := broker.New(t, nil)
	st := &stand{t: t, server: s, index: index.New(index.Config{}), fleet: fleet.New(fleet.Config{})}
	var err error
	if st.in, err = New(Config{Conn: connect(t, s), Pool: "test", Index: st.index, Fleet: st.fleet}); err != nil {
		t.Fatal(err)
	}
	messages := make(chan *nats.Msg, pending)
	unsubscribe, err := st.in.subscribe(messages)
	if err != nil {
		t.Fatal(err)
	}
	defer unsubscribe()
	if err := st.in.cfg.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	const more = 1000
	a := newWireAgent(t, s, "ns_uid_0", 10).listen()
	a.say()
	for range pending - 1 + more {
		a.tell()
	}
	await.True(t, "the rest dropped", func() bool { return st.in.Stats().Dropped == more })
	if len(messages) != pending {
		t.Errorf("%d messages wait, want %d", len(messages), pending)
	}

	// The processor is back.
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for _, w := range st.in.workers {
		running.Go(func() { w.run(ctx) })
	}
	running.Go(func() { st.in.dispatch(ctx, messages) })
	defer running.Wait()
	defer cancel()
	await.True(t, "the backlog is read", func() bool { return len(messages) == 0 })
	a.say()
	st.exact(a)
	if got := st.in.Stats(); got.Resyncs != 1 {
		t.Errorf("%+v", got)
	}
}

func TestSnapshotsInFlightAreBounded(t *testing.T) {
	s := broker.New(t, nil)
	st := newStand(t, s, fleet.Config{})
	const n = 40
	var open atomic.Bool // from then on agents answer
	var asked, most atomic.Int64
	conn := connect(t, s)
	agents := make(map[string]*wireAgent)
	for i := range n {
		a := newWireAgent(t, s, fmt.Sprintf("ns_uid-%d_0", i), 10)
		agents[a.sub.Snapshot(a.name)] = a
		a.lose()
	}
	_, err := conn.Subscribe("kvscout.v1.test.snapshot.*.*.*", func(m *nats.Msg) {
		asked.Add(1)
		most.Store(max(most.Load(), st.in.Stats().InFlight))
		if !open.Load() {
			return // it hangs, is given up and makes room for another
		}
		for _, c := range agents[m.Subject].chunks() {
			agents[m.Subject].send(m.Reply, c)
		}
	})
	if err == nil {
		err = conn.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range agents {
		a.say()
	}
	await.True(t, "all are known, and as many asked for as may be", func() bool { return st.in.Stats().Members == n && asked.Load() >= 8 })
	time.Sleep(50 * time.Millisecond) // several looks later there are no more
	if got := st.in.Stats(); got.InFlight > 8 || asked.Load() > 8+int64(got.FailedSnapshots) {
		t.Errorf("%d were asked for: %+v", asked.Load(), got)
	}
	open.Store(true)
	for _, a := range agents {
		st.exact(a)
	}
	if most.Load() > 8 {
		t.Errorf("%d were under way at a time", most.Load())
	}
}

func TestReady(t *testing.T) {
	s := broker.New(t, nil)
	a := newWireAgent(t, s, "ns_uid_0", 10)
	a.lose()
	st := newStand(t, s, fleet.Config{})
	if st.in.Ready() {
		t.Error("ready before anybody could speak")
	}
	a.say()
	await.True(t, "announced", func() bool { return st.member(a.name) != nil })
	ago := time.Now().Add(-settle)
	st.in.connected.Store(&ago)
	if st.in.Ready() {
		t.Error("ready with a member that has no cache state")
	}
	a.listen()
	st.exact(a)
	await.True(t, "ready", st.in.Ready)

	st = newStand(t, s, fleet.Config{})
	dead := newWireAgent(t, s, "ns_dead_0", 10)
	dead.lose()
	dead.say()
	await.True(t, "announced", func() bool { return st.member(dead.name) != nil })
	if st.in.Ready() {
		t.Error("does not wait")
	}
	before := time.Now().Add(-st.in.cfg.Wait)
	st.in.connected.Store(&before)
	deaf := true
	st.in.cfg.Deaf = func() bool { return deaf }
	if st.in.Ready() {
		t.Error("ready though NATS lets it hear nobody")
	}
	deaf = false
	st.in.connected.Store(nil)
	if st.in.Ready() {
		t.Error("ready without a connection")
	}
	st.in.connected.Store(&before)
	await.True(t, "ready without a cache state", st.in.Ready)
	st.in.connected.Store(nil)
	if !st.in.Ready() {
		t.Error("not ready any more when the connection is lost")
	}
}

func TestNewRefuses(t *testing.T) {
	s := broker.New(t, nil)
	ok := Config{Conn: connect(t, s), Pool: "p", Index: index.New(index.Config{}), Fleet: fleet.New(fleet.Config{})}
	for name, spoil := range map[string]func(*Config){
		"conn": func(c *Config) { c.Conn = nil }, "index": func(c *Config) { c.Index = nil },
		"fleet": func(c *Config) { c.Fleet = nil }, "pool": func(c *Config) { c.Pool = "a.b" },
	} {
		c := ok
		spoil(&c)
		if _, err := New(c); err == nil {
			t.Errorf("%s passed", name)
		}
	}
	in, err := New(ok)
	if err != nil {
		t.Fatal(err)
	}
	if in.Stats() != (Stats{}) || in.Ready() {
		t.Error("something happened before Run")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := in.Run(ctx); err != nil {
		t.Error(err)
	}
	if err := in.Run(ctx); err == nil {
		t.Error("ran twice")
	}
}

// BenchmarkSnapshot measures from the request to EXACT for a member of
// 100,000 blocks, held on all lanes.
func BenchmarkSnapshot(b *testing.B) {
	const blocks, run = 100_000, 500
	s := broker.New(b, nil)
	conn := connect(b, s)
	sub, err := protocol.NewSubjects("test")
	if err != nil {
		b.Fatal(err)
	}
	header := &pb.Header{Version: 1, Member: name, Epoch: 1, Sequence: 9}
	var held protocol.Held
	var messages [][]byte
	chunk := &pb.SnapshotChunk{Header: header}
	flush := func() {
		data, err := proto.Marshal(chunk)
		if err != nil {
			b.Fatal(err)
		}
		messages = append(messages, data)
		chunk = &pb.SnapshotChunk{Header: header, Index: uint32(len(messages))}
	}
	root := blockkey.Scope{Model: "m", BlockSize: 16}.Root()
	for i := 0; i < blocks; i += run {
		keys := make([]uint64, run)
		for j, parent := 0, root; j < run; j++ {
			parent = blockkey.Chain(parent, uint64(i+j)+1)
			keys[j] = uint64(parent)
		}
		chunk.Stored = append(chunk.Stored, &pb.Stored{Lane: 1, Through: 3, Keys: keys})
		for l := range protocol.Lanes {
			held[l].Count += run
			held[l].Digest ^= digestOf(keys)
		}
		if len(chunk.Stored) == 60 {
			flush()
		}
	}
	chunk.Last, chunk.Lanes, chunk.Trust = true, lanesOf(held), pb.Trust_TRUST_EXACT
	flush()
	if _, err := conn.Subscribe(sub.Snapshot(name), func(m *nats.Msg) {
		for _, data := range messages {
			_ = conn.Publish(m.Reply, data)
		}
	}); err != nil {
		b.Fatal(err)
	}
	m, err := protocol.ParseMember(name)
	if err != nil {
		b.Fatal(err)
	}
	say := func(h *pb.Heartbeat) {
		data, err := proto.Marshal(h)
		if err == nil {
			err = conn.Publish(sub.Load(name), data)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	st := newStand(b, s, fleet.Config{})
	for b.Loop() {
		say(&pb.Heartbeat{Header: header, Trust: pb.Trust_TRUST_EXACT, Lanes: lanesOf(held), Info: &pb.MemberInfo{Namespace: m.Namespace, PodUid: m.PodUID}})
		await.True(b, "EXACT", func() bool { return st.trust(name) == fleet.Exact })
		b.StopTimer()
		say(&pb.Heartbeat{Header: header, Leaving: true})
		await.True(b, "gone", func() bool { return st.member(name) == nil })
		b.StartTimer()
	}
}

// The last member that falls silent is gone, because the server still answers;
// while it does not, nobody is.
func TestLastSilentMemberIsForgottenWhileTheServerAnswers(t *testing.T) {
	s := broker.New(t, nil)
	st := newStand(t, s, fleet.Config{Silence: 6 * time.Second, Grace: 7 * time.Second})
	a := newWireAgent(t, s, "ns_uid_0", 10)
	a.say()
	a.tell()
	st.exact(a)
	await.True(t, "forgotten", func() bool { return st.member(a.name) == nil })
	if n := st.index.Stats().Memberships; n != 0 {
		t.Errorf("%d memberships are left", n)
	}
}
