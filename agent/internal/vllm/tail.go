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

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/zmtp"
)

// Trust is how far the events that a Tail has handed on make a whole cache state.
type Trust uint8

const (
	Syncing     Trust = iota // not known whether it still holds
	Approximate              // events are missing; what is believed held is held
	Exact
	Unreadable // the engine sends what no known release sends: nothing of it is believed
)

// Mark is how far one incarnation of an engine was followed: enough to go on from there
// in another process, and to tell whether it still is that incarnation.
type Mark struct {
	Sequence uint64 // of the newest batch applied
	Digest   uint64 // of its payload
	Whole    bool   // with it, every event that counts was applied
	Offloads bool   // tiers below the GPU were seen, which no event clears
	Live     bool   `json:"-"` // it came as it was published, and was not replayed
}

// Sink takes what a Tail finds out. All calls come from one goroutine, in
// order: a batch counts for the incarnation that began with the last NewLife.
type Sink interface {
	// NewIncarnation says that all that was known is void.
	NewIncarnation(reason string)
	// Resume says that the engine is in the incarnation of TailConfig.Known: what was
	// known at that mark holds, and what follows will be applied. It is called
	// at most once, before the first Apply.
	Resume()
	// Apply hands over a batch; its slices are only lent.
	Apply(at Mark, b Batch)
	// State says what the cache state is worth from here on.
	State(t Trust, reason string)
}

// TailConfig says which stream to follow. Log and Sink are required.
type TailConfig struct {
	Endpoint string // of the events; empty: nowhere, until Move says where
	Replay   string // of the replay socket; empty: the engine has none
	Bind     bool   // listen on Endpoint, for engines that connect
	Topic    string // prefix to subscribe to; empty: everything
	// Known is where another process left off; nil: nothing is known. It counts
	// once the engine has verified to be in that incarnation, by Sink.Resume; otherwise
	// Sink.NewIncarnation is called.
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
	Incarnations uint64
	Malformed    uint64 // messages without sequence or payload
	HungUp       uint64 // peers of a Tail that listens, for others that came
	Undecodable  uint64 // batches
	// UnknownShapes are those of the Undecodable that are well-formed.
	UnknownShapes uint64
	Sequence      uint64 // of the newest applied batch
	AnySequence   bool
	Connected     bool
	EngineSecond  float64 // wall clock of the engine in the newest batch
	Skips         Skips
}

// Tail follows the events of one rank of one engine: it keeps the sequence
// whole by replaying what is missing, and notices when another incarnation of the
// engine has begun. After any lost connection the cache state is suspected until
// the engine has verified, by replaying the newest known batch, that it still is
// the one that sent it.
type Tail struct {
	cfg     TailConfig
	opt     zmtp.Options
	restart chan string
	peers   *peers // of a Tail that listens
	at      atomic.Pointer[address]

	// Owned by the goroutine of Run.
	dec        Decoder
	want       uint64 // next sequence to apply
	last       uint64 // newest sequence taken in this incarnation, when any
	any        bool
	met        bool   // the engine of this incarnation was connected to
	dirty      bool   // the sink may hold blocks
	whole      bool   // the sink has had every event that counts
	blind      bool   // not known whether the engine sent anything before we came
	born       bool   // the engine's socket was not there a moment before the present connection
	offloads   bool   // tiers below the GPU, which no event clears
	unread     string // why a batch of this incarnation could not be read; empty: all could
	unverified bool   // all that is known is cfg.Known, and the engine was not asked yet
	sums       [sumsKept]sum
	trust      Trust
	reason     string

	mu    sync.Mutex // guards stats
	stats TailStats
}

// address is where a stream is at present.
type address struct{ events, replay string }

// sumsKept is how many payload digests a Tail remembers.
const sumsKept = 1024

// sum is the digest of one payload. They tell two incarnations of an engine apart,
// because every batch carries its time.
type sum struct {
	sequence uint64
	digest   uint64
	set      bool
}

// Pace of a Tail.
const (
	redialEvery = 50 * time.Millisecond // in the first seconds
	redialFast  = 10 * time.Second
	redialSlow  = 250 * time.Millisecond
	// relistenEvery is how often an address that is taken is tried.
	relistenEvery = time.Second
	// bornWithin is the time after a refused connection in which a new engine
	// cannot have served anything yet: from its sockets to its first request an
	// engine takes seconds. An agent that was stopped meanwhile knows nothing.
	bornWithin = 500 * time.Millisecond
)

// NewTail checks the endpoints.
func NewTail(cfg TailConfig) (*Tail, error) {
	var err error
	if cfg.Endpoint != "" {
		_, err = zmtp.ParseEndpoint(cfg.Endpoint)
	}
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
			MaxPeers: maxPeers + 1, HandshakeTimeout: 2 * time.Second, Heartbeat: pingAfter, HeartbeatTimeout: deadAfter,
		},
		restart: make(chan string, 1),
		whole:   true,
	}
	if k := cfg.Known; k != nil {
		t.want, t.last, t.any, t.unverified = k.Sequence+1, k.Sequence, true, true
		t.whole, t.offloads = k.Whole, k.Offloads
		t.sums[k.Sequence%sumsKept] = sum{sequence: k.Sequence, digest: k.Digest, set: true}
	}
	t.at.Store(&address{events: cfg.Endpoint, replay: cfg.Replay})
	return t, nil
}

// Move makes the Tail go on elsewhere, with a new incarnation.
func (t *Tail) Move(endpoint, replay string) {
	t.at.Store(&address{events: endpoint, replay: replay})
	t.Restart("the engine publishes elsewhere")
}

// Restart makes the Tail forget the engine's present incarnation and begin it again
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
// for without end, and so is the address to listen on.
func (t *Tail) Run(ctx context.Context) {
	t.reason = "waiting for the engine's event stream"
	t.cfg.Sink.State(t.trust, t.reason)
	connect := t.connect
	if t.cfg.Bind {
		listener := t.listen(ctx)
		if listener == nil {
			return // ctx ended
		}
		t.peers = newPeers(ctx, listener, t)
		defer t.peers.close()
		connect = t.peers.next
	}
	for {
		live := connect(ctx)
		if live == nil {
			return // ctx ended
		}
		t.session(ctx, live)
	}
}

// listen opens the address that the engine connects to, or returns nil when ctx
// has ended.
func (t *Tail) listen(ctx context.Context) *zmtp.Listener {
	for ctx.Err() == nil {
		listener, err := zmtp.Listen(ctx, t.cfg.Endpoint, t.opt)
		if err == nil {
			return listener
		}
		reason := fmt.Sprintf("cannot listen for events: %v", err)
		if reason != t.reason {
			t.cfg.Log.Error("cannot listen for events", "endpoint", t.cfg.Endpoint, "error", err)
		}
		t.setState(Syncing, reason)
		sleep(ctx, relistenEvery)
	}
	return nil
}

// connect returns the next connection, or nil when ctx has ended.
func (t *Tail) connect(ctx context.Context) *feed {
	began := time.Now()
	logged := false
	t.born = false
	var refused time.Time // last
	for ctx.Err() == nil {
		conn, err := zmtp.Dial(ctx, t.at.Load().events, t.opt)
		if err == nil {
			t.born = youngAt(time.Now(), refused)
			return newFeed(ctx, conn, nil)
		}
		// The socket lives as long as the engine's process: when nobody listens
		// on it, the incarnation that we knew is over.
		refused = time.Time{}
		if gone(err) {
			refused = time.Now()
			if t.any || t.met {
				t.newIncarnation("nobody listens on the engine's event socket")
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

// apply hands on the batch that is due.
func (t *Tail) apply(sequence uint64, payload []byte, replayed bool) {
	digest := xxhash.Sum64(payload)
	t.sums[sequence%sumsKept] = sum{sequence: sequence, digest: digest, set: true}
	t.last, t.any = sequence, true
	b, err := t.dec.Decode(payload)
	if err != nil {
		shape := errors.Is(err, ErrShape)
		if shape {
			t.unread = err.Error()
		}
		t.count(func(st *TailStats) {
			st.Undecodable++
			if shape {
				st.UnknownShapes++
			}
		})
		t.cfg.Log.Warn("batch cannot be read", "error", fmt.Errorf("decode batch %d: %w", sequence, err))
		t.lose(sequence + 1)
		return
	}
	for i := range b.Events {
		e := &b.Events[i]
		switch {
		case e.Kind == Stored && e.Store.Tier != mirror.GPU:
			t.offloads = true
		case e.Kind == Cleared && !t.offloads:
			t.whole = true
		}
	}
	t.want = sequence + 1
	t.dirty = t.dirty || len(b.Events) > 0
	t.cfg.Sink.Apply(Mark{Sequence: sequence, Digest: digest, Whole: t.whole, Offloads: t.offloads, Live: !replayed}, b)
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
func (t *Tail) newIncarnation(why string) {
	t.cfg.Log.Warn("new incarnation of the engine", "why", why)
	t.count(func(st *TailStats) { st.Incarnations++; st.Sequence, st.AnySequence = 0, false })
	t.want, t.last, t.any = 0, 0, false
	t.whole, t.offloads, t.dirty, t.unverified, t.met = true, false, false, false, false
	t.sums, t.unread = [sumsKept]sum{}, ""
	t.cfg.Sink.NewIncarnation(why)
	t.setState(Syncing, why)
}

// confirm says that the incarnation that is known goes on.
func (t *Tail) confirm() {
	if !t.unverified {
		return
	}
	t.unverified, t.dirty = false, true
	t.cfg.Log.Info("going on where another process left off", "batch", t.last)
	t.count(func(st *TailStats) { st.Sequence, st.AnySequence = t.last, true })
	t.cfg.Sink.Resume()
}

// lose gives up all batches before next.
func (t *Tail) lose(next uint64) {
	lost := next - t.want
	t.count(func(st *TailStats) { st.LostBatches += lost })
	why := fmt.Sprintf("batches %d to %d are lost", t.want, next-1)
	if lost == 0 {
		why = "the engine does not keep the last known batch any more"
	}
	t.forget(why)
	t.want = next
}

// forget follows from batches that are not known: a removal may have been among
// them, so what is held is held no longer for sure. What comes makes a cache state
// that lacks blocks but has none too many.
func (t *Tail) forget(why string) {
	if t.dirty {
		t.cfg.Log.Warn("events lost, forgetting the cache state", "why", why)
		t.cfg.Sink.NewIncarnation(why)
		t.dirty = false
	}
	t.whole = false
}

// settle says what the cache state is worth between two messages.
func (t *Tail) settle() {
	switch {
	case len(t.restart) > 0:
		// The cache state is about to begin anew.
	case t.unread != "":
		t.setState(Unreadable, t.unread)
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
