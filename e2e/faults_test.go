package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/protocol"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// flight is how long a wrong answer may call itself EXACT: events are on their
// way, on a machine that runs other tests too.
const flight = 500 * time.Millisecond

// silence is the silence after which a member's cache state is suspect.
const silence = 3 * protocol.HeartbeatEvery

// witness asks all the time about prompts on one member, and notes what the
// answers said of themselves while they promised what was not there.
type witness struct {
	engine atomic.Pointer[fakevllm.Engine] // the one that lives
	stop   func()
	done   chan struct{}

	mu     sync.Mutex    // guards what follows
	doubt  string        // the first reason that was given
	lied   time.Duration // the longest time of wrong answers called EXACT, of ours
	wrongs int
}

func (e *engine) witness(prompts ...prompt) *witness {
	e.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	w := &witness{stop: cancel, done: make(chan struct{})}
	w.engine.Store(e.Engine)
	id := e.agent.Members[0]
	go func() {
		defer close(w.done)
		since := make([]*stopwatch, len(prompts)) // that the answer is wrong and EXACT
		for i := 0; ctx.Err() == nil; i++ {
			n := i % len(prompts)
			q := prompts[n]
			answer, err := e.Client.Score(ctx, &api.ScoreRequest{Request: q.request(id)}, grpc.WaitForReady(true))
			if err != nil || len(answer.GetRanking().GetCandidates()) != 1 {
				time.Sleep(time.Millisecond)
				continue
			}
			c := answer.GetRanking().GetCandidates()[0]
			held := min(w.engine.Load().Depth(q.rank, q.tokens, q.adapter, q.salt), (len(q.tokens)-1)/size) * size
			wrong := int(c.GetCachedTokens().GetGpu()) > held
			w.mu.Lock()
			if !stage.Trusted(c) && w.doubt == "" {
				w.doubt = strings.TrimPrefix(c.GetCacheState().GetTrust().String(), "TRUST_") + ": " + c.GetCacheState().GetExplanation()
			}
			switch {
			case wrong && stage.Trusted(c):
				w.wrongs++
				if since[n] == nil {
					watch := newStopwatch()
					since[n] = &watch
				}
				w.lied = max(w.lied, since[n].ours())
			default:
				since[n] = nil
			}
			w.mu.Unlock()
			time.Sleep(time.Millisecond)
		}
	}()
	e.t.Cleanup(func() { w.stop(); <-w.done })
	return w
}

// admits ends the watch like says, and demands besides that the state said in
// between that it was not to be relied on.
func (w *witness) admits(t *testing.T, truth, longest time.Duration) {
	t.Helper()
	w.says(t, truth, longest)
	if w.doubt == "" {
		t.Error("no doubt was admitted")
	}
}

// doubts says whether an answer has admitted a doubt.
func (w *witness) doubts() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.doubt != ""
}

// says ends the watch and demands that no answer was wrong and EXACT for longer
// than that.
func (w *witness) says(t *testing.T, truth, longest time.Duration) {
	t.Helper()
	w.stop()
	<-w.done
	w.mu.Lock()
	defer w.mu.Unlock()
	t.Logf("true %v after the fault's end; in between %q, %d wrong answers called EXACT within %v", truth.Round(time.Millisecond), w.doubt, w.wrongs, w.lied.Round(time.Millisecond))
	if w.lied > longest+leeway {
		t.Errorf("answers were wrong and EXACT for %v, more than %v", w.lied, longest)
	}
}

// agentProgram builds the agent once for all tests.
var agentProgram = sync.OnceValues(func() (string, error) {
	path := filepath.Join(os.TempDir(), "kvscout-agent-under-test")
	build := exec.Command("go", "build", "-o", path, "github.com/kvscout/kvscout/agent/cmd/kvscout-agent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	text, err := build.CombinedOutput()
	if err != nil {
		return string(text), err
	}
	return path, nil
})

// process starts the agent as a process of its own beside the engine.
func (e *engine) process(pod string) *exec.Cmd {
	e.t.Helper()
	path, err := agentProgram()
	if err != nil {
		e.t.Fatal(err, path)
	}
	cmd := exec.Command(path, "-nats-url", e.NATS, "-engine", e.URL(), "-pod", pod, "-admin-address", "", "-heartbeat", "100ms", "-probe", "100ms")
	if err := cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	e.agent = &stage.Agent{Members: []string{"default_" + pod + "_0"}}
	e.untilMember(e.id(), "settle", stage.Settled)
	return cmd
}

// claims waits until nothing is believed that the engine does not hold, and
// the cache state has an owner again.
func (e *engine) claims(prompts ...prompt) time.Duration {
	e.t.Helper()
	return e.wait(soon, "be free of phantoms", prompts, func(got, want int, p *api.CacheState) bool {
		return got <= want && stage.Settled(&api.MemberState{CacheState: p})
	})
}

func TestFaultAEngineKilledReplayOn(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	old := several(1, 20)
	e.complete(old...)
	e.truth(soon, old...)
	w := e.witness(old...)
	e.stop()
	p.until("doubt is admitted", w.doubts) // an engine that is back at once may leave it unseen
	e.start()
	w.engine.Store(e.Engine)
	w.admits(t, e.truth(soon, old...), flight)
}

func TestFaultBEngineKilledReplayOff(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{NoReplay: true}).watched("pod")
	old := several(1, 20)
	e.complete(old...)
	e.wait(soon, "follow", old, func(got, want int, _ *api.CacheState) bool { return got == want })
	w := e.witness(old...)
	e.restart()
	w.engine.Store(e.Engine)
	w.admits(t, e.claims(old...), flight)
}

func TestFaultCEngineRestartedBehindAStoppedAgent(t *testing.T) {
	for name, cfg := range map[string]fakevllm.Config{
		"replay": {}, "short ring": {BufferSteps: 8}, "no replay": {NoReplay: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t, stage.Options{})
			e := p.engine(cfg)
			agent := e.process("pod")
			old := several(1, 20)
			e.complete(old...)
			e.wait(soon, "follow", old, func(got, want int, _ *api.CacheState) bool { return got == want })
			if err := agent.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			e.restart()
			young := several(2, 30) // more batches than the old life had
			e.complete(young...)
			e.until("doubt is admitted", func() bool { return !stage.Exact(p.member(e.id())) })
			if err := agent.Process.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			took := e.claims(append(old, young...)...)
			if name == "replay" {
				took = e.truth(soon, append(old, young...)...)
			}
			t.Log("true after", took)
			// What was published before is heard by replay alone.
			p.until("the agent listens again", func() bool { return e.Events(0).Stats().Subscribers == 1 })
			newest := several(3, 3)
			e.complete(newest...)
			e.wait(soon, "follow the new life", append(newest, old...), func(got, want int, _ *api.CacheState) bool { return got == want })
		})
	}
}

func TestFaultDAgentAndEngineRestartTogether(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{})
	agent := e.process("pod")
	old := several(1, 20)
	e.complete(old...)
	e.truth(soon, old...)
	w := e.witness(old...)
	if err := agent.Process.Kill(); err != nil { // no farewell
		t.Fatal(err)
	}
	_ = agent.Wait()
	e.restart()
	w.engine.Store(e.Engine)
	young := several(2, 5)
	e.complete(young...)
	start := time.Now()
	e.process("pod")
	e.truth(soon, append(old, young...)...)
	// Nobody can tell a killed agent from a quiet one before heartbeats are missing;
	// the new one may be there first, and speak of a new life at once.
	w.says(t, time.Since(start), silence+flight)
}

func TestFaultEReset(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	old := several(1, 20)
	e.complete(old...)
	e.truth(soon, old...)
	e.act("/reset_prefix_cache", nil)
	first := several(2, 1)
	e.complete(first...) // an idle engine speaks of it with its next batch
	t.Log("true after", e.truth(soon, append(old, first...)...))

	e.act("/sleep", map[string][]string{"level": {"1"}})
	e.untilMember(e.id(), "be asleep", func(m *api.MemberState) bool { return m.GetIneligible() != 0 })
	woken := time.Now()
	e.act("/wake_up", nil)
	e.untilMember(e.id(), "be awake", func(m *api.MemberState) bool { return m.GetIneligible() == 0 })
	e.complete(first...)
	e.truth(soon, append(old, first...)...)
	t.Log("awake and true after", time.Since(woken))
}

func TestFaultFBatchesLostForGood(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{BufferSteps: 8, Blocks: 80})
	events := newLink(t, e.Events(0).Endpoint())
	e.watchedBy(stage.AgentOptions{Pod: "pod", Events: events.endpoint(), Replay: e.Events(0).ReplayEndpoint()})
	old := several(1, 20)
	e.complete(old...)
	e.truth(soon, old...)
	events.Tamper(func([]byte) [][]byte { return nil })
	lost := several(2, 20) // evict what was there, more than the ring keeps
	e.complete(lost...)
	events.Tamper(nil)
	next := several(3, 1)
	e.complete(next...) // shows the gap
	list := append(append(old, lost...), next...)
	t.Log("a lower bound after", e.lower(soon, list...))
	e.wait(soon, "know what came behind the gap", next, func(got, want int, _ *api.CacheState) bool { return got == want })
}
