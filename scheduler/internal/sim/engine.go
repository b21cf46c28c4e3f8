package sim

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// Admission says when a waiting request may begin.
type Admission string

const (
	// VLLM begins a request when its prompt fits, and takes blocks as tokens
	// come. When a running request finds none, the one that began last gives
	// its blocks back and is computed again later. Blocks of output are cached
	// as they fill.
	VLLM Admission = "vllm"
	// Reserve begins a request when prompt and whole output fit, and takes all
	// of it at once: nobody is ever preempted. Prompts count as held from that
	// moment; output that has no keys is not cached.
	Reserve Admission = "reserve"
)

// request is one request on its way.
type request struct {
	arrival.Request
	decision string        // the scheduler's name for where it goes
	priority int64         // lower is served first, where the engine goes by it
	turn     uint64        // order of arrival at the engine
	taken    time.Duration // by the engine, when the step under way was over
	queued   time.Duration // how long the scheduler let it wait

	blocks   []int32 // its KV memory, in order
	parted   int     // leading blocks that were held at its admission, where hits end at some only
	computed int     // leading tokens of prompt and output that are in it
	goal     int     // tokens to compute before the next one comes out
	made     int     // tokens that came out

	begun                bool          // admitted once
	cached               int           // tokens of the prompt found at first admission
	firstAdmitted, first time.Duration // when it began to compute; when the first token came
	last                 time.Duration // when the latest token came
	predictedMS          float64
	predictedCached      int
	resent               int
	loaded               time.Duration // when what lies in host memory has come
	landing              int           // blocks that come from there; 0 once they did
}

// decoding tells that the next step brings a token.
func (r *request) decoding() bool { return r.made > 0 && r.goal-r.computed == 1 }

// engine serves requests in steps, as vLLM does. A step computes one token for
// every decoding request, then goes on with prompts that were begun, then
// begins waiting ones as long as there is budget, memory and a free place. A
// stretch is one step, or several that only decode: nothing can change between
// them but by an arrival, which ends the stretch with the step under way.
type engine struct {
	profile   Profile
	admission Admission
	ranked    bool // waiting requests are served by priority, not by arrival
	blockSize int
	cache     *cache
	host      *cache        // what host memory holds, if there is any; nobody uses its blocks
	link      time.Duration // when the way from host memory is free
	// held, if set, says how many leading blocks of a prompt need not be
	// computed; otherwise the cache does.
	held func(r *request) int
	// hybrid: besides the blocks of full attention the engine keeps states, one
	// where each prompt ends and one where it parts from what is held. A hit ends
	// at a state.
	hybrid bool

	calendar *calendar
	ended    *entry // of the stretch under way
	busy     bool
	stretch  stretch

	waiting, running []*request
	fresh            []*request // those waiting that came since a stretch was planned
	served           []*request // those running when a stretch was planned
	arrivals         uint64
	// shown are the gauges as they stood when the last stretch ended: an engine
	// tells of itself at the end of each step.
	shown gauges

	tell   reporter
	totals fleet.Totals
	counts counts
}

// gauges of an engine.
type gauges struct{ running, waiting, used int }

// counts of an engine since the run began.
type counts struct {
	busy                   time.Duration
	hit, queried, fromHost int // tokens
	computed, preemptions  int
}

// stretch is what an engine is busy with.
type stretch struct {
	start    time.Duration
	steps    int
	work     prefill
	batch    int // requests that decode
	context  int // their tokens in the first step
	decodes  []*request
	prefills []chunk
}

// chunk of a prompt that a step computes.
type chunk struct {
	r      *request
	tokens int
}

func newEngine(p Profile, blockSize, blocks int, c *calendar, t reporter) *engine {
	e := &engine{profile: p, blockSize: blockSize, cache: newCache(blocks), calendar: c, tell: t}
	e.ended = &entry{what: e.finish, place: none}
	return e
}

// fits tells whether the engine could serve the request at all.
func (e *engine) fits(r *request) bool {
	return ceil(r.Length+r.Output, e.blockSize) <= e.cache.limit
}

// serve takes a request that fits.
func (e *engine) serve(r *request) {
	e.arrivals++
	r.turn = e.arrivals
	r.goal = r.Length
	e.wait(r)
	e.fresh = append(e.fresh, r)
	if !e.busy {
		e.begin()
		return
	}
	if e.stretch.steps > 1 {
		e.stretch.steps = e.stretch.reached(&e.profile, e.calendar.now)
		e.calendar.set(e.ended, e.stretch.start+e.stretch.time(&e.profile, e.stretch.steps))
	}
}

// wait puts a request at its place among the waiting ones.
func (e *engine) wait(r *request) {
	at, _ := slices.BinarySearchFunc(e.waiting, r, e.order)
	e.waiting = slices.Insert(e.waiting, at, r)
}

// order of service. A request that was preempted has its old turn.
func (e *engine) order(a, b *request) int {
	if e.ranked {
		return cmp.Or(cmp.Compare(a.priority, b.priority), cmp.Compare(a.turn, b.turn))
	}
	return cmp.Compare(a.turn, b.turn)
}

// begin plans the next stretch and starts it.
func (e *engine) begin() {
	e.busy = false
	s := &e.stretch
	*s = stretch{start: e.calendar.now, decodes: s.decodes[:0], prefills: s.prefills[:0]}
	for _, r := range e.fresh {
		r.taken = e.calendar.now
	}
	clear(e.fresh)
	e.fresh = e.fresh[:0]
	budget, preempted := e.profile.StepTokens, false
	e.served = append(e.served[:0], e.running...)
	for _, r := range e.served {
		if !r.decoding() || len(r.blocks) == 0 {
			continue
		}
		if budget == 0 {
			break
		}
		fits, gaveUp := e.grow(r, r.goal)
		preempted = preempted || gaveUp
		if !fits {
			break
		}
		s.decodes = append(s.decodes, r)
		s.context += r.goal
		budget--
	}
	for _, r := range e.served {
		if r.decoding() || r.loaded > e.calendar.now || len(r.blocks) == 0 {
			continue
		}
		if budget == 0 {
			break
		}
		e.land(r)
		n := min(r.goal-r.computed, budget)
		fits, gaveUp := e.grow(r, r.computed+n)
		preempted = preempted || gaveUp
		if !fits {
			break
		}
		e.compute(r, n)
		budget -= n
	}
	if preempted {
		e.strike()
	}
	for !preempted && len(e.waiting) > 0 && budget > 0 && len(e.running) < e.profile.Sequences {
		r := e.waiting[0]
		if !e.admit(r) {
			break
		}
		e.waiting = slices.Delete(e.waiting, 0, 1)
		e.running = append(e.running, r)
		if r.loaded > e.calendar.now {
			continue
		}
		n := min(r.goal-r.computed, budget)
		e.grow(r, r.computed+n) // admission saw to it that there is room
		e.compute(r, n)
		budget -= n
	}
	s.batch = len(s.decodes)
	if s.batch == 0 && len(s.prefills) == 0 {
		if preempted {
			e.begin() // who gave up memory left it to others
		}
		e.shown = e.gauges()
		return
	}
	s.steps = 1
	if len(s.prefills) == 0 {
		s.steps = e.unchanged()
	}
	e.busy = true
	e.calendar.set(e.ended, s.start+s.time(&e.profile, s.steps))
}

// compute lets the stretch work on n tokens of r.
func (e *engine) compute(r *request, n int) {
	e.stretch.work.add(n, r.computed)
	e.stretch.prefills = append(e.stretch.prefills, chunk{r, n})
}

// strike takes requests that were preempted while the step was planned out of it.
func (e *engine) strike() {
	s := &e.stretch
	gone := func(r *request) bool { return len(r.blocks) == 0 }
	s.decodes = slices.DeleteFunc(s.decodes, gone)
	s.prefills = slices.DeleteFunc(s.prefills, func(c chunk) bool { return gone(c.r) })
	s.context, s.work = 0, prefill{}
	for _, r := range s.decodes {
		s.context += r.goal
	}
	for _, c := range s.prefills {
		s.work.add(c.tokens, c.r.computed)
	}
}

// unchanged is the number of steps in which nothing but decoding happens: until
// a request ends or needs another block, or what it loads has come.
func (e *engine) unchanged() int {
	steps := math.MaxInt
	for _, r := range e.stretch.decodes {
		steps = min(steps, r.Output-r.made, len(r.blocks)*e.blockSize-r.computed)
		if len(r.Keys) > r.Length/e.blockSize {
			steps = min(steps, e.blockSize-r.computed%e.blockSize) // its output has keys
		}
	}
	for _, r := range e.running {
		if r.loaded > e.calendar.now {
			steps = min(steps, e.stretch.reached(&e.profile, r.loaded))
		}
	}
	return steps
}

// time of the first steps of a stretch.
func (s *stretch) time(p *Profile, steps int) time.Duration {
	return time.Duration(p.ms(s.work, s.batch, s.context, steps) * float64(time.Millisecond))
}

// reached is the number of steps that are over or under way at a time after
// the start, at most those of the stretch if it has begun.
func (s *stretch) reached(p *Profile, t time.Duration) int {
	low, high := 1, max(s.steps, 1)
	if s.steps == 0 {
		for high = 1; s.start+s.time(p, high) < t; high *= 2 {
		}
	}
	for low < high {
		middle := (low + high) / 2
		if s.start+s.time(p, middle) >= t {
			high = middle
		} else {
			low = middle + 1
		}
	}
	return low
}

// finish ends a stretch.
func (e *engine) finish() {
	s := &e.stretch
	took := e.calendar.now - s.start
	e.counts.busy += took
	e.busy = false
	for _, c := range s.prefills {
		c.r.computed += c.tokens
		e.counts.computed += c.tokens
		if c.r.computed == c.r.goal {
			e.token(c.r, 1)
		}
	}
	for _, r := range s.decodes {
		from := r.computed
		r.computed += s.steps
		e.nameFrom(r, from/e.blockSize, r.computed/e.blockSize)
		e.token(r, s.steps)
	}
	e.running = slices.DeleteFunc(e.running, func(r *request) bool { return r.made >= r.Output })
	e.shown = e.gauges()
	e.tell.step()
	e.begin()
}

// token lets n tokens come out of r.
func (e *engine) token(r *request, n int) {
	r.made += n
	r.goal = r.Length + r.made
	e.totals.GenerationTokens += float64(n)
	if r.made == n && r.first == 0 {
		r.first = e.calendar.now
		e.totals.PromptTokens += float64(r.Length)
		e.totals.CachedTokens += float64(r.cached)
		e.tell.firstToken(r)
		if r.Output > 1 {
			e.offload(r)
		}
	} else {
		e.totals.InterTokenSeconds += (e.calendar.now - r.last).Seconds()
		e.totals.InterTokenCount += float64(n)
	}
	r.last = e.calendar.now
	if r.made >= r.Output {
		e.offload(r)
		e.release(r)
		e.count(r)
		e.tell.end(r)
	}
}

// reset empties the engine as a restart does, and returns what it served.
func (e *engine) reset() []*request {
	broken := append(slices.Clone(e.running), e.waiting...)
	if e.busy {
		e.calendar.drop(e.ended)
		e.counts.busy += e.calendar.now - e.stretch.start
	}
	e.busy, e.running, e.waiting, e.fresh, e.shown = false, nil, nil, nil, gauges{}
	e.cache, e.totals = newCache(e.cache.limit), fleet.Totals{}
	if e.host != nil {
		e.host, e.link = newCache(e.host.limit), 0
	}
	return broken
}

// count takes a request that ended into the totals that vLLM observes then. Its
// prompt was counted with its first token.
func (e *engine) count(r *request) {
	e.totals.PrefillSeconds += (r.first - r.firstAdmitted).Seconds()
	e.totals.PrefillComputedTokens += float64(r.Length - r.cached)
	e.totals.PrefillRequests++
	e.totals.QueueSeconds += (r.firstAdmitted - r.taken).Seconds()
	e.totals.QueueRequests++
	e.totals.RequestPromptTokens += float64(r.Length)
	e.totals.RequestGenerationTokens += float64(r.made)
}

// admit gives a waiting request what is cached of it, if it may begin.
func (e *engine) admit(r *request) bool {
	most := (r.goal - 1) / e.blockSize
	keys := r.Keys[:min(len(r.Keys), most)]
	local := e.cache.match(keys, most)
	if e.hybrid && e.held == nil {
		r.parted = local
		local = e.cache.lastEnd(keys[:local])
	}
	hit, landing := local, 0
	if e.host != nil {
		landing = e.host.match(keys[local:], most)
		hit += landing
	}
	if e.held != nil {
		hit, landing = min(e.held(r), most), 0
	}
	need := ceil(r.goal, e.blockSize)
	if e.admission == Reserve {
		need = ceil(r.Length+r.Output, e.blockSize)
	}
	if e.cache.room() < need-local+e.cache.unused(keys[:local]) {
		return false
	}
	for _, k := range keys[:local] {
		at, _ := e.cache.use(k)
		r.blocks = append(r.blocks, at)
	}
	r.computed = hit * e.blockSize
	for len(r.blocks) < hit {
		r.blocks = append(r.blocks, e.cache.take())
	}
	if landing > 0 {
		e.fetch(r, landing)
	} else {
		e.nameFrom(r, local, hit)
	}
	if e.admission == Reserve {
		for len(r.blocks) < need {
			e.another(r)
		}
		e.nameFrom(r, hit, r.Length/e.blockSize)
	}
	if !r.begun {
		r.begun = true
		r.cached, r.firstAdmitted = r.computed, max(e.calendar.now, r.loaded)
		e.counts.hit += r.cached
		e.counts.fromHost += landing * e.blockSize
		e.counts.queried += r.Length
	}
	return true
}

// fetch lets so many blocks come from host memory, one request after the other.
func (e *engine) fetch(r *request, blocks int) {
	bytes := float64(blocks*e.blockSize) * float64(e.profile.KVBytes)
	e.link = max(e.link, e.calendar.now) + time.Duration(bytes/e.profile.HostGBps) // GB/s are bytes/ns
	r.loaded, r.landing = e.link, blocks
	e.calendar.at(r.loaded, func() {
		if !e.busy {
			e.begin()
		}
	})
}

// land says that what was fetched for r is there.
func (e *engine) land(r *request) {
	if r.landing > 0 {
		hit := r.computed / e.blockSize
		e.nameFrom(r, hit-r.landing, hit)
		r.landing = 0
	}
}

// offload copies what r has computed to host memory, as far as it is not there
// already: from its tail to its head, so that heads live longest there, too.
func (e *engine) offload(r *request) {
	if e.host == nil {
		return
	}
	for i := min(r.computed/e.blockSize, len(r.Keys)) - 1; i >= 0; i-- {
		at, ok := e.host.use(r.Keys[i])
		if !ok {
			at = e.host.take()
			e.host.name(at, r.Keys, i)
		}
		e.host.release(at, true)
	}
}

// another takes one more block for r: that which holds its content already, or
// a new one.
func (e *engine) another(r *request) {
	if n := len(r.blocks); n < r.Length/e.blockSize && n < len(r.Keys) {
		if at, ok := e.cache.use(r.Keys[n]); ok {
			r.blocks = append(r.blocks, at)
			return
		}
	}
	r.blocks = append(r.blocks, e.cache.take())
}

// grow sees to it that r has blocks for so many tokens. If there are none left,
// the request that is last in order gives up its own, until there are, or it
// is r itself.
func (e *engine) grow(r *request, tokens int) (fits, preempted bool) {
	need := ceil(tokens, e.blockSize)
	for e.cache.room() < need-len(r.blocks) {
		last := e.running[len(e.running)-1]
		if e.ranked {
			last = slices.MaxFunc(e.running, e.order)
		}
		e.preempt(last)
		preempted = true
		if last == r {
			return false, true
		}
	}
	for len(r.blocks) < need {
		e.another(r)
	}
	// What a step computes can be found by those who come after it.
	e.nameFrom(r, r.computed/e.blockSize, tokens/e.blockSize)
	return true, preempted
}

// preempt takes everything from a running request, and lets it wait again.
func (e *engine) preempt(r *request) {
	e.counts.preemptions++
	e.release(r)
	r.computed, r.loaded, r.landing = 0, 0, 0
	e.running = slices.DeleteFunc(e.running, func(o *request) bool { return o == r })
	e.wait(r)
}

// nameFrom names the blocks of r in a range of positions, where r has keys.
func (e *engine) nameFrom(r *request, from, to int) {
	if e.cache.limit == boundless {
		return // only an oracle has such a cache, and knows what is held
	}
	for i := from; i < min(to, len(r.Keys)); i++ {
		e.cache.name(r.blocks[i], r.Keys, i)
		if n := i + 1; e.hybrid && (n == r.parted || n == (r.Length-1)/e.blockSize) {
			e.cache.mark(r.Keys[i])
		}
	}
}

// release gives the blocks of r back, the last first. Output without keys is
// cached by vLLM all the same, and in the way of others until it is evicted.
func (e *engine) release(r *request) {
	for i := len(r.blocks) - 1; i >= 0; i-- {
		at := r.blocks[i]
		e.cache.release(at, e.admission == VLLM || e.cache.blocks[at].key != 0)
	}
	r.blocks = r.blocks[:0]
}

// sample is what the engine tells of itself at this moment: how it stood when
// its last step ended.
func (e *engine) sample() (running, waiting int, usage float64, totals fleet.Totals) {
	g, totals := e.shown, e.totals
	if s := &e.stretch; e.busy && s.steps > 1 {
		if over := s.reached(&e.profile, e.calendar.now) - 1; over > 0 {
			g = e.gauges()
			totals.GenerationTokens += float64(over * s.batch)
			totals.InterTokenCount += float64(over * s.batch)
			totals.InterTokenSeconds += s.time(&e.profile, over).Seconds() * float64(s.batch)
		}
	}
	return g.running, g.waiting, float64(g.used) / float64(e.cache.limit), totals
}

// gauges between two steps. What came since is not taken yet.
func (e *engine) gauges() gauges {
	return gauges{running: len(e.running), waiting: len(e.waiting) - len(e.fresh), used: e.cache.used()}
}

func ceil(tokens, size int) int { return (tokens + size - 1) / size }
