package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/agent/synthetic"
	"github.com/kvscout/kvscout/protocol/bus"
	"github.com/kvscout/kvscout/protocol/pb"
)

const (
	pool      = "default"
	modelName = "synthetic"
)

// agentsOrder tells the process of agents what to do. The first one has the fleet.
type agentsOrder struct {
	Do       string // begin, stats, pause, resume, kill, part, mend
	From, To int    // members it is for

	NATS    string
	Fleet   options
	Process int // of Fleet.processes, whose members are From to To
}

// agentsAnswer is what the process says after each order.
type agentsAnswer struct {
	synthetic.Stats
	// Batches of all engines since the beginning, and Wire: bytes written to NATS.
	Batches, Wire uint64
	// Late is how far engines were behind their steps at most, since the last answer.
	Late time.Duration
	// At are the last batches of the members that the order is for.
	At []uint64
}

// podUID is as long as Kubernetes makes them.
func podUID(member int) string { return fmt.Sprintf("5ca1e000-0000-4000-8000-%012d", member) }

// memberID as the API has it.
func memberID(member int) string { return "default_" + podUID(member) + "_0" }

// period is the time of an engine's step: from 0.6 to 1.4 times the mean.
func period(member int, rate float64) time.Duration {
	return time.Duration((0.6 + float64(member*7%28)*0.03) / rate * float64(time.Second))
}

// agents plays the agents of some members.
type agents struct {
	order   agentsOrder
	content *content
	wire    atomic.Uint64
	paused  atomic.Bool
	late    atomic.Int64
	group   sync.WaitGroup
	ctx     context.Context

	mu      sync.Mutex // guards the rest
	members []*agent
	stats   synthetic.Stats // of those that were killed
	errs    []error
}

// agent is one of them.
type agent struct {
	number int
	line   line
	every  time.Duration
	next   time.Time // step
	first  uint64
	at     uint64 // batches of the engine
	member *synthetic.Member
	kill   func()
}

// line is the connection of an agent, which can be cut.
type line struct {
	wire *atomic.Uint64
	mu   sync.Mutex // guards both
	cut  bool
	conn net.Conn
}

// Dial connects unless the line is cut; see nats.CustomDialer.
func (l *line) Dial(network, address string) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil, errors.New("the line is cut")
	}
	conn, err := net.DialTimeout(network, address, nats.DefaultTimeout)
	if err != nil {
		return nil, err
	}
	l.conn = &counted{Conn: conn, wire: l.wire}
	return l.conn, nil
}

func (l *line) set(cut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut = cut; cut && l.conn != nil {
		l.conn.Close()
	}
}

// counted adds up what is written.
type counted struct {
	net.Conn
	wire *atomic.Uint64
}

func (c *counted) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.wire.Add(uint64(n))
	return n, err
}

func serveAgents(ctx context.Context, in io.Reader, out io.Writer) error {
	a := &agents{}
	ctx, cancel := context.WithCancel(ctx)
	a.ctx = ctx
	defer func() { cancel(); a.group.Wait() }()
	return answer(ctx, in, out, func(raw json.RawMessage) (any, error) {
		var order agentsOrder
		if err := json.Unmarshal(raw, &order); err != nil {
			return nil, err
		}
		return a.do(order)
	})
}

func (a *agents) do(order agentsOrder) (*agentsAnswer, error) {
	if order.Do == "begin" {
		if err := a.begin(order); err != nil {
			return nil, err
		}
	}
	a.paused.Store(order.Do == "pause" || order.Do != "resume" && a.paused.Load())
	a.mu.Lock()
	defer a.mu.Unlock()
	answer := &agentsAnswer{Stats: a.stats, Wire: a.wire.Load(), Late: time.Duration(a.late.Swap(0))}
	for _, m := range a.members {
		mine := m.number >= order.From && m.number < order.To
		switch {
		case !mine:
		case order.Do == "kill":
			m.kill()
			add(&a.stats, m.member.Stats())
			if err := a.startLocked(m); err != nil {
				return nil, err
			}
		case order.Do == "part", order.Do == "mend":
			m.line.set(order.Do == "part")
		}
		if mine {
			answer.At = append(answer.At, m.at)
		}
		add(&answer.Stats, m.member.Stats())
		answer.Batches += m.at - m.first
	}
	return answer, errors.Join(a.errs...)
}

func add(to *synthetic.Stats, s synthetic.Stats) {
	to.Deltas += s.Deltas
	to.Heartbeats += s.Heartbeats
	to.Keys += s.Keys
	to.Snapshots += s.Snapshots
	to.Bytes += s.Bytes
	to.Dropped += s.Dropped
	to.Errors += s.Errors
}

// begin starts all members, and their engines' steps.
func (a *agents) begin(order agentsOrder) error {
	o := order.Fleet
	var err error
	if a.content, err = newContent(o.Members, o.Blocks, o.Holders, o.Shared); err != nil {
		return err
	}
	a.order = order
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := order.From; i < order.To; i++ {
		m := &agent{number: i, every: period(i, o.Rate), first: a.content.first(i), line: line{wire: &a.wire}}
		m.at = m.first
		if err := a.startLocked(m); err != nil {
			return err
		}
		a.members = append(a.members, m)
	}
	now := time.Now()
	for i, m := range a.members {
		m.next = now.Add(m.every * time.Duration(i) / time.Duration(len(a.members)))
	}
	a.group.Go(a.step)
	return nil
}

// startLocked starts the agent of a member beside its engine, which has come to
// batch m.at.
func (a *agents) startLocked(m *agent) error {
	log := slog.New(slog.DiscardHandler)
	settings, _, closed := bus.Options("kvscout-agent", bus.Events{
		Log: log, Connected: func() {}, NotConnected: func(error) {}, Failed: func(*nats.Conn, *nats.Subscription, error) {},
	})
	conn, err := bus.Login{}.Connect(a.order.NATS, append(settings, nats.SetCustomDialer(&m.line))...)
	if err != nil {
		return err
	}
	number, at, epoch := m.number, m.at, uint64(time.Now().UnixNano())
	member, err := synthetic.New(synthetic.Config{
		Conn: conn, Pool: pool, Cache: cache{a.content, number}, From: at, Epoch: epoch,
		Info: &pb.MemberInfo{
			Namespace: "default", Pod: fmt.Sprintf("engine-%d", number), PodUid: podUID(number),
			Address: fmt.Sprintf("10.%d.%d.%d:8000", number>>16&255, number>>8&255, number&255),
			Engine:  "vllm", EngineVersion: "0.32.0", Models: []string{modelName},
			BlockSize: blockSize, Blocks: uint64(a.order.Fleet.Blocks) * 21 / 20,
		},
		Load: func() *pb.Load {
			return &pb.Load{Running: proto.Uint32(32), Waiting: proto.Uint32(0), KvUsage: proto.Float64(.95), ProcessStartMs: 1}
		},
	})
	if err != nil {
		conn.Close()
		return err
	}
	ctx, cancel := context.WithCancel(a.ctx)
	ended := make(chan struct{})
	a.group.Go(func() {
		defer close(ended)
		err := member.Run(ctx)
		conn.Close()
		<-closed
		if err != nil && ctx.Err() == nil {
			a.mu.Lock()
			a.errs = append(a.errs, err)
			a.mu.Unlock()
		}
	})
	m.member = member
	m.kill = func() { // no goodbye: the connection goes first
		conn.Close()
		cancel()
		<-ended
	}
	return nil
}

// step lets the engines publish their batches when they are due.
func (a *agents) step() {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-a.ctx.Done():
			return
		case <-tick.C:
		}
		a.mu.Lock()
		now := time.Now()
		var late time.Duration
		for _, m := range a.members {
			if a.paused.Load() {
				m.next = now.Add(m.every)
				continue
			}
			due := now.Sub(m.next)
			if due < 0 {
				continue
			}
			late = max(late, due)
			steps := due/m.every + 1
			m.at += uint64(steps)
			m.next = m.next.Add(steps * m.every)
			m.member.Advance(m.at, now)
		}
		a.late.Store(max(a.late.Load(), int64(late)))
		a.mu.Unlock()
	}
}
