package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// What befalls an agent: it restarts alone, hangs, is slow, loses NATS, is
// killed. Each time the scheduler's cache state must be right again soon after.

func TestAgentRestartsAloneAfterTheRingMovedOn(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{BufferSteps: 8})
	opt := stage.AgentOptions{Pod: "pod", State: t.TempDir()}
	e.watchedBy(opt)
	list := several(1, 40)
	e.complete(list...)
	e.truth(soon, list...)
	for round := range uint64(3) {
		epoch := p.member(e.id()).GetCacheState().GetEpoch()
		e.agent.Stop()
		e.untilMember(e.id(), "leave", func(m *api.MemberState) bool { return m == nil })
		if round > 0 {
			more := several(10+round, 2)
			e.complete(more...)
			list = append(list, more...)
		}
		start := time.Now()
		e.watchedBy(opt)
		e.truth(soon, list...)
		t.Log("exact after", time.Since(start))
		if now := p.member(e.id()).GetCacheState().GetEpoch(); now <= epoch {
			t.Errorf("epoch %d after %d", now, epoch)
		}
		if n := p.counted(e.agent.Admin(), "kvscout_agent_state_loads_total", `"resumed"`); n != 1 {
			t.Errorf("resumed %v times", n)
		}
	}
	// Without the file it is a lower bound.
	e.agent.Stop()
	opt.State = ""
	e.watchedBy(opt)
	e.lower(soon, list...)
}

func TestEngineRestartsWhileTheAgentIsDown(t *testing.T) {
	for name, batches := range map[string]int{"below the old sequence": 3, "beyond the old sequence": 30} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t, stage.Options{})
			e := p.engine(fakevllm.Config{})
			opt := stage.AgentOptions{Pod: "pod", State: t.TempDir()}
			e.watchedBy(opt)
			old := several(1, 20)
			e.complete(old...)
			e.truth(soon, old...)
			e.agent.Stop()
			e.restart()
			young := several(2, batches)
			e.complete(young...)
			e.watchedBy(opt)
			t.Log("true after", e.truth(soon, append(old, young...)...))
			if n := p.counted(e.agent.Admin(), "kvscout_agent_state_loads_total", `"disproved"`); n != 1 {
				t.Errorf("disproved %v times", n)
			}
		})
	}
}

func TestAgentGoesOnWithoutItsStateFolder(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{})
	list := several(1, 5)
	e.complete(list...)
	opt := stage.AgentOptions{Pod: "pod", State: filepath.Join(t.TempDir(), "absent")}
	for range 2 {
		e.watchedBy(opt)
		e.truth(soon, list...)
		e.agent.Stop()
	}
	// Neither does a file that is rubbish stop it.
	opt.State = t.TempDir()
	file := filepath.Join(opt.State, e.id()+".state")
	if err := os.WriteFile(file, bytes.Repeat([]byte("kvsstate"), 100), 0o600); err != nil {
		t.Fatal(err)
	}
	e.watchedBy(opt)
	e.truth(soon, list...)
	if n := p.counted(e.agent.Admin(), "kvscout_agent_state_loads_total", `"refused"`); n != 1 {
		t.Errorf("refused %v times", n)
	}
}

// program is the agent's real binary at work.
type program struct {
	t   *testing.T
	cmd *exec.Cmd
	log bytes.Buffer
	end sync.Once
}

func buildAgent(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kvscout-agent")
	build := exec.Command("go", "build", "-o", path, "./agent/cmd/kvscout-agent")
	build.Dir = ".."
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return path
}

// run starts the binary beside the engine.
func (e *engine) run(binary, pod string, args ...string) *program {
	e.t.Helper()
	a := &program{t: e.t}
	a.cmd = exec.Command(binary, append([]string{
		"-nats-url", e.NATS, "-engine", e.URL(), "-pod", pod, "-pool", "default", "-heartbeat", "50ms", "-probe", "50ms", "-admin-address", "",
	}, args...)...)
	a.cmd.Stderr = &a.log
	if err := a.cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(a.kill)
	e.agent = &stage.Agent{Members: []string{"default_" + pod + "_0"}}
	return a
}

func (a *program) signal(s syscall.Signal) {
	a.t.Helper()
	if err := a.cmd.Process.Signal(s); err != nil {
		a.t.Fatal(err)
	}
}

// kill is for good: no leave, no last file.
func (a *program) kill() {
	a.end.Do(func() {
		_ = a.cmd.Process.Kill()
		_ = a.cmd.Wait()
		if a.t.Failed() {
			a.t.Log(a.log.String())
		}
	})
}

// load keeps an engine busy until stop is called, which gives what it served.
func (e *engine) load(seed uint64) (stop func() []prompt) {
	quit, done := make(chan struct{}), make(chan struct{})
	var served []prompt
	go func() {
		defer close(done)
		for n := uint64(0); ; n++ {
			select {
			case <-quit:
				return
			default:
			}
			q := random(seed<<32+n, 3*size+5)
			e.complete(q)
			served = append(served, q)
		}
	}()
	return func() []prompt { close(quit); <-done; return served }
}

// some keeps a handful of prompts, so that they can be asked about quickly.
func some(list []prompt) []prompt {
	for len(list) > 50 {
		half := list[:0:0]
		for i := 0; i < len(list); i += 2 {
			half = append(half, list[i])
		}
		list = half
	}
	return list
}

func TestAgentProgram(t *testing.T) {
	binary := buildAgent(t)

	t.Run("killed", func(t *testing.T) {
		t.Parallel()
		p := open(t, stage.Options{})
		e := p.engine(fakevllm.Config{BufferSteps: 40})
		dir := t.TempDir()
		a := e.run(binary, "pod", "-state-dir", dir)
		e.untilMember(e.id(), "settle", stage.Settled)
		list := several(1, 60)
		e.complete(list...)
		e.truth(soon, list...)
		file := filepath.Join(dir, e.id()+".state")
		var first os.FileInfo
		// Two files: the second was begun after all the prompts were known.
		p.until("the cache state is saved", func() bool {
			info, err := os.Stat(file)
			if err == nil && first == nil {
				first = info
				last := random(99, 3*size)
				e.complete(last)
				list = append(list, last)
			}
			return err == nil && info.ModTime().After(first.ModTime())
		})
		more := several(2, 5)
		e.complete(more...)
		a.kill()
		lost := several(3, 5)
		e.complete(lost...)
		start := time.Now()
		e.run(binary, "pod", "-state-dir", dir)
		e.truth(soon, append(append(list, more...), lost...)...)
		t.Log("exact after", time.Since(start))
	})

	t.Run("hangs", func(t *testing.T) {
		t.Parallel()
		p := open(t, stage.Options{})
		e := p.engine(fakevllm.Config{Blocks: 400, MaxModelLen: 1000})
		a := e.run(binary, "pod")
		e.untilMember(e.id(), "settle", stage.Settled)
		list := several(1, 50)
		e.complete(list...)
		e.truth(soon, list...)
		w := e.witness(list...)
		a.signal(syscall.SIGSTOP)
		stop := e.load(2)
		time.Sleep(2 * time.Second)
		list = append(list, stop()...)
		a.signal(syscall.SIGCONT)
		w.admits(t, e.truth(soon, some(list)...), silence+flight)
	})

	t.Run("slow", func(t *testing.T) {
		t.Parallel()
		p := open(t, stage.Options{})
		e := p.engine(fakevllm.Config{Blocks: 400, MaxModelLen: 1000})
		a := e.run(binary, "pod")
		e.untilMember(e.id(), "settle", stage.Settled)
		old := several(1, 20)
		e.complete(old...)
		e.truth(soon, old...)
		w := e.witness(old...)
		stop := e.load(3)
		for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
			a.signal(syscall.SIGSTOP) // a tenth of the time is its own
			time.Sleep(45 * time.Millisecond)
			a.signal(syscall.SIGCONT)
			time.Sleep(5 * time.Millisecond)
		}
		// Heartbeats come late but they come: it need not suspect anything.
		w.says(t, e.truth(soon, some(append(old, stop()...))...), flight)
	})

	t.Run("without NATS", func(t *testing.T) {
		t.Parallel()
		away := 5 * time.Second
		if os.Getenv("KVSCOUT_LONG") != "" {
			away = time.Minute
		}
		s := broker.New(t, nil)
		p := open(t, stage.Options{NATS: s.URL()})
		e := p.engine(fakevllm.Config{Blocks: 400, MaxModelLen: 1000})
		e.run(binary, "pod")
		e.untilMember(e.id(), "settle", stage.Settled)
		old := several(1, 20)
		e.complete(old...)
		e.truth(soon, old...)
		w := e.witness(old...)
		stop := e.load(4)
		s.Stop()
		time.Sleep(away)
		s.Start()
		w.admits(t, e.truth(soon, some(append(old, stop()...))...), flight)
		t.Log("away for", away)
	})

	t.Run("killed in the middle of a snapshot", func(t *testing.T) {
		t.Parallel()
		s := broker.New(t, nil)
		p := open(t, stage.Options{NATS: s.URL()})
		e := p.engine(fakevllm.Config{})
		a := e.run(binary, "pod")
		e.untilMember(e.id(), "settle", stage.Settled)
		var list []prompt
		for n := range uint64(16) {
			list = append(list, random(5<<32+n, 2000*size+1))
		}
		e.complete(list...)
		e.truth(patience, list...)

		// The first chunk that goes over the wire is the last thing the agent does.
		closed := make(chan struct{})
		conn, err := nats.Connect(s.URL(), nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { conn.Close(); <-closed }()
		chunks := make(chan struct{}, 1)
		if _, err := conn.Subscribe(">", func(m *nats.Msg) {
			if len(m.Data) < 64<<10 || strings.Contains(m.Subject, ".blocks.") {
				return
			}
			select {
			case chunks <- struct{}{}:
				_ = a.cmd.Process.Kill()
			default:
			}
		}); err != nil {
			t.Fatal(err)
		}
		if err := conn.Flush(); err != nil {
			t.Fatal(err)
		}
		if err := p.RestartScheduler(); err != nil {
			t.Fatal(err)
		}
		select {
		case <-chunks:
		case <-time.After(patience):
			t.Fatal("no snapshot was sent")
		}
		a.kill()
		e.run(binary, "pod")
		t.Log("true after", e.truth(soon, list...))
		if strings.Contains(a.log.String(), "panic") {
			t.Error(a.log.String())
		}
	})
}

// The engine stays silent about a reset while it is idle, and here it does not
// count the request either: only a question can tell.
func TestAuditNoticesASilentReset(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	const every = 200 * time.Millisecond
	e := p.engine(fakevllm.Config{NoRequestCounts: true})
	e.watchedBy(stage.AgentOptions{Pod: "pod", Audit: every})
	list := several(1, 10)
	e.complete(list...)
	e.truth(soon, list...)
	p.until("an audit finds what is held", func() bool {
		return p.counted(e.agent.Admin(), "kvscout_agent_audits_total", `"held"`) > 0
	})
	stored := e.State(0).Counters.Stored
	p.until("another one does", func() bool {
		return p.counted(e.agent.Admin(), "kvscout_agent_audits_total", `"held"`) > 1
	})
	if now := e.State(0).Counters.Stored; now != stored {
		t.Errorf("audits stored %d blocks", now-stored)
	}
	e.truth(soon, list...)
	e.act("/reset_prefix_cache", nil)
	took := e.truth(every+soon, list...)
	t.Log("true after", took)
	// The cache state is emptied before the audit is counted.
	missing := func() float64 { return p.counted(e.agent.Admin(), "kvscout_agent_audits_total", `"missing"`) }
	p.until("the audit is counted", func() bool { return missing() > 0 })
	e.complete(list...)
	held := p.counted(e.agent.Admin(), "kvscout_agent_audits_total", `"held"`)
	p.until("audits find what is held again", func() bool {
		return p.counted(e.agent.Admin(), "kvscout_agent_audits_total", `"held"`) > held+1
	})
	if n := missing(); n != 1 {
		t.Errorf("%v audits found something missing", n)
	}
}
