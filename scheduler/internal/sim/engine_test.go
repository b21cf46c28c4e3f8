package sim

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// script is a source of given requests.
type script struct {
	size int
	list []arrival.Request
	next int
	done []time.Duration // by request; 0: not yet
}

func scripted(size int, list ...arrival.Request) *script {
	list = slices.Clone(list)
	for i := range list {
		list[i].ID = i
	}
	return &script{size: size, list: list, done: make([]time.Duration, len(list))}
}

func (s *script) BlockSize() int { return s.size }
func (s *script) Len() int       { return len(s.list) }
func (s *script) Done(id int, at time.Duration) {
	if s.done[id] != 0 {
		panic(fmt.Sprintf("request %d ended twice", id))
	}
	s.done[id] = at
}
func (s *script) Peek() (time.Duration, bool) {
	if s.next == len(s.list) {
		return 0, false
	}
	return s.list[s.next].At, true
}
func (s *script) Next() (arrival.Request, bool) {
	if s.next == len(s.list) {
		return arrival.Request{}, false
	}
	s.next++
	return s.list[s.next-1], true
}

// keys of n blocks of a document.
func keys(document, n int) []blockkey.Key {
	list := make([]blockkey.Key, n)
	for i := range list {
		list[i] = blockkey.Key(document<<20 + i + 1)
	}
	return list
}

// plain is an engine whose times are easy to add up: 10 ms a step, 1 ms a token
// of prompt, 0.001 ms a pair, 1 ms a sequence, 0.01 ms a token of context.
var plain = Profile{Name: "plain", StepMS: 10, TokenMS: 1, PairMS: 0.001, SequenceMS: 1, ContextMS: 0.01, KVTokens: 160, StepTokens: 100}

// bench plays a script on one engine and notes what comes out in order.
type bench struct {
	testing.TB
	*run
	first map[int]time.Duration
	ends  map[int]time.Duration
	hits  map[int]int // tokens
	asked map[int]int64
}

func (b *bench) place(r *request) (*pod, error) {
	r.priority = b.asked[r.ID]
	return b.pods[0], nil
}
func (b *bench) firstToken(r *request) { b.first[r.ID] = b.calendar.now }
func (b *bench) end(r *request, o fleet.Outcome) {
	if _, again := b.ends[r.ID]; again {
		b.Errorf("request %d ended twice", r.ID)
	}
	b.ends[r.ID], b.hits[r.ID] = b.calendar.now, r.cached
}
func (b *bench) join(*pod)    {}
func (b *bench) step(*pod)    {}
func (b *bench) restart(*pod) {}

func newBench(t testing.TB, cfg Config, s *script) *bench {
	cfg.Pods = 1
	if len(cfg.Engines) == 0 {
		cfg.Engines = []Profile{plain}
	}
	cfg.Arrivals = func(uint64) arrival.Source { return s }
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	b := &bench{TB: t, first: map[int]time.Duration{}, ends: map[int]time.Duration{}, hits: map[int]int{}, asked: map[int]int64{}}
	b.run = &run{cfg: cfg.withDefaults(), source: s, placer: b}
	b.cfg.blockSize = s.size
	b.add()
	return b
}

func (b *bench) play() *bench {
	b.Helper()
	if err := b.run.play(); err != nil {
		b.Fatal(err)
	}
	if used := b.pods[0].cache.used(); used != 0 {
		b.Errorf("%d blocks are in use at the end", used)
	}
	for i := range b.pods[0].cache.blocks {
		if n := b.pods[0].cache.blocks[i].users; n != 0 {
			b.Errorf("block %d has %d users at the end", i, n)
		}
	}
	return b
}

func ms(v float64) time.Duration { return time.Duration(v * float64(time.Millisecond)) }

// near allows for rounding to nanoseconds.
func near(a, b time.Duration) bool { return math.Abs(float64(a-b)) < 1000 }

func TestOneRequestTakesWhatTheFitSays(t *testing.T) {
	b := newBench(t, Config{}, scripted(16, arrival.Request{Length: 40, Output: 4})).play()
	// 40 tokens, 40*20 pairs; then three steps with 41, 42, 43 of context.
	first := ms(40 + 0.8)
	if want := first + ms(3*(10+1)+0.01*(41+42+43)); !near(b.first[0], first) || !near(b.ends[0], want) {
		t.Errorf("first token %v, end %v, want %v, %v", b.first[0], b.ends[0], first, want)
	}
}

func TestLongPromptsAreComputedInChunks(t *testing.T) {
	b := newBench(t, Config{}, scripted(16,
		arrival.Request{Length: 130, Output: 1},
		arrival.Request{Length: 10, Output: 1})).play()
	// 100 of the first; then its other 30 and the second in one step. That
	// came when the first had begun.
	one := ms(100 + 0.001*100*50)
	two := one + ms(40+0.001*(30*(100+15)+10*5))
	want := map[int]time.Duration{0: two, 1: two}
	for id := range want {
		if !near(b.first[id], want[id]) {
			t.Errorf("request %d: first token %v, want %v", id, b.first[id], want[id])
		}
	}
}

func TestDecodesGoFirstAndArrivalsWaitForTheStepUnderWay(t *testing.T) {
	b := newBench(t, Config{}, scripted(16,
		arrival.Request{Length: 20, Output: 10},
		arrival.Request{At: ms(45), Length: 20, Output: 1})).play()
	first := ms(20 + 0.001*200)
	// Steps of 11.21, 11.22, 11.23 ms: the third is under way at 45 ms.
	third := first + ms(3*11+0.01*(21+22+23))
	shared := third + ms(20+0.001*200+1+0.01*24)
	rest := shared + ms(5*11+0.01*(25+26+27+28+29))
	if !near(b.first[1], shared) || !near(b.ends[0], rest) {
		t.Errorf("first token of the second %v, end of the first %v, want %v, %v", b.first[1], b.ends[0], shared, rest)
	}
}

func TestPrefixesAreSharedAndTheLastTokenIsComputed(t *testing.T) {
	for _, admission := range []Admission{VLLM, Reserve} {
		b := newBench(t, Config{Admission: admission}, scripted(16,
			arrival.Request{Length: 48, Output: 2, Keys: keys(1, 3)},
			arrival.Request{At: time.Second, Length: 48, Output: 2, Keys: keys(1, 3)},
			arrival.Request{At: 2 * time.Second, Length: 49, Output: 2, Keys: keys(1, 3)},
			arrival.Request{At: 3 * time.Second, Length: 49, Output: 2, Keys: keys(2, 3)},
			arrival.Request{At: 3 * time.Second, Length: 49, Output: 2, Keys: keys(2, 3)},
		)).play()
		if diff := cmp.Diff(map[int]int{0: 0, 1: 32, 2: 48, 3: 0, 4: 48}, b.hits); diff != "" {
			t.Errorf("%s: %s", admission, diff)
		}
	}
}

func TestOutputIsCachedAsItsBlocksFill(t *testing.T) {
	b := newBench(t, Config{}, scripted(16,
		arrival.Request{Length: 20, Output: 30, Keys: keys(1, 3)}, // 50 tokens, of which the last is not computed
		arrival.Request{At: time.Second, Length: 60, Output: 1, Keys: keys(1, 3)},
	)).play()
	if b.hits[1] != 48 {
		t.Errorf("%d tokens of the next turn are cached, want 48", b.hits[1])
	}
}

func TestReserveBeginsOnlyWhatFitsWhole(t *testing.T) {
	// 10 blocks: the first takes 6, so the second has to wait for its end.
	b := newBench(t, Config{Admission: Reserve}, scripted(16,
		arrival.Request{Length: 16, Output: 80},
		arrival.Request{Length: 16, Output: 64})).play()
	if b.first[1] < b.ends[0] || b.pods[0].counts.preemptions != 0 {
		t.Errorf("first token of the second %v before the end of the first %v", b.first[1], b.ends[0])
	}
}

func TestVLLMPreemptsTheNewestAndComputesItAgain(t *testing.T) {
	s := scripted(16,
		arrival.Request{Length: 16, Output: 80},
		arrival.Request{Length: 16, Output: 80, Keys: keys(1, 1)})
	b := newBench(t, Config{}, s).play()
	if b.first[1] > ms(100) || b.pods[0].counts.preemptions == 0 || b.ends[1] < b.ends[0] {
		t.Errorf("first token of the second %v, %d preemptions, ends %v", b.first[1], b.pods[0].counts.preemptions, b.ends)
	}
	if n := b.pods[0].totals.GenerationTokens; n != 160 {
		t.Errorf("%v tokens came out, want 160", n)
	}
}

func TestPriorityOrdersTheQueue(t *testing.T) {
	s := scripted(16,
		arrival.Request{Length: 100, Output: 1},
		arrival.Request{At: ms(1), Length: 100, Output: 1},
		arrival.Request{At: ms(2), Length: 100, Output: 1})
	for _, ranked := range []bool{false, true} {
		b := newBench(t, Config{EnginePriority: ranked, Arrivals: nil}, scripted(16, s.list...))
		b.asked[1], b.asked[2] = 2, 1
		if b.play(); (b.first[2] < b.first[1]) != ranked {
			t.Errorf("by priority %v: first tokens %v", ranked, b.first)
		}
	}
}

func TestRequestsThatNeverFitAreRefused(t *testing.T) {
	b := newBench(t, Config{}, scripted(16,
		arrival.Request{Length: 160, Output: 1},
		arrival.Request{Length: 150, Output: 10})).play()
	if b.log.rejects != 1 || b.log.ended() != 2 || b.ends[0] != 0 || b.first[0] != 0 || b.first[1] == 0 {
		t.Errorf("%d refused, first tokens %v", b.log.rejects, b.first)
	}
}

func TestWhatWasEvictedComesFromHostMemory(t *testing.T) {
	slow := plain
	slow.KVBytes, slow.HostGBps = 1e6, 1 // 1 ms a token
	b := newBench(t, Config{Engines: []Profile{slow}, HostTokens: 320}, scripted(16,
		arrival.Request{Length: 96, Output: 1, Keys: keys(1, 6)},
		arrival.Request{At: time.Second, Length: 96, Output: 1, Keys: keys(2, 6)}, // evicts the last two of the first
		arrival.Request{At: 2 * time.Second, Length: 100, Output: 2, Keys: keys(1, 6)},
		arrival.Request{At: 2*time.Second + ms(1), Length: 20, Output: 1},
	)).play()
	// 32 ms for two blocks, then 4 tokens behind 96. A prompt that needs none of
	// that is computed meanwhile.
	if want := 2*time.Second + ms(32+10+0.001*4*98); b.hits[2] != 96 || !near(b.first[2], want) {
		t.Errorf("%d tokens are cached, first token %v, want 96 and %v", b.hits[2], b.first[2], want)
	}
	if want := 2*time.Second + ms(1+20+0.001*200); !near(b.first[3], want) {
		t.Errorf("first token of the other %v, want %v", b.first[3], want)
	}
	if n := b.pods[0].counts.fromHost; n != 32 {
		t.Errorf("%d tokens came from host memory", n)
	}
}

// A hybrid engine keeps states where prompts end and where they part: the second
// prompt with a beginning computes it again, the third finds it.
func TestHitsOfHybridEnginesEndAtStates(t *testing.T) {
	branch := func(own int) []blockkey.Key { return append(keys(1, 3), keys(own, 2)...) }
	b := newBench(t, Config{Hybrid: true}, scripted(16,
		arrival.Request{Length: 80, Output: 1, Keys: branch(2)},
		arrival.Request{At: 1 * time.Second, Length: 80, Output: 1, Keys: branch(3)},
		arrival.Request{At: 2 * time.Second, Length: 80, Output: 1, Keys: branch(4)},
		arrival.Request{At: 3 * time.Second, Length: 80, Output: 1, Keys: branch(2)},
		arrival.Request{At: 4 * time.Second, Length: 160 - 16, Output: 1, Keys: keys(9, 9)}, // evicts
		arrival.Request{At: 5 * time.Second, Length: 80, Output: 1, Keys: branch(2)},
	)).play()
	for i, want := range []int{0, 0, 48, 64, 0, 0} {
		if b.hits[i] != want {
			t.Errorf("request %d found %d tokens, want %d", i, b.hits[i], want)
		}
	}
	if err := (Config{Hybrid: true, HostTokens: 1, Pods: 1}).Validate(); err == nil || !strings.Contains(err.Error(), "hybrid") {
		t.Errorf("with host memory: %v", err)
	}
}

// What the scheduler knows of states it predicts to the token; by all blocks that
// are held it promises more than there is.
func TestStatesArePredicted(t *testing.T) {
	var list []arrival.Request
	for i := range 200 { // one at a time, so that nothing happens between pick and admission
		at := time.Duration(i) * time.Minute
		list = append(list, arrival.Request{At: at, Length: 256 * (4 + i%5), Output: 5, Keys: append(keys(1, 1+i%3), keys(2+i%7+10*(i%3), 4)...)})
	}
	c := fleetOf(2, 256, list)
	c.Hybrid, c.Seed = true, 1
	c.Restarts = []Restart{{Pod: 0, At: 100*time.Minute + 30*time.Second}}
	if r := mustRun(t, c); r.PredictedCachedError != 0 || r.TokenHit == 0 {
		t.Errorf("by states: off by %v tokens a request, hits %v", r.PredictedCachedError, r.TokenHit)
	}
	c.FullDepth = true
	if r := mustRun(t, c); r.PredictedCachedError == 0 {
		t.Error("by all blocks nothing was promised too much")
	}
}

// A stretch of many steps is the same as its steps one by one.
func TestStretchesAreTheirSteps(t *testing.T) {
	p := plain.withDefaults()
	s := stretch{batch: 3, context: 100, steps: 50}
	var sum float64
	for i := range 50 {
		sum += p.ms(prefill{}, 3, 100+3*i, 1)
		if got := s.time(&p, i+1); !near(got, ms(sum)) {
			t.Fatalf("%d steps take %v, one by one %v", i+1, got, ms(sum))
		}
		if at := s.time(&p, i+1); s.reached(&p, at) != i+1 || s.reached(&p, at-1) != i+1 || i < 49 && s.reached(&p, at+1) != i+2 {
			t.Fatalf("at the end of step %d, %d are reached", i+1, s.reached(&p, at))
		}
	}
}

func TestGaugesAreThoseOfTheLastStepsEnd(t *testing.T) {
	b := newBench(t, Config{}, scripted(16,
		arrival.Request{Length: 30, Output: 4},
		arrival.Request{At: ms(45), Length: 18, Output: 1}))
	// Steps end at 30.45, 41.76 and 53.08 ms. The second request comes in the
	// third, and is computed in the fourth.
	type shown struct {
		Running, Waiting, Blocks int
		Prompt, Generated, Ended float64
	}
	got := map[time.Duration]shown{}
	want := map[time.Duration]shown{
		ms(29): {},
		ms(31): {1, 0, 2, 30, 1, 0},
		ms(46): {1, 0, 2, 30, 2, 0},
		ms(60): {1, 0, 2, 30, 3, 0},
	}
	sample := func(at time.Duration) {
		running, waiting, usage, totals := b.pods[0].sample()
		got[at] = shown{running, waiting, int(math.Round(usage * 10)), totals.PromptTokens, totals.GenerationTokens, totals.QueueRequests}
		if totals.PrefillRequests != totals.QueueRequests || (totals.PrefillSeconds > 0) != (totals.PrefillRequests > 0) {
			t.Errorf("at %v: %+v", at, totals)
		}
	}
	for at := range want {
		b.calendar.at(at, func() { sample(at) })
	}
	b.play()
	const end = time.Hour
	want[end] = shown{0, 0, 0, 48, 5, 2}
	sample(end)
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	totals := b.pods[0].totals
	// It waited for the end of a step in front of the engine, not in its queue.
	if totals.QueueSeconds != 0 || totals.InterTokenCount != 3 || !near(ms(totals.InterTokenSeconds*1000), b.ends[0]-b.first[0]) {
		t.Errorf("%+v; first token %v, end %v", totals, b.first[0], b.ends[0])
	}
}
