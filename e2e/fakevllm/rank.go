package fakevllm

import (
	"context"
	"slices"
	"sync"
	"time"
)

// maxLag bounds what a late rank may catch up. Beyond it the lost time is gone
// and shows in Counters.Lag.
const maxLag = 50 * time.Millisecond

// rank is one data-parallel rank: a pool, a batch and a stream of events. Its
// loop takes step after step; requests come and go between.
type rank struct {
	index   int
	cfg     Config
	events  *Publisher // nil: none are sent
	metrics *metrics
	wake    chan struct{}
	started time.Time

	mu       sync.Mutex // guards what follows
	pool     *pool
	incoming []*sequence // sent since the last step began
	waiting  []*sequence // by order, then arrival
	running  []*sequence // by admission
	reserved int         // blocks that running sequences may still ask for
	fresh    []int32     // states of the step under way, which it cannot hit
	batch    batch
	// clearing: the next batch begins with AllBlocksCleared.
	clearing bool
	sleeping int  // sleep level, 0 awake
	paused   bool // no steps are taken
	left     bool // somebody did, since the last step
	arrivals int64
	counters Counters
}

// share is what one sequence computes in one step.
type share struct {
	seq    *sequence
	tokens int
}

func newRank(index int, cfg Config, events *Publisher, m *metrics) *rank {
	return &rank{
		index:   index,
		cfg:     cfg,
		events:  events,
		metrics: m,
		wake:    make(chan struct{}, 1),
		started: time.Now(),
		pool:    newPool(cfg.Blocks),
		batch:   batch{era: cfg.Era},
	}
}

// run takes steps until ctx ends. Steps follow each other at the times the
// profile says, not at the times the machine finds for them: a late step does
// not delay the next.
func (r *rank) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var shares []share
	var busyUntil time.Time
	for {
		start, late := busyUntil, time.Duration(0)
		if now := time.Now(); start.IsZero() {
			start = now
		} else if lag := now.Sub(start); lag > maxLag {
			start, late = now, lag
		}
		var cost time.Duration
		shares, cost = r.begin(shares[:0], start)
		if len(shares) == 0 {
			busyUntil = time.Time{}
			select {
			case <-ctx.Done():
				r.abortAll()
				return
			case <-r.wake:
			}
			continue
		}
		if late > 0 {
			r.lagged(late)
		}
		busyUntil = start.Add(time.Duration(float64(cost) / r.cfg.Speedup))
		if wait := time.Until(busyUntil); wait > 0 {
			timer.Reset(wait)
			select {
			case <-ctx.Done():
				r.abortAll()
				return
			case <-timer.C:
			}
		} else if ctx.Err() != nil {
			r.abortAll()
			return
		}
		r.finish(shares, busyUntil)
	}
}

func (r *rank) lagged(d time.Duration) {
	r.mu.Lock()
	r.counters.Lag += d
	r.mu.Unlock()
}

// add sends a sequence to the rank, which takes it before its next step.
func (r *rank) add(s *sequence) {
	s.hashes = s.scope.appendHashes(nil, s.tokens, r.cfg.BlockSize)
	s.boundaries = r.cfg.resumable(s.prompt)
	r.mu.Lock()
	s.arrival = r.arrivals
	r.arrivals++
	s.arrived = time.Now()
	s.cached = -1
	r.incoming = append(r.incoming, s)
	r.mu.Unlock()
	signal(r.wake)
}

func (r *rank) enqueueLocked(s *sequence) {
	i, _ := slices.BinarySearchFunc(r.waiting, s, func(a, b *sequence) int {
		if a.order != b.order {
			if a.order < b.order {
				return -1
			}
			return 1
		}
		return int(a.arrival - b.arrival)
	})
	r.waiting = slices.Insert(r.waiting, i, s)
}

// cancel takes a sequence out and frees its blocks at once; what a step under
// way computes for it is lost.
func (r *rank) cancel(s *sequence) {
	r.mu.Lock()
	s.aborted = true
	r.sweepLocked()
	r.mu.Unlock()
	signal(r.wake)
}

func (r *rank) abortAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.running {
		s.aborted = true
	}
	for _, s := range r.waiting {
		s.aborted = true
	}
	for _, s := range r.incoming {
		s.aborted = true
	}
	r.sweepLocked()
}

// sweepLocked drops aborted sequences. No histogram hears of them.
func (r *rank) sweepLocked() {
	gone := func(s *sequence) bool {
		if !s.aborted {
			return false
		}
		r.dropLocked(s)
		r.counters.Aborted++
		r.left = true
		s.end("abort")
		return true
	}
	r.running = slices.DeleteFunc(r.running, gone)
	r.waiting = slices.DeleteFunc(r.waiting, gone)
	r.incoming = slices.DeleteFunc(r.incoming, gone)
}

// dropLocked gives a sequence's blocks back.
func (r *rank) dropLocked(s *sequence) {
	if s.blocks == nil {
		return
	}
	for _, list := range s.blocks {
		if !r.cfg.Preemption {
			r.reserved -= r.blocksFor(s.total()) - len(list)
		}
		r.pool.release(list)
	}
	s.blocks = nil
}

func (r *rank) blocksFor(tokens int) int {
	return (tokens + r.cfg.BlockSize - 1) / r.cfg.BlockSize
}

// begin plans a step and takes its blocks: running sequences first, then the
// queue in order, until the token budget is spent. Blocks that the step fills
// can be found from now on, their events leave when it ends.
func (r *rank) begin(shares []share, now time.Time) ([]share, time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.incoming {
		s.queued = now
		r.enqueueLocked(s)
	}
	clear(r.incoming)
	r.incoming = r.incoming[:0]
	if r.sleeping > 0 || r.paused {
		if r.left {
			r.reportLocked(now)
		}
		return shares, 0
	}
	r.fresh = r.fresh[:0]
	budget := r.cfg.MaxBatchedTokens
	preempted := r.counters.Preempted
	var w work
	plan := func(s *sequence, n int) {
		if s.generated() > 0 && n == 1 {
			w.decode(s.computed)
		} else {
			w.prefill(n, s.computed)
		}
		budget -= n
		r.computeLocked(s, n)
		shares = append(shares, share{s, n})
	}
	for i := 0; i < len(r.running) && budget > 0; i++ {
		s := r.running[i]
		n := r.shareLocked(s, budget)
		if n == 0 {
			continue
		}
		if !r.growLocked(s, s.computed+n) {
			break // s itself was preempted, and everybody behind it
		}
		plan(s, n)
	}
	for budget > 0 && len(r.waiting) > 0 && len(r.running) < r.cfg.MaxSequences && r.counters.Preempted == preempted {
		s := r.waiting[0]
		if !r.admitLocked(s, now) {
			break
		}
		r.waiting = slices.Delete(r.waiting, 0, 1)
		r.running = append(r.running, s)
		n := r.shareLocked(s, budget)
		if n == 0 {
			break
		}
		r.growLocked(s, s.computed+n)
		plan(s, n)
	}
	if len(shares) == 0 {
		r.reportLocked(now)
		return shares, 0
	}
	r.counters.Steps++
	return shares, r.cfg.Profile.step(w)
}

// shareLocked is how many tokens of s the next step computes.
func (r *rank) shareLocked(s *sequence, budget int) int {
	return r.cfg.stop(s, s.computed, s.computed+min(len(s.tokens)-s.computed, budget)) - s.computed
}

// admitLocked looks up what is cached of s and takes it, if there is room: for
// all that s may ever need, or with preemption for all that it has now.
func (r *rank) admitLocked(s *sequence, now time.Time) bool {
	end, alone := r.cfg.hit(r.pool, s.hashes, len(s.tokens))
	computed := end * r.cfg.BlockSize
	need := r.blocksFor(s.total())
	if r.cfg.Preemption {
		need = r.blocksFor(len(s.tokens))
	}
	hit, idle := make([][]int32, len(r.cfg.Groups)), 0
	for i, g := range r.cfg.Groups {
		hit[i] = make([]int32, end)
		for at := min(g.passed(computed, r.cfg.BlockSize), end); at < end; at++ {
			hit[i][at] = r.pool.byHash[name{s.hashes[at], i}]
			if slices.Contains(r.fresh, hit[i][at]) {
				return false
			}
		}
		idle += r.pool.idle(hit[i])
	}
	if r.pool.free-r.reserved < len(hit)*(need-end)+idle {
		return false
	}
	for _, list := range hit {
		r.pool.take(list)
	}
	if !r.cfg.Preemption {
		r.reserved += len(hit) * (need - end)
	}
	s.blocks, s.computed, s.sealed = hit, computed, end
	if s.junction = 0; alone > end {
		s.junction = alone
	}
	if s.cached < 0 {
		s.cached = computed
		s.admitted = now
		r.counters.Queries += uint64(s.prompt)
		r.counters.Hits += uint64(computed)
	}
	return true
}

// trimLocked gives back what s does not need any more of its leading blocks.
func (r *rank) trimLocked(s *sequence) {
	for i, g := range r.cfg.Groups {
		list := s.blocks[i]
		end := min(g.passed(s.computed, r.cfg.BlockSize), len(list))
		at := 0 // between states there is nothing
		if g.Kind != StateSpace {
			for at = end; at > 0 && list[at-1] != 0; at-- {
			}
		}
		r.pool.release(list[at:end])
		clear(list[at:end])
	}
}

// growLocked gives s the blocks for so many tokens. With preemption the last
// running sequences yield for it; false if s itself had to.
func (r *rank) growLocked(s *sequence, tokens int) bool {
	r.trimLocked(s)
	all, n := r.blocksFor(tokens), 0
	for i, g := range r.cfg.Groups {
		if g.Kind == StateSpace { // between the states of two steps there is nothing
			n += min(1, all-len(s.blocks[i]))
		} else {
			n += all - len(s.blocks[i])
		}
	}
	if n <= 0 {
		return true
	}
	for r.cfg.Preemption && r.pool.free < n {
		last := r.running[len(r.running)-1]
		r.running = r.running[:len(r.running)-1]
		r.preemptLocked(last)
		if last == s {
			return false
		}
	}
	for i, g := range r.cfg.Groups {
		had := len(s.blocks[i])
		if !r.cfg.Preemption {
			r.reserved -= all - had
		}
		if g.Kind == StateSpace && had < all {
			s.blocks[i] = append(s.blocks[i], make([]int32, all-1-had)...)
		}
		s.blocks[i] = r.pool.allocate(s.blocks[i], all-len(s.blocks[i]), func(n name) {
			r.counters.Evicted++
			r.batch.removed(n)
		})
	}
	return true
}

// preemptLocked sends a running sequence back to the queue; it starts over.
func (r *rank) preemptLocked(s *sequence) {
	r.dropLocked(s)
	s.computed, s.sealed = 0, 0
	s.preempted++
	r.counters.Preempted++
	r.enqueueLocked(s)
}

// computeLocked accounts n more tokens of s and seals the blocks they fill.
func (r *rank) computeLocked(s *sequence, n int) {
	s.computed += n
	full := s.computed / r.cfg.BlockSize
	if full <= s.sealed {
		return
	}
	s.hashes = s.scope.appendHashes(s.hashes, s.tokens, r.cfg.BlockSize)
	for i, g := range r.cfg.Groups {
		e := stored{
			hashes:    make([]uint64, 0, full-s.sealed),
			tokens:    s.tokens[s.sealed*r.cfg.BlockSize : full*r.cfg.BlockSize],
			blockSize: r.cfg.BlockSize,
			group:     i, spec: g,
			adapter:   s.scope.adapter,
			adapterID: s.adapterID,
			salt:      s.scope.salt,
		}
		if s.sealed > 0 {
			e.parent, e.hasParent = s.hashes[s.sealed-1], true
		}
		for at := s.sealed; at < full; at++ {
			id := s.blocks[i][at]
			if id == 0 || !r.cfg.Dense && !g.keeps(at, r.cfg.BlockSize, r.boundaries(s), r.cfg.Drops) {
				continue
			}
			r.pool.seal(id, name{s.hashes[at], i})
			if g.Kind == StateSpace {
				r.fresh = append(r.fresh, id)
			}
			if at == 0 {
				e.first = true
			}
			e.hashes = append(e.hashes, s.hashes[at])
		}
		r.counters.Stored += uint64(len(e.hashes))
		r.storeLocked(e)
	}
	s.sealed = full
}

// boundaries are where others may resume behind s.
func (r *rank) boundaries(s *sequence) []int {
	if s.junction == 0 {
		return s.boundaries
	}
	return append(s.boundaries[:len(s.boundaries):len(s.boundaries)], s.junction)
}

func (r *rank) storeLocked(e stored) {
	if r.events == nil {
		return
	}
	if r.clearing {
		r.batch.cleared()
		r.clearing = false
	}
	r.batch.stored(e)
}

// finish ends a step: its events leave, then each sequence that has all its
// tokens computed gets another one.
func (r *rank) finish(shares []share, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if payload := r.batch.take(float64(time.Now().UnixNano())/1e9, r.index); payload != nil && r.events != nil {
		r.events.Publish(payload)
	}
	report := r.metrics.begin(r.index, now)
	got := shares[:0]
	done := false
	for _, sh := range shares {
		s := sh.seq
		if s.aborted || s.computed < len(s.tokens) {
			continue
		}
		state := uint64(hashSeed)
		if len(s.hashes) > 0 {
			state = s.hashes[len(s.hashes)-1]
		}
		s.tokens = append(s.tokens, generated(r.cfg.Seed, state, len(s.tokens)))
		r.counters.Generated++
		if s.generated() == 1 {
			r.counters.FirstTokens++
			r.counters.FirstTokenWait += now.Sub(s.arrived)
		}
		report.token(s)
		if s.generated() >= s.limit {
			done = true
			r.dropLocked(s)
			r.counters.Finished++
			r.counters.PromptTokens += uint64(s.prompt)
			report.finished(s, s.ending)
		}
		got = append(got, sh)
	}
	if done {
		r.running = slices.DeleteFunc(r.running, func(s *sequence) bool { return s.blocks == nil })
	}
	r.metrics.end(report, r.gaugesLocked())
	r.left = false
	// Clients hear of their tokens after the metrics do.
	for _, sh := range got {
		s := sh.seq
		reason := ""
		if s.generated() >= s.limit {
			reason = s.ending
		}
		s.deliver(s.tokens[len(s.tokens)-1], reason)
	}
}

// reportLocked is a step in which nothing is computed.
func (r *rank) reportLocked(now time.Time) {
	r.metrics.end(r.metrics.begin(r.index, now), r.gaugesLocked())
	r.left = false
}

// gaugesLocked is how the rank stands between two steps: what clients sent
// meanwhile is not known to it.
func (r *rank) gaugesLocked() gauges {
	g := gauges{
		running: len(r.running), waiting: len(r.waiting), usage: r.pool.usage(),
		queries: r.counters.Queries, hits: r.counters.Hits,
	}
	for _, s := range r.running {
		if name := s.scope.adapter; name != "" && !s.first.IsZero() {
			g.adapters = append(g.adapters, name)
		}
	}
	return g
}

// reset forgets the cache; only if nothing uses it, unless running sequences
// shall start over. An idle engine says nothing about it before it has
// something else to say.
func (r *rank) reset(preempt bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if preempt {
		for _, s := range slices.Backward(r.running) {
			r.preemptLocked(s)
		}
		r.running = r.running[:0]
	}
	return r.clearLocked()
}

func (r *rank) clearLocked() bool {
	if !r.pool.clear() {
		return false
	}
	r.clearing = true
	r.counters.Resets++
	return true
}

// pause keeps everything as it is from the next step on, or goes on.
func (r *rank) pause(on bool) {
	r.mu.Lock()
	r.paused = on
	r.mu.Unlock()
	signal(r.wake)
}

// sleep aborts what was taken and forgets the cache, level 0 wakes up.
func (r *rank) sleep(level int) {
	r.mu.Lock()
	r.sleeping = level
	if level > 0 {
		report := r.metrics.begin(r.index, time.Now())
		for _, list := range [][]*sequence{r.running, r.waiting} {
			for _, s := range list {
				s.aborted = true
				report.ended(s, r.started)
			}
		}
		r.sweepLocked()
		r.metrics.end(report, r.gaugesLocked())
		r.clearLocked()
	}
	r.metrics.sleep(r.index, level)
	r.mu.Unlock()
	signal(r.wake)
}
