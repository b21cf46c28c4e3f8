package agent

import (
	"time"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
)

// mark is where a rank's stream stood when a look at the metrics began.
type mark struct {
	epoch   uint64
	batches uint64
	clears  uint64
	states  uint64
}

func (r *rank) mark() mark {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.markLocked()
}

func (r *rank) markLocked() mark {
	return mark{epoch: r.epoch, batches: r.life.batches, clears: r.life.clears, states: r.states}
}

// resetWatch finds resets of the prefix cache that the engine has not announced
// yet. An idle engine sends AllBlocksCleared only with its next request's
// events, but counts the HTTP request at once.
type resetWatch struct {
	known  bool
	count  float64
	idle   bool // at the look before
	before mark // where the stream stood at the look before
	// pending: a reset was asked for, and it is open whether it succeeded.
	pending bool
	since   mark
}

// anew is the watch of an epoch that begins: the count goes on, as long as the
// process is the same, so that a reset before the epoch's first look shows.
func (w resetWatch) anew() resetWatch { return resetWatch{known: w.known, count: w.count} }

// judge takes one look and says whether the GPU's blocks are gone (clear), and
// whether that is certain.
func (w *resetWatch) judge(count float64, idle bool, at, now mark) (clear, certain bool) {
	grown := count - w.count
	known, idleBefore, before := w.known && grown >= 0, w.idle, w.before
	w.known, w.count, w.idle, w.before = true, count, idle, at
	if !known {
		return false, false // the first look, or the counter of a new process
	}
	announced := float64(now.clears - before.clears)
	if grown > announced {
		w.pending = true
		w.since = now
		if idle && idleBefore && now.batches == before.batches {
			// Nobody ran from look to look: nothing could make it fail.
			w.pending = false
			return true, true
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

// silenceWatch notices engines that compute prompts and send no events while
// the stream stands. It begins anew whenever the stream's state changes: what is
// computed while the connection is away says nothing.
type silenceWatch struct {
	known    bool
	computed float64 // prompt tokens that were not cached, at the first look
	requests float64
}

// mute says whether so much was computed that events must have come.
func (w *silenceWatch) mute(l *vllm.Load, blockSize int) bool {
	if l.PromptTokens == nil || l.CachedTokens == nil || l.PrefillRequests == nil {
		return false
	}
	computed, requests := *l.PromptTokens-*l.CachedTokens, *l.PrefillRequests
	if !w.known || computed < w.computed {
		w.known, w.computed, w.requests = true, computed, requests
		return false
	}
	// Prompts shorter than a block have no events to send.
	size := float64(max(blockSize, 16))
	grown, asked := computed-w.computed, requests-w.requests
	return grown >= 64*size && asked > 0 && grown/asked >= 2*size
}

// weigh draws the conclusions that only metrics allow: the engine sleeps, was
// reset while idle, or sends nothing although it works. at is where the stream
// stood when the look began: what came since may be younger than the metrics.
// The text says why events are missing altogether.
func (r *rank) weigh(l *vllm.Load, resets float64, at mark) (silent string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.markLocked()
	if at.epoch != now.epoch {
		return ""
	}
	if l.Sleeping != nil && *l.Sleeping && now == at && r.mirror.Stats().GPUCopies > 0 {
		r.log.Info("the engine sleeps: its GPU blocks are gone")
		r.clearLocked("")
	}
	if clear, certain := r.life.reset.judge(resets, idleOf(l), at, now); clear {
		doubt := ""
		if !certain {
			doubt = "the prefix cache may have been reset"
		}
		r.log.Info("the idle engine's prefix cache was reset", "certain", certain)
		r.clearLocked(doubt)
	}
	if now.batches == 0 && now.states == at.states && r.life.silence.mute(l, r.blockSizeLocked()) {
		return "the engine computes prompts but no events arrive: are KV events enabled, and is this their endpoint?"
	}
	return ""
}

func (r *rank) clearLocked(doubt string) {
	r.mirror.Clear(mirror.GPU)
	r.changes++
	if doubt != "" {
		r.life.doubt = doubt
	}
	r.wake()
}

// unconnected says why there is no stream although the engine answers.
func (r *rank) unconnected(engineSince time.Time) string {
	const patience = 10 * time.Second
	if engineSince.IsZero() || time.Since(engineSince) < patience || r.tail.Stats().Connections > 0 {
		return ""
	}
	return "the engine answers but its event stream is not there: are KV events enabled?"
}
