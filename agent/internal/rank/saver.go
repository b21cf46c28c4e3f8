package rank

import (
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
)

// keepEvery is the time between two state files. The engine replays 10,000
// batches, minutes of work: any file that is younger than that will do.
const keepEvery = 5 * time.Second

// saver keeps a rank's state file. Nobody waits for it: a slow disk makes the
// file older, and no disk at all only costs what the file is for.
type saver struct {
	rank  *Rank
	path  string
	every time.Duration
	write func(path string, file []byte) error
	log   *slog.Logger

	saved   uint64 // rank.changes in the newest file
	failing bool
	buffer  []byte
	stats   saverStats
}

type saverStats struct {
	written, failed    atomic.Uint64
	loaded, refused    atomic.Uint64 // when the process began
	resumed, disproved atomic.Uint64 // of those loaded, by the engine
	bytes              atomic.Uint64 // of the newest file
}

// SaverStats counts state files.
type SaverStats struct {
	Written, Failed    uint64
	Loaded, Refused    uint64 // when the process began
	Resumed, Disproved uint64 // of those loaded, by the engine
	Bytes              uint64 // of the newest file
}

func (k *saver) counts() SaverStats {
	s := &k.stats
	return SaverStats{
		Written: s.written.Load(), Failed: s.failed.Load(), Loaded: s.loaded.Load(), Refused: s.refused.Load(),
		Resumed: s.resumed.Load(), Disproved: s.disproved.Load(), Bytes: s.bytes.Load(),
	}
}

func newSaver(dir string, r *Rank) *saver {
	return &saver{rank: r, path: filepath.Join(dir, r.member+".state"), every: keepEvery, write: writeState, log: r.log}
}

// load hands the rank what an earlier process left, as far as it is about this
// engine. It is believed when the engine has verified to be in the same incarnation; the
// mark is what it has to verify, nil for none.
func (k *saver) load(now Emptied) *vllm.Mark {
	head, state, err := readState(k.path)
	if errors.Is(err, fs.ErrNotExist) {
		k.log.Info("no saved cache state", "file", k.path)
		return nil
	}
	r := k.rank
	if err == nil {
		err = head.check(r.member, r.engineVersion(), r.id, now, time.Now())
	}
	var m *mirror.Mirror
	if err == nil {
		m = r.newMirror()
		err = m.Restore(state)
	}
	if err != nil {
		k.stats.refused.Add(1)
		k.log.Warn("saved cache state refused", "file", k.path, "reason", err)
		return nil
	}
	k.stats.loaded.Add(1)
	k.log.Info("saved cache state read, the engine has to verify it", "file", k.path, "batch", head.Mark.Sequence, "blocks", m.Stats().Nodes)
	r.await(&waiting{head: head, mirror: m, stats: &k.stats})
	return &head.Mark
}

// run saves from time to time, and a last time when the rank is at rest.
func (k *saver) run(rest <-chan struct{}) {
	timer := time.NewTicker(k.every)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			k.save()
		case <-rest:
			k.save()
			return
		}
	}
}

// save writes what changed since the last file.
func (k *saver) save() {
	file, changes, err := k.rank.capture(k.buffer[:0], k.saved)
	if file == nil && err == nil {
		return
	}
	if err == nil {
		file = endState(file)
		k.buffer = file
		err = k.write(k.path, file)
	}
	if err != nil {
		k.stats.failed.Add(1)
		if !k.failing {
			k.log.Warn("cache state cannot be saved, going on without", "file", k.path, "error", err)
		}
		k.failing = true
		return
	}
	if k.failing {
		k.log.Info("cache state can be saved again", "file", k.path)
	}
	k.failing, k.saved = false, changes
	k.stats.written.Add(1)
	k.stats.bytes.Store(uint64(len(file)))
}

// waiting is a cache state that the engine has not verified yet.
type waiting struct {
	head   *stateHead
	mirror *mirror.Mirror
	stats  *saverStats
}

// await takes a saved cache state that the tail is about to have verified. Until then
// nobody sees it.
func (r *Rank) await(w *waiting) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiting = w
	r.epoch = max(r.epoch, w.head.Epoch+1)
	r.reason = "the engine has not yet verified that the saved cache state is its own"
}

// Resume is called by the tail: the saved cache state becomes the first of this
// process's epoch, in which nothing was published so far. The epoch of the
// process before cannot go on, because its newest sequence is not known.
func (r *Rank) Resume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.waiting
	if w == nil {
		return
	}
	r.waiting = nil
	w.stats.resumed.Add(1)
	r.mirror = w.mirror
	r.id.learn(w.head)
	r.mirror.SetMaxBlocks(r.id.Blocks)
	r.newest, r.batches = &w.head.Mark, w.head.Mark.Sequence+1
	r.incarnation.before = r.mirror.Stats()
	r.incarnation.missing = w.head.Missing
	r.incarnation.dropped, r.incarnation.refused = w.head.Dropped, w.head.Refused
	r.incarnation.reset = resetWatch{counted: w.head.Emptied}
	r.stream.resume(w.head.Mark, r.mirror.Stats().Repeated)
	r.emptied = w.head.Emptied
	r.purgeChangedLocked(w.head.Adapters)
	r.changes++
	r.log.Info("the saved cache state holds", "batch", w.head.Mark.Sequence)
	r.wake()
}

// purgeChangedLocked forgets the blocks of adapters that are gone or have
// another root than the saved ones.
func (r *Rank) purgeChangedLocked(saved map[string]string) {
	roots := r.rootsLocked()
	for name, root := range saved {
		if now, ok := roots[name]; !ok || now != root {
			r.log.Info("adapter is gone or reloaded, forgetting its blocks", "adapter", name)
			r.mirror.PurgeAdapter(name)
		}
	}
}

// rootLocked is where an adapter was loaded from; empty: not known.
func (r *Rank) rootLocked(adapter string) string {
	if adapter == "" {
		return ""
	}
	for _, a := range r.info.GetAdapters() {
		if a.GetName() == adapter {
			return a.GetRoot()
		}
	}
	return ""
}

func (r *Rank) rootsLocked() map[string]string {
	roots := make(map[string]string)
	for _, a := range r.info.GetAdapters() {
		roots[a.GetName()] = a.GetRoot()
	}
	return roots
}

func (r *Rank) engineVersion() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.info.GetEngineVersion()
}

// counted takes what the engine counted at a poll that has been weighed.
func (r *Rank) counted(now Emptied, at Position) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at.epoch == r.epoch && r.emptied != now {
		r.emptied = now
		r.changes++
	}
}

// capture copies the cache state into a state file that lacks its end. Without
// changes, and while there is nothing that could be verified, it is nil.
func (r *Rank) capture(dst []byte, saved uint64) (file []byte, changes uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.newest == nil, r.changes == saved:
		return nil, saved, nil
	case !r.emptied.Known, r.incarnation.reset.pending:
		return nil, saved, nil // what the engine counts does not yet fit the mirror
	}
	st := r.mirror.Stats()
	file, err = beginState(dst, &stateHead{
		Member: r.member, Version: r.info.GetEngineVersion(),
		Model: r.id.Model, BlockSize: r.id.BlockSize, Reported: r.id.Reported, Blocks: r.id.Blocks,
		Epoch: r.epoch, Mark: *r.newest,
		Missing: r.incarnation.missing, Dropped: r.droppedLocked(st), Refused: r.refusedLocked(st),
		Emptied: r.emptied, Adapters: r.rootsLocked(),
	})
	if err != nil {
		return nil, saved, err
	}
	return r.mirror.Append(file), r.changes, nil
}
