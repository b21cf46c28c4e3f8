package agent

import (
	"cmp"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/publish"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/pb"
)

// loadLives is the age at which a load sample says nothing any more.
const loadTTL = 10 * time.Second

const (
	// mirrorBlocks bounds the blocks that all ranks together remember, and
	// rankBlocks those of one. At the bound what the engine announces is dropped
	// and counted, and the rank calls itself APPROXIMATE.
	mirrorBlocks = 1 << 22
	rankBlocks   = 1 << 21
)

// identity is what keys and capacity of a rank depend on. Another identity is
// another incarnation.
type identity struct {
	model     string
	blockSize int // tokens as configured; 0: the mirror learns it
	reported  int // tokens as the engine's metrics say; 0: not known
	blocks    int // 0: not known
}

// differs says whether b contradicts a; what is not known contradicts nothing.
func (a identity) differs(b identity) bool {
	other := func(x, y int) bool { return x != 0 && y != 0 && x != y }
	return a.model != b.model || other(a.reported, b.reported) || other(a.blocks, b.blocks)
}

// learn fills in what is not known.
func (a *identity) learn(h *stateHead) {
	a.reported = cmp.Or(a.reported, h.Reported)
	a.blocks = cmp.Or(a.blocks, h.Blocks)
}

// rank is one data-parallel rank: the mirror of its cache, the incarnation it is in
// and how far that can be believed. The tail writes, the publisher reads, the
// watch adds what only metrics can tell.
type rank struct {
	number int
	member string
	log    *slog.Logger
	tail   *vllm.Tail
	wake   func()      // tells the publisher
	engine string      // URL of the engine's HTTP server, for people
	source vllm.Source // owned by the watch

	mu          sync.Mutex // guards all below
	id          identity
	mirror      *mirror.Mirror
	nodes       int // bound of the mirror
	epoch       uint64
	trust       vllm.Trust // as the tail sees it
	reason      string
	states      uint64 // changes of trust or reason so far
	batches     uint64 // of this epoch applied: the newest sequence plus one
	incarnation incarnation
	newest      *vllm.Mark // batch applied; nil: none in this incarnation
	waiting     *waiting   // saved by an earlier process; nil: nothing is
	heads       *heads     // nil: there are no audits
	hits        hitRule
	emptied     emptied // as the engine counted at the newest look
	changes     uint64  // of anything that a state file holds
	broken      string  // why the engine sends no usable events; empty: it may
	stream      stream  // what is known of whose events these are
	info        *pb.MemberInfo
	load        *pb.Load
	loadAt      time.Time
	said        pb.Trust // what people were told last; unspecified: nothing
	saidAt      time.Time
}

// life is what counts from one epoch's start.
type incarnation struct {
	batches uint64
	clears  uint64
	doubt   string       // why blocks may be missing, apart from lost events
	before  mirror.Stats // at its start: the mirror's counters go on
	dropped bool         // blocks, before this process
	refused bool         // stores, before this process
	reset   resetWatch
}

func newRank(number int, member string, id identity, log *slog.Logger) *rank {
	r := &rank{number: number, member: member, log: log, id: id, nodes: rankBlocks, wake: func() {}, reason: "the event stream is not connected yet"}
	r.stream.whole = true
	r.mirror = r.newMirror()
	r.epoch = uint64(time.Now().UnixNano())
	return r
}

func (r *rank) newMirror() *mirror.Mirror {
	return mirror.New(mirror.Config{Model: r.id.model, BlockSize: r.id.blockSize, MaxBlocks: r.id.blocks, MaxNodes: r.nodes, Rule: r.hits.Rule})
}

// beginLocked starts an epoch with nothing in it.
func (r *rank) beginLocked() {
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
func (r *rank) NewIncarnation(reason string) {
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

// State is called by the tail.
func (r *rank) State(t vllm.Trust, reason string) {
	r.mu.Lock()
	r.trust, r.reason = t, reason
	r.states++
	r.mu.Unlock()
	r.wake()
}

// Apply is called by the tail.
func (r *rank) Apply(at vllm.Mark, b vllm.Batch) {
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
			r.mirror.Expect(storeOf(&e.Store))
		}
	}
	for i := range b.Events {
		switch e := &b.Events[i]; e.Kind {
		case vllm.Stored:
			r.mirror.Store(storeOf(&e.Store))
			if r.heads != nil {
				r.heads.note(&e.Store)
			}
		case vllm.Removed:
			r.mirror.Remove(mirror.Remove{
				Tier: mirror.Tier(e.Remove.Tier), Group: e.Remove.Group, HasGroup: e.Remove.HasGroup, Hashes: e.Remove.Hashes,
			})
		case vllm.Cleared:
			r.mirror.Clear(mirror.GPU)
			r.incarnation.clears++
			r.incarnation.doubt = ""
		}
	}
	r.batches = at.Sequence + 1
	r.incarnation.batches++
	if r.mirror.Overflown() {
		// More copies than the engine has blocks: the counts have drifted, and
		// only what is announced from here on is sure.
		r.log.Warn("mirror holds more blocks than the engine has, forgetting them", "blocks", r.id.blocks)
		r.beginLocked()
		r.batches, r.incarnation.batches = at.Sequence+1, 1
		r.incarnation.doubt = "more blocks were announced than the engine has"
	}
	r.newest = &at
	r.againLocked()
	r.changes++
	r.wake()
}

// storeOf hands an event over field by field: both rooms name the same things.
func storeOf(s *vllm.Store) mirror.Store {
	return mirror.Store{
		Tier: mirror.Tier(s.Tier), Group: s.Group, Kind: mirror.GroupKind(s.Kind), Window: s.Window,
		Hashes: s.Hashes, Parent: s.Parent, HasParent: s.HasParent, Tokens: s.Tokens, BlockSize: s.BlockSize,
		Adapter: s.Adapter, Salt: s.Salt, Refs: s.Refs,
		Withhold: s.Withhold, HidesExtras: s.HidesExtras, Physical: s.Physical,
	}
}

// become takes over what the engine is. Another identity ends the present incarnation:
// the tail replays what there is of the next.
func (r *rank) become(id identity) {
	r.mu.Lock()
	if !r.id.differs(id) {
		if id.blocks != 0 && id.blocks != r.id.blocks {
			r.mirror.SetMaxBlocks(id.blocks)
			r.id.blocks = id.blocks
		}
		if r.id.reported == 0 {
			r.id.reported = id.reported
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

// move follows the rank's events elsewhere.
func (r *rank) move(source vllm.Source) {
	r.source = source
	r.mu.Lock()
	r.stream.elsewhere()
	r.mu.Unlock()
	r.tail.Move(source.Endpoint, source.Replay)
}

// share tells the rank how many blocks it may remember.
func (r *rank) share(nodes int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if nodes != r.nodes {
		r.nodes = nodes
		r.mirror.SetMaxNodes(nodes)
	}
}

// purge forgets the blocks of an adapter.
func (r *rank) purge(adapter string) {
	r.mu.Lock()
	r.mirror.PurgeAdapter(adapter)
	r.changes++
	r.mu.Unlock()
	r.wake()
}

// Drain is called by the publisher.
func (r *rank) Drain(ops []mirror.Op) ([]mirror.Op, publish.State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ops = r.mirror.Drain(ops)
	return ops, r.stateLocked()
}

// Snapshot is called by the publisher.
func (r *rank) Snapshot() ([]mirror.Op, publish.State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var ops []mirror.Op
	r.mirror.Snapshot(func(op mirror.Op) bool {
		ops = append(ops, op)
		return true
	})
	return ops, r.stateLocked()
}

func (r *rank) stateLocked() publish.State {
	st := publish.State{Epoch: r.epoch, EngineBatches: r.batches}
	st.Trust, st.Reason = r.trustLocked()
	if ends, dropped := r.mirror.HasEnds(), r.mirror.Dropped(); ends || dropped > 0 {
		st.Rule = &pb.HitRule{Ends: ends, DroppedBlocks: uint32(dropped), DroppedToTheEnd: r.hits.toTheEnd && r.mirror.Kinds() > 1}
	}
	for l := range st.Lanes {
		st.Lanes[l].Count = uint64(r.mirror.Count(mirror.Lane(l)))
		st.Lanes[l].Digest = r.mirror.Digest(mirror.Lane(l))
	}
	return st
}

// trustLocked weighs everything that speaks against the cache state.
func (r *rank) trustLocked() (pb.Trust, string) {
	st := r.mirror.Stats()
	held := r.mirror.Count(mirror.LaneDisk)
	switch {
	case r.broken != "":
		return pb.Trust_TRUST_UNKNOWN, r.broken
	case r.stream.foreign != "":
		return pb.Trust_TRUST_UNKNOWN, r.stream.foreign
	case st.NoCredit != "":
		return pb.Trust_TRUST_UNKNOWN, st.NoCredit
	case r.trust == vllm.Syncing:
		return pb.Trust_TRUST_SYNCING, r.reason
	case r.blockSizeLocked() == 0:
		return pb.Trust_TRUST_SYNCING, "the block size is not known yet"
	case r.stream.trial:
		return pb.Trust_TRUST_SYNCING, "the event stream was another engine's and is held against this engine's counters"
	case r.trust == vllm.Approximate:
		return pb.Trust_TRUST_APPROXIMATE, r.reason
	case r.incarnation.doubt != "":
		return pb.Trust_TRUST_APPROXIMATE, r.incarnation.doubt
	case r.droppedLocked(st):
		return pb.Trust_TRUST_APPROXIMATE, "the mirror is full: blocks are missing"
	case r.refusedLocked(st):
		return pb.Trust_TRUST_APPROXIMATE, "events of another block size or form: blocks are missing"
	case r.hits.guess != "":
		return pb.Trust_TRUST_APPROXIMATE, r.hits.guess
	case st.Guess != "":
		return pb.Trust_TRUST_APPROXIMATE, st.Guess
	case (r.mirror.HasEnds() || r.mirror.Dropped() > 0) && held > r.mirror.Count(mirror.LaneGPU):
		return pb.Trust_TRUST_APPROXIMATE, "blocks of a hybrid or speculating engine count in GPU memory only"
	case st.Withheld > 0:
		return pb.Trust_TRUST_APPROXIMATE, fmt.Sprintf("%d blocks withheld: their content is not certain", st.Withheld)
	case st.Doubtful > 0:
		return pb.Trust_TRUST_APPROXIMATE, fmt.Sprintf("%d blocks may have lost their last copy", st.Doubtful)
	case st.Waiting > 16+held/16:
		return pb.Trust_TRUST_APPROXIMATE, fmt.Sprintf("%d blocks whose prefix was never announced", st.Waiting)
	}
	return pb.Trust_TRUST_EXACT, ""
}

// tellLocked says when the trust is another one than was said.
func (r *rank) logTrustLocked() {
	trust, reason := r.trustLocked()
	if trust == r.said {
		return
	}
	first, after := r.said == pb.Trust_TRUST_UNSPECIFIED, time.Since(r.saidAt).Round(time.Millisecond)
	r.said, r.saidAt = trust, time.Now()
	switch trust {
	case pb.Trust_TRUST_EXACT:
		blocks := r.mirror.Count(mirror.LaneGPU)
		if first {
			r.log.Info("cache state is EXACT", "batches", r.batches, "blocks", blocks)
			return
		}
		r.log.Info("cache state is EXACT", "batches", r.batches, "blocks", blocks, "after", after)
	case pb.Trust_TRUST_SYNCING:
		if first {
			r.log.Info("cache state is SYNCING", "reason", reason)
			return
		}
		r.log.Warn("cache state is SYNCING: schedulers give the cache no credit", "reason", reason,
			"do", "nothing for a few seconds; if it stays, see whether the engine runs and answers on its event socket")
	case pb.Trust_TRUST_APPROXIMATE:
		r.log.Warn("cache state is APPROXIMATE: blocks may be missing", "reason", reason,
			"do", "look the reason up in docs/OPERATIONS.md; often it is the engine's configuration")
	default:
		r.log.Warn("cache state is UNKNOWN: the engine sends no usable events", "reason", reason,
			"do", "check the engine's --kv-events-config, and -events; requests come by load alone meanwhile")
	}
}

func (r *rank) droppedLocked(st mirror.Stats) bool {
	return r.incarnation.dropped || st.Dropped > r.incarnation.before.Dropped
}

func (r *rank) refusedLocked(st mirror.Stats) bool {
	return r.incarnation.refused || st.Refused > r.incarnation.before.Refused
}

// describe replaces what the member is; info is not written to afterwards.
func (r *rank) describe(info *pb.MemberInfo, broken string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	info.BlockSize = uint32(r.blockSizeLocked())
	info.Blocks = uint64(r.id.blocks)
	r.info, r.broken = info, broken
}

// blockSizeLocked is the size that the keys have: what the events say, before
// the first of them what metrics say.
func (r *rank) blockSizeLocked() int {
	if n := r.mirror.Stats().BlockSize; n > 0 {
		return n
	}
	return r.id.reported
}

// Heartbeat is called by the publisher.
func (r *rank) Heartbeat() (*pb.MemberInfo, *pb.Load) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.logTrustLocked()
	info := r.info
	if size := uint32(r.blockSizeLocked()); info != nil && info.BlockSize != size {
		info = proto.Clone(info).(*pb.MemberInfo)
		info.BlockSize = size
		r.info = info
	}
	if r.load == nil {
		return info, nil
	}
	age := time.Since(r.loadAt)
	if age > loadTTL {
		return info, nil
	}
	load := proto.Clone(r.load).(*pb.Load)
	load.AgeMs = uint32(age.Milliseconds())
	return info, load
}

// sample replaces the load; nil: not known any more. The publisher decides
// whether that can wait for the next heartbeat.
func (r *rank) sample(l *vllm.Load, at time.Time) {
	r.mu.Lock()
	r.load, r.loadAt = nil, at
	if l != nil {
		r.load = loadOf(l)
	}
	r.mu.Unlock()
	r.wake()
}

// unreachable says that the engine does not answer.
func (r *rank) unreachable(at time.Time) {
	r.mu.Lock()
	r.load, r.loadAt = &pb.Load{Unreachable: true}, at
	r.mu.Unlock()
	r.wake()
}

func loadOf(l *vllm.Load) *pb.Load {
	return &pb.Load{
		Running: whole(l.Running), Waiting: whole(l.Waiting), KvUsage: l.KVUsage,
		PromptTokens: l.PromptTokens, CachedTokens: l.CachedTokens, GenerationTokens: l.GenerationTokens,
		PrefillSeconds: l.PrefillSeconds, PrefillComputedTokens: l.PrefillComputedTokens, PrefillRequests: l.PrefillRequests,
		InterTokenSeconds: l.InterTokenSeconds, InterTokenCount: l.InterTokenCount,
		QueueSeconds: l.QueueSeconds, QueueRequests: l.QueueRequests,
		RequestPromptTokens: l.RequestPromptTokens, RequestGenerationTokens: l.RequestGenerationTokens,
		RunningAdapters: l.RunningAdapters, Sleeping: l.Sleeping,
	}
}

// whole makes a count of a gauge.
func whole(v *float64) *uint32 {
	if v == nil {
		return nil
	}
	n := uint32(min(*v, math.MaxUint32))
	return &n
}
