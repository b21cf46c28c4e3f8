package rank

import (
	"cmp"
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
// requests to reset it, to sleep and to pause. An idle engine sends
// AllBlocksCleared only with its next request's events, but counts the HTTP
// request at once.
type resetWatch struct {
	counted Emptied  // at the poll before
	idle    bool     // at the poll before
	before  Position // where the stream stood when the poll before began
	clears  uint64   // announced until the poll before ended
	// ahead are clears that were announced while the poll before ran: its page may
	// be older than they are.
	ahead float64
	// owed are clears that the counters told and no event did. The next batch
	// announces all of them that took place.
	owed float64
	// pending: a reset was asked for, and it is open whether it succeeded.
	pending bool
	since   Position
}

// anew is the watch of an epoch that begins: the count goes on, as long as the
// process is the same, so that a reset before the epoch's first poll shows.
func (w resetWatch) anew() resetWatch { return resetWatch{counted: w.counted} }

// judge takes one poll and says whether the GPU's blocks are gone (clear), and
// whether that is certain. asleep is what the engine says of itself; at and now
// are where the stream stood when the poll began, and when it had ended.
func (w *resetWatch) judge(count Emptied, idle, asleep bool, at, now Position) (clear, certain bool) {
	resets, sleeps := count.Resets-w.counted.Resets, count.Sleeps-w.counted.Sleeps
	known, idleBefore, before := w.counted.Known && resets >= 0 && sleeps >= 0, w.idle, w.before
	if at.epoch != before.epoch {
		w.clears = at.clears // what was told again is no news
	}
	announced := float64(now.clears-w.clears) + w.ahead
	if now.batches != before.batches {
		announced -= min(announced, w.owed)
		w.owed = 0
	}
	w.counted, w.idle, w.before, w.clears, w.ahead = count, idle, at, now.clears, 0
	if !known { // the first poll, or the counters of a new process
		w.ahead, w.owed = float64(now.clears-at.clears), 0
		return false, false
	}
	unannounced := resets + sleeps - announced
	w.ahead = min(max(0, -unannounced), float64(now.clears-at.clears))
	if unannounced > 0 {
		w.owed += unannounced
		w.pending = true
		w.since = now
		if idle && idleBefore && now.batches == before.batches {
			// Nobody ran from poll to poll: nothing could make a reset fail. A
			// request to sleep or to pause may have left the cache as it is.
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
		if !certain {
			r.incarnation.doubted = time.Now()
		}
	}
	if l.HitTokens != nil && *l.HitTokens > 0 && r.stream.whole {
		r.mirror.Heard()
	}
	r.incarnation.fetched = l.ExternalTokens != nil && *l.ExternalTokens > 0
	r.reconcileLocked(l, now.Resets, asked, stand.states == at.states)
}

// keptLocked says whether a batch shows that a cache that may have been emptied
// was not: the engine would have said so in its first batch.
func (r *Rank) keptLocked(at vllm.Mark, b vllm.Batch) bool {
	return !r.incarnation.doubted.IsZero() && at.Live && len(b.Events) > 0 && b.At().After(r.incarnation.doubted)
}

// clearLocked forgets all blocks. missing is why there may still be some, empty:
// the GPU's are gone for certain.
func (r *Rank) clearLocked(missing string) {
	r.mirror.Clear(mirror.GPU)
	below := r.clearTiersLocked()
	r.incarnation.missing = cmp.Or(missing, below, r.incarnation.missing)
	r.changes++
	r.wake()
}

// clearTiersLocked forgets what lies outside GPU memory, and says why there may
// still be something; empty: nothing ever lay there. To sleep or to pause empties
// the tiers of a connector, to reset the prefix cache does so if the request
// asked for it, and no event tells any of it.
func (r *Rank) clearTiersLocked() (missing string) {
	if !r.mirror.Offloads() {
		return ""
	}
	r.mirror.Clear(mirror.Host)
	r.mirror.Clear(mirror.Disk)
	return "the prefix cache was emptied, and what a connector held outside GPU memory perhaps with it"
}

// Unconnected says why there is no stream although the engine answers.
func (r *Rank) Unconnected(engineSince time.Time) string {
	const patience = 10 * time.Second
	if engineSince.IsZero() || time.Since(engineSince) < patience || r.tail.Stats().Connections > 0 {
		return ""
	}
	return "the engine answers but its event stream is not there: are KV events enabled?"
}
