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
// until a snapshot has replaced the whole picture.
type wire struct {
	*scout
	pod *pod
	id  fleet.ID

	epoch    uint64
	sent     uint64   // batches of this epoch
	pending  []change // of the step under way
	received uint64   // batches that the picture stands on
	synced   bool
	asked    bool // for a snapshot
	load     *fleet.Load
	sampled  time.Duration
}

func newWire(s *scout, p *pod, id fleet.ID) *wire {
	w := &wire{scout: s, pod: p, id: id, epoch: 1, synced: true}
	p.cache.change = w.change
	s.fleet.Heard(id, s.info(p), nil, s.clock())
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
	w.fleet.SetPicture(w.id, fleet.Picture{Trust: t, Epoch: w.epoch, Sequence: w.received, EngineBatches: w.received})
}

// sample reads the engine's metrics; the scheduler hears of it later.
func (w *wire) sample() {
	load := w.pod.load(w.clock())
	w.calendar.at(w.calendar.now+w.cfg.SampleAge, func() {
		w.fleet.Heard(w.id, w.info(w.pod), load, w.clock())
	})
	w.calendar.at(w.calendar.now+w.cfg.SampleInterval, w.sample)
}

// heartbeat says that the member is there, and how many batches it has sent:
// it comes after them.
func (w *wire) heartbeat() {
	epoch, sent := w.epoch, w.sent
	w.after(w.cfg.EventLag, func() {
		w.fleet.Heard(w.id, w.info(w.pod), nil, w.clock())
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

// change hears what the engine does with a block. Blocks that follow each other
// become one change, as they do in the agent.
func (w *wire) change(held bool, at int32) {
	b := &w.pod.cache.blocks[at]
	if n := len(w.pending); n > 0 {
		switch c := &w.pending[n-1]; {
		case c.held != held:
		case held && c.keys[len(c.keys)-1] == b.parent():
			c.keys = append(c.keys, b.key)
			return
		case !held && c.position > 0 && c.before[len(c.before)-1] == b.key:
			// Evicted from tail to head: turned round when published.
			c.keys, c.before, c.position = append(c.keys, b.key), b.before, b.position
			return
		}
	}
	w.pending = append(w.pending, change{held, b.before, b.position, []blockkey.Key{b.key}})
}

// publish sends the changes of a step as one batch.
func (w *wire) publish() {
	if len(w.pending) == 0 {
		return
	}
	batch := w.pending
	w.pending = nil
	if w.cfg.EventLag == 0 {
		w.pending = batch[:0]
	}
	w.sent++
	if w.cfg.Lose > 0 && w.random.Float64() < w.cfg.Lose {
		w.pending = nil
		return
	}
	epoch, sequence := w.epoch, w.sent
	w.after(w.cfg.EventLag, func() { w.receive(epoch, sequence, batch) })
}

// receive applies a batch that fits the picture.
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
	if c.held {
		w.index.Store(index.Member(w.id), index.LaneGPU, c.before, uint32(c.position), c.keys)
		return
	}
	slices.Reverse(c.keys)
	w.index.Remove(index.Member(w.id), index.LaneGPU, c.before, uint32(c.position), c.keys)
}

// lost forgets the picture and asks for a snapshot.
func (w *wire) lost() {
	w.synced = false
	w.index.ForgetLane(index.Member(w.id), index.LaneGPU)
	w.trust(fleet.Syncing)
	w.calendar.at(w.calendar.now+w.cfg.Resync, w.snapshot)
}

// snapshot is taken by the agent, travels as batches do, and replaces all that
// was before it. Batches behind it may be on their way: while the picture is
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

// held lists all that the engine has published as held, parents first.
func (w *wire) held() []change {
	var all []change
	cache := w.pod.cache
	for at := range cache.blocks {
		if b := &cache.blocks[at]; b.key != 0 {
			all = append(all, change{true, b.before, b.position, []blockkey.Key{b.key}})
		}
	}
	slices.SortFunc(all, func(a, b change) int { return int(a.position - b.position) })
	return all
}

// restart begins another life of the engine, which holds nothing.
func (w *wire) restart() {
	w.epoch++
	w.sent, w.received, w.pending, w.synced = 0, 0, nil, true
	w.pod.cache.change = w.change
	w.index.ForgetLane(index.Member(w.id), index.LaneGPU)
	w.trust(fleet.Exact)
}
