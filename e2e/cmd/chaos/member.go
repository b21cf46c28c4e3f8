package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvscout/kvscout/agent"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/e2e/wire"
)

const (
	// poolBlocks is small, so that blocks are evicted all the time.
	poolBlocks = 600
	// shortRing is the replay buffer of engines that forget soon.
	shortRing = 8
	// birth is the time from an engine's sockets to its first request. Real
	// ones take seconds.
	birth = 150 * time.Millisecond
	// Where an engine serves, on a host of its own: it comes back there.
	httpPort, eventsPort, replayPort = 28000, 25557, 25657
)

// layers are the KV cache groups of the members' models, one after the other.
var layers = []struct {
	groups []fakevllm.Group
	dense  bool
}{
	{},
	{},
	{groups: []fakevllm.Group{{Kind: fakevllm.Sliding, Span: 128}, {Kind: fakevllm.Full}}},
	{groups: []fakevllm.Group{{Kind: fakevllm.Sliding, Span: 128}, {Kind: fakevllm.Full}}, dense: true},
	{groups: []fakevllm.Group{{Kind: fakevllm.StateSpace}, {Kind: fakevllm.Full}}},
	{},
}

// member is an engine with its agent. Members differ in how events reach the
// agent, in what can be replayed, in whether the agent is a process, and in the
// layers of their models.
type member struct {
	f      *fleet
	name   string // pod
	id     string
	relays bool // the events pass a proxy
	child  bool

	cfg     fakevllm.Config
	release func()                          // the engine's host
	engine  atomic.Pointer[fakevllm.Engine] // also while it is down: the last one
	up      atomic.Bool                     // it serves requests
	runs    stage.Part

	events, replay *wire.Proxy // nil: direct
	nats           *wire.Proxy
	agent          stage.Part
	process        *exec.Cmd
	stopped        bool     // by SIGSTOP
	stash          [][]byte // messages of the agent from earlier; owned by the proxy
}

func newMember(f *fleet, i int) (*member, error) {
	m := &member{
		f: f, name: fmt.Sprintf("pod%d", i), id: fmt.Sprintf("default_pod%d_0", i),
		relays: i%2 == 1, child: f.o.children && i%3 == 2,
	}
	host, release, err := loopback.Claim()
	if err != nil {
		return nil, err
	}
	m.release = release
	m.cfg = fakevllm.Config{
		Host: host, Port: httpPort, EventsPort: eventsPort, ReplayPort: replayPort, Model: model, Blocks: poolBlocks, MaxModelLen: 2048, BlockSize: blockSize,
		Speedup: 1000, Seed: f.o.seed + uint64(i), NoReplay: i%4 == 1,
		NoSources: m.relays, // or the agent would go around them
		Groups:    layers[i%len(layers)].groups, Dense: layers[i%len(layers)].dense,
	}
	if i%4 == 3 {
		m.cfg.BufferSteps = shortRing
	}
	if err := m.startEngine(); err != nil {
		return m, err
	}
	if m.nats, err = wire.New(f.nats.Address(), wire.NATS, nil); err != nil {
		return m, err
	}
	if m.relays {
		e := m.engine.Load().Events(0)
		if m.events, err = wire.New(hostPort(e.Endpoint()), nil, wire.ZMTP); err != nil {
			return m, err
		}
		if at := e.ReplayEndpoint(); at != "" {
			if m.replay, err = wire.New(hostPort(at), nil, wire.ZMTP); err != nil {
				return m, err
			}
		}
	}
	return m, m.startAgent()
}

func hostPort(endpoint string) string { return strings.TrimPrefix(endpoint, "tcp://") }

// startEngine starts the engine, at its old addresses if it had some.
func (m *member) startEngine() error {
	e, err := fakevllm.New(m.cfg)
	if err != nil {
		return err
	}
	m.engine.Store(e)
	m.runs = m.f.stage.Go(e.Run)
	pause(m.f.ctx, birth)
	m.up.Store(true)
	return nil
}

// stopEngine ends it as death does: requests are cut off.
func (m *member) stopEngine() {
	m.up.Store(false)
	m.runs.Stop()
	m.f.http.CloseIdleConnections()
}

func (m *member) endpoints() (events, replay string) {
	if !m.relays {
		return "", ""
	}
	events, replay = "tcp://"+m.events.Addr(), agent.NoReplay
	if m.replay != nil {
		replay = "tcp://" + m.replay.Addr()
	}
	return events, replay
}

func (m *member) startAgent() error {
	events, replay := m.endpoints()
	engine := "http://" + m.engine.Load().Addr()
	if m.child {
		m.process = exec.Command(m.f.program, "-nats-url", "nats://"+m.nats.Addr(), "-engine", engine,
			"-pod", m.name, "-admin-address", "", "-events", events, "-replay", replay, "-heartbeat", m.f.o.heartbeat.String())
		if m.f.logFile != nil {
			m.process.Stderr = m.f.logFile
		}
		return m.process.Start()
	}
	a, err := m.f.stage.Agent(stage.AgentOptions{
		NATS: "nats://" + m.nats.Addr(), Engine: engine, Pod: m.name, Events: events, Replay: replay, Heartbeat: m.f.o.heartbeat, Probe: probe,
	})
	if err != nil {
		return err
	}
	m.agent = a.Part
	return nil
}

// stopAgent ends the agent, in good order or by SIGKILL.
func (m *member) stopAgent(kill bool) {
	if !m.child {
		m.agent.Stop()
		return
	}
	signal := syscall.SIGTERM
	if kill {
		signal = syscall.SIGKILL
	}
	m.signal(signal)
	var exit *exec.ExitError
	if err := m.process.Wait(); err != nil && (!kill || !errors.As(err, &exit)) {
		m.f.stage.Fail(fmt.Errorf("agent of %s: %w", m.name, err))
	}
	m.process, m.stopped = nil, false
}

func (m *member) signal(s syscall.Signal) {
	if err := m.process.Process.Signal(s); err != nil {
		m.f.stage.Fail(fmt.Errorf("agent of %s: %w", m.name, err))
	}
	switch s {
	case syscall.SIGSTOP:
		m.stopped = true
		for m.f.ctx.Err() == nil && !halted(m.process.Process.Pid) {
			pause(m.f.ctx, time.Millisecond)
		}
	case syscall.SIGCONT:
		m.stopped = false
	}
}

// halted tells whether a process is stopped by now, where the system says.
func halted(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	return strings.HasPrefix(rest, "T")
}

func (m *member) close() {
	if m.process != nil {
		if m.stopped {
			m.signal(syscall.SIGCONT)
		}
		m.stopAgent(true)
	}
	m.agent.Stop()
	m.stopEngine()
	for _, p := range []*wire.Proxy{m.events, m.replay, m.nats} {
		if p != nil {
			p.Close()
		}
	}
	m.release()
}

// reset, sleep and the like: what an operator asks of an engine.
func (m *member) act(path string) error {
	ctx, cancel := context.WithTimeout(m.f.ctx, readyTime)
	defer cancel()
	if err := m.f.post(ctx, m.engine.Load().URL()+path, []byte("{}")); err != nil {
		return fmt.Errorf("%s%s: %w", m.name, path, err)
	}
	return nil
}
