package vllm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/kvscout/kvscout/agent/internal/zmtp"
)

// Trust is how far the events that a Tail has handed on make a whole picture.
type Trust uint8

const (
	Syncing     Trust = iota // not known whether it still holds
	Approximate              // events are missing; what is believed held is held
	Exact
)

// Mark is how far one life of an engine was followed: enough to go on from there
// in another process, and to tell whether it still is that life.
type Mark struct {
	Sequence uint64 // of the newest batch applied
	Digest   uint64 // of its payload
	Whole    bool   // with it, every event that counts was applied
	Offloads bool   // tiers below the GPU were seen, which no event clears
}

// Sink takes what a Tail finds out. All calls come from one goroutine, in
// order: a batch counts for the life that began with the last NewLife.
type Sink interface {
	// NewLife says that all that was known is void.
	NewLife(reason string)
	// Resume says that the engine is in the life of TailConfig.Known: what was
	// known at that mark holds, and what follows will be applied. It is called
	// at most once, before the first Apply.
	Resume()
	// Apply hands over a batch; its slices are only lent.
	Apply(at Mark, b Batch)
	// State says what the picture is worth from here on.
	State(t Trust, reason string)
}

// TailConfig says which stream to follow. Log and Sink are required.
type TailConfig struct {
	Endpoint string // of the events
	Replay   string // of the replay socket; empty: the engine has none
	Bind     bool   // listen on Endpoint, for engines that connect
	Topic    string // prefix to subscribe to; empty: everything
	// Known is where another process left off; nil: nothing is known. It counts
	// once the engine has proved to be in that life, by Sink.Resume; otherwise
	// Sink.NewLife is called.
	Known *Mark
	Sink  Sink
	Log   *slog.Logger
}

// TailStats counts what a Tail has seen.
type TailStats struct {
	Batches      uint64 // applied
	Replayed     uint64 // of these, from the replay socket
	Connections  uint64
	Gaps         uint64 // holes in the live stream
	LostBatches  uint64 // never to be had
	Replays      uint64 // requests sent
	NewLives     uint64
	Malformed    uint64 // messages without sequence or payload
	Undecodable  uint64 // batches
	Sequence     uint64 // of the newest applied batch
	AnySequence  bool
	Connected    bool
	EngineSecond float64 // wall clock of the engine in the newest batch
	Skips        Skips
}

// Tail follows the events of one rank of one engine: it keeps the sequence
// whole by replaying what is missing, and notices when another life of the
// engine has begun. After any lost connection the picture is in doubt until
// the engine has proved, by replaying the newest known batch, that it still is
// the one that sent it.
type Tail struct {
	cfg     TailConfig
	opt     zmtp.Options
	restart chan string
	at      atomic.Pointer[address]

	// Owned by the goroutine of Run.
	dec      Decoder
	want     uint64 // next sequence to apply
	last     uint64 // newest sequence taken in this life, when any
	any      bool
	dirty    bool // the sink may hold blocks
	whole    bool // the sink has had every event that counts
	blind    bool // not known whether the engine sent anything before we came
	born     bool // the engine's socket was not there a moment before the present connection
	offloads bool // tiers below the GPU, which no event clears
	unproven bool // all that is known is cfg.Known, and the engine was not asked yet
	sums     [sumsKept]sum
	trust    Trust
	reason   string

	mu    sync.Mutex // guards stats
	stats TailStats
}

// address is where a stream is at present.
type address struct{ events, replay string }

// sumsKept is how many payload digests a Tail remembers.
const sumsKept = 1024

// sum is the digest of one payload. They tell two lives of an engine apart,
// because every batch carries its time.
type sum struct {
	sequence uint64
	digest   uint64
	set      bool
}

// Pace of a Tail.
const (
	redialEvery     = 50 * time.Millisecond // in the first seconds
	redialFast      = 10 * time.Second
	redialSlow      = 250 * time.Millisecond
	streamHeartbeat = 5 * time.Second
	// bornWithin is the time after a refused connection in which a new engine
	// cannot have served anything yet: from its sockets to its first request an
	// engine takes seconds. An agent that was stopped meanwhile knows nothing.
	bornWithin = 500 * time.Millisecond
)

// NewTail checks the endpoints.
func NewTail(cfg TailConfig) (*Tail, error) {
	_, err := zmtp.ParseEndpoint(cfg.Endpoint)
	if cfg.Replay != "" {
		_, replayErr := zmtp.ParseEndpoint(cfg.Replay)
		err = errors.Join(err, replayErr)
	}
	if err != nil {
		return nil, err
	}
	t := &Tail{
		cfg: cfg,
		opt: zmtp.Options{
			Type: zmtp.SUB, Topics: [][]byte{[]byte(cfg.Topic)}, MaxMessage: maxMessage,
			HandshakeTimeout: 2 * time.Second, Heartbeat: streamHeartbeat,
		},
		restart: make(chan string, 1),
		whole:   true,
	}
	if k := cfg.Known; k != nil {
		t.want, t.last, t.any, t.unproven = k.Sequence+1, k.Sequence, true, true
		t.whole, t.offloads = k.Whole, k.Offloads
		t.sums[k.Sequence%sumsKept] = sum{sequence: k.Sequence, digest: k.Digest, set: true}
	}
	t.at.Store(&address{events: cfg.Endpoint, replay: cfg.Replay})
	return t, nil
}

// Move makes the Tail go on elsewhere, with a new life.
func (t *Tail) Move(endpoint, replay string) {
	t.at.Store(&address{events: endpoint, replay: replay})
	t.Restart("the engine publishes elsewhere")
}

// Restart makes the Tail forget the engine's present life and begin it again
// from the start, as far as the engine can replay it.
func (t *Tail) Restart(reason string) {
	select {
	case t.restart <- reason:
	default: // one is under way
	}
}

// Stats may be called at any time.
func (t *Tail) Stats() TailStats {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stats
}

func (t *Tail) count(change func(*TailStats)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	change(&t.stats)
}

// Run follows the stream until ctx ends. An engine that is not there is waited
// for without end. The error is that of a Listener that cannot be opened.
func (t *Tail) Run(ctx context.Context) error {
	t.reason = "waiting for the engine's event stream"
	t.cfg.Sink.State(t.trust, t.reason)
	var listener *zmtp.Listener
	if t.cfg.Bind {
		var err error
		if listener, err = zmtp.Listen(ctx, t.cfg.Endpoint, t.opt); err != nil {
			return fmt.Errorf("events: %w", err)
		}
		defer listener.Close()
	}
	for {
		conn := t.connect(ctx, listener)
		if conn == nil {
			return nil // ctx ended
		}
		t.session(ctx, conn)
	}
}

// connect returns the next connection, or nil when ctx has ended.
func (t *Tail) connect(ctx context.Context, listener *zmtp.Listener) *zmtp.Conn {
	began := time.Now()
	logged := false
	t.born = false
	var refused time.Time // last
	for ctx.Err() == nil {
		conn, err := t.open(ctx, listener)
		if err == nil {
			t.born = youngAt(time.Now(), refused)
			return conn
		}
		// The socket lives as long as the engine's process: when nobody listens
		// on it, the life that we knew is over.
		refused = time.Time{}
		if gone(err) {
			refused = time.Now()
			if t.any {
				t.newLife("nobody listens on the engine's event socket")
			}
		}
		pause := redialEvery
		if time.Since(began) > redialFast {
			pause = redialSlow
		}
		if !logged {
			logged = true
			t.cfg.Log.Info("event stream is not there", "endpoint", t.at.Load().events, "error", err)
		}
		sleep(ctx, pause)
	}
	return nil
}

func (t *Tail) open(ctx context.Context, listener *zmtp.Listener) (*zmtp.Conn, error) {
	if listener == nil {
		return zmtp.Dial(ctx, t.at.Load().events, t.opt)
	}
	conn, err := listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	if err := conn.Handshake(ctx); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// youngAt tells whether an engine whose socket was not there at the time of
// refused, the last attempt, can have sent nothing by now.
func youngAt(now, refused time.Time) bool {
	return !refused.IsZero() && now.Sub(refused) < bornWithin
}

// gone says that a connection failed because the peer's socket does not exist.
func gone(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist)
}

// sleep waits for d, give or take a quarter.
func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d*3/4 + rand.N(d/2))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// session is the time of one connection.
type session struct {
	live *feed
	any  bool
	last uint64 // newest sequence seen on this connection
}

func (t *Tail) session(ctx context.Context, conn *zmtp.Conn) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &session{live: newFeed(ctx, conn)}
	defer func() {
		cancel()
		<-s.live.lost
		t.count(func(st *TailStats) { st.Connected = false })
		t.setState(Syncing, "connection to the engine's event stream lost")
	}()
	t.count(func(st *TailStats) { st.Connections++; st.Connected = true })
	t.cfg.Log.Info("event stream connected", "endpoint", t.at.Load().events)
	// A replay ends with the connection: what it says is then about to be void.
	replayCtx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-s.live.lost:
			stop()
		case <-replayCtx.Done():
		}
	}()
	if !t.begin(replayCtx) {
		return
	}
	t.follow(replayCtx, s)
	if ctx.Err() == nil {
		t.cfg.Log.Warn("event stream ended", "endpoint", t.at.Load().events, "error", s.live.err)
	}
}

// begin finds out whether the engine at the other end is the one that was
// known, and catches up with it. It is false when the connection has ended.
func (t *Tail) begin(ctx context.Context) bool {
	select {
	case why := <-t.restart:
		t.newLife(why)
	default:
	}
	if t.any {
		if why := t.compare(ctx); why != "" {
			if ctx.Err() != nil {
				return false // undecided: the next connection decides
			}
			t.newLife(why)
		}
	} else {
		t.want, t.whole = 0, true
	}
	t.blind = false
	if err := t.catchUp(ctx, 0); err != nil {
		if ctx.Err() != nil {
			return false
		}
		t.blind = !t.any && !t.born
	}
	t.settle()
	return true
}

// follow applies the live stream until it ends or a restart is asked for.
func (t *Tail) follow(ctx context.Context, s *session) {
	for {
		select {
		case m, ok := <-s.live.messages:
			if !ok {
				return
			}
			t.live(ctx, s, m.Frames)
			s.live.done(m)
			if ctx.Err() != nil {
				return
			}
		case why := <-t.restart:
			t.newLife(why)
			return
		case <-ctx.Done():
			return
		}
	}
}

// live takes one message of the stream: topic, sequence, payload.
func (t *Tail) live(ctx context.Context, s *session, frames [][]byte) {
	if len(frames) < 3 || len(frames[1]) != 8 {
		t.count(func(st *TailStats) { st.Malformed++ })
		return
	}
	sequence, payload := bigEndian(frames[1]), frames[2]
	if sequence == endMarker {
		t.count(func(st *TailStats) { st.Malformed++ })
		return
	}
	switch {
	case s.any && sequence <= s.last:
		// One connection keeps the order, so numbers fall only with a new life.
		t.newLife(fmt.Sprintf("sequence fell from %d to %d", s.last, sequence))
	case sequence < t.want && t.foreign(sequence, payload):
		t.newLife(fmt.Sprintf("batch %d differs from its replay", sequence))
	}
	s.any, s.last = true, sequence
	if sequence > t.want {
		t.fill(ctx, sequence)
	}
	if ctx.Err() != nil {
		return
	}
	if sequence >= t.want {
		t.apply(sequence, payload, false)
		t.blind = false
	}
	t.settle()
}

// fill closes the gap before head, or gives up what lies in it.
func (t *Tail) fill(ctx context.Context, head uint64) {
	if !t.blind {
		t.count(func(st *TailStats) { st.Gaps++ })
		t.cfg.Log.Warn("gap in the event stream", "from", t.want, "to", head-1)
	}
	if t.at.Load().replay != "" {
		t.setState(Syncing, fmt.Sprintf("replaying from batch %d", t.want))
	}
	if err := t.catchUp(ctx, head); ctx.Err() != nil {
		return
	} else if err != nil {
		t.cfg.Log.Warn("replay gave up", "from", t.want, "error", err)
	}
	if t.want < head {
		t.lose(head)
	}
}

// apply hands on the batch that is due.
func (t *Tail) apply(sequence uint64, payload []byte, replayed bool) {
	digest := xxhash.Sum64(payload)
	t.sums[sequence%sumsKept] = sum{sequence: sequence, digest: digest, set: true}
	t.last, t.any = sequence, true
	b, err := t.dec.Decode(payload)
	if err != nil {
		t.count(func(st *TailStats) { st.Undecodable++ })
		t.cfg.Log.Warn("batch cannot be read", "error", fmt.Errorf("decode batch %d: %w", sequence, err))
		t.lose(sequence + 1)
		return
	}
	for i := range b.Events {
		e := &b.Events[i]
		switch {
		case e.Kind == Stored && e.Store.Tier != GPU:
			t.offloads = true
		case e.Kind == Cleared && !t.offloads:
			t.whole = true
		}
	}
	t.want = sequence + 1
	t.dirty = t.dirty || len(b.Events) > 0
	t.cfg.Sink.Apply(Mark{Sequence: sequence, Digest: digest, Whole: t.whole, Offloads: t.offloads}, b)
	t.mu.Lock()
	t.stats.Batches++
	if replayed {
		t.stats.Replayed++
	}
	t.stats.Sequence, t.stats.AnySequence = sequence, true
	t.stats.EngineSecond = b.Time
	t.stats.Skips = t.dec.Skips
	t.mu.Unlock()
}

// foreign says that a batch is not the one that had this sequence before.
func (t *Tail) foreign(sequence uint64, payload []byte) bool {
	known := t.sums[sequence%sumsKept]
	return known.set && known.sequence == sequence && known.digest != xxhash.Sum64(payload)
}

// newLife forgets everything: the engine that follows starts at batch 0.
func (t *Tail) newLife(why string) {
	t.cfg.Log.Warn("new life of the engine", "why", why)
	t.count(func(st *TailStats) { st.NewLives++; st.Sequence, st.AnySequence = 0, false })
	t.want, t.last, t.any = 0, 0, false
	t.whole, t.offloads, t.dirty, t.unproven = true, false, false, false
	t.sums = [sumsKept]sum{}
	t.cfg.Sink.NewLife(why)
	t.setState(Syncing, why)
}

// confirm says that the life that is known goes on.
func (t *Tail) confirm() {
	if !t.unproven {
		return
	}
	t.unproven, t.dirty = false, true
	t.cfg.Log.Info("going on where another process left off", "batch", t.last)
	t.count(func(st *TailStats) { st.Sequence, st.AnySequence = t.last, true })
	t.cfg.Sink.Resume()
}

// lose gives up all batches before next. A removal may have been among them,
// so what is held is held no longer for sure: forget, and go on from next with
// a picture that lacks blocks but has none too many.
func (t *Tail) lose(next uint64) {
	lost := next - t.want
	why := fmt.Sprintf("batches %d to %d are lost", t.want, next-1)
	t.count(func(st *TailStats) { st.LostBatches += lost })
	if t.dirty {
		t.cfg.Log.Warn("events lost, forgetting the picture", "from", t.want, "to", next-1)
		t.cfg.Sink.NewLife(why)
		t.dirty = false
	}
	t.want, t.whole = next, false
}

// settle says what the picture is worth between two messages.
func (t *Tail) settle() {
	switch {
	case t.blind:
		t.setState(Approximate, "no replay: what the engine sent before the agent came is not known")
	case !t.whole:
		t.setState(Approximate, "older events are lost: blocks may be missing")
	default:
		t.setState(Exact, "")
	}
}

func (t *Tail) setState(trust Trust, reason string) {
	if trust == t.trust && reason == t.reason {
		return
	}
	t.trust, t.reason = trust, reason
	t.cfg.Sink.State(trust, reason)
}
