package rank

import (
	"time"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
)

// Position is where a rank's stream stood when a poll of the engine began.
type Position struct {
	epoch   uint64
	batches uint64
	clears  uint64
	states  uint64
}

// Position of the stream now.
func (r *Rank) Position() Position {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.positionLocked()
}

func (r *Rank) positionLocked() Position {
	return Position{epoch: r.epoch, batches: r.incarnation.batches, clears: r.incarnation.clears, states: r.states}
}

// resetWatch finds what emptied the prefix cache and was not announced yet:
// requests to reset it, and to sleep. An idle engine sends AllBlocksCleared only
// with its next request's events, but counts the HTTP request at once.
type resetWatch struct {
	counted Emptied  // at the poll before
	idle    bool     // at the poll before
	before  Position // where the stream stood at the poll before
	// pending: a reset was asked for, and it is open whether it succeeded.
	pending bool
	since   Position
}

// anew is the watch of an epoch that begins: the count goes on, as long as the
// process is the same, so that a reset before the epoch's first poll shows.
func (w resetWatch) anew() resetWatch { return resetWatch{counted: w.counted} }

// judge takes one poll and says whether the GPU's blocks are gone (clear), and
// whether that is certain.
func (w *resetWatch) judge(count Emptied, idle, asleep bool, at, now Position) (clear, certain bool) {
	resets, sleeps := count.Resets-w.counted.Resets, count.Sleeps-w.counted.Sleeps
	known, idleBefore, before := w.counted.Known && resets >= 0 && sleeps >= 0, w.idle, w.before
	w.counted, w.idle, w.before = count, idle, at
	if !known {
		return false, false // the first poll, or the counters of a new process
	}
	if announced := float64(now.clears - before.clears); resets+sleeps > announced {
		w.pending = true
		w.since = now
		if idle && idleBefore && now.batches == before.batches {
			// Nobody ran from poll to poll: nothing could make a reset fail. A
			// request to sleep may only have paused the engine.
			w.pending = false
			return true, sleeps == 0 || asleep
		}
		return false, false
	}
	if !w.pending {
		return false, false
	}
	switch {
	case now.clears != w.since.clears, now.batches != w.since.batches:
		// Announced; or events came without a word of it, so it had failed.
		w.pending = false
	case idle:
		// It failed because the engine was busy, or it succeeded just after.
		w.pending = false
		return true, false
	}
	return false, false
}

// weigh draws the conclusions that only metrics allow: the engine sleeps, was
// emptied while idle, or is not the one whose events these are. at is where the
// stream stood when the poll began, asked when the metrics were asked for: what
// came since may be younger than they are.
func (r *Rank) weigh(l *vllm.Load, now Emptied, at Position, asked time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	stand := r.positionLocked()
	if at.epoch != stand.epoch {
		return
	}
	asleep := l.Sleeping != nil && *l.Sleeping
	if asleep && stand == at && r.mirror.Stats().GPUCopies > 0 {
		r.log.Info("the engine sleeps: its GPU blocks are gone")
		r.clearLocked("")
	}
	if clear, certain := r.incarnation.reset.judge(now, l.Idle(), asleep, at, stand); clear {
		missing := ""
		if !certain {
			missing = "the prefix cache may have been emptied"
		}
		r.log.Info("the idle engine's prefix cache was emptied", "certain", certain)
		r.clearLocked(missing)
	}
	r.reconcileLocked(l, now.Resets, asked, stand.states == at.states)
}

func (r *Rank) clearLocked(missing string) {
	r.mirror.Clear(mirror.GPU)
	r.changes++
	if missing != "" {
		r.incarnation.missing = missing
	}
	r.wake()
}

// Unconnected says why there is no stream although the engine answers.
func (r *Rank) Unconnected(engineSince time.Time) string {
	const patience = 10 * time.Second
	if engineSince.IsZero() || time.Since(engineSince) < patience || r.tail.Stats().Connections > 0 {
		return ""
	}
	return "the engine answers but its event stream is not there: are KV events enabled?"
}
