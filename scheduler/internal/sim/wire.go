package sim

import (
	"slices"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// beat is the interval in which members speak.
const beat = time.Second

// wire brings what one engine tells to the scheduler: what it holds, batch by
// batch in the order of events, and how loaded it is. It stands for agent, bus
// and ingest, and keeps their promise: a batch that is lost is noticed by the
// next one or the next heartbeat, and then nothing is believed of the member
// until a snapshot has replaced the whole cache state.
type wire struct {
	*scout
	pod *pod
	id  fleet.ID

	epoch    uint64
	sent     uint64          // batches of this epoch
	pending  [lanes][]change // of the step under way
	ends     []change        // blocks at which hits may end, and may no longer
	received uint64          // batches that the cache state stands on
	synced   bool
}

func newWire(s *scout, p *pod, id fleet.ID) *wire {
	w := &wire{scout: s, pod: p, id: id, epoch: 1, synced: true}
	w.listen()
	s.fleet.Receive(id, s.info(p), nil, s.clock())
	w.trust(fleet.Exact)
	// Members do not speak at one moment.
	offset := func(every time.Duration) time.Duration {
		return s.calendar.now + every*time.Duration(len(s.wires)%s.cfg.Pods)/time.Duration(s.cfg.Pods)
	}
	s.calendar.at(offset(s.cfg.SampleInterval), w.sample)
	s.calendar.at(offset(beat), w.heartbeat)
	return w
}

func (w *wire) trust(t fleet.Trust) {
	rule := fleet.HitRule{Ends: w.cfg.Hybrid && !w.cfg.FullDepth}
	w.fleet.SetCacheState(w.id, fleet.CacheState{Trust: t, Epoch: w.epoch, Sequence: w.received, EngineBatches: w.received, Rule: rule})
}

// sample reads the engine's metrics; the scheduler hears of it later.
func (w *wire) sample() {
	load := w.pod.load(w.clock())
	w.calendar.at(w.calendar.now+w.cfg.SampleAge, func() {
		w.fleet.Receive(w.id, w.info(w.pod), load, w.clock())
	})
	w.calendar.at(w.calendar.now+w.cfg.SampleInterval, w.sample)
}

// heartbeat says that the member is there, and how many batches it has sent:
// it comes after them.
func (w *wire) heartbeat() {
	epoch, sent := w.epoch, w.sent
	w.after(w.cfg.EventLag, func() {
		w.fleet.Receive(w.id, w.info(w.pod), nil, w.clock())
		if epoch == w.epoch && w.synced && sent > w.received {
			w.lost()
		}
	})
	w.calendar.at(w.calendar.now+beat, w.heartbeat)
}

// after lets something happen after a time, at once if there is none.
func (w *wire) after(d time.Duration, what func()) {
	if d == 0 {
		what()
		return
	}
	w.calendar.at(w.calendar.now+d, what)
}

// lanes of the cache state that are kept: what is in GPU memory, and what is there
// or in host memory. No engine here has a disk, and a lane that reaches no
// deeper than the GPU's means nothing to the scheduler; so without host memory
// there is only the first.
const lanes = 2

// listen lets the wire hear what the pod's caches hold.
func (w *wire) listen() {
	gpu, host := w.pod.cache, w.pod.host
	gpu.marked = func(end bool, at int32) { w.mark(end, &gpu.blocks[at]) }
	gpu.change = func(held bool, at int32) {
		b := &gpu.blocks[at]
		w.changed(index.LaneGPU, held, b)
		if host == nil {
			return
		}
		if _, also := host.byKey[b.key]; !also {
			w.changed(index.LaneHost, held, b)
		}
	}
	if host == nil {
		return
	}
	host.change = func(held bool, at int32) {
		b := &host.blocks[at]
		if _, also := gpu.byKey[b.key]; !also {
			w.changed(index.LaneHost, held, b)
		}
	}
}

// changed notes what became of a block. Blocks that follow each other become
// one change, as they do in the agent.
func (w *wire) changed(l index.Lane, held bool, b *block) {
	pending := w.pending[l]
	if n := len(pending); n > 0 {
		switch c := &pending[n-1]; {
		case c.held != held:
		case held && c.keys[len(c.keys)-1] == b.parent():
			c.keys = append(c.keys, b.key)
			return
		case !held && c.position > 0 && c.before[len(c.before)-1] == b.key:
			// Evicted from tail to head: turned round when applied.
			c.keys, c.before, c.position = append(c.keys, b.key), b.before, b.position
			return
		}
	}
	w.pending[l] = append(pending, change{lane: l, held: held, before: b.before, position: b.position, keys: []blockkey.Key{b.key}})
}

// mark notes a block at which hits may end, or may no longer. One that came and
// went within a step is not spoken of.
func (w *wire) mark(end bool, b *block) {
	if !end {
		for i := len(w.ends) - 1; i >= 0; i-- {
			if w.ends[i].keys[0] == b.key && w.ends[i].held {
				w.ends = slices.Delete(w.ends, i, i+1)
				return
			}
		}
	}
	w.ends = append(w.ends, endChange(end, b))
}

func endChange(held bool, b *block) change {
	return change{end: true, held: held, before: b.before, position: b.position, keys: []blockkey.Key{b.key}}
}

// publish sends the changes of a step as one batch.
func (w *wire) publish() {
	var batch []change
	for _, c := range w.ends { // on lanes that they are about to leave
		if !c.held {
			batch = append(batch, c)
		}
	}
	for l := range w.pending {
		batch = append(batch, w.pending[l]...)
		clear(w.pending[l])
		w.pending[l] = w.pending[l][:0]
	}
	for _, c := range w.ends {
		if c.held {
			batch = append(batch, c)
		}
	}
	w.ends = nil
	if len(batch) == 0 {
		return
	}
	w.sent++
	if w.cfg.Lose > 0 && w.random.Float64() < w.cfg.Lose {
		return
	}
	epoch, sequence := w.epoch, w.sent
	w.after(w.cfg.EventLag, func() { w.receive(epoch, sequence, batch) })
}

// receive applies a batch that fits the cache state.
func (w *wire) receive(epoch, sequence uint64, batch []change) {
	switch {
	case epoch != w.epoch || sequence <= w.received:
		return // of another life, or in the snapshot
	case !w.synced:
		return // the snapshot will have it
	case sequence != w.received+1:
		w.lost()
		return
	}
	w.received = sequence
	for i := range batch {
		w.apply(&batch[i])
	}
}

func (w *wire) apply(c *change) {
	member, position := index.Member(w.id), uint32(c.position)
	switch {
	case c.end && c.held:
		w.index.MarkEnds(member, c.before, position, c.keys)
	case c.end:
		w.index.ClearEnds(member, c.before, position, c.keys)
	case c.held:
		w.index.Store(member, c.lane, c.before, position, c.keys)
	default:
		slices.Reverse(c.keys)
		w.index.Remove(member, c.lane, c.before, position, c.keys)
	}
}

// lost forgets the cache state and asks for a snapshot.
func (w *wire) lost() {
	w.synced = false
	w.index.Forget(index.Member(w.id))
	w.trust(fleet.Syncing)
	w.calendar.at(w.calendar.now+w.cfg.Resync, w.snapshot)
}

// snapshot is taken by the agent, travels as batches do, and replaces all that
// was before it. Batches behind it may be on their way: while the cache state is
// not synced they are dropped, and so the cut must come no later than they.
func (w *wire) snapshot() {
	epoch, sequence := w.epoch, w.sent
	held := w.held()
	w.after(w.cfg.EventLag, func() {
		if epoch != w.epoch {
			return
		}
		w.received, w.synced = sequence, true
		for i := range held {
			w.apply(&held[i])
		}
		w.trust(fleet.Exact)
	})
}

// held lists all that the engine holds, parents first.
func (w *wire) held() []change {
	gpu, host := w.pod.cache, w.pod.host
	named := gpu.named()
	all := chains(nil, index.LaneGPU, named)
	for _, b := range named {
		if b.end {
			all = append(all, endChange(true, b))
		}
	}
	if host == nil {
		return all
	}
	either := gpu.named()
	for _, b := range host.named() {
		if _, also := gpu.byKey[b.key]; !also {
			either = append(either, b)
		}
	}
	return chains(all, index.LaneHost, either)
}

// chains appends the blocks, each one behind that which it follows, where
// nothing else does.
func chains(all []change, l index.Lane, blocks []*block) []change {
	slices.SortStableFunc(blocks, func(a, b *block) int { return int(a.position - b.position) })
	ends := make(map[blockkey.Key]int, len(blocks))
	for _, b := range blocks {
		at, ok := ends[b.parent()]
		if ok {
			delete(ends, b.parent())
			all[at].keys = append(all[at].keys, b.key)
		} else {
			at = len(all)
			all = append(all, change{lane: l, held: true, before: b.before, position: b.position, keys: []blockkey.Key{b.key}})
		}
		ends[b.key] = at
	}
	return all
}

// restart begins another life of the engine, which holds nothing.
func (w *wire) restart() {
	w.epoch++
	w.sent, w.received, w.pending, w.ends, w.synced = 0, 0, [lanes][]change{}, nil, true
	w.listen()
	w.index.Forget(index.Member(w.id))
	w.trust(fleet.Exact)
}
