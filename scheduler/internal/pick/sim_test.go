package pick

import (
	"cmp"
	"container/heap"
	"container/list"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// The simulation puts the real picker, fleet, index and fits in front of
// engines on a virtual clock. Engines work as vLLM does, in steps: running
// decodes first, then prefills in order of arrival, at most simBudget tokens a
// step, admitted when prompt and output fit into the cache. What they count is
// what vLLM counts: a request's prefill time runs from its first step to its
// first token, all that shares the steps included, and is counted when the
// request ends.
const (
	simBlock  = 64
	simBudget = 8192
)

// simProfile times a step in ms: max(floor, token*new) + pair*pairs +
// sequence*decodes + context*contexts.
type simProfile struct{ floor, token, pair, sequence, context float64 }

// qwen is Qwen3-32B on two H100, by published kernel times.
var qwen = simProfile{floor: 11, token: 0.0425, pair: 8.86e-7, sequence: 0.025, context: 4.53e-5}

// times returns a profile so many times slower.
func (p simProfile) times(f float64) simProfile {
	return simProfile{p.floor * f, p.token * f, p.pair * f, p.sequence * f, p.context * f}
}

type simRequest struct {
	at       time.Duration // when it arrives
	keys     []blockkey.Key
	input    int
	output   int
	decision string
	engine   *simEngine

	cached, computed, made int
	blocks                 []*simCached
	private                int // blocks without a key
	admitted, first        time.Duration
}

type simCached struct {
	key      blockkey.Key
	position int
	before   []blockkey.Key
	users    int
	idle     *list.Element
}

type simEngine struct {
	id               fleet.ID
	profile          simProfile
	free             int // blocks that hold nothing
	blocks           map[blockkey.Key]*simCached
	idle             *list.List // blocks without users, the longest unused in front
	waiting, running []*simRequest
	step             []*simRequest // who takes part in the one under way
	busy             bool
	totals           fleet.Totals
	served           int
	mostRunning      int
	hits, queries    int
}

type simEvent struct {
	at   time.Duration
	n    int // order of equal times
	what func()
}

type simEvents []simEvent

func (h simEvents) Len() int { return len(h) }
func (h simEvents) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(h[i].at, h[j].at), cmp.Compare(h[i].n, h[j].n)) < 0
}
func (h simEvents) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *simEvents) Push(x any)   { *h = append(*h, x.(simEvent)) }
func (h *simEvents) Pop() any {
	old := *h
	e := old[len(old)-1]
	*h = old[:len(old)-1]
	return e
}

type sim struct {
	*bed
	policy  string
	engines []*simEngine
	events  simEvents
	n       int
	now     time.Duration
	open    int
	ttft    []float64 // ms, by order of first tokens
}

// simCapacity is the KV cache of an engine in tokens, that of Qwen3-32B on two
// H100.
const simCapacity = 307_328

func newSim(b *bed, policy string, capacity int, profiles ...simProfile) *sim {
	s := &sim{bed: b, policy: policy}
	for i, p := range profiles {
		id := b.joinAs(fleet.Info{Name: fmt.Sprintf("m%d", i), Models: []string{"model"}, BlockSize: simBlock})
		e := &simEngine{id: id, profile: p, free: capacity / simBlock, blocks: make(map[blockkey.Key]*simCached), idle: list.New()}
		s.engines = append(s.engines, e)
		s.at(time.Duration(i)*time.Second/time.Duration(len(profiles)), func() { s.heartbeat(e) })
	}
	s.at(0, s.tick)
	return s
}

func (s *sim) at(t time.Duration, what func()) {
	s.n++
	heap.Push(&s.events, simEvent{t, s.n, what})
}

func (s *sim) clock() time.Time { return t0.Add(s.now) }

// run serves the requests to their ends.
func (s *sim) run(requests []*simRequest) {
	s.open = len(requests)
	for _, r := range requests {
		s.at(r.at, func() { s.arrive(r) })
	}
	for s.open > 0 {
		e := heap.Pop(&s.events).(simEvent)
		s.now = e.at
		e.what()
	}
}

func (s *sim) tick() {
	s.Tick(s.clock())
	s.fleet.Sweep(s.clock())
	s.at(s.now+500*time.Millisecond, s.tick)
}

func (s *sim) heartbeat(e *simEngine) {
	info := *s.fleet.View().Member(e.id).Info
	s.fleet.Heard(e.id, info, &fleet.Load{
		At: s.clock(), Running: len(e.running), Waiting: len(e.waiting), KVUsage: math.NaN(), Totals: e.totals,
	}, s.clock())
	s.at(s.now+time.Second, func() { s.heartbeat(e) })
}

func (s *sim) arrive(r *simRequest) {
	req := Request{
		Prompt: Prompt{Keys: r.keys, BlockSize: simBlock, Length: r.input}, Policy: s.policy, Reserve: true, Top: 1,
	}
	if s.policy == "least-ttft" {
		req.Policy, req.Reserve, req.Top = "default", false, 0
		all := s.pickAt(req, s.clock())
		best := slices.MinFunc(all.Candidates, func(a, b Candidate) int { return cmp.Compare(a.Cost.FirstToken(), b.Cost.FirstToken()) })
		req.Candidates, req.Reserve = []Ref{{Member: best.Member.Info.Name}}, true
	}
	d := s.pickAt(req, s.clock())
	r.decision = d.ID
	for _, e := range s.engines {
		if e.id == d.Candidates[0].Member.ID {
			r.engine = e
		}
	}
	e := r.engine
	e.served++
	e.waiting = append(e.waiting, r)
	s.begin(e)
}

// begin plans the next step of an engine that has none under way.
func (s *sim) begin(e *simEngine) {
	if e.busy {
		return
	}
	budget, decodes := simBudget, 0
	var tokens, pairs, contexts float64
	prefill := func(r *simRequest) {
		n := min(r.input-r.computed, budget)
		tokens += float64(n)
		pairs += float64(n) * (float64(r.computed) + float64(n)/2)
		r.computed += n
		budget -= n
		e.step = append(e.step, r)
	}
	e.step = e.step[:0]
	for _, r := range e.running {
		if r.computed == r.input {
			decodes++
			contexts += float64(r.input + r.made)
			budget--
			e.step = append(e.step, r)
		}
	}
	for _, r := range e.running {
		if r.computed < r.input && budget > 0 {
			prefill(r)
		}
	}
	for len(e.waiting) > 0 && budget > 0 && len(e.running) < 256 && s.admit(e, e.waiting[0]) {
		r := e.waiting[0]
		e.waiting = e.waiting[1:]
		e.running = append(e.running, r)
		prefill(r)
	}
	if len(e.step) == 0 {
		return
	}
	e.mostRunning = max(e.mostRunning, len(e.running))
	p := &e.profile
	ms := max(p.floor, p.token*tokens) + p.pair*pairs + p.sequence*float64(decodes) + p.context*contexts
	e.busy = true
	s.at(s.now+time.Duration(ms*float64(time.Millisecond)), func() { s.finish(e, ms/1000) })
}

// finish ends a step.
func (s *sim) finish(e *simEngine, seconds float64) {
	e.busy = false
	for _, r := range e.step {
		if r.computed < r.input {
			continue
		}
		r.made++
		e.totals.GenerationTokens++
		if r.made == 1 {
			r.first = s.now
			s.ttft = append(s.ttft, float64(s.now-r.at)/float64(time.Millisecond))
			s.report(r, fleet.FirstToken)
		} else {
			e.totals.InterTokenSeconds += seconds
			e.totals.InterTokenCount++
		}
		if r.made >= r.output {
			s.end(e, r)
		}
	}
	e.running = slices.DeleteFunc(e.running, func(r *simRequest) bool { return r.made >= r.output })
	s.begin(e)
}

func (s *sim) report(r *simRequest, o fleet.Outcome) {
	s.Report(Report{Decision: r.decision, Outcome: o}, s.clock())
}

// admit looks up what is cached of r and takes blocks for all that it needs.
func (s *sim) admit(e *simEngine, r *simRequest) bool {
	hit := 0
	for limit := (r.input - 1) / simBlock; hit < limit && e.blocks[r.keys[hit]] != nil; hit++ {
	}
	pinned := 0
	for _, k := range r.keys[:hit] {
		if e.blocks[k].users == 0 {
			pinned++
		}
	}
	need := (r.input+r.output+simBlock-1)/simBlock - hit
	if e.free+e.idle.Len()-pinned < need {
		return false
	}
	for i, k := range r.keys {
		b := e.blocks[k]
		if i >= hit && b == nil {
			s.room(e)
			b = &simCached{key: k, position: i, before: blockkey.Before(r.keys, i)}
			e.blocks[k] = b
			need--
			for l := index.LaneGPU; l <= index.LaneDisk; l++ {
				s.index.Store(index.Member(e.id), l, b.before, uint32(i), r.keys[i:i+1])
			}
		} else if i >= hit {
			need-- // the last block, whose tokens are computed again
		}
		if b.idle != nil {
			e.idle.Remove(b.idle)
			b.idle = nil
		}
		b.users++
		r.blocks = append(r.blocks, b)
	}
	for range need {
		s.room(e)
	}
	r.private = max(need, 0)
	r.cached, r.computed, r.admitted = hit*simBlock, hit*simBlock, s.now
	e.hits += r.cached
	e.queries += r.input
	return true
}

// room takes a free block, or the longest unused.
func (s *sim) room(e *simEngine) {
	if e.free > 0 {
		e.free--
		return
	}
	b := e.idle.Remove(e.idle.Front()).(*simCached)
	delete(e.blocks, b.key)
	for l := index.LaneGPU; l <= index.LaneDisk; l++ {
		s.index.Remove(index.Member(e.id), l, b.before, uint32(b.position), []blockkey.Key{b.key})
	}
}

// end frees a request's blocks, the tail of the prompt first, and counts it.
func (s *sim) end(e *simEngine, r *simRequest) {
	for _, b := range slices.Backward(r.blocks) {
		if b.users--; b.users == 0 {
			b.idle = e.idle.PushBack(b)
		}
	}
	e.free += r.private
	e.totals.PrefillSeconds += (r.first - r.admitted).Seconds()
	e.totals.PrefillComputedTokens += float64(r.input - r.cached)
	e.totals.PrefillRequests++
	e.totals.QueueSeconds += (r.admitted - r.at).Seconds()
	e.totals.QueueRequests++
	s.report(r, fleet.Finished)
	s.open--
}

// simResult is what a run came to.
type simResult struct {
	mean, p50, p99, hit float64
	itl                 float64 // ms between tokens
	requests            int
	least, most         int // requests an engine
	running             int // the most at a time on one engine
	learned             []float64
}

func (s *sim) result() simResult {
	var r simResult
	slices.Sort(s.ttft)
	for _, v := range s.ttft {
		r.mean += v / float64(len(s.ttft))
	}
	r.p50, r.p99 = s.ttft[len(s.ttft)/2], s.ttft[len(s.ttft)*99/100]
	hits, queries := 0, 0
	var stepSeconds, steps float64
	r.requests, r.least = len(s.ttft), math.MaxInt
	for _, e := range s.engines {
		hits += e.hits
		queries += e.queries
		stepSeconds += e.totals.InterTokenSeconds
		steps += e.totals.InterTokenCount
		r.least, r.most = min(r.least, e.served), max(r.most, e.served)
		r.running = max(r.running, e.mostRunning)
		r.learned = append(r.learned, s.speeds.of(s.fleet.View().Member(e.id)).Prefill(4000, 0))
	}
	r.itl = 1000 * stepSeconds / steps
	r.hit = float64(hits) / float64(queries)
	return r
}

func (r simResult) String() string {
	return fmt.Sprintf("TTFT mean %.0f p50 %.0f p99 %.0f ms, ITL %.1f, hit %.3f, %d to %d requests an engine, at most %d at a time, 4,000 tokens in %.0f ms",
		r.mean, r.p50, r.p99, r.itl, r.hit, r.least, r.most, r.running, r.learned)
}

// simChats is a synthetic conversation load: chats begin at random moments,
// go on with probability more after a pause, and each turn brings the whole
// chat so far. Lengths are lognormal, near those of the public Mooncake
// conversation trace. Without sharing, more is 0.
func simChats(seed uint64, rate, more float64, span time.Duration) []*simRequest {
	r := rand.New(rand.NewPCG(seed, 0))
	lognormal := func(median, sigma float64) int { return int(median * math.Exp(sigma*r.NormFloat64())) }
	var list []*simRequest
	begin := 0.0
	for chat := uint64(1); ; chat++ {
		begin += r.ExpFloat64() / (rate * (1 - more)) // a chat has 1/(1-more) turns
		if begin > span.Seconds() {
			break
		}
		length := min(simBlock+lognormal(5500, 1), 60_000)
		for at := begin; at < span.Seconds(); {
			q := &simRequest{at: time.Duration(at * float64(time.Second)), input: length, output: 1 + min(lognormal(300, 0.7), 2000)}
			for i := range length / simBlock {
				of := chat
				if i == 0 {
					of = 0 // everybody has the same system prompt
				}
				q.keys = append(q.keys, blockkey.Key(mix(of<<20+uint64(i)+1)|1))
			}
			list = append(list, q)
			if r.Float64() >= more {
				break
			}
			at += float64(q.output)*0.015 + 5 + 40*r.ExpFloat64()
			length = min(length+q.output+lognormal(1500, 1), 80_000)
		}
	}
	slices.SortStableFunc(list, func(a, b *simRequest) int { return cmp.Compare(a.at, b.at) })
	return list
}
