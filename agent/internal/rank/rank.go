// Package rank follows one data-parallel rank of an engine: it applies the
// events of its stream to the mirror of its cache, says how far that can be
// believed, publishes it as a member of the fleet, and keeps it in a file for
// the next process. What only the engine's HTTP server can tell is handed in.
package rank

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/publish"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/pb"
)

const (
	// mirrorBlocks bounds the blocks that all ranks together remember, and
	// rankBlocks those of one. At the bound what the engine announces is dropped
	// and counted, and the rank calls itself APPROXIMATE.
	mirrorBlocks = 1 << 22
	rankBlocks   = 1 << 21
)

// Config of a rank.
type Config struct {
	Number   int
	Member   string
	Identity Identity
	Hits     HitRule
	Info     *pb.MemberInfo
	// Emptied is what the engine had counted when the rank was found.
	Emptied Emptied
	// Source of its events.
	Source vllm.Source
	// Poll asks for a poll of the engine soon.
	Poll func()
	// Lag is told how long it took from the engine's stamp on a batch that was
	// published live until the batch was applied.
	Lag func(time.Duration)
	// Engine is the URL of the engine's HTTP server, for people.
	Engine string
	// Audited ranks keep the beginnings of a few prompts for audits.
	Audited bool
	// StateDir holds the state file; empty: nothing is kept.
	StateDir string
	// Tail says how to listen; where, and for whom, the rank knows.
	Tail vllm.TailConfig
	// Publish says how to publish; what, and as whom, the rank knows.
	Publish publish.Config
	Log     *slog.Logger
}

// Identity is what keys and capacity of a rank depend on. Another identity is
// another incarnation.
type Identity struct {
	Model     string
	BlockSize int // tokens as configured; 0: the mirror learns it
	Reported  int // tokens as the engine's metrics say; 0: not known
	Blocks    int // 0: not known
}

// differs says whether b contradicts a; what is not known contradicts nothing.
func (a Identity) differs(b Identity) bool {
	other := func(x, y int) bool { return x != 0 && y != 0 && x != y }
	return a.Model != b.Model || other(a.Reported, b.Reported) || other(a.Blocks, b.Blocks)
}

// learn fills in what is not known.
func (a *Identity) learn(h *stateHead) {
	a.Reported = cmp.Or(a.Reported, h.Reported)
	a.Blocks = cmp.Or(a.Blocks, h.Blocks)
}

// Rank is one data-parallel rank: the mirror of its cache, the incarnation it is in
// and how far that can be believed. The tail writes, the publisher reads, the
// watch adds what only metrics can tell.
type Rank struct {
	number    int
	member    string
	log       *slog.Logger
	tail      *vllm.Tail
	publisher *publish.Publisher
	saver     *saver              // nil: nothing is kept
	wake      func()              // wakes the publisher
	poll      func()              // asks the watch to poll soon
	lag       func(time.Duration) // see Config
	engine    string              // URL of the engine's HTTP server, for people
	source    vllm.Source         // owned by the watch

	mu          sync.Mutex // guards all below
	id          Identity
	mirror      *mirror.Mirror
	nodes       int // bound of the mirror
	epoch       uint64
	trust       vllm.Trust // as the tail sees it
	reason      string
	states      uint64 // changes of trust or reason so far
	batches     uint64 // of this epoch applied: the newest sequence plus one
	incarnation incarnation
	newest      *vllm.Mark // batch applied; nil: none in this incarnation
	eventTime   time.Time  // engine's stamp of the oldest live batch that was not drained; zero: none
	waiting     *waiting   // saved by an earlier process; nil: nothing is
	heads       *heads     // nil: there are no audits
	hits        HitRule
	emptied     Emptied // as the engine counted at the newest poll
	changes     uint64  // of anything that a state file holds
	broken      string  // why the engine sends no usable events; empty: it may
	stream      stream  // what is known of whose events these are
	info        *pb.MemberInfo
	load        *pb.Load
	loadAt      time.Time
	facts       []Fact   // as they were logged last
	said        pb.Trust // what people were told last; unspecified: nothing
	saidAt      time.Time
}

// incarnation is what counts from one epoch's start.
type incarnation struct {
	batches uint64
	clears  uint64
	missing string       // why blocks may be missing, apart from lost events
	before  mirror.Stats // at its start: the mirror's counters go on
	dropped bool         // blocks, before this process
	refused bool         // stores, before this process
	reset   resetWatch
	// fetched: a connector has brought blocks from elsewhere.
	fetched bool
	// doubted is when all was forgotten because it may be gone; zero: it was not,
	// or that is settled.
	doubted time.Time
}

// New is a rank that Run follows.
func New(cfg Config) (*Rank, error) {
	r := newRank(cfg)
	r.poll, r.lag = cfg.Poll, cfg.Lag
	r.follow(cfg.Hits)
	r.Describe(cfg.Info, "")
	r.emptied = cfg.Emptied
	r.incarnation.reset = resetWatch{counted: cfg.Emptied}
	if cfg.Audited {
		r.heads = new(heads)
	}
	listen := cfg.Tail
	listen.Endpoint, listen.Replay, listen.Sink, listen.Log = cfg.Source.Endpoint, cfg.Source.Replay, r, cfg.Log
	if cfg.StateDir != "" {
		r.saver = newSaver(cfg.StateDir, r)
		listen.Known = r.saver.load(cfg.Emptied)
	}
	var err error
	if r.tail, err = vllm.NewTail(listen); err != nil {
		return nil, err
	}
	send := cfg.Publish
	send.Member, send.CacheState, send.Log = cfg.Member, r, cfg.Log
	if r.publisher, err = publish.New(send); err != nil {
		return nil, err
	}
	r.wake = r.publisher.Wake
	return r, nil
}

// newRank is a rank without a tail, which publishes nothing.
func newRank(cfg Config) *Rank {
	r := &Rank{number: cfg.Number, member: cfg.Member, log: cfg.Log, engine: cfg.Engine, source: cfg.Source, id: cfg.Identity,
		nodes: rankBlocks, wake: func() {}, poll: func() {}, lag: func(time.Duration) {}, reason: "the event stream is not connected yet"}
	r.stream.whole = true
	r.mirror = r.newMirror()
	r.epoch = uint64(time.Now().UnixNano())
	return r
}

// Run follows the rank until ctx ends; then its publisher takes leave, and the
// state file is written a last time.
func (r *Rank) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	rest := make(chan struct{})
	g.Go(func() error {
		defer close(rest)
		r.tail.Run(ctx)
		return nil
	})
	if r.saver != nil {
		g.Go(func() error { r.saver.run(rest); return nil })
	}
	g.Go(func() error { return r.publisher.Run(ctx) })
	if err := g.Wait(); err != nil {
		return fmt.Errorf("rank %d: %w", r.number, err)
	}
	return nil
}

// Number of the rank in its engine.
func (r *Rank) Number() int { return r.number }

// Member is its name in the fleet.
func (r *Rank) Member() string { return r.member }

func (r *Rank) newMirror() *mirror.Mirror {
	return mirror.New(mirror.Config{Model: r.id.Model, BlockSize: r.id.BlockSize, MaxBlocks: r.id.Blocks, MaxNodes: r.nodes, Rule: r.hits.Rule})
}

// beginLocked starts an epoch with nothing in it.
func (r *Rank) beginLocked() {
	r.mirror.Reset()
	r.epoch = max(uint64(time.Now().UnixNano()), r.epoch+1)
	r.batches = 0
	r.newest, r.waiting = nil, nil
	if r.heads != nil {
		*r.heads = nil
	}
	r.incarnation = incarnation{before: r.mirror.Stats(), reset: r.incarnation.reset.anew()}
	r.changes++
}

// NewIncarnation is called by the tail.
func (r *Rank) NewIncarnation(reason string) {
	r.mu.Lock()
	saved := r.waiting
	r.beginLocked()
	r.stream.begin(r.mirror.Stats().Repeated, r.tail.Stats())
	r.mu.Unlock()
	if saved != nil {
		saved.stats.disproved.Add(1)
		r.log.Warn("the saved cache state is not the engine's", "reason", reason)
	}
	r.wake()
}

// State is called by the tail. What changes it may be another engine, of which
// only a poll can tell more.
func (r *Rank) State(t vllm.Trust, reason string) {
	r.mu.Lock()
	changed := t != r.trust
	r.trust, r.reason = t, reason
	r.states++
	r.mu.Unlock()
	r.wake()
	if changed {
		r.poll()
	}
}

// Apply is called by the tail.
func (r *Rank) Apply(at vllm.Mark, b vllm.Batch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stream.take(at, &b)
	defer func() { r.stream.check.Announce(time.Now(), r.flowLocked()) }()
	if r.stream.foreign != "" {
		r.batches = at.Sequence + 1 // of another engine: counted, and nothing else
		return
	}
	for i := range b.Events {
		if e := &b.Events[i]; e.Kind == vllm.Stored {
			e.Store.Root = r.rootLocked(e.Store.Adapter)
			r.mirror.Expect(e.Store)
		}
	}
	cleared := false
	for i := range b.Events {
		switch e := &b.Events[i]; e.Kind {
		case vllm.Stored:
			r.mirror.Store(e.Store)
			if r.heads != nil {
				r.heads.note(&e.Store)
			}
		case vllm.Removed:
			r.mirror.Remove(e.Remove)
		case vllm.Cleared:
			r.mirror.Clear(mirror.GPU)
			r.incarnation.clears++
			cleared = true
		}
	}
	if cleared {
		// Behind it a batch may still tell of blocks that a connector had stored
		// before.
		r.incarnation.missing = r.clearTiersLocked()
		r.incarnation.doubted = time.Time{}
	}
	r.batches = at.Sequence + 1
	r.incarnation.batches++
	if r.mirror.Overflown() {
		// More copies than the engine has blocks: the counts have drifted, and
		// only what is announced from here on is sure.
		r.log.Warn("mirror holds more blocks than the engine has, forgetting them", "blocks", r.id.Blocks)
		r.beginLocked()
		r.batches, r.incarnation.batches = at.Sequence+1, 1
		r.incarnation.missing = "more blocks were announced than the engine has"
	}
	r.newest = &at
	if stamp := b.At(); at.Live && !stamp.IsZero() {
		if r.eventTime.IsZero() {
			r.eventTime = stamp
		}
		r.lag(time.Since(stamp))
	}
	switch reason := r.mirror.Outgrown(); {
	case reason != "":
		r.againLocked(reason)
	case r.keptLocked(at, b):
		r.againLocked("the prefix cache was not emptied")
	}
	r.changes++
	r.wake()
}

// become takes over what the engine is. Another identity ends the present incarnation:
// the tail replays what there is of the next.
func (r *Rank) become(id Identity) {
	r.mu.Lock()
	if !r.id.differs(id) {
		if id.Blocks != 0 && id.Blocks != r.id.Blocks {
			r.mirror.SetMaxBlocks(id.Blocks)
			r.id.Blocks = id.Blocks
		}
		if r.id.Reported == 0 {
			r.id.Reported = id.Reported
		}
		r.mu.Unlock()
		return
	}
	reason := fmt.Sprintf("the engine became another: %+v, was %+v", id, r.id)
	r.id = id
	r.mirror = r.newMirror()
	r.beginLocked()
	r.trust, r.reason = vllm.Syncing, "the engine became another"
	r.mu.Unlock()
	r.tail.Restart(reason)
	r.wake()
}

// Poll is what one poll of the engine has found out about a rank.
type Poll struct {
	Identity Identity
	Hits     HitRule
	Load     vllm.Load
	// Began is when the engine's process began.
	Began   time.Time
	Emptied Emptied
	// Asked and At are when the metrics were asked for, and there.
	Asked, At time.Time
	// Before is where the stream stood when the poll began; nil: the rank is new.
	Before *Position
}

// Learn takes over what a poll has found.
func (r *Rank) Learn(p Poll) {
	r.become(p.Identity)
	r.follow(p.Hits)
	r.logFacts()
	r.sample(&p.Load, p.Began, p.At)
	if p.Before != nil {
		r.weigh(&p.Load, p.Emptied, *p.Before, p.Asked)
		r.counted(p.Emptied, *p.Before)
	}
}

// Move follows the rank's events elsewhere. The watch alone calls it and Source.
func (r *Rank) Move(source vllm.Source) {
	if source == r.source {
		return
	}
	r.source = source
	r.mu.Lock()
	r.stream.elsewhere()
	r.mu.Unlock()
	r.tail.Move(source.Endpoint, source.Replay)
}

// Share tells the rank how many there are, which bounds the blocks it may
// remember.
func (r *Rank) Share(ranks int) { r.bound(min(rankBlocks, mirrorBlocks/ranks)) }

func (r *Rank) bound(nodes int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if nodes != r.nodes {
		r.nodes = nodes
		r.mirror.SetMaxNodes(nodes)
	}
}

// Purge forgets the blocks of an adapter.
func (r *Rank) Purge(adapter string) {
	r.mu.Lock()
	r.mirror.PurgeAdapter(adapter)
	r.changes++
	r.mu.Unlock()
	r.wake()
}

// Drain is called by the publisher.
func (r *Rank) Drain(ops []mirror.Op) ([]mirror.Op, publish.State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ops = r.mirror.Drain(ops)
	st := r.stateLocked()
	st.EventTime, r.eventTime = r.eventTime, time.Time{}
	return ops, st
}

// Snapshot is called by the publisher.
func (r *Rank) Snapshot() ([]mirror.Op, publish.State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var ops []mirror.Op
	r.mirror.Snapshot(func(op mirror.Op) bool {
		ops = append(ops, op)
		return true
	})
	return ops, r.stateLocked()
}

func (r *Rank) stateLocked() publish.State {
	st := publish.State{Epoch: r.epoch, EngineBatches: r.batches}
	st.Trust, st.Reason = r.trustLocked()
	// Before the first event it is the engine's size that tells of several groups.
	fresh := r.hits.Several && r.mirror.Kinds() == 0
	if ends, dropped := r.mirror.HasEnds() || fresh, r.mirror.Dropped(); ends || dropped > 0 {
		st.Rule = &pb.HitRule{Ends: ends, DroppedBlocks: uint32(dropped), DroppedToTheEnd: r.hits.toTheEnd && (r.mirror.Kinds() > 1 || fresh)}
	}
	for l := range st.Lanes {
		st.Lanes[l].Count = uint64(r.mirror.Count(mirror.Lane(l)))
		st.Lanes[l].Digest = r.mirror.Digest(mirror.Lane(l))
	}
	return st
}

// Describe replaces what the member is; info is not written to afterwards.
func (r *Rank) Describe(info *pb.MemberInfo, broken string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	info.BlockSize = uint32(r.blockSizeLocked())
	info.Blocks = uint64(r.id.Blocks)
	info.HidesExtraKeys, info.Offloads = r.mirror.HidesExtras(), r.mirror.Offloads()
	r.info, r.broken = info, broken
}

// blockSizeLocked is the size that the keys have: what the events say, before
// the first of them what metrics say.
func (r *Rank) blockSizeLocked() int {
	if n := r.mirror.Stats().BlockSize; n > 0 {
		return n
	}
	return r.id.Reported
}
