package realvllm_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/kvscout/kvscout/e2e/realvllm"
	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/e2e/wire"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// within is the time after a fault's end in which no block may be believed held
// any more that the engine does not hold.
const within = time.Second

// TestFaultsLeaveNoPhantoms breaks a real engine and its agent in all ways that
// restarts and losses come in. Its ring is short, so that replay is no help for
// what lies further back.
func TestFaultsLeaveNoPhantoms(t *testing.T) {
	t.Parallel()
	r := open(t, "", realvllm.Config{Ring: 16})
	b := &broken{run: r, program: build(t), state: t.TempDir()}

	r.phase("batches lost for good", b.loss)
	r.phase("the agent restarts alone, the ring has moved on", b.alone)
	r.phase("reset while idle, audits", b.idleReset)
	r.phase("engine restarted behind a stopped agent", b.behind)
	r.phase("agent and engine killed together", b.together)
	r.phase("engine killed, replay off", b.killed)
}

// broken is a run whose agent is a process of its own.
type broken struct {
	*run
	program string
	state   string
	process *exec.Cmd
	log     *os.File
}

func build(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kvscout-agent")
	cmd := exec.Command("go", "build", "-o", path, "github.com/kvscout/kvscout/agent/cmd/kvscout-agent")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return path
}

// launch starts the agent's process and waits for nothing.
func (b *broken) launch(args ...string) {
	b.t.Helper()
	log, err := os.CreateTemp(b.t.TempDir(), "agent-*.log")
	if err != nil {
		b.t.Fatal(err)
	}
	b.log = log
	if events, replay, err := b.engine.ExplicitEndpoints(b.t.Context()); err == nil && events != "" {
		args = append([]string{"-events", events, "-replay", replay}, args...) // what args say wins
	}
	cmd := exec.Command(b.program, append([]string{"-nats-url", b.stage.NATS, "-engine", b.engine.URL(), "-pod", pod, "-admin-address", "127.0.0.1:0"}, args...)...)
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.process = cmd
	b.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if b.t.Failed() {
			text, _ := os.ReadFile(log.Name())
			b.t.Logf("the agent's log ends:\n%s", text[max(0, len(text)-3000):])
		}
	})
	b.agent = &stage.Agent{Members: []string{"default_" + pod + "_0"}}
}

func (b *broken) follow(args ...string) {
	b.t.Helper()
	b.launch(args...)
	b.until("be settled", stage.Settled)
}

// leave ends the agent's process in good order.
func (b *broken) leave() {
	b.t.Helper()
	b.signal(syscall.SIGTERM)
	_ = b.process.Wait()
	b.until("be gone", func(m *api.MemberState) bool { return m == nil })
}

func (b *broken) signal(s syscall.Signal) {
	b.t.Helper()
	if err := b.process.Process.Signal(s); err != nil {
		b.t.Fatal(err)
	}
}

// prompts are n that share nothing, of several blocks each.
func (b *broken) prompts(n int) [][]uint32 {
	var list [][]uint32
	for range n {
		list = append(list, b.tokens(9*b.engine.BlockSize()+1))
	}
	return list
}

func (b *broken) serve(list [][]uint32) {
	b.t.Helper()
	for _, tokens := range list {
		b.complete(realvllm.Request{Tokens: tokens, MaxTokens: 1})
	}
}

// know serves prompts until the scheduler promises all of them.
func (b *broken) know(list [][]uint32) {
	b.t.Helper()
	b.serve(list)
	for _, tokens := range list {
		b.until("know what was served", func(*api.MemberState) bool {
			got, _ := b.predict(realvllm.Request{Tokens: tokens})
			return got == 9*b.engine.BlockSize()
		})
	}
}

// doubted watches a member until the returned function is called, which gives
// the first reason for not calling it EXACT; empty: there was none.
func (b *broken) doubted() (reason func() string) {
	ctx, cancel := context.WithCancel(b.t.Context())
	var once sync.WaitGroup
	first := ""
	once.Go(func() {
		for ctx.Err() == nil {
			fleet, err := b.stage.Operator.ListMembers(ctx, &api.ListMembersRequest{}, grpc.WaitForReady(true))
			if err == nil && first == "" {
				switch m := fleet.GetMembers(); {
				case len(m) == 0:
					first = "not a member"
				case !stage.Exact(m[0]):
					first = strings.TrimPrefix(m[0].GetCacheState().GetTrust().String(), "TRUST_") + ": " + m[0].GetCacheState().GetExplanation()
				}
			}
			time.Sleep(time.Millisecond)
		}
	})
	return func() string { cancel(); once.Wait(); return first }
}

// free waits until nothing is promised of what the engine does not hold, and
// the cache state is settled, and holds the time against the promise.
func (b *broken) free(ended time.Time, limit time.Duration, reason func() string, gone [][]uint32) {
	b.t.Helper()
	for {
		m, err := b.stage.Member(b.t.Context(), b.agent.Members[0])
		if err != nil {
			b.t.Fatal(err)
		}
		phantoms := 0
		if m != nil { // one that was silent for long is forgotten until its agent is back
			for _, tokens := range gone {
				got, _ := b.predict(realvllm.Request{Tokens: tokens})
				phantoms += got / b.engine.BlockSize()
			}
		}
		took := time.Since(ended)
		if phantoms == 0 && m != nil && stage.Settled(m) {
			why := reason()
			b.t.Logf("no phantom %v after the fault's end; in between %q", took.Round(time.Millisecond), why)
			if took > limit {
				b.t.Errorf("free of phantoms only after %v", took)
			}
			if why == "" {
				b.t.Error("no doubt was admitted")
			}
			return
		}
		if took > patience {
			b.t.Fatalf("%d phantom blocks after %v; %v", phantoms, took, m)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// loss drops more batches than the engine can replay.
func (b *broken) loss() {
	proxy, err := wire.New(b.engine.Events(), nil, wire.ZMTP)
	if err != nil {
		b.t.Fatal(err)
	}
	defer proxy.Close()
	replay, err := wire.New(b.engine.Replay(), nil, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	defer replay.Close()
	b.follow("-engine", front(b.t, b.engine, nil), "-events", "tcp://"+proxy.Addr(), "-replay", "tcp://"+replay.Addr())
	old := b.prompts(20)
	b.know(old)
	reason := b.doubted()
	proxy.Tamper(func([]byte) [][]byte { return nil })
	replay.Refuse(true)    // else each lost batch is fetched as soon as the engine is quiet
	b.serve(b.prompts(20)) // evicts what was there
	proxy.Tamper(nil)
	replay.Refuse(false)
	next := b.prompts(1)
	b.serve(next) // shows the gap, should the quiet not have done so
	b.free(time.Now(), within, reason, old[:10])
	b.until("know what came behind the gap", func(*api.MemberState) bool {
		got, _ := b.predict(realvllm.Request{Tokens: next[0]})
		return got == 9*b.engine.BlockSize()
	})
	b.leave()
}

// alone restarts the agent beside an engine that cannot replay everything.
func (b *broken) alone() {
	if err := b.engine.Reset(b.t.Context()); err != nil { // so that all is known
		b.t.Fatal(err)
	}
	b.follow("-state-dir", b.state)
	list := b.prompts(20)
	b.know(list)
	b.until("be exact", stage.Exact)
	b.leave()
	more := b.prompts(3)
	b.serve(more)
	b.follow("-state-dir", b.state)
	b.until("be exact", stage.Exact)
	if n := b.counted("kvscout_agent_state_loads_total", "resumed"); n != 1 {
		b.t.Errorf("the saved cache state was resumed %v times", n)
	}
	b.requests(5, realvllm.Request{})
	for _, tokens := range append(list[15:], more...) {
		b.judge(realvllm.Request{Tokens: tokens, MaxTokens: 1})
	}
	b.leave()
}

// idleReset empties the cache of an engine that has nothing else to do.
func (b *broken) idleReset() {
	const probe, audit = 500 * time.Millisecond, 300 * time.Millisecond
	b.follow("-audit", audit.String())
	list := b.prompts(5)
	b.know(list)
	for began := time.Now(); b.counted("kvscout_agent_audits_total", "held") < 2; time.Sleep(20 * time.Millisecond) {
		if time.Since(began) > patience {
			b.t.Fatal("no audit found what is held")
		}
	}
	if n := b.counted("kvscout_agent_audits_total", "missing"); n != 0 {
		b.t.Errorf("%v audits missed what is held", n)
	}
	b.leave()
	b.follow("-probe", probe.String())
	b.know(list)
	if err := b.engine.Reset(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	// A reset is no doubt: it is known or it is not. Until the engine is looked
	// at nothing tells of it.
	b.free(time.Now(), probe*6/5+within, func() string { return "nothing tells of it before a look" }, list)
	b.requests(5, realvllm.Request{})
	b.leave()
}

// behind restarts the engine while the agent hears nothing, and lets its new
// life pass the old sequence.
func (b *broken) behind() {
	b.follow()
	old := b.prompts(5)
	b.know(old)
	before := b.batches()
	reason := b.doubted()
	b.signal(syscall.SIGSTOP)
	b.engine.Kill()
	b.start()
	young := b.prompts(int(before) + 5)
	b.serve(young)
	b.signal(syscall.SIGCONT)
	b.free(time.Now(), within, reason, old)
	if n := b.batches(); n <= before {
		b.t.Errorf("the new life is at batch %d, the old one was at %d", n, before)
	}
	b.judge(realvllm.Request{Tokens: young[len(young)-1], MaxTokens: 1})
}

// killed ends the engine beside an agent that cannot ask for a replay.
func (b *broken) killed() {
	b.leave()
	b.follow("-replay", "none")
	old := b.prompts(5)
	b.know(old)
	reason := b.doubted()
	b.engine.Kill()
	b.start()
	b.free(time.Now(), within, reason, old)
	young := b.prompts(3)
	b.know(young)
	for _, tokens := range append(old[:1], young...) {
		b.judge(realvllm.Request{Tokens: tokens, MaxTokens: 1})
	}
}

// together kills both and starts both, with a saved cache state of the life before.
func (b *broken) together() {
	b.signal(syscall.SIGKILL)
	_ = b.process.Wait()
	b.until("be doubted", func(m *api.MemberState) bool { return !stage.Exact(m) })
	b.follow("-state-dir", b.state)
	old := b.prompts(5)
	b.know(old)
	b.saved(time.Now())
	reason := b.doubted()
	b.signal(syscall.SIGKILL)
	_ = b.process.Wait()
	b.engine.Kill()
	b.start()
	ended := time.Now()
	b.launch("-state-dir", b.state)
	b.free(ended, within, reason, old)
	if n := b.counted("kvscout_agent_state_loads_total", "disproved"); n != 1 {
		b.t.Errorf("the cache state of the life before was refused %v times", n)
	}
	b.requests(10, realvllm.Request{})
}

// saved waits for a state file that is younger than that.
func (b *broken) saved(than time.Time) {
	b.t.Helper()
	for {
		files, err := filepath.Glob(filepath.Join(b.state, "*.state"))
		if err != nil {
			b.t.Fatal(err)
		}
		for _, name := range files {
			if info, err := os.Stat(name); err == nil && info.ModTime().After(than) {
				return
			}
		}
		if time.Since(than) > patience {
			b.t.Fatal("the cache state is not saved")
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (b *broken) batches() uint64 {
	b.t.Helper()
	m, err := b.stage.Member(b.t.Context(), b.agent.Members[0])
	if err != nil {
		b.t.Fatal(err)
	}
	return m.GetCacheState().GetEngineBatches()
}

var address = regexp.MustCompile(`serving probes.*address=(\S+)`)

// counted reads one of the agent's counters.
func (b *broken) counted(metric, event string) float64 {
	b.t.Helper()
	text, err := os.ReadFile(b.log.Name())
	if err != nil {
		b.t.Fatal(err)
	}
	at := address.FindSubmatch(text)
	if at == nil {
		b.t.Fatal("the agent does not say where its metrics are")
	}
	page, err := http.Get("http://" + string(at[1]) + "/metrics")
	if err != nil {
		b.t.Fatal(err)
	}
	defer page.Body.Close()
	body, err := io.ReadAll(page.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	sum := 0.0
	for line := range strings.Lines(string(body)) {
		if strings.HasPrefix(line, metric) && strings.Contains(line, fmt.Sprintf("%q", event)) {
			_, value, _ := strings.Cut(line, "} ")
			n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				b.t.Fatal(err)
			}
			sum += n
		}
	}
	return sum
}
