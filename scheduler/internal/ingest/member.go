package ingest

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

const (
	// maxHeld bounds the deltas of one member that wait for a snapshot.
	maxHeld      = 4096
	maxHeldBytes = 16 << 20
	// maxSnapshot bounds what one snapshot in the making may weigh, maxAwaited
	// what all of them and the deltas held meanwhile may.
	maxSnapshot = 128 << 20
	maxAwaited  = 256 << 20
	// changeWeight is what one change weighs in memory beside its keys.
	changeWeight = 160
	// breath is how many keys are stored before others may have the processor: a
	// whole cache takes milliseconds, in which all picks would wait.
	breath = 2048
	// keptKeys is how long a member's scratch may be and still be kept.
	keptKeys = 1024
	// patience is how long a member may take for the next chunk. It doubles
	// with every failure, up to maxPatience: who is slow must get there.
	patience    = 500 * time.Millisecond
	maxPatience = 4 * time.Second
	// firstJitter spreads the first requests, backoff those after a failure,
	// which at worst are maxBackoff apart. A member that stayed in step for
	// calm starts again from the beginning.
	firstJitter = 20 * time.Millisecond
	backoff     = 100 * time.Millisecond
	maxBackoff  = 5 * time.Second
	calm        = 10 * time.Second
)

// member follows one member's cache state: it applies what the wire says to the
// index, for as long as that can be verified, and otherwise forgets it and wants
// a snapshot. It is pure: time and randomness are handed in, requests are sent
// by its owner.
//
// The index holds blocks of the member on the lanes of the wire only while
// synced, and then exactly those of the member's cache state at (epoch, sequence).
type member struct {
	name  string
	id    fleet.ID
	index *index.Index
	rng   *rand.Rand
	count *counters

	trust    pb.Trust // as the agent says
	reason   string
	lastSeen time.Time // last heartbeat

	synced          bool
	unverified      bool // synced, but no digest has said so yet
	short           bool // the index had no room for all of it
	why             string
	epoch, sequence uint64
	held            protocol.Held
	rule            fleet.HitRule
	batches         uint64 // of the engine, in the cache state
	trace           string // of the last delta applied; empty: it had none

	failures int
	syncedAt time.Time
	askAt    time.Time // when to ask, while neither synced nor asked
	asked    bool
	attempt  uint64 // number of the request, also when it is over
	deadline time.Time
	waiting  []*pb.Delta // arrived since asked
	bytes    int         // of waiting
	snapshot snapshot

	verdict verdict // what its agent is told

	keys   []blockkey.Key // scratch
	stored int            // keys since the last breath

	said standing
}

// snapshot is an answer in the making.
type snapshot struct {
	chunks []*pb.SnapshotChunk
	held   protocol.Held
	bytes  int
}

func newMember(name string, id fleet.ID, x *index.Index, rng *rand.Rand, c *counters, now time.Time) *member {
	m := &member{name: name, id: id, index: x, rng: rng, count: c, why: "just announced"}
	m.askAt = now.Add(m.pause())
	return m
}

// cacheState is what may be said about the member in answers.
func (m *member) cacheState() fleet.CacheState {
	p := fleet.CacheState{Trust: fleet.TrustOf(int32(m.trust)), Reason: m.reason, Epoch: m.epoch, Sequence: m.sequence, EngineBatches: m.batches, Trace: m.trace, Rule: m.rule}
	if m.synced {
		for l := range p.Held {
			p.Held[l] = m.held[l].Count
		}
	}
	switch {
	case p.Trust == fleet.Unknown:
	case !m.synced || m.unverified:
		p.Trust, p.Reason = fleet.Syncing, m.why
	case p.Trust == fleet.Exact && m.short:
		p.Trust, p.Reason = fleet.Approximate, "the index is full"
	case p.Trust == fleet.Exact:
		p.Reason = ""
	}
	return p
}

// heartbeat compares what the agent says its cache state is with what was applied.
func (m *member) heartbeat(h *pb.Heartbeat, now time.Time) {
	m.lastSeen = now
	epoch, sequence := h.GetHeader().GetEpoch(), h.GetHeader().GetSequence()
	if epoch > m.epoch || epoch == m.epoch && sequence >= m.sequence || !m.synced {
		m.trust, m.reason = h.GetTrust(), h.GetReason()
	}
	if epoch > m.epoch && sequence == 0 {
		m.begin(epoch, now)
		m.batches = h.GetEngineBatches()
		return
	}
	if !m.synced {
		return
	}
	switch {
	case epoch < m.epoch:
		m.count.epochsBack.Add(1)
		m.resync("epoch went back", now)
	case epoch > m.epoch:
		m.count.gaps.Add(1)
		m.resync("new epoch missed", now)
	case sequence > m.sequence:
		m.count.gaps.Add(1)
		m.resync("deltas lost", now)
	case sequence == m.sequence && m.follow(h.GetHeader(), now):
		m.batches = h.GetEngineBatches()
		held, err := protocol.ReadHeld(h.GetLanes())
		m.verify(held, err, now)
	}
}

// delta applies the next change, or holds it while a snapshot is awaited.
func (m *member) delta(d *pb.Delta, size int, now time.Time) {
	epoch, sequence := d.GetHeader().GetEpoch(), d.GetHeader().GetSequence()
	if epoch > m.epoch && sequence == 1 {
		m.begin(epoch, now)
	}
	if !m.synced {
		m.hold(d, size, now)
		return
	}
	switch {
	case epoch < m.epoch:
		m.count.epochsBack.Add(1)
		m.resync("epoch went back", now)
	case epoch > m.epoch:
		m.count.gaps.Add(1)
		m.resync("new epoch missed", now)
	case sequence <= m.sequence:
		m.count.repeated.Add(1)
	case sequence > m.sequence+1:
		m.count.gaps.Add(1)
		m.resync("gap", now)
	default:
		m.apply(d, now)
	}
}

// begin starts a new epoch with the empty cache state.
func (m *member) begin(epoch uint64, now time.Time) {
	m.index.Forget(index.Member(m.id)) // predictions too: that engine is gone
	m.abandon()
	m.synced, m.unverified, m.short, m.why = true, false, false, ""
	m.syncedAt = now
	m.epoch, m.sequence, m.held, m.rule, m.batches = epoch, 0, protocol.Held{}, fleet.HitRule{}, 0
	m.count.epochs.Add(1)
}

// follow takes over the rule of a message that is in step, and says whether it
// could. Blocks that were applied under another rule mean something else now.
func (m *member) follow(h *pb.Header, now time.Time) bool {
	rule := ruleOf(h.GetRule())
	if rule != m.rule && m.held != (protocol.Held{}) {
		m.resync("hits follow another rule", now)
		return false
	}
	m.rule = rule
	return true
}

// apply takes the cache state from m.sequence to the next.
func (m *member) apply(d *pb.Delta, now time.Time) {
	if !m.follow(d.GetHeader(), now) {
		return
	}
	for _, c := range d.GetChanges() {
		switch c := c.GetChange().(type) {
		case *pb.Change_Stored:
			m.store(c.Stored, &m.held)
			m.put(c.Stored)
		case *pb.Change_Removed:
			if !m.remove(c.Removed) {
				m.count.mismatches.Add(1)
				m.resync("more removed than held", now)
				return
			}
		}
	}
	m.sequence, m.batches = d.GetHeader().GetSequence(), d.GetEngineBatches()
	if len(d.GetLanes()) == 0 {
		// A part of a change that was split: only the last one verifies it.
		m.unverified, m.why = true, "in the middle of a change"
		return
	}
	held, err := protocol.ReadHeld(d.GetLanes())
	m.verify(held, err, now)
}

// verify compares the cache state with the agent's claim for the same sequence, and
// the index with the cache state.
func (m *member) verify(claim protocol.Held, err error, now time.Time) {
	if err != nil || claim != m.held {
		m.count.mismatches.Add(1)
		m.resync("digest differs", now)
		return
	}
	m.short = false
	for l := range claim {
		n := m.index.CountEnds(index.Member(m.id))
		if l != protocol.Ends {
			n = m.index.Count(index.Member(m.id), index.Lane(l))
		}
		switch n := uint64(n); {
		case n > claim[l].Count:
			m.count.mismatches.Add(1)
			m.resync("index holds too much", now)
			return
		case n < claim[l].Count:
			m.short = true
		}
	}
	m.unverified, m.why = false, ""
}

// suspect makes the cache state unverified until the next claim: the connection was
// lost, and with it perhaps deltas. An answer that was awaited may be lost too.
func (m *member) suspect(now time.Time) {
	switch {
	case m.synced:
		m.unverified, m.why = true, "connection was lost"
	case m.asked:
		m.fail(&m.count.failed, "connection was lost", now)
	}
}

// resync forgets what is no longer certain and wants a snapshot.
func (m *member) resync(why string, now time.Time) {
	m.drop()
	m.abandon()
	if m.synced && now.Sub(m.syncedAt) >= calm {
		m.failures = 0
	}
	m.synced, m.unverified, m.short, m.why = false, false, false, why
	m.held = protocol.Held{}
	m.askAt = now.Add(m.pause())
	m.failures++
	m.count.resyncs.Add(1)
}

// malformed is a message of the member that contradicts the rules.
func (m *member) malformed(k kind, now time.Time) {
	switch {
	case k == isChunk && m.asked:
		m.fail(&m.count.failed, "malformed snapshot", now)
	case k != isChunk && m.synced:
		m.resync("malformed message", now)
	}
}

// drop takes the member's blocks from the index. Predicted and approximate
// ones stay: they claim nothing.
func (m *member) drop() {
	for l := range index.Lane(protocol.Lanes) {
		m.index.ForgetLane(index.Member(m.id), l)
	}
}

// pause is the time until the next request, spread at random.
func (m *member) pause() time.Duration {
	d := firstJitter
	if m.failures > 0 {
		d = min(backoff<<min(m.failures-1, 10), maxBackoff)
		return d/2 + time.Duration(m.rng.Int64N(int64(d/2)))
	}
	return time.Duration(m.rng.Int64N(int64(d)))
}

func (m *member) patience() time.Duration { return min(patience<<min(m.failures, 10), maxPatience) }

// wants tells whether a request is to be sent.
func (m *member) wants(now time.Time) bool {
	return !m.synced && !m.asked && !now.Before(m.askAt)
}

// ask begins a request and returns its number.
func (m *member) ask(now time.Time) uint64 {
	m.abandon()
	m.asked = true
	m.attempt++
	m.deadline = now.Add(m.patience())
	return m.attempt
}

// expire gives up a request that got no answer.
func (m *member) expire(now time.Time) {
	if m.asked && now.After(m.deadline) {
		m.fail(&m.count.failed, "no answer", now)
	}
}

// refused is the server's word that nobody listens for requests.
func (m *member) refused(attempt uint64, now time.Time) {
	if m.asked && attempt == m.attempt {
		m.fail(&m.count.noResponders, "nobody answers for it", now)
	}
}

// fail ends a request without success, which count is of.
func (m *member) fail(count *atomic.Uint64, why string, now time.Time) {
	count.Add(1)
	m.abandon()
	m.why = why
	m.failures++
	m.askAt = now.Add(m.pause())
}

// abandon ends a request, whatever became of it.
func (m *member) abandon() {
	m.asked = false
	m.count.awaited.Add(-int64(m.bytes + m.snapshot.bytes))
	m.waiting, m.bytes = nil, 0
	m.snapshot = snapshot{}
}

// weigh takes so many bytes from what all members may hold while they wait,
// and says whether there was room.
func (m *member) weigh(bytes int) bool {
	if m.count.awaited.Add(int64(bytes)) > maxAwaited {
		m.count.awaited.Add(-int64(bytes))
		return false
	}
	return true
}

// hold keeps a delta for after the snapshot. One that arrives before the
// request is sent is older than the cut.
func (m *member) hold(d *pb.Delta, size int, now time.Time) {
	if !m.asked {
		m.count.ignored.Add(1)
		return
	}
	size += changeWeight * len(d.GetChanges())
	if len(m.waiting) >= maxHeld || m.bytes+size > maxHeldBytes || !m.weigh(size) {
		m.fail(&m.count.overflows, "too many deltas while waiting", now)
		return
	}
	m.waiting = append(m.waiting, d)
	m.bytes += size
}

// chunk takes one part of the answer. Nothing of a snapshot touches the index
// before the whole of it is verified.
func (m *member) chunk(attempt uint64, c *pb.SnapshotChunk, size int, now time.Time) {
	if !m.asked || attempt != m.attempt {
		m.count.ignored.Add(1)
		return
	}
	s := &m.snapshot
	if int(c.GetIndex()) != len(s.chunks) {
		m.fail(&m.count.failed, fmt.Sprintf("snapshot chunk %d instead of %d", c.GetIndex(), len(s.chunks)), now)
		return
	}
	h := c.GetHeader()
	if len(s.chunks) > 0 {
		first := s.chunks[0].GetHeader()
		if h.GetEpoch() != first.GetEpoch() || h.GetSequence() != first.GetSequence() || ruleOf(h.GetRule()) != ruleOf(first.GetRule()) {
			m.fail(&m.count.failed, "snapshot cut at two sequences", now)
			return
		}
	}
	size += changeWeight * len(c.GetStored())
	if s.bytes+size > maxSnapshot || !m.weigh(size) {
		m.fail(&m.count.overflows, "snapshot too large, or too many at once", now)
		return
	}
	s.bytes += size
	for _, stored := range c.GetStored() {
		m.store(stored, &s.held)
	}
	s.chunks = append(s.chunks, c)
	m.deadline = now.Add(m.patience())
	if !c.GetLast() {
		return
	}
	if claim, err := protocol.ReadHeld(c.GetLanes()); err != nil || claim != s.held {
		m.count.mismatches.Add(1)
		m.fail(&m.count.failed, "snapshot digest differs", now)
		return
	}
	m.install(c, now)
}

// install makes a verified snapshot the cache state and goes on with what was held.
func (m *member) install(last *pb.SnapshotChunk, now time.Time) {
	h := last.GetHeader()
	s, waiting := m.snapshot, m.waiting
	if h.GetEpoch() != m.epoch {
		m.index.Forget(index.Member(m.id))
		m.count.epochs.Add(1)
	} else {
		m.drop()
	}
	m.abandon()
	m.synced, m.syncedAt, m.why = true, now, ""
	m.epoch, m.sequence, m.held, m.batches = h.GetEpoch(), h.GetSequence(), s.held, last.GetEngineBatches()
	m.rule = ruleOf(h.GetRule())
	m.trust, m.reason = last.GetTrust(), last.GetReason()
	for _, c := range s.chunks {
		for _, stored := range c.GetStored() {
			m.put(stored)
		}
	}
	m.count.snapshots.Add(1)
	m.verify(s.held, nil, now)
	for _, d := range waiting {
		if d.GetHeader().GetEpoch() < h.GetEpoch() {
			continue // of an incarnation before the snapshot
		}
		m.delta(d, 0, now)
	}
}

// store counts keys into held.
func (m *member) store(s *pb.Stored, held *protocol.Held) {
	digest := digestOf(s.GetKeys())
	first, last := protocol.LanesOf(s.GetLane(), s.GetThrough())
	for l := first; l <= last; l++ {
		held[l].Count += uint64(len(s.GetKeys()))
		held[l].Digest ^= digest
	}
}

// put stores keys in the index, on the widest lane first: at no moment does a
// reader see a block on a lane and not on the wider one.
func (m *member) put(s *pb.Stored) {
	before, keys := m.typed(s.GetBefore(), s.GetKeys())
	first, last := protocol.LanesOf(s.GetLane(), s.GetThrough())
	if first == protocol.Ends {
		m.index.MarkEnds(index.Member(m.id), before, s.GetPosition(), keys)
		m.count.keys.Add(uint64(len(keys)))
		return
	}
	for l := last; l >= first; l-- {
		m.index.Store(index.Member(m.id), index.Lane(l), before, s.GetPosition(), keys)
	}
	m.count.keys.Add(uint64(len(keys)))
	if m.stored += len(keys); m.stored >= breath {
		m.stored = 0
		runtime.Gosched()
	}
}

// remove takes keys from cache state and index, and tells whether it could.
func (m *member) remove(r *pb.Removed) bool {
	before, keys := m.typed(r.GetBefore(), r.GetKeys())
	digest := digestOf(r.GetKeys())
	first, last := protocol.LanesOf(r.GetLane(), r.GetThrough())
	for l := first; l <= last; l++ {
		if m.held[l].Count < uint64(len(keys)) {
			return false
		}
		m.held[l].Count -= uint64(len(keys))
		m.held[l].Digest ^= digest
		if l == protocol.Ends {
			m.index.ClearEnds(index.Member(m.id), before, r.GetPosition(), keys)
			continue
		}
		m.index.Remove(index.Member(m.id), index.Lane(l), before, r.GetPosition(), keys)
	}
	m.count.keys.Add(uint64(len(keys)))
	return true
}

func digestOf(keys []uint64) (digest uint64) {
	for _, k := range keys {
		digest ^= blockkey.Digest(blockkey.Key(k))
	}
	return digest
}

// typed is both as keys, until the next call.
func (m *member) typed(before, keys []uint64) ([]blockkey.Key, []blockkey.Key) {
	typed := m.keys[:0]
	for _, part := range [...][]uint64{before, keys} {
		for _, k := range part {
			typed = append(typed, blockkey.Key(k))
		}
	}
	if cap(typed) <= keptKeys {
		m.keys = typed
	}
	return typed[:len(before)], typed[len(before):]
}

func ruleOf(r *pb.HitRule) fleet.HitRule {
	return fleet.HitRule{Ends: r.GetEnds(), Dropped: int(r.GetDroppedBlocks()), DroppedToTheEnd: r.GetDroppedToTheEnd()}
}
