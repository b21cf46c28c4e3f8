package main

import (
	"context"
	"math/rand/v2"
	"syscall"
	"time"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/wire"
	"github.com/kvscout/kvscout/protocol"
)

const (
	// within is the time after a fault's end in which all must be true again.
	within = time.Second
	// flight is how long an answer may be wrong and call itself EXACT: events
	// on their way, on a machine that does other things too.
	flight = 500 * time.Millisecond
	// settling is what is added to a limit for the way to the scheduler.
	settling = 300 * time.Millisecond
)

// fault is one kind of them.
type fault struct {
	name string
	// fits tells whether it can be done to a member; nil: it is done to
	// something that all members share.
	fits func(m *member) bool
	do   func(s *strike) error
	// verified: cache states are suspect until the next heartbeat verifies them.
	verified bool
	// silence: nothing shows the fault before the next heartbeat does, which
	// is when the time to the truth begins.
	silence bool
	// probed: metrics tell of it, which the agent reads once a second.
	probed bool
	// silent: somebody is not heard any more, which nothing else shows.
	silent bool
}

func anybody(*member) bool    { return true }
func relayed(m *member) bool  { return m.relays }
func separate(m *member) bool { return m.child }

// faults is the list from which the seed chooses.
var faults = []fault{
	{name: "engine killed and restarted", fits: anybody, do: func(s *strike) error {
		s.m.stopEngine()
		s.hold(0, 300*time.Millisecond)
		s.mutate()
		return s.m.startEngine()
	}},
	{name: "engine restarted behind a stopped agent", fits: separate, do: func(s *strike) error {
		s.m.signal(syscall.SIGSTOP)
		defer s.m.signal(syscall.SIGCONT)
		return s.overtake()
	}},
	{name: "engine restarted behind a stalled network", fits: relayed, do: func(s *strike) error {
		s.m.network(func(p *wire.Proxy) { p.Stall(true) })
		defer s.m.network(func(p *wire.Proxy) { p.Stall(false) })
		return s.overtake()
	}},
	{name: "agent and engine restarted together", fits: anybody, do: func(s *strike) error {
		s.m.stopAgent(s.r.IntN(2) == 0)
		s.m.stopEngine()
		s.hold(0, 200*time.Millisecond)
		s.mutate()
		if err := s.m.startEngine(); err != nil {
			return err
		}
		return s.m.startAgent()
	}},
	{name: "prefix cache reset under load", fits: anybody, do: func(s *strike) error {
		path := "/reset_prefix_cache"
		if s.r.IntN(2) == 0 {
			path += "?reset_running_requests=true"
		}
		if err := s.m.act(path); err != nil {
			return err
		}
		return s.novel()
	}},
	{name: "prefix cache reset while idle", fits: anybody, do: func(s *strike) error {
		s.f.load.pause()
		defer s.f.load.resume()
		if err := s.m.act("/reset_prefix_cache"); err != nil {
			return err
		}
		return s.novel()
	}},
	{name: "sleep and wake", fits: anybody, probed: true, do: func(s *strike) error {
		if err := s.m.act("/sleep?level=1"); err != nil {
			return err
		}
		s.hold(0, 400*time.Millisecond)
		if err := s.m.act("/wake_up"); err != nil {
			return err
		}
		return s.novel()
	}},
	{name: "agent restarted", fits: anybody, do: func(s *strike) error {
		s.m.stopAgent(false)
		s.hold(0, 200*time.Millisecond)
		return s.m.startAgent()
	}},
	{name: "agent killed and restarted", fits: separate, do: func(s *strike) error {
		s.m.stopAgent(true)
		s.hold(0, 200*time.Millisecond)
		return s.m.startAgent()
	}},
	{name: "agent stopped for a while", silent: true, fits: separate, do: func(s *strike) error {
		s.m.signal(syscall.SIGSTOP)
		defer s.m.signal(syscall.SIGCONT)
		s.hold(50*time.Millisecond, 250*time.Millisecond)
		return s.still(0, 2500*time.Millisecond)
	}},
	{name: "event connections dropped", fits: anybody, do: func(s *strike) error {
		for range 1 + s.r.IntN(3) {
			s.m.engine.Load().Events(0).Disconnect()
			s.hold(0, 60*time.Millisecond)
		}
		return nil
	}},
	{name: "event network down", fits: relayed, do: func(s *strike) error {
		s.m.network(func(p *wire.Proxy) { p.Refuse(true) })
		defer s.m.network(func(p *wire.Proxy) { p.Refuse(false) })
		s.hold(0, 300*time.Millisecond)
		return nil
	}},
	{name: "event network stalled", fits: relayed, do: func(s *strike) error {
		s.m.network(func(p *wire.Proxy) { p.Stall(true) })
		defer s.m.network(func(p *wire.Proxy) { p.Stall(false) })
		s.hold(0, 500*time.Millisecond)
		return nil
	}},
	{name: "event batches lost", fits: relayed, do: func(s *strike) error {
		left := 1 + s.r.IntN(2*shortRing)
		s.m.events.Tamper(func(message []byte) [][]byte {
			if left > 0 {
				left--
				return nil
			}
			return [][]byte{message}
		})
		s.hold(100*time.Millisecond, 400*time.Millisecond)
		s.m.events.Tamper(nil)
		return s.novel() // a lost last batch shows with the next one
	}},
	{name: "scheduler restarted", verified: true, do: func(s *strike) error {
		s.f.stopScheduler()
		s.hold(0, 300*time.Millisecond)
		return s.f.stage.StartScheduler()
	}},
	{name: "NATS restarted", verified: true, do: func(s *strike) error {
		s.f.nats.Stop()
		s.hold(0, 300*time.Millisecond)
		return s.f.nats.Run()
	}},
	{name: "agent cut from NATS", fits: anybody, do: func(s *strike) error {
		s.m.nats.Refuse(true)
		defer s.m.nats.Refuse(false)
		s.hold(0, 500*time.Millisecond)
		return nil
	}},
	{name: "agent partitioned from NATS", silent: true, fits: anybody, do: func(s *strike) error {
		s.m.nats.Stall(true)
		defer s.m.nats.Stall(false)
		s.hold(50*time.Millisecond, 250*time.Millisecond)
		return s.still(0, 2500*time.Millisecond)
	}},
	{name: "agent's messages late", fits: anybody, do: func(s *strike) error {
		s.m.nats.Delay(time.Duration(20+s.r.IntN(200)) * time.Millisecond)
		defer s.m.nats.Delay(0)
		s.hold(100*time.Millisecond, 600*time.Millisecond)
		return nil
	}},
	{name: "agent's messages lost", fits: anybody, silence: true, do: func(s *strike) error {
		return s.tamper(func(r *rand.Rand, message []byte) [][]byte { return nil })
	}},
	{name: "agent's messages doubled", fits: anybody, silence: true, do: func(s *strike) error {
		return s.tamper(func(r *rand.Rand, message []byte) [][]byte { return [][]byte{message, message} })
	}},
	{name: "agent's messages reordered", fits: anybody, silence: true, do: func(s *strike) error {
		var late []byte
		return s.tamper(func(r *rand.Rand, message []byte) [][]byte {
			if late == nil {
				late = message
				return nil
			}
			pair := [][]byte{message, late}
			late = nil
			return pair
		})
	}},
	{name: "agent's messages cut short", fits: anybody, silence: true, do: func(s *strike) error {
		return s.tamper(func(r *rand.Rand, message []byte) [][]byte {
			payload := wire.Payload(message)
			return [][]byte{wire.WithPayload(message, payload[:r.IntN(len(payload)+1)])}
		})
	}},
	{name: "agent's old messages again", fits: anybody, silence: true, do: func(s *strike) error {
		m := s.m
		return s.tamper(func(r *rand.Rand, message []byte) [][]byte {
			out := [][]byte{message}
			if len(m.stash) > 0 {
				out = append(out, m.stash[r.IntN(len(m.stash))])
			}
			if len(m.stash) < 64 {
				m.stash = append(m.stash, message)
			} else {
				m.stash[r.IntN(64)] = message
			}
			return out
		})
	}},
	{name: "scheduler cut from NATS", verified: true, do: func(s *strike) error {
		s.f.bus.Refuse(true)
		defer s.f.bus.Refuse(false)
		s.hold(0, 500*time.Millisecond)
		return nil
	}},
	{name: "scheduler partitioned from NATS", silent: true, do: func(s *strike) error {
		s.f.bus.Stall(true)
		defer s.f.bus.Stall(false)
		s.hold(50*time.Millisecond, 250*time.Millisecond)
		return s.still(0, 2500*time.Millisecond)
	}},
	{name: "scheduler hears late", do: func(s *strike) error {
		s.f.bus.Delay(time.Duration(20+s.r.IntN(100)) * time.Millisecond)
		defer s.f.bus.Delay(0)
		s.hold(100*time.Millisecond, 600*time.Millisecond)
		return nil
	}},
}

// strike is one fault at one moment.
type strike struct {
	f     *fleet
	m     *member // nil where the fault concerns no single one
	fault *fault
	r     *rand.Rand
	lie   lie
}

// hold lets the load go on for some time.
func (s *strike) hold(least, most time.Duration) {
	pause(s.f.ctx, least+upTo(s.r, most-least))
}

func upTo(r *rand.Rand, d time.Duration) time.Duration { return time.Duration(r.Int64N(int64(d) + 1)) }

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// still keeps the fault without load, and looks whether answers that are wrong
// by now admit it.
func (s *strike) still(least, most time.Duration) error {
	d := least + upTo(s.r, most-least)
	s.f.load.pause()
	defer s.f.load.resume()
	for end := time.Now().Add(d); time.Now().Before(end) && s.f.ctx.Err() == nil; pause(s.f.ctx, 10*time.Millisecond) {
		v, err := s.f.look(s.f.ctx)
		if err != nil {
			return err
		}
		s.lie.see(v, time.Now())
	}
	s.lie.end()
	return nil
}

// mutate lets the next incarnation of the engine keep another history.
func (s *strike) mutate() {
	if !s.m.relays {
		s.m.cfg.NoReplay = s.r.IntN(3) == 0
	}
	if s.m.cfg.BufferSteps = 0; s.r.IntN(3) == 0 {
		s.m.cfg.BufferSteps = shortRing
	}
}

// overtake restarts the engine and lets its new incarnation come about as far as the
// old one, or farther.
func (s *strike) overtake() error {
	old := s.m.engine.Load().Events(0).Stats().Next
	s.m.stopEngine()
	s.mutate()
	if err := s.m.startEngine(); err != nil {
		return err
	}
	for range 40 + s.r.IntN(120) {
		if s.m.engine.Load().Events(0).Stats().Next > old+uint64(s.r.IntN(8)) {
			break
		}
		if err := s.novel(); err != nil {
			return err
		}
	}
	return nil
}

// novel lets the engine serve a prompt that it does not have, so that it has
// something to say.
func (s *strike) novel() error {
	e := s.m.engine.Load()
	for _, i := range s.r.Perm(len(s.f.prompts)) {
		q := &s.f.prompts[i]
		if len(q.prefixes) > 0 && e.Depth(0, q.tokens, "", "") < len(q.prefixes) {
			return s.f.serve(e, q)
		}
	}
	return nil
}

func (f *fleet) serve(e *fakevllm.Engine, q *prompt) error {
	ctx, cancel := context.WithTimeout(f.ctx, readyTime)
	defer cancel()
	return f.post(ctx, e.URL()+"/v1/completions", q.body)
}

// tamper lays hands on every other message or so of the member's agent.
func (s *strike) tamper(with func(r *rand.Rand, message []byte) [][]byte) error {
	r := rand.New(rand.NewPCG(s.r.Uint64(), 7))
	s.m.nats.Tamper(func(message []byte) [][]byte {
		if r.IntN(2) == 0 {
			return [][]byte{message}
		}
		return with(r, message)
	})
	s.hold(100*time.Millisecond, 400*time.Millisecond)
	s.m.nats.Tamper(nil)
	return nil
}

// network does something to all the ways of the engine's events.
func (m *member) network(do func(*wire.Proxy)) {
	do(m.events)
	if m.replay != nil {
		do(m.replay)
	}
}

// lies is how long answers may be wrong and call themselves EXACT. A fault that
// makes no noise shows at the next heartbeat, or when three have not come.
func (s *strike) lies() time.Duration {
	switch {
	case s.fault.silence:
		return s.f.o.limit(s.f.o.heartbeat + settling)
	case s.fault.silent:
		return s.f.o.limit(3*max(s.f.o.heartbeat, protocol.HeartbeatEvery) + settling)
	}
	return s.f.o.limit(flight)
}
