package sim

import (
	"encoding/json"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/scheduler/internal/admission"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// chats draws conversations that begin at random moments: each turn brings the
// whole chat so far, answers included, and all share a head of one block.
func chats(seed uint64, rate, more float64, span time.Duration, size int) []arrival.Request {
	r := rand.New(rand.NewPCG(seed, 1))
	var list []arrival.Request
	begin := 0.0
	for chat := 1; ; chat++ {
		begin += r.ExpFloat64() / (rate * (1 - more))
		if begin > span.Seconds() {
			break
		}
		length := size + r.IntN(20_000)
		for at := begin; at < span.Seconds(); at += 5 + 20*r.Float64() {
			q := arrival.Request{At: time.Duration(at * float64(time.Second)), Length: length, Output: 1 + r.IntN(600)}
			q.Session = string(rune('a' + chat%26))
			q.Keys = keys(chat, (q.Length+q.Output)/size)
			if len(q.Keys) > 0 {
				q.Keys[0] = 1
			}
			list = append(list, q)
			if r.Float64() > more {
				break
			}
			length += q.Output + r.IntN(3000)
		}
	}
	sortByTime(list)
	return list
}

func sortByTime(list []arrival.Request) {
	for i := range list {
		for j := i; j > 0 && list[j].At < list[j-1].At; j-- {
			list[j], list[j-1] = list[j-1], list[j]
		}
	}
}

// fleetOf is a fleet of Qwen3-32B on which these requests are played.
func fleetOf(pods, size int, list []arrival.Request) Config {
	p, _ := Engine("")
	return Config{Pods: pods, Engines: []Profile{p}, Arrivals: func(uint64) arrival.Source { return scripted(size, list...) }}
}

func mustRun(t testing.TB, c Config) Result {
	t.Helper()
	r, err := Run(c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Whatever is played, every request ends once, all that was asked for comes
// out, and no block stays in use.
func TestEveryRequestEndsOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) arrival.Request {
			q := arrival.Request{
				At:     time.Duration(rapid.IntRange(0, 2000).Draw(t, "ms")) * time.Millisecond,
				Length: rapid.IntRange(1, 140).Draw(t, "length"),
				Output: rapid.IntRange(1, 60).Draw(t, "output"),
			}
			blocks := q.Length / 16
			if rapid.Bool().Draw(t, "keyed output") {
				blocks = (q.Length + q.Output) / 16
			}
			q.Keys = keys(rapid.IntRange(1, 3).Draw(t, "document"), blocks)
			return q
		}), 1, 40).Draw(t, "requests")
		sortByTime(list)
		s := scripted(16, list...)
		c := Config{
			Pods: rapid.IntRange(1, 3).Draw(t, "pods"), Engines: []Profile{plain}, Policy: rapid.SampledFrom([]string{"default", "random", Oracle, CapacityOracle, PooledLRU}).Draw(t, "policy"),
			HostTokens:     rapid.SampledFrom([]int{0, 64, 640}).Draw(t, "host"),
			Admission:      rapid.SampledFrom([]Admission{VLLM, Reserve}).Draw(t, "admission"),
			EnginePriority: rapid.Bool().Draw(t, "ranked"),
			EventLag:       time.Duration(rapid.IntRange(0, 300).Draw(t, "lag")) * time.Millisecond,
			Lose:           rapid.SampledFrom([]float64{0, 0.2}).Draw(t, "lose"),
			Arrivals:       func(uint64) arrival.Source { return scripted(16, list...) },
		}
		if length := rapid.SampledFrom([]int{0, 1, 100}).Draw(t, "queue"); length > 0 {
			wait := time.Duration(rapid.IntRange(1, 3000).Draw(t, "wait")) * time.Millisecond
			c.Queue = admission.Rules{Length: length, BudgetMS: 1, Wait: wait}
		}
		if rapid.Bool().Draw(t, "restart") {
			c.Restarts = []Restart{{At: 700 * time.Millisecond}}
			c.Adds = []time.Duration{900 * time.Millisecond}
		}
		r := &run{cfg: c.withDefaults()}
		if err := r.start(); err != nil {
			t.Fatal(err)
		}
		r.source = s
		if err := r.play(); err != nil {
			t.Fatal(err)
		}
		over, tokens := 0, 0
		for i, q := range list {
			if s.done[i] < q.At {
				t.Errorf("request %d came at %v and ended at %v", i, q.At, s.done[i])
			}
			over++
			tokens += q.Output
		}
		if r.open != 0 || r.log.ended() != over || r.log.rejects == 0 && r.log.tokens != tokens {
			t.Errorf("%d open, %d of %d ended, %d of %d tokens", r.open, r.log.ended(), over, r.log.tokens, tokens)
		}
		for _, p := range r.pods {
			if p.cache.used() != 0 || len(p.running)+len(p.waiting) != 0 {
				t.Errorf("%s ends with %d blocks in use, %d running, %d waiting", p.name, p.cache.used(), len(p.running), len(p.waiting))
			}
		}
	})
}

// The scheduler's cache state is the engines' state once the wires are quiet,
// whatever was late, lost or restarted on the way.
func TestNothingIsBelievedThatIsNotHeld(t *testing.T) {
	for name, spoil := range map[string]func(*Config){
		"as it is":         func(*Config) {},
		"late":             func(c *Config) { c.EventLag = 3 * time.Second },
		"lost":             func(c *Config) { c.Lose = 0.2 },
		"with host memory": func(c *Config) { c.HostTokens = 200_000 },
		"with host memory, lost, late, a restart": func(c *Config) {
			c.HostTokens = 150_000
			c.Lose, c.EventLag, c.Restarts = 0.1, 300*time.Millisecond, []Restart{{Pod: 1, At: 8 * time.Second}}
		},
		"lost and late, with a restart": func(c *Config) {
			c.Lose, c.EventLag, c.Restarts = 0.1, 300*time.Millisecond, []Restart{{Pod: 1, At: 8 * time.Second}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			list := chats(1, 6, 0.6, 15*time.Second, 128)
			c := fleetOf(2, 128, list)
			c.Capacity = 0.2
			spoil(&c)
			r := &run{cfg: c.withDefaults()}
			if err := r.start(); err != nil {
				t.Fatal(err)
			}
			if err := r.play(); err != nil {
				t.Fatal(err)
			}
			for quiet := r.calendar.now + 20*time.Second; r.calendar.now < quiet; {
				r.calendar.step()
			}
			s := r.placer.(*scout)
			for _, p := range r.pods {
				id := p.wire.id
				if trust := s.fleet.View().Member(id).CacheState.Trust; trust != fleet.Exact {
					t.Errorf("%s is %v", p.name, trust)
				}
				if got, want := s.index.Count(index.Member(id), index.LaneGPU), len(p.cache.byKey); got != want || want == 0 {
					t.Errorf("%s holds %d blocks, believed: %d", p.name, want, got)
				}
				for _, q := range list {
					var want, got [lanes]int
					want[index.LaneGPU] = p.cache.match(q.Keys, len(q.Keys))
					if p.host != nil {
						for n := 0; n < len(q.Keys) && p.cache.match(q.Keys[n:n+1], 1)+p.host.match(q.Keys[n:n+1], 1) > 0; n++ {
							want[index.LaneHost] = n + 1
						}
					}
					var answer index.Answer
					s.index.Match(q.Keys, &answer)
					for h, depth := range answer.All() {
						for l := range index.Lane(lanes) {
							if fleet.ID(h.Member()) == id && h.On(l) {
								got[l] = int(depth)
							}
						}
					}
					if got != want {
						t.Fatalf("%s holds %d blocks of request %d on GPU and host, believed: %d", p.name, want, q.ID, got)
					}
				}
			}
			if c.HostTokens > 0 && r.result().HostHit == 0 {
				t.Error("nothing came from host memory")
			}
		})
	}
}

func TestSameSeedSameBytes(t *testing.T) {
	list := chats(2, 8, 0.5, 30*time.Second, 512)
	for _, policy := range []string{"default", "random", Oracle, CapacityOracle, PooledLRU} {
		c := fleetOf(4, 512, list)
		c.Policy, c.Lose, c.EventLag = policy, 0.01, 10*time.Millisecond
		var texts [2]string
		for i := range texts {
			text, err := json.Marshal(mustRun(t, c))
			if err != nil {
				t.Fatal(err)
			}
			texts[i] = string(text)
		}
		if diff := cmp.Diff(texts[0], texts[1]); diff != "" {
			t.Errorf("%s: %s", policy, diff)
		}
	}
}

// The order that published measurements on the first staged load show: blind
// routing is worst, load helps a little, prefixes most, and no router passes
// the oracle. 75 groups share 6,000 tokens each, five prompts a group: half the
// load's, on half its pods.
func TestStagesOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	var list []arrival.Request
	for at := 0.0; at < 40; at += r.ExpFloat64() / 15 {
		prompt := r.IntN(375)
		q := arrival.Request{At: time.Duration(at * float64(time.Second)), Length: 7200, Output: 250}
		q.Keys = append(keys(1+prompt/5, 6000/100), keys(1000+prompt, 1200/100)...)
		list = append(list, q)
	}
	results := map[string]Result{}
	for _, policy := range []string{"random", "least-tokens", "default", Oracle} {
		c := fleetOf(4, 100, list)
		c.Policy = policy
		results[policy] = mustRun(t, c)
		t.Logf("%s: %.2f s, hit %.3f", policy, results[policy].TTFTMean, results[policy].TokenHit)
	}
	random, blind, ours, oracle := results["random"], results["least-tokens"], results["default"], results[Oracle]
	if !(oracle.TTFTMean <= ours.TTFTMean && 5*ours.TTFTMean < blind.TTFTMean && blind.TTFTMean < 1.05*random.TTFTMean) {
		t.Errorf("TTFT: oracle %.3f, default %.3f, least-tokens %.3f, random %.3f", oracle.TTFTMean, ours.TTFTMean, blind.TTFTMean, random.TTFTMean)
	}
	if !(oracle.TokenHit >= ours.TokenHit && ours.TokenHit > blind.TokenHit+0.2) {
		t.Errorf("hits: oracle %.3f, default %.3f, least-tokens %.3f", oracle.TokenHit, ours.TokenHit, blind.TokenHit)
	}
}

func TestFaultsCostLittle(t *testing.T) {
	list := chats(4, 8, 0.6, 60*time.Second, 512)
	base := fleetOf(4, 512, list)
	right := mustRun(t, base)
	for name, spoil := range map[string]func(*Config){
		"late events":   func(c *Config) { c.EventLag = time.Second },
		"rare samples":  func(c *Config) { c.SampleInterval = 10 * time.Second },
		"old samples":   func(c *Config) { c.SampleAge = 2 * time.Second },
		"lost events":   func(c *Config) { c.Lose = 0.01 },
		"no reports":    func(c *Config) { c.NoReports = true },
		"late decision": func(c *Config) { c.DecisionLag = 20 * time.Millisecond },
		"cold pod":      func(c *Config) { c.Adds = []time.Duration{30 * time.Second} },
	} {
		c := base
		spoil(&c)
		if r := mustRun(t, c); r.Requests != right.Requests || r.TTFTMean > 1.5*right.TTFTMean || cmp.Equal(r, right) {
			t.Errorf("%s: TTFT %.3f s, without %.3f s; %d of %d requests", name, r.TTFTMean, right.TTFTMean, r.Requests, right.Requests)
		}
	}
}

func TestConfigSaysAllThatIsWrong(t *testing.T) {
	_, err := Run(Config{Policy: "best", Pods: -1, Capacity: -2, Admission: "maybe", Lose: 2, SampleInterval: -1, Restarts: []Restart{{Pod: 9}}})
	if err == nil {
		t.Fatal("no error")
	}
	if n := len(err.(interface{ Unwrap() []error }).Unwrap()); n != 9 {
		t.Errorf("%d things are said: %v", n, err)
	}
}
