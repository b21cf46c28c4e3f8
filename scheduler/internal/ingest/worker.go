package ingest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

const (
	// queueLength and queueBytes bound what waits for one worker. What does
	// not fit is dropped: its member sees a gap and starts over. A thousand busy
	// engines send 30,000 messages a second, and a gap costs a snapshot, so a
	// process that gets no processor for a second must not drop any.
	queueLength = 1 << 15
	queueBytes  = 64 << 20
	// behind is how many messages may wait and snapshots still be asked for. With
	// more, the processor is what lacks: those in step come first, or they would
	// fall out of step for the sake of those that are not.
	behind = queueLength / 16
	// pollEvery is how often requests are sent and given up.
	pollEvery = 10 * time.Millisecond
)

// item is what waits for a worker.
type item struct {
	kind    kind
	name    string
	attempt uint64
	data    []byte
	trace   string // context of the span that a delta was sent in; may be empty
	at      time.Time
	why     string // of a nameless one
}

type kind uint8

const (
	isDelta kind = iota
	isHeartbeat
	isChunk
	isRefusal  // nobody answers snapshot requests
	isSilence  // the fleet has given the member up
	isNameless // the subject names no member
)

// worker owns a share of the members: what concerns one member happens in
// order, and a large snapshot of one holds up only that share.
type worker struct {
	in         *Ingest
	queue      chan item
	review     chan struct{} // holds one
	bytes      atomic.Int64
	members    map[string]*member
	unsynced   map[string]*member
	rng        *rand.Rand
	reconnects uint64
	swept      time.Time           // when silent members were last looked for
	strangers  map[string]*verdict // refused, and no members
	send       func(name string, v *pb.Verdict)
}

func newWorker(in *Ingest) *worker {
	return &worker{
		in:        in,
		queue:     make(chan item, queueLength),
		review:    make(chan struct{}, 1),
		members:   make(map[string]*member),
		unsynced:  make(map[string]*member),
		rng:       rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
		strangers: make(map[string]*verdict),
		send:      in.send,
	}
}

// put tells whether there was room.
func (w *worker) put(it item) bool {
	size := int64(len(it.data))
	if w.bytes.Add(size) > queueBytes {
		w.bytes.Add(-size)
		return false
	}
	select {
	case w.queue <- it:
		return true
	default:
		w.bytes.Add(-size)
		return false
	}
}

func (w *worker) run(ctx context.Context) {
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case it := <-w.queue:
			w.bytes.Add(-int64(len(it.data)))
			now := time.Now()
			w.handle(it, now)
			w.publish(it.name, now)
		case now := <-poll.C:
			w.poll(now)
		case <-w.review:
			w.reviewMembers(time.Now())
		}
	}
}

// reviewMembers asks again who may be a member, and who is in service.
func (w *worker) reviewMembers(now time.Time) {
	view := w.in.cfg.Fleet.View()
	for name, m := range w.members {
		one := view.Member(m.id)
		if one == nil {
			continue
		}
		info := *one.Info
		if err := w.admit(&info); err != nil {
			w.forget(m)
			w.bar(name, err, now)
			w.publish(name, now)
			continue
		}
		w.withdraw(m, &info)
	}
}

// withdraw notes whether a member is in service.
func (w *worker) withdraw(m *member, i *fleet.Info) {
	if w.in.cfg.Withdrawn == nil {
		return
	}
	is := w.in.cfg.Withdrawn(i)
	w.logWithdrawal(m, is)
	w.in.cfg.Fleet.Withdraw(m.id, is)
}

func (w *worker) handle(it item, now time.Time) {
	w.checkConnection(now)
	m := w.members[it.name]
	c := &w.in.count
	if m == nil {
		switch it.kind {
		case isHeartbeat:
			w.announce(it, now)
		case isDelta:
			// Its first heartbeat says where it stands.
			c.ignored.Add(1)
		case isNameless:
			c.malformed.Add(1)
			w.refuseMember(it.name, it.why, now)
		}
		return
	}
	switch it.kind {
	case isHeartbeat:
		h, err := protocol.ReadHeartbeat(it.data, it.name)
		if err != nil {
			w.refuse(m, it, h, err, now)
			return
		}
		c.heartbeats.Add(1)
		if h.GetLeaving() {
			w.in.cfg.Log.Info("member leaves", "member", m.name, "pod", m.said.pod)
			w.forget(m)
			return
		}
		info := infoOf(h)
		if err := w.admit(&info); err != nil {
			w.forget(m)
			w.bar(it.name, err, now)
			return
		}
		if m.verdict.accept(now) {
			w.in.cfg.Log.Info("member accepted again", "member", m.name)
		}
		w.logHeartbeat(m, h, now)
		w.withdraw(m, &info)
		w.in.cfg.Fleet.Receive(m.id, info, loadOf(h.GetLoad(), now), now)
		w.step(m, func() { m.heartbeat(h, now) })
	case isDelta:
		d, err := protocol.ReadDelta(it.data, it.name)
		if err != nil {
			w.refuse(m, it, nil, err, now)
			return
		}
		c.deltas.Add(1)
		w.step(m, func() {
			before := m.sequence
			m.delta(d, len(it.data), now)
			if sequence := d.GetHeader().GetSequence(); m.sequence == sequence {
				m.trace = it.trace
				if stamp := d.GetEventTimeUs(); stamp > 0 && before != sequence && w.in.cfg.Lag != nil {
					w.in.cfg.Lag(time.Since(time.UnixMicro(int64(min(stamp, math.MaxInt64)))))
				}
			}
		})
	case isChunk:
		chunk, err := protocol.ReadChunk(it.data, it.name)
		if err != nil {
			w.refuse(m, it, nil, err, now)
			return
		}
		c.chunks.Add(1)
		w.step(m, func() { m.chunk(it.attempt, chunk, len(it.data), now) })
	case isRefusal:
		w.step(m, func() { m.refused(it.attempt, now) })
	case isSilence:
		if m.lastSeen.Before(it.at) {
			w.in.cfg.Log.Warn("member is forgotten: it was silent for too long", "member", m.name, "pod", m.said.pod, "for", now.Sub(m.lastSeen).Round(time.Millisecond),
				"do", "nothing if it is gone for good; else see its agent")
			w.forget(m)
		}
	}
}

// announce takes up a member at its first heartbeat.
func (w *worker) announce(it item, now time.Time) {
	h, err := protocol.ReadHeartbeat(it.data, it.name)
	if err != nil {
		w.refuse(nil, it, h, err, now)
		return
	}
	w.in.count.heartbeats.Add(1)
	if h.GetLeaving() {
		return
	}
	info := infoOf(h)
	if err := w.admit(&info); err != nil {
		w.bar(it.name, err, now)
		return
	}
	id, err := w.in.cfg.Fleet.Join(it.name, now)
	if err != nil {
		w.bar(it.name, fmt.Errorf("%w: raise -max-members", err), now)
		return
	}
	delete(w.strangers, it.name)
	// The number may have been another member's.
	w.in.cfg.Index.Forget(index.Member(id))
	m := newMember(it.name, id, w.in.cfg.Index, w.rng, &w.in.count, now)
	w.members[it.name] = m
	w.unsynced[it.name] = m
	w.in.count.members.Add(1)
	w.in.count.syncing.Add(1)
	w.in.cfg.Log.Info("member announced", "member", it.name, "pod", info.Pod, "address", info.Address, "models", info.Models, "engine", info.EngineVersion)
	w.logHeartbeat(m, h, now)
	w.withdraw(m, &info)
	w.in.cfg.Fleet.Receive(id, info, loadOf(h.GetLoad(), now), now)
	w.step(m, func() { m.heartbeat(h, now) })
}

func (w *worker) admit(i *fleet.Info) error {
	if w.in.cfg.Admit == nil {
		return nil
	}
	return w.in.cfg.Admit(i)
}

// bar keeps a member out, and has its agent told why.
func (w *worker) bar(name string, why error, now time.Time) {
	w.in.count.refusedMembers.Add(1)
	w.refuseMember(name, why.Error(), now)
}

// step lets something happen to a member and draws the consequences.
func (w *worker) step(m *member, do func()) {
	synced, asked := m.synced, m.asked
	do()
	if asked && !m.asked {
		w.in.inFlight.Add(-1)
	}
	if synced != m.synced {
		if m.synced {
			delete(w.unsynced, m.name)
			w.in.count.syncing.Add(-1)
		} else {
			w.unsynced[m.name] = m
			w.in.count.syncing.Add(1)
		}
	}
	w.logTrust(m)
	w.in.cfg.Fleet.SetCacheState(m.id, m.cacheState())
}

// poll gives up requests without an answer, and sends those that are due, as
// many as may be under way.
func (w *worker) poll(now time.Time) {
	w.checkConnection(now)
	w.logSilent(now)
	mayAsk := w.in.cfg.Conn.IsConnected() && len(w.queue) <= behind
	for _, m := range w.unsynced {
		if m.asked {
			if len(w.queue) == 0 { // else the answer may be in it
				w.step(m, func() { m.expire(now) })
			}
			continue
		}
		if !mayAsk || !m.wants(now) {
			continue
		}
		if w.in.inFlight.Add(1) > int64(w.in.cfg.Snapshots) {
			w.in.inFlight.Add(-1)
			mayAsk = false
			continue
		}
		attempt := m.ask(now)
		if err := w.in.ask(m.name, attempt); err != nil {
			w.step(m, func() { m.fail(&m.count.failed, "request not sent", now) })
		}
	}
}

// checkConnection makes every cache state unverified when the connection came back:
// what was lost shows at the next heartbeat.
func (w *worker) checkConnection(now time.Time) {
	n := w.in.reconnects.Load()
	if n == w.reconnects {
		return
	}
	w.reconnects = n
	for _, m := range w.members {
		w.step(m, func() { m.suspect(now) })
	}
}

// forget drops a member with all its blocks. The index comes first: the fleet
// may give the number to another member at once.
func (w *worker) forget(m *member) {
	if m.asked {
		w.in.inFlight.Add(-1)
	}
	m.abandon()
	if !m.synced {
		w.in.count.syncing.Add(-1)
	}
	w.in.count.members.Add(-1)
	delete(w.members, m.name)
	delete(w.unsynced, m.name)
	w.in.cfg.Index.Forget(index.Member(m.id))
	w.in.cfg.Fleet.Leave(m.id)
}

// refuse counts a message that may not be believed. Bytes that are no message,
// or speak for somebody else, say nothing about m and change nothing: if they
// stood in a delta's place, the gap will show. A message of m's own that
// contradicts the rules means that the two ends no longer agree. h is what was
// read of a heartbeat: of an agent of another version it names the release.
func (w *worker) refuse(m *member, it item, h *pb.Heartbeat, err error, now time.Time) {
	c := &w.in.count
	var version protocol.OtherVersion
	switch {
	case errors.As(err, &version):
		c.wrongVersion.Add(1)
		if h == nil {
			return // its heartbeats are answered
		}
		err = errors.New(version.Explain("the agent", h.GetRelease(), "this scheduler", w.in.cfg.Release))
	case errors.Is(err, protocol.ErrMember):
		c.wrongMember.Add(1)
	default:
		c.malformed.Add(1)
		if m != nil && !errors.Is(err, protocol.ErrGarbage) {
			w.step(m, func() { m.malformed(it.kind, now) })
		}
	}
	w.refuseMember(it.name, err.Error(), now)
}
