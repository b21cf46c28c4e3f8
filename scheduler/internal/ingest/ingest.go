// Package ingest is the scheduler's end of the bus: it follows every member
// of a pool and keeps index and fleet true to what their agents say. The rules
// are those of package protocol; the answer to every doubt is the same: forget
// the member's blocks and ask for a snapshot. What the blocks are good for it
// leaves to others.
package ingest

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

const (
	// pending bounds the messages that NATS holds for us. They are moved to
	// the workers' queues by a goroutine that never waits, so it fills up only
	// when the process gets no processor; NATS drops then, and the gap shows.
	pending = 4096
	// largeIndex is an index beside which garbage is kept to garbageShare percent
	// of the memory in use.
	largeIndex   = 32 << 20
	garbageShare = 25
	// sweepEvery is how often silent members are looked for.
	sweepEvery = 250 * time.Millisecond
	// probeEvery is how often the server is asked for an answer, probeWait how
	// long one may take.
	probeEvery = 250 * time.Millisecond
	probeWait  = time.Second
	// maxTrace bounds the trace context of a delta in bytes.
	maxTrace = 64
	// settle is how long after the connection members may announce
	// themselves before nobody is taken for everybody.
	settle = 1500 * time.Millisecond
)

// Config of an Ingest. Zero values stand for the defaults named.
type Config struct {
	Conn  *nats.Conn
	Pool  string
	Index *index.Index
	Fleet *fleet.Fleet
	// Name and Release of this scheduler, for the people behind agents.
	Name, Release string
	// Admit says why a member may not be one, by what it announces; it is asked
	// at every heartbeat. Nil: all may.
	Admit func(*fleet.Info) error
	// Withdrawn says why a member is to be picked only where no other can be; it is
	// asked like Admit, and both again after Review. Nil: none is.
	Withdrawn func(*fleet.Info) fleet.Withdrawal
	// Warn says what is wrong with a member beside its cache state, for its agent to
	// be told; empty: nothing. Nil: never anything.
	Warn func(name string) string
	// Lag is told how long events took from the engine's stamp on them to the index;
	// nil: nobody is.
	Lag func(time.Duration)
	// Log of changes of state; nil: nowhere.
	Log *slog.Logger
	// Snapshots awaited at a time; 8: more only cost memory, the processors are
	// busy with fewer.
	Snapshots int
	// Workers share the members among them; one a processor, at most 4.
	Workers int
	// Wait is how long, from the connection on, to be not ready for members that
	// are out of step; 10 s.
	Wait time.Duration
	// Deaf tells that NATS does not let this connection hear the members; nil: it
	// does.
	Deaf func() bool
}

// Ingest follows the members of one pool.
type Ingest struct {
	cfg      Config
	subjects protocol.Subjects
	sender   uint64 // one incarnation of this scheduler, in verdicts
	inbox    string // snapshots arrive on <inbox>.<member>.<attempt>
	seed     maphash.Seed
	workers  []*worker
	count    counters
	inFlight atomic.Int64 // snapshots awaited
	// reconnects counts up each time the connection came back.
	reconnects atomic.Uint64

	started   atomic.Bool
	connected atomic.Pointer[time.Time] // since when; nil: not connected
	answered  atomic.Pointer[time.Time] // when the server was asked what it answered last
	ready     atomic.Bool

	tidying bool // watch's, like garbage
	garbage int  // percent, before

	subscriptions atomic.Pointer[[]*nats.Subscription]
}

// New checks the configuration.
func New(cfg Config) (*Ingest, error) {
	if cfg.Conn == nil || cfg.Index == nil || cfg.Fleet == nil {
		return nil, errors.New("ingest: connection, index and fleet are needed")
	}
	subjects, err := protocol.NewSubjects(cfg.Pool)
	if err != nil {
		return nil, fmt.Errorf("ingest: %w", err)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Snapshots <= 0 {
		cfg.Snapshots = 8
	}
	if cfg.Workers <= 0 {
		cfg.Workers = min(runtime.GOMAXPROCS(0), 4)
	}
	if cfg.Wait <= 0 {
		cfg.Wait = 10 * time.Second
	}
	in := &Ingest{cfg: cfg, subjects: subjects, sender: max(1, rand.Uint64()), inbox: cfg.Conn.NewInbox(), seed: maphash.MakeSeed()}
	for range cfg.Workers {
		in.workers = append(in.workers, newWorker(in))
	}
	return in, nil
}

// Run follows the pool until ctx is done. It may be called once.
func (in *Ingest) Run(ctx context.Context) error {
	if !in.started.CompareAndSwap(false, true) {
		return errors.New("ingest: Run called twice")
	}
	status := in.cfg.Conn.StatusChanged(nats.CONNECTED, nats.DISCONNECTED, nats.RECONNECTING)
	defer in.cfg.Conn.RemoveStatusListener(status)
	in.link(in.cfg.Conn.IsConnected())

	messages := make(chan *nats.Msg, pending)
	unsubscribe, err := in.subscribe(messages)
	if err != nil {
		return err
	}
	defer unsubscribe()
	g, ctx := errgroup.WithContext(ctx)
	for _, w := range in.workers {
		g.Go(func() error { w.run(ctx); return nil })
	}
	g.Go(func() error { in.watch(ctx, status); return nil })
	g.Go(func() error { in.dispatch(ctx, messages); return nil })
	g.Go(func() error { in.probe(ctx); return nil })
	return g.Wait()
}

// subscribe lets all messages come through one channel, which keeps a member's
// deltas, heartbeats and answers in the order of the connection.
func (in *Ingest) subscribe(messages chan *nats.Msg) (end func(), err error) {
	var subscriptions []*nats.Subscription
	end = func() {
		for _, s := range subscriptions {
			if err := s.Unsubscribe(); err != nil {
				in.cfg.Log.Debug("unsubscribe", "subject", s.Subject, "error", err)
			}
		}
	}
	for _, subject := range []string{in.inbox + ".*.*", in.subjects.Blocks(protocol.Any), in.subjects.Load(protocol.Any)} {
		s, err := in.cfg.Conn.ChanSubscribe(subject, messages)
		if err != nil {
			end()
			return nil, fmt.Errorf("subscribe to %s: %w", subject, err)
		}
		subscriptions = append(subscriptions, s)
	}
	in.subscriptions.Store(&subscriptions)
	return end, nil
}

// Ready tells whether every member that announced itself has a cache state, or
// the wait for that is over. Both count from the connection on: without one, and
// while NATS keeps the members' messages from us, nothing is known of anybody; that
// it does so has come when it answers.
// Once ready, it stays so, also when the connection is lost.
func (in *Ingest) Ready() bool {
	if in.ready.Load() {
		return true
	}
	since, answered := in.connected.Load(), in.answered.Load()
	if since == nil || answered == nil || answered.Before(*since) || in.cfg.Deaf != nil && in.cfg.Deaf() {
		return false
	}
	up := time.Since(*since)
	if up >= in.cfg.Wait || up >= settle && in.count.syncing.Load() == 0 {
		in.ready.Store(true)
		return true
	}
	return false
}

// Connected tells whether agents can be heard at present.
func (in *Ingest) Connected() bool { return in.connected.Load() != nil }

// link notes that the connection is there, or is not.
func (in *Ingest) link(up bool) {
	now := time.Now()
	in.cfg.Fleet.Link(up, now)
	switch {
	case !up:
		in.connected.Store(nil)
	case in.connected.Load() == nil:
		in.connected.Store(&now)
	}
}

// dispatch puts every message into its member's queue. It never waits.
func (in *Ingest) dispatch(ctx context.Context, messages <-chan *nats.Msg) {
	for {
		select {
		case <-ctx.Done():
			return
		case m := <-messages:
			it, err := in.itemOf(m)
			if err != nil {
				if name, ok := in.subjects.Speaker(m.Subject); ok {
					in.enqueue(item{kind: isNameless, name: name, why: err.Error()})
				} else {
					in.count.malformed.Add(1)
				}
				continue
			}
			in.enqueue(it)
		}
	}
}

func (in *Ingest) itemOf(m *nats.Msg) (item, error) {
	if rest, ok := strings.CutPrefix(m.Subject, in.inbox+"."); ok {
		name, number, _ := strings.Cut(rest, ".")
		attempt, err := strconv.ParseUint(number, 10, 64)
		if err != nil {
			return item{}, fmt.Errorf("subject %.80q: %w", m.Subject, err)
		}
		if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
			return item{kind: isRefusal, name: name, attempt: attempt}, nil
		}
		return item{kind: isChunk, name: name, attempt: attempt, data: m.Data}, nil
	}
	kind, name, err := in.subjects.Parse(m.Subject)
	if err != nil {
		return item{}, err
	}
	if kind == protocol.Load {
		return item{kind: isHeartbeat, name: name, data: m.Data}, nil
	}
	it := item{kind: isDelta, name: name, data: m.Data}
	if len(m.Header) > 0 {
		it.trace = traceOf(m.Header)
	}
	return it, nil
}

// traceOf is the context of the span that a delta was sent in; empty: none.
func traceOf(h nats.Header) string {
	if t := h.Get("Traceparent"); len(t) <= maxTrace {
		return t
	}
	return ""
}

func (in *Ingest) enqueue(it item) {
	w := in.workers[maphash.String(in.seed, it.name)%uint64(len(in.workers))]
	if !w.put(it) {
		in.count.dropped.Add(1)
	}
}

// ask sends a snapshot request.
func (in *Ingest) ask(name string, attempt uint64) error {
	data, err := proto.Marshal(&pb.SnapshotRequest{Version: protocol.Version, Member: name})
	if err != nil {
		return err
	}
	reply := in.inbox + "." + name + "." + strconv.FormatUint(attempt, 10)
	return in.cfg.Conn.PublishRequest(in.subjects.Snapshot(name), reply, data)
}

// tidy lets garbage grow to a quarter of the memory in use beside a large index,
// not to as much again: the index has no pointers, so a collection beside it is
// cheap, and what it would wait for is as large as the index. Beside a small one, or
// where somebody asked for less, the share stays as it was.
func (in *Ingest) tidy() {
	switch size := in.cfg.Index.Stats().Bytes; {
	case size >= largeIndex && !in.tidying:
		in.tidying = true
		if in.garbage = debug.SetGCPercent(garbageShare); in.garbage < garbageShare { // off is less than 0
			debug.SetGCPercent(in.garbage)
		}
	case size < largeIndex/2 && in.tidying:
		in.untidy()
	}
}

// untidy gives the share of garbage back as it was found.
func (in *Ingest) untidy() {
	if in.tidying {
		in.tidying = false
		debug.SetGCPercent(in.garbage)
	}
}

// probe asks the server for an answer again and again. What it sent before that
// has come, too: so the fleet can tell members that are silent from a connection
// that carries nothing.
func (in *Ingest) probe(ctx context.Context) {
	again := time.NewTicker(probeEvery)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case asked := <-again.C:
			bounded, cancel := context.WithTimeout(ctx, probeWait)
			if in.cfg.Conn.FlushWithContext(bounded) == nil {
				in.cfg.Fleet.Answered(asked)
				in.answered.Store(&asked)
			}
			cancel()
		}
	}
}

// Review has Admit and Withdrawn asked about every member, soon. What they say has
// changed.
func (in *Ingest) Review() {
	for _, w := range in.workers {
		select {
		case w.review <- struct{}{}:
		default: // it has not begun with the last one
		}
	}
}

// watch looks after the connection and sweeps the fleet.
func (in *Ingest) watch(ctx context.Context, status <-chan nats.Status) {
	sweep := time.NewTicker(sweepEvery)
	defer sweep.Stop()
	defer in.untidy()
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-status:
			if s == nats.CONNECTED {
				in.reconnects.Add(1)
			}
			in.link(s == nats.CONNECTED)
		case now := <-sweep.C:
			in.tidy()
			for _, id := range in.cfg.Fleet.Sweep(now) {
				if m := in.cfg.Fleet.View().Member(id); m != nil {
					in.enqueue(item{kind: isSilence, name: m.Info.Name, at: now})
				}
			}
		}
	}
}
