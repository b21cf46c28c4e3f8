// Package publish is the agent's end of the bus: it numbers and sends what
// changed in one rank's cache state, says regularly what the cache state must look
// like, answers who asks for the whole of it, and remembers what schedulers make
// of it. The rules are those of package protocol. What the cache state is, and what the engine said, it leaves
// to the Cache state that it is given.
package publish

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
)

// CacheState is the truth about one rank. It is safe for concurrent use; Drain
// and Snapshot are never called at the same time.
type CacheState interface {
	// Drain appends the changes since the last call and says what they lead
	// to. When the epoch differs from the last call's, the changes are the
	// whole cache state of the new epoch. Keys need live until the next Drain.
	Drain(ops []mirror.Op) ([]mirror.Op, State)
	// Snapshot is the whole cache state as of the last Drain, parents first. The
	// keys are the caller's.
	Snapshot() ([]mirror.Op, State)
	// Heartbeat describes the member and its load; the load may be nil.
	Heartbeat() (*pb.MemberInfo, *pb.Load)
}

// State is what a cache state amounts to.
type State struct {
	// Epoch 0: no incarnation was seen yet, and nothing is sent.
	Epoch         uint64
	Trust         pb.Trust
	Reason        string // when Trust is not EXACT
	Lanes         protocol.Held
	Rule          *pb.HitRule // nil: hits end at any block; not changed any more
	EngineBatches uint64
	// EventTime is the engine's time stamp of the oldest live batch since the last
	// Drain; zero: there was none.
	EventTime time.Time
}

// Config of a Publisher. Zero durations stand for the defaults named.
type Config struct {
	// Conn must not buffer while it is disconnected: nats.ReconnectBufSize(-1).
	Conn       *nats.Conn
	Pool       string
	Member     string
	CacheState CacheState
	// Release of this program, which schedulers are told.
	Release string
	// Tick is the least time between two deltas; 1 ms.
	Tick time.Duration
	// HeartbeatEvery is the most time between two heartbeats;
	// protocol.HeartbeatEvery.
	HeartbeatEvery time.Duration
	// Log of what happens to the connection; nil: nowhere.
	Log *slog.Logger
	// Sent is told of each delta before it goes, and may add headers to it; nil:
	// nobody is, and deltas have none.
	Sent func(epoch, sequence uint64, keys int, header nats.Header)
}

// Stats counts what happened since New.
type Stats struct {
	Deltas, Changes, Keys, Bytes uint64
	// Dropped changes of the cache state: the connection was down, or refused them.
	Dropped    uint64
	Heartbeats uint64
	// Snapshots answered and their chunks; Refused requests were malformed,
	// repeated, one too many, or not a scheduler's.
	Snapshots, Chunks, Refused uint64
	// Errors of the connection when sending.
	Errors uint64
	// Unreadable verdicts, or from more schedulers than are remembered.
	Unreadable uint64
}

// Publisher sends one rank's cache state.
type Publisher struct {
	cfg      Config
	blocks   string
	load     string
	ask      string
	verdicts string
	wake     chan struct{}
	queries  *queries
	received *verdicts
	started  atomic.Bool

	mu        sync.Mutex // guards what follows: a sequence and its cache state belong together
	ops       []mirror.Op
	encoder   *encoder
	epoch     uint64 // 0: nothing drained yet
	sequence  uint64 // of the last delta of the epoch, sent or dropped
	batches   uint64 // of the engine, that it stands on
	beat      beat
	connected bool // when last looked at
	stats     Stats
}

// New checks the configuration.
func New(cfg Config) (*Publisher, error) {
	if cfg.Conn == nil || cfg.CacheState == nil {
		return nil, errors.New("publish: no connection or no cache state")
	}
	if cfg.Conn.Opts.ReconnectBufSize >= 0 {
		return nil, errors.New("publish: the connection would keep stale messages; open it with nats.ReconnectBufSize(-1)")
	}
	subjects, err := protocol.NewSubjects(cfg.Pool)
	if err != nil {
		return nil, fmt.Errorf("publish: %w", err)
	}
	if err := protocol.CheckMember(cfg.Member); err != nil {
		return nil, fmt.Errorf("publish: %w", err)
	}
	if cfg.Tick <= 0 {
		cfg.Tick = time.Millisecond
	}
	if cfg.HeartbeatEvery <= 0 {
		cfg.HeartbeatEvery = protocol.HeartbeatEvery
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Publisher{
		cfg:      cfg,
		blocks:   subjects.Blocks(cfg.Member),
		load:     subjects.Load(cfg.Member),
		ask:      subjects.Snapshot(cfg.Member),
		verdicts: subjects.Verdict(cfg.Member),
		wake:     make(chan struct{}, 1),
		queries:  newQueries(subjects.Inbox() + "."),
		received: newVerdicts(cfg.Log, cfg.Release, time.Now()),
		encoder:  newEncoder(cfg.Member),
	}, nil
}

// Wake says that something changed: it is published at once, or a tick after
// what was published last. It never blocks.
func (p *Publisher) Wake() {
	select {
	case p.wake <- struct{}{}:
	default: // a wake-up is waiting already
	}
}

// Stats returns the counts.
func (p *Publisher) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	st := p.stats
	st.Snapshots = p.queries.answered.Load()
	st.Chunks = p.queries.chunks.Load()
	st.Refused = p.queries.refused.Load()
	st.Errors += p.queries.errors.Load()
	st.Unreadable = p.received.refused.Load()
	return st
}

// Opinions are what the schedulers that answer make of the member.
func (p *Publisher) Opinions() []Opinion { return p.received.list() }

// Run publishes until ctx is done, and says goodbye then. It may be called once.
func (p *Publisher) Run(ctx context.Context) error {
	if p.started.Swap(true) {
		return errors.New("publish: Run called twice")
	}
	status := p.cfg.Conn.StatusChanged(nats.CONNECTED, nats.DISCONNECTED, nats.RECONNECTING, nats.CLOSED)
	defer p.cfg.Conn.RemoveStatusListener(status)

	// Requests wait from here on, so that nobody who gets the first heartbeat
	// finds nobody to ask; they are answered after it.
	subscription, err := p.cfg.Conn.Subscribe(p.ask, p.queries.ask(p.cfg.Member))
	if err != nil {
		return fmt.Errorf("subscribe to %s: %w", p.ask, err)
	}
	if err := subscription.SetPendingLimits(4*maxQueries, protocol.MaxMessage); err != nil {
		return fmt.Errorf("limit %s: %w", p.ask, err)
	}
	verdicts, err := p.cfg.Conn.Subscribe(p.verdicts, p.received.receive(p.cfg.Member))
	if err != nil {
		return fmt.Errorf("subscribe to %s: %w", p.verdicts, err)
	}
	if err := verdicts.SetPendingLimits(4*maxSchedulers, protocol.MaxMessage); err != nil {
		return fmt.Errorf("limit %s: %w", p.verdicts, err)
	}
	p.beatNow()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { p.tick(ctx, status); return nil })
	g.Go(func() error { p.answer(ctx); return nil })
	err = g.Wait()
	for _, s := range []*nats.Subscription{subscription, verdicts} {
		if e := s.Unsubscribe(); e != nil && p.cfg.Conn.IsConnected() {
			p.cfg.Log.Debug("unsubscribe", "subject", s.Subject, "error", e)
		}
	}
	p.goodbye()
	return err
}

// tick owns the rhythm: deltas when woken, heartbeats when due.
func (p *Publisher) tick(ctx context.Context, status <-chan nats.Status) {
	heartbeat := time.NewTimer(p.cfg.HeartbeatEvery)
	defer heartbeat.Stop()
	pause := time.NewTimer(0)
	<-pause.C
	defer pause.Stop()
	wake := (<-chan struct{})(p.wake) // nil during the pause
	for {
		select {
		case <-ctx.Done():
			return
		case <-wake:
			p.publish()
			wake = nil
			pause.Reset(p.cfg.Tick)
			continue
		case <-pause.C:
			wake = p.wake
			continue
		case now := <-heartbeat.C:
			p.beatNow()
			p.received.expire(now)
		case <-status:
			p.beatNow()
		}
		heartbeat.Reset(p.cfg.HeartbeatEvery)
	}
}

// sendLocked sends the delta of the present sequence.
func (p *Publisher) sendLocked(data []byte, keys int) error {
	if p.cfg.Sent == nil {
		return p.cfg.Conn.Publish(p.blocks, data)
	}
	m := nats.NewMsg(p.blocks)
	m.Data = data
	p.cfg.Sent(p.epoch, p.sequence, keys, m.Header)
	if len(m.Header) == 0 {
		return p.cfg.Conn.Publish(p.blocks, data)
	}
	return p.cfg.Conn.PublishMsg(m)
}

// publish sends what changed, and a heartbeat where that cannot wait.
func (p *Publisher) publish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	st := p.drainLocked()
	if p.beat.due(st, time.Now(), p.cfg.CacheState) {
		p.heartbeatLocked(st)
	}
}

// beatNow sends what changed and then a heartbeat.
func (p *Publisher) beatNow() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.heartbeatLocked(p.drainLocked())
}

// drainLocked publishes what changed in the cache state.
func (p *Publisher) drainLocked() State {
	var st State
	p.ops, st = p.cfg.CacheState.Drain(p.ops[:0])
	connected := p.cfg.Conn.IsConnected()
	if connected != p.connected {
		p.connected = connected
		p.beat.forget() // nobody may have got the last one
	}
	if st.Epoch == 0 {
		return st // no incarnation was seen yet: there is nothing to speak of
	}
	if st.Epoch != p.epoch {
		p.epoch, p.sequence = st.Epoch, 0
		// The new incarnation is announced before its first delta, so that whoever
		// listens can begin with the empty cache state and need not ask.
		empty := State{Epoch: st.Epoch, Trust: st.Trust, Reason: st.Reason}
		if len(p.ops) > 0 && st.Trust == pb.Trust_TRUST_EXACT {
			empty.Trust, empty.Reason = pb.Trust_TRUST_SYNCING, "new epoch"
		}
		p.batches = 0
		p.heartbeatLocked(empty)
	}
	// Batches that changed nothing are published, too: the cache state stands on them.
	if len(p.ops) == 0 && (!connected || st.EngineBatches == p.batches) {
		return st
	}
	p.batches = st.EngineBatches
	if !connected {
		p.sequence++ // what nobody can get must leave a gap
		p.stats.Dropped++
		return st
	}
	for part := range p.encoder.parts(p.ops, st, p.limit()) {
		p.sequence++
		data, err := p.encoder.delta(part, st, p.sequence)
		if err == nil {
			err = p.sendLocked(data, part.keys)
		}
		if err != nil {
			// The rest is not sent: the gap is there, and more of the same
			// would only be thrown away by those who see it.
			p.sequence++
			p.stats.Dropped++
			p.failedLocked("publish delta", err)
			break
		}
		p.stats.Deltas++
		p.stats.Changes += uint64(len(part.changes))
		p.stats.Keys += uint64(part.keys)
		p.stats.Bytes += uint64(len(data))
	}
	if cap(p.ops) > keepOps {
		p.ops = nil
	}
	return st
}

// limit is how large a message may be. The server counts its headers too.
func (p *Publisher) limit() int {
	n := p.cfg.Conn.MaxPayload()
	if p.cfg.Sent != nil {
		n -= maxHeader
	}
	if n > 0 && n < protocol.MaxMessage {
		return int(n)
	}
	return protocol.MaxMessage
}

// heartbeatLocked says what the cache state at the last sequence must look like.
func (p *Publisher) heartbeatLocked(st State) {
	if st.Epoch == 0 {
		return
	}
	info, load := p.cfg.CacheState.Heartbeat()
	p.beat.sent(st, info, load, time.Now())
	if !p.cfg.Conn.IsConnected() {
		return
	}
	data, err := p.encoder.heartbeat(&pb.Heartbeat{
		Info: info, Load: load,
		Trust: st.Trust, Reason: st.Reason,
		EngineBatches: st.EngineBatches,
		IntervalMs:    uint32(p.cfg.HeartbeatEvery.Milliseconds()),
		Release:       p.cfg.Release,
	}, st, p.sequence)
	if err == nil {
		err = p.cfg.Conn.Publish(p.load, data)
	}
	if err != nil {
		p.failedLocked("publish heartbeat", err)
		return
	}
	p.stats.Heartbeats++
	p.stats.Bytes += uint64(len(data))
}

// goodbye tells schedulers to forget the member.
func (p *Publisher) goodbye() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.epoch == 0 || !p.cfg.Conn.IsConnected() {
		return
	}
	data, err := p.encoder.heartbeat(&pb.Heartbeat{Leaving: true}, State{Epoch: p.epoch}, p.sequence)
	if err == nil {
		err = p.cfg.Conn.Publish(p.load, data)
	}
	if err == nil {
		err = p.cfg.Conn.FlushTimeout(time.Second)
	}
	if err != nil {
		p.cfg.Log.Info("goodbye was not sent", "error", err)
	}
}

func (p *Publisher) failedLocked(what string, err error) {
	p.stats.Errors++
	if p.cfg.Conn.IsConnected() {
		p.cfg.Log.Warn(what, "subject", p.blocks, "error", err)
	}
}
