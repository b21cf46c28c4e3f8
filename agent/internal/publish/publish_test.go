package publish

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
)

const member = "ns_uid_0"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func connect(t testing.TB, url string, options ...nats.Option) *nats.Conn {
	closed := make(chan struct{})
	options = append([]nats.Option{
		nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.ReconnectWait(10 * time.Millisecond),
		nats.ReconnectJitter(0, 0), nats.CustomInboxPrefix("kvscout.v1.test.inbox"), nats.ClosedHandler(func(*nats.Conn) { close(closed) }),
	}, options...)
	conn, err := nats.Connect(url, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); <-closed })
	return conn
}

// rank is a Cache state around a real mirror, as an agent has one.
type rank struct {
	mu      sync.Mutex // guards all
	mirror  *mirror.Mirror
	epoch   uint64
	batches uint64
	trust   pb.Trust
	load    *pb.Load
	hashes  uint64
}

func newRank() *rank {
	return &rank{mirror: mirror.New(mirror.Config{Model: "m", BlockSize: 4}), epoch: 100, trust: pb.Trust_TRUST_EXACT}
}

func (r *rank) Drain(ops []mirror.Op) ([]mirror.Op, State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ops = r.mirror.Drain(ops)
	return ops, r.stateLocked()
}

func (r *rank) Snapshot() (ops []mirror.Op, _ State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mirror.Snapshot(func(op mirror.Op) bool { ops = append(ops, op); return true })
	return ops, r.stateLocked()
}

func (r *rank) stateLocked() State {
	st := State{Epoch: r.epoch, Trust: r.trust, Reason: "told", EngineBatches: r.batches}
	for l := range st.Lanes {
		st.Lanes[l].Count = uint64(r.mirror.Count(mirror.Lane(l)))
		st.Lanes[l].Digest = r.mirror.Digest(mirror.Lane(l))
	}
	return st
}

func (r *rank) Heartbeat() (*pb.MemberInfo, *pb.Load) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &pb.MemberInfo{Namespace: "ns", PodUid: "uid", Models: []string{"m"}}, r.load
}

// store puts a prompt of n random blocks into GPU memory.
func (r *rank) store(rng *rand.Rand, n int) (first uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	first = r.hashes + 1
	s := mirror.Store{Kind: mirror.Full, BlockSize: 4}
	for range n {
		r.hashes++
		s.Hashes = append(s.Hashes, r.hashes)
		s.Tokens = append(s.Tokens, rng.Uint32(), rng.Uint32(), rng.Uint32(), rng.Uint32())
	}
	r.mirror.Store(s)
	return first
}

// remove takes blocks of a prompt away, the last one first, as engines do.
func (r *rank) remove(first uint64, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for h := first + uint64(n) - 1; h >= first; h-- {
		r.mirror.Remove(mirror.Remove{Hashes: []uint64{h}})
	}
}

// restart begins a new incarnation with an empty cache.
func (r *rank) restart() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mirror = mirror.New(mirror.Config{Model: "m", BlockSize: 4})
	r.epoch += 100
}

func (r *rank) set(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// reader takes what is published and holds it against the rules.
type reader struct {
	t        testing.TB
	messages chan *nats.Msg
	epoch    uint64
	sequence uint64
	parts    int // deltas without lanes
	sets     [protocol.Lanes]map[uint64]bool
	last     *pb.Heartbeat
	beats    []*pb.Heartbeat
}

func newReader(t testing.TB, conn *nats.Conn) *reader {
	r := &reader{t: t, messages: make(chan *nats.Msg, 1<<16)}
	for _, kind := range []string{"blocks", "load"} {
		if _, err := conn.ChanSubscribe("kvscout.v1.test."+kind+".ns.uid.0", r.messages); err != nil {
			t.Fatal(err)
		}
	}
	if err := conn.Flush(); err != nil {
		t.Fatal(err)
	}
	r.clear()
	return r
}

func (r *reader) message() *nats.Msg {
	r.t.Helper()
	select {
	case m := <-r.messages:
		return m
	case <-time.After(await.Patience):
		r.t.Fatal("nothing is published")
		return nil
	}
}

func (r *reader) clear() {
	for l := range r.sets {
		r.sets[l] = make(map[uint64]bool)
	}
}

// next takes one message; it returns what was read.
func (r *reader) next() proto.Message {
	r.t.Helper()
	m := r.message()
	if strings.Contains(m.Subject, ".load.") {
		h, err := protocol.ReadHeartbeat(m.Data, member)
		if err != nil {
			r.t.Fatal(err)
		}
		r.last, r.beats = h, append(r.beats, h)
		if h.GetHeader().GetEpoch() > r.epoch && h.GetHeader().GetSequence() == 0 && !h.Leaving {
			r.epoch, r.sequence = h.GetHeader().GetEpoch(), 0
			r.clear()
		}
		if got := h.GetHeader(); got.GetEpoch() != r.epoch || got.GetSequence() != r.sequence {
			r.t.Fatalf("heartbeat at %v, deltas at %d %d", got, r.epoch, r.sequence)
		}
		if !h.Leaving {
			r.agree(h.GetLanes())
		}
		return h
	}
	d, err := protocol.ReadDelta(m.Data, member)
	if err != nil {
		r.t.Fatal(err)
	}
	if got := d.GetHeader(); got.GetEpoch() != r.epoch || got.GetSequence() != r.sequence+1 {
		r.t.Fatalf("delta at %v after %d %d", got, r.epoch, r.sequence)
	}
	r.sequence++
	for _, c := range d.GetChanges() {
		r.change(c)
	}
	if len(d.GetLanes()) == 0 {
		r.parts++
	} else {
		r.agree(d.GetLanes())
	}
	return d
}

func (r *reader) change(c *pb.Change) {
	if s := c.GetStored(); s != nil {
		first, last := protocol.LanesOf(s.GetLane(), s.GetThrough())
		for l := first; l <= last; l++ {
			for _, k := range s.GetBefore() {
				if !r.sets[l][k] {
					r.t.Fatalf("stored on lane %d at %d behind key %#x, which is not held", l, s.GetPosition(), k)
				}
			}
			for _, k := range s.GetKeys() {
				if r.sets[l][k] {
					r.t.Fatalf("key %#x stored twice on lane %d", k, l)
				}
				r.sets[l][k] = true
			}
		}
		return
	}
	rm := c.GetRemoved()
	first, last := protocol.LanesOf(rm.GetLane(), rm.GetThrough())
	for l := first; l <= last; l++ {
		for _, k := range rm.GetKeys() {
			if !r.sets[l][k] {
				r.t.Fatalf("key %#x removed from lane %d, which does not hold it", k, l)
			}
			delete(r.sets[l], k)
		}
	}
}

func (r *reader) agree(lanes []*pb.LaneState) {
	want, err := protocol.ReadHeld(lanes)
	if err != nil {
		r.t.Fatal(err)
	}
	var got protocol.Held
	for l, set := range r.sets {
		got[l].Count = uint64(len(set))
		for k := range set {
			got[l].Digest ^= blockkey.Digest(blockkey.Key(k))
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		r.t.Fatalf("lanes at %d %d (-said +applied):\n%s", r.epoch, r.sequence, diff)
	}
}

// upTo takes messages until the GPU lane has n blocks.
func (r *reader) upTo(n int) {
	r.t.Helper()
	for len(r.sets[0]) != n {
		r.next()
	}
}

// heartbeat takes messages up to the next heartbeat.
func (r *reader) heartbeat() *pb.Heartbeat {
	r.t.Helper()
	for {
		if h, ok := r.next().(*pb.Heartbeat); ok {
			return h
		}
	}
}

// start runs a publisher until the test ends or stop is called.
func start(t testing.TB, conn *nats.Conn, p CacheState, heartbeat time.Duration) (*Publisher, func()) {
	pub, err := New(Config{Conn: conn, Pool: "test", Member: member, CacheState: p, HeartbeatEvery: heartbeat})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- pub.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return pub, stop
}

// askFor collects a whole snapshot.
func askFor(t testing.TB, conn *nats.Conn) (chunks []*pb.SnapshotChunk, sizes []int) {
	t.Helper()
	inbox := conn.NewInbox()
	sub, err := conn.SubscribeSync(inbox + ".1")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	data, err := proto.Marshal(&pb.SnapshotRequest{Version: 1, Member: member})
	if err != nil {
		t.Fatal(err)
	}
	ask := func() {
		if err := conn.PublishRequest("kvscout.v1.test.snapshot.ns.uid.0", inbox+".1", data); err != nil {
			t.Fatal(err)
		}
	}
	ask()
	for {
		m, err := sub.NextMsg(await.Patience / 2)
		if errors.Is(err, nats.ErrTimeout) && len(chunks) == 0 {
			ask() // the first may have come before the agent's subscription
			m, err = sub.NextMsg(await.Patience)
		}
		if err != nil {
			t.Fatal(err)
		}
		c, err := protocol.ReadChunk(m.Data, member)
		if err != nil {
			t.Fatal(err)
		}
		chunks, sizes = append(chunks, c), append(sizes, len(m.Data))
		if c.Last {
			return chunks, sizes
		}
	}
}

func TestPublishesWhatChanges(t *testing.T) {
	s := broker.New(t, nil)
	r := newReader(t, connect(t, s.URL()))
	p := newRank()
	pub, stop := start(t, connect(t, s.URL()), p, time.Hour)
	if h := r.heartbeat(); h.GetHeader().GetEpoch() != 100 || h.GetHeader().GetSequence() != 0 {
		t.Fatalf("first: %v", h)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	a := p.store(rng, 10)
	pub.Wake()
	r.upTo(10)
	p.store(rng, 5)
	p.remove(a+6, 4)
	pub.Wake()
	r.upTo(11)
	stop()
	if h := r.heartbeat(); !h.Leaving {
		t.Errorf("last: %v", h)
	}
	if got := pub.Stats(); got.Deltas != r.sequence || got.Dropped+got.Errors != 0 || got.Keys == 0 {
		t.Errorf("%+v", got)
	}
}

func TestAtMostOneDeltaATick(t *testing.T) {
	s := broker.New(t, nil)
	r := newReader(t, connect(t, s.URL()))
	p := newRank()
	pub, err := New(Config{Conn: connect(t, s.URL()), Pool: "test", Member: member, CacheState: p, Tick: 50 * time.Millisecond, HeartbeatEvery: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- pub.Run(ctx) }()
	rng := rand.New(rand.NewPCG(1, 1))
	began := time.Now()
	for range 100 {
		p.store(rng, 1)
		pub.Wake()
		time.Sleep(time.Millisecond)
	}
	r.upTo(100)
	if most := uint64(time.Since(began)/(50*time.Millisecond)) + 2; r.sequence > most {
		t.Errorf("%d deltas, at most %d", r.sequence, most)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestLargeChangeIsSplitIntoSequences(t *testing.T) {
	s := broker.New(t, nil)
	r := newReader(t, connect(t, s.URL()))
	p := newRank()
	rng := rand.New(rand.NewPCG(1, 1))
	const n = 100_000
	first := p.store(rng, n) // one run of 800 KB
	pub, _ := start(t, connect(t, s.URL()), p, time.Hour)
	r.upTo(n)
	if r.sequence != 4 || r.parts != 3 {
		t.Errorf("%d deltas, %d without lanes", r.sequence, r.parts)
	}
	p.remove(first+10, n-10) // from the tail: each part leaves a closed prefix
	pub.Wake()
	r.upTo(10)
	if h := r.heartbeatAfter(pub); h.GetTrust() != pb.Trust_TRUST_EXACT {
		t.Errorf("%v", h)
	}
}

func (r *reader) heartbeatAfter(p *Publisher) *pb.Heartbeat {
	r.t.Helper()
	p.beatNow()
	return r.heartbeat()
}

func TestServerWithSmallMessages(t *testing.T) {
	s := broker.New(t, &server.Options{MaxPayload: 4096})
	conn := connect(t, s.URL())
	r := newReader(t, conn)
	p := newRank()
	p.store(rand.New(rand.NewPCG(1, 1)), 3000)
	start(t, connect(t, s.URL()), p, time.Hour)
	r.upTo(3000)
	chunks, sizes := askFor(t, conn)
	for i, size := range sizes {
		if size > 4096 {
			t.Errorf("chunk %d of %d bytes", i, size)
		}
	}
	if len(chunks) < 6 {
		t.Errorf("%d chunks", len(chunks))
	}
}

func TestSnapshotIsTheCacheStateAtItsSequence(t *testing.T) {
	s := broker.New(t, nil)
	conn := connect(t, s.URL())
	p := newRank()
	r := newReader(t, conn)
	pub, _ := start(t, connect(t, s.URL()), p, time.Hour)
	r.heartbeat()
	rng := rand.New(rand.NewPCG(1, 1))
	stopWriting := make(chan struct{})
	var writer sync.WaitGroup
	writer.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stopWriting:
				return
			default:
			}
			first := p.store(rng, 300)
			if i%2 == 0 {
				p.remove(first+100, 200)
			}
			pub.Wake()
			time.Sleep(time.Millisecond)
		}
	})
	var before uint64
	for range 10 {
		chunks, sizes := askFor(t, conn)
		got := newReaderOf(t, chunks)
		if got.sequence < before {
			t.Errorf("sequence %d after %d", got.sequence, before)
		}
		before = got.sequence
		for i, size := range sizes {
			if size > protocol.MaxMessage {
				t.Errorf("chunk %d of %d bytes", i, size)
			}
		}
	}
	// From the last snapshot on, the deltas behind its cut continue it.
	chunks, _ := askFor(t, conn)
	cut := newReaderOf(t, chunks)
	r.epoch, r.sequence, r.sets = cut.epoch, cut.sequence, cut.sets
	close(stopWriting)
	writer.Wait()
	pub.beatNow()
	pub.mu.Lock()
	end := pub.sequence
	pub.mu.Unlock()
	for {
		m := r.message()
		switch {
		case strings.Contains(m.Subject, ".load."):
			h, err := protocol.ReadHeartbeat(m.Data, member)
			if err != nil {
				t.Fatal(err)
			}
			if h.Header.Sequence == end {
				r.agree(h.GetLanes())
				return
			}
		case strings.Contains(m.Subject, ".blocks."):
			d, err := protocol.ReadDelta(m.Data, member)
			if err != nil {
				t.Fatal(err)
			}
			if d.Header.Sequence <= cut.sequence {
				continue
			}
			if d.Header.Sequence != r.sequence+1 {
				t.Fatalf("delta %d after %d", d.Header.Sequence, r.sequence)
			}
			r.sequence++
			for _, c := range d.GetChanges() {
				r.change(c)
			}
			r.agree(d.GetLanes())
		}
	}
}

// newReaderOf reads a snapshot and holds it against the rules.
func newReaderOf(t testing.TB, chunks []*pb.SnapshotChunk) *reader {
	r := &reader{t: t}
	r.clear()
	r.epoch, r.sequence = chunks[0].Header.Epoch, chunks[0].Header.Sequence
	for i, c := range chunks {
		if int(c.Index) != i || c.Header.Epoch != r.epoch || c.Header.Sequence != r.sequence {
			t.Fatalf("chunk %d: %v, index %d", i, c.Header, c.Index)
		}
		for _, s := range c.Stored {
			r.change(&pb.Change{Change: &pb.Change_Stored{Stored: s}})
		}
	}
	r.agree(chunks[len(chunks)-1].Lanes)
	return r
}

func TestNewEpochIsAnnouncedBeforeItsFirstDelta(t *testing.T) {
	s := broker.New(t, nil)
	r := newReader(t, connect(t, s.URL()))
	p := newRank()
	rng := rand.New(rand.NewPCG(1, 1))
	p.store(rng, 10)
	pub, _ := start(t, connect(t, s.URL()), p, time.Hour)
	r.upTo(10)
	if h := r.beats[0]; h.GetTrust() != pb.Trust_TRUST_SYNCING || h.GetHeader().GetSequence() != 0 {
		t.Errorf("announced as %v", h)
	}
	if h := r.heartbeat(); h.GetTrust() != pb.Trust_TRUST_EXACT || h.GetHeader().GetSequence() != 1 {
		t.Errorf("then %v", h)
	}
	p.restart()
	p.store(rng, 3)
	pub.Wake()
	r.upTo(0)
	if r.epoch != 200 {
		t.Errorf("epoch %d", r.epoch)
	}
	r.upTo(3)
	p.restart() // to nothing
	pub.Wake()
	if h := r.heartbeat(); h.GetTrust() != pb.Trust_TRUST_EXACT { // of epoch 200
		t.Errorf("%v", h)
	}
	if h := r.heartbeat(); h.GetHeader().GetEpoch() != 300 || h.GetTrust() != pb.Trust_TRUST_EXACT {
		t.Errorf("%v", h)
	}
}

func TestStateIsPublishedAtOnce(t *testing.T) {
	s := broker.New(t, nil)
	r := newReader(t, connect(t, s.URL()))
	p := newRank()
	pub, _ := start(t, connect(t, s.URL()), p, time.Hour)
	r.heartbeat()
	p.set(func() { p.trust = pb.Trust_TRUST_APPROXIMATE })
	r.drain(pub, func(h *pb.Heartbeat) bool { return h.Trust == pb.Trust_TRUST_APPROXIMATE && h.Reason == "told" })
	p.set(func() { p.load = &pb.Load{Running: proto.Uint32(4), AgeMs: 12} })
	r.drain(pub, func(h *pb.Heartbeat) bool { return h.Load.GetRunning() == 4 && h.Load.GetAgeMs() == 12 })
}

// drain wakes the publisher until a heartbeat is as wanted.
func (r *reader) drain(p *Publisher, ok func(*pb.Heartbeat) bool) {
	r.t.Helper()
	stop := make(chan struct{})
	var waking sync.WaitGroup
	waking.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				p.Wake()
			}
		}
	})
	for !ok(r.heartbeat()) {
	}
	close(stop)
	waking.Wait()
}

func TestBatchesThatChangeNothingArePublished(t *testing.T) {
	s := broker.New(t, nil)
	r := newReader(t, connect(t, s.URL()))
	p := newRank()
	pub, _ := start(t, connect(t, s.URL()), p, time.Hour)
	r.heartbeat()
	p.set(func() { p.batches = 9 })
	pub.Wake()
	for {
		if d, ok := r.next().(*pb.Delta); ok {
			if d.GetEngineBatches() != 9 || d.GetHeader().GetSequence() != 1 || len(d.GetChanges()) != 0 {
				t.Errorf("%v", d)
			}
			return
		}
	}
}

func TestSnapshotNeverMixesTwoEpochs(t *testing.T) {
	s := broker.New(t, nil)
	conn := connect(t, s.URL())
	r := newReader(t, conn)
	p := newRank()
	rng := rand.New(rand.NewPCG(1, 1))
	pub, _ := start(t, connect(t, s.URL()), p, time.Hour)
	for range 3 {
		p.store(rng, 4)
		pub.Wake()
		r.upTo(len(r.sets[0]) + 4)
	}
	p.restart() // and nobody wakes the publisher
	p.store(rng, 2)
	chunks, _ := askFor(t, conn)
	if got := newReaderOf(t, chunks); got.epoch != 200 || got.sequence != 1 || len(got.sets[0]) != 2 {
		t.Errorf("snapshot at %d %d with %d", got.epoch, got.sequence, len(got.sets[0]))
	}
	r.upTo(2) // the same was published
}

func TestHeartbeatsComeRegularly(t *testing.T) {
	s := broker.New(t, nil)
	r := newReader(t, connect(t, s.URL()))
	start(t, connect(t, s.URL()), newRank(), 20*time.Millisecond)
	for range 5 {
		if h := r.heartbeat(); h.GetIntervalMs() != 20 {
			t.Errorf("%v", h)
		}
	}
}

func TestNothingIsKeptWhileTheServerIsAway(t *testing.T) {
	s := broker.New(t, nil)
	conn := connect(t, s.URL())
	p := newRank()
	pub, _ := start(t, conn, p, time.Hour)
	rng := rand.New(rand.NewPCG(1, 1))
	p.store(rng, 3)
	pub.Wake()
	await.True(t, "first delta", func() bool { return pub.Stats().Deltas == 1 })
	s.Stop()
	await.True(t, "disconnected", func() bool { return !conn.IsConnected() })
	for i := range 5 {
		p.store(rng, 3)
		pub.Wake()
		await.True(t, "dropped", func() bool { return pub.Stats().Dropped == uint64(i)+1 })
	}
	s.Start()
	listener := connect(t, s.URL())
	r := newReader(t, listener)
	// It may have come back before the reader did.
	await.True(t, "connected", conn.IsConnected)
	await.True(t, "heartbeat after the return", func() bool {
		return len(r.messages) > 0 || pub.Stats().Heartbeats >= 3
	})
	pub.beatNow()
	m := r.message()
	h, err := protocol.ReadHeartbeat(m.Data, member)
	if err != nil {
		t.Fatalf("%s: %v", m.Subject, err)
	}
	if h.Header.Sequence != 6 || h.Lanes[0].Count != 18 {
		t.Errorf("%v", h)
	}
	chunks, _ := askFor(t, listener)
	if got := newReaderOf(t, chunks); got.sequence != 6 || len(got.sets[0]) != 18 {
		t.Errorf("snapshot at %d with %d", got.sequence, len(got.sets[0]))
	}
}

func TestServerMayBeAwayAtTheStart(t *testing.T) {
	s := broker.Absent(t, nil)
	conn := connect(t, s.URL(), nats.RetryOnFailedConnect(true))
	p := newRank()
	p.store(rand.New(rand.NewPCG(1, 1)), 3)
	pub, _ := start(t, conn, p, time.Hour)
	await.True(t, "dropped", func() bool { return pub.Stats().Dropped == 1 })
	s.Start()
	await.True(t, "heartbeat", func() bool { return pub.Stats().Heartbeats > 0 })
	chunks, _ := askFor(t, connect(t, s.URL()))
	if got := newReaderOf(t, chunks); got.sequence != 1 || len(got.sets[0]) != 3 {
		t.Errorf("snapshot at %d with %d", got.sequence, len(got.sets[0]))
	}
}

func TestRequestsAreBounded(t *testing.T) {
	q := newQueries("kvscout.v1.test.inbox.")
	ask := q.ask(member)
	good, err := proto.Marshal(&pb.SnapshotRequest{Version: 1, Member: member})
	if err != nil {
		t.Fatal(err)
	}
	for reply, data := range map[string][]byte{
		"": good, "kvscout.v1.test.inbox.a.1": []byte("garbage"), "kvscout.v1.test.inbox.a.2": nil,
		"kvscout.v1.test.blocks.ns.uid.0": good, "kvscout.v1.test.inbox": good, "_INBOX.a.1": good,
	} {
		ask(&nats.Msg{Reply: reply, Data: data})
	}
	if len(q.waiting) != 0 || q.refused.Load() != 6 {
		t.Fatalf("%d waiting, %d refused", len(q.waiting), q.refused.Load())
	}
	ask(&nats.Msg{Reply: "kvscout.v1.test.inbox.x.1", Data: good})
	ask(&nats.Msg{Reply: "kvscout.v1.test.inbox.x.2", Data: good}) // the same requester
	if len(q.waiting) != 1 {
		t.Fatalf("%d waiting", len(q.waiting))
	}
	for i := range 2 * maxQueries {
		ask(&nats.Msg{Reply: "kvscout.v1.test.inbox." + string(rune('a'+i)) + ".1", Data: good})
	}
	if len(q.waiting) != maxQueries || len(q.busy) != maxQueries {
		t.Fatalf("%d waiting, %d busy", len(q.waiting), len(q.busy))
	}
	q.done((<-q.waiting).requester)
	ask(&nats.Msg{Reply: "kvscout.v1.test.inbox.x.3", Data: good})
	if len(q.waiting) != maxQueries {
		t.Error("the requester may not ask again")
	}
}

// TestSnapshotGoesToASchedulersInboxOnly is a request that would have the agent
// speak where it has the right to speak of something else.
func TestSnapshotGoesToASchedulersInboxOnly(t *testing.T) {
	s := broker.New(t, nil)
	conn := connect(t, s.URL())
	p := newRank()
	p.store(rand.New(rand.NewPCG(1, 1)), 3)
	pub, _ := start(t, connect(t, s.URL()), p, time.Hour)
	await.True(t, "first delta", func() bool { return pub.Stats().Deltas == 1 })
	elsewhere, err := conn.SubscribeSync("kvscout.v1.test.load.>")
	if err != nil {
		t.Fatal(err)
	}
	data, err := proto.Marshal(&pb.SnapshotRequest{Version: 1, Member: member})
	if err != nil {
		t.Fatal(err)
	}
	// Asked again, because the agent's subscription may come after the request.
	await.True(t, "refused or answered", func() bool {
		if err := conn.PublishRequest("kvscout.v1.test.snapshot.ns.uid.0", "kvscout.v1.test.load.ns.other.0", data); err != nil {
			t.Fatal(err)
		}
		st := pub.Stats()
		return st.Refused+st.Snapshots > 0
	})
	if n, _, err := elsewhere.Pending(); n > 0 || err != nil || pub.Stats().Snapshots > 0 {
		t.Errorf("%d messages, %v, %+v", n, err, pub.Stats())
	}
	if chunks, _ := askFor(t, conn); len(chunks) != 1 {
		t.Errorf("%d chunks for a scheduler", len(chunks))
	}
}

func TestNewRefuses(t *testing.T) {
	s := broker.New(t, nil)
	ok := Config{Conn: connect(t, s.URL()), Pool: "p", Member: member, CacheState: newRank()}
	buffering := connect(t, s.URL(), nats.ReconnectBufSize(1<<20))
	for name, spoil := range map[string]func(*Config){
		"no conn": func(c *Config) { c.Conn = nil }, "no cache state": func(c *Config) { c.CacheState = nil },
		"pool": func(c *Config) { c.Pool = "a b" }, "member": func(c *Config) { c.Member = "a.b" },
		"buffering": func(c *Config) { c.Conn = buffering },
	} {
		c := ok
		spoil(&c)
		if _, err := New(c); err == nil {
			t.Errorf("%s passed", name)
		}
	}
	p, err := New(ok)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := p.Run(ctx); err != nil {
		t.Error(err)
	}
	if p.Run(ctx) == nil {
		t.Error("ran twice")
	}
}

func TestLoadMoved(t *testing.T) {
	load := func(running, waiting uint32, usage float64) *pb.Load {
		return &pb.Load{Running: &running, Waiting: &waiting, KvUsage: &usage}
	}
	for _, c := range []struct {
		a, b *pb.Load
		want bool
	}{
		{nil, nil, false},
		{nil, load(0, 0, 0), true},
		{load(1, 0, 0), load(1, 0, 0.04), false},
		{load(1, 0, 0), load(1, 0, 0.06), true},
		{load(0, 0, 0), load(1, 0, 0), true},
		{load(40, 0, 0), load(45, 0, 0), false},
		{load(40, 0, 0), load(51, 0, 0), true},
		{load(40, 3, 0), load(40, 4, 0), true},
		{load(40, 3, 0), &pb.Load{Running: proto.Uint32(40), Waiting: proto.Uint32(3), KvUsage: proto.Float64(0), Sleeping: proto.Bool(true)}, true},
		{load(40, 3, 0), &pb.Load{Running: proto.Uint32(40), Waiting: proto.Uint32(3), KvUsage: proto.Float64(0), ProcessStartMs: 7}, true},
	} {
		if got := loadMoved(c.a, c.b); got != c.want {
			t.Errorf("%v to %v: %v", c.a, c.b, got)
		}
	}
}

// changes is a Cache state that is never at rest: each Drain is a tick's worth of
// new blocks on all lanes, and of old ones that go.
type changes struct {
	rank
	ops []mirror.Op
	st  State
}

func (c *changes) Drain(ops []mirror.Op) ([]mirror.Op, State) { return append(ops, c.ops...), c.st }

// BenchmarkPublish measures from Drain to the connection: 16 prompts of 40
// new blocks a tick and as many that go.
func BenchmarkPublish(b *testing.B) {
	s := broker.New(b, nil)
	c := &changes{st: State{Epoch: 1, Trust: pb.Trust_TRUST_EXACT}}
	stored := 0
	for i := range 32 {
		keys := make([]blockkey.Key, 40)
		for j := range keys {
			keys[j] = blockkey.Key(i*1000 + j + 1)
		}
		for l := range mirror.Lane(mirror.Lanes) {
			c.ops = append(c.ops, mirror.Op{Remove: i < 16, Lane: l, Keys: keys})
		}
		if i >= 16 {
			stored += len(keys)
		}
	}
	p, err := New(Config{Conn: connect(b, s.URL()), Pool: "test", Member: member, CacheState: c})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		p.mu.Lock()
		p.drainLocked()
		p.mu.Unlock()
	}
	b.ReportMetric(float64(stored)*float64(b.N)/b.Elapsed().Seconds(), "stored/s")
}

// BenchmarkSnapshot measures the encoding of 100,000 blocks in 2,000 runs.
func BenchmarkSnapshot(b *testing.B) {
	var ops []mirror.Op
	for i := range 2000 {
		keys := make([]blockkey.Key, 50)
		for j := range keys {
			keys[j] = blockkey.Key(i*1000 + j + 1)
		}
		for l := range mirror.Lane(mirror.Lanes) {
			ops = append(ops, mirror.Op{Lane: mirror.LaneDisk - l, Keys: keys})
		}
	}
	st := State{Epoch: 1, Trust: pb.Trust_TRUST_EXACT}
	b.ReportAllocs()
	for b.Loop() {
		e := newEncoder(member)
		for part := range e.parts(ops, st, protocol.MaxMessage) {
			if _, err := e.chunk(part, st, 1); err != nil {
				b.Fatal(err)
			}
		}
	}
}
