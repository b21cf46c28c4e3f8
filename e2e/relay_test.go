package e2e

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
)

// relay stands between an agent and a ZeroMQ socket of its engine. It is a
// network that breaks, loses messages, and lets strangers speak.
type relay struct {
	listener net.Listener
	target   string
	group    sync.WaitGroup

	mu    sync.Mutex // guards what follows, and writing to agents
	conns map[net.Conn]bool
	ready map[net.Conn]bool // agents whose handshake is done
	cut   bool
	lose  int // messages of the engine to lose
	lost  int
}

func newRelay(t *testing.T, endpoint string) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{
		listener: l, target: strings.TrimPrefix(endpoint, "tcp://"),
		conns: make(map[net.Conn]bool), ready: make(map[net.Conn]bool),
	}
	r.group.Go(r.accept)
	t.Cleanup(func() {
		l.Close()
		r.part()
		r.group.Wait()
	})
	return r
}

func (r *relay) endpoint() string { return "tcp://" + r.listener.Addr().String() }

// part breaks every connection and lets none through. Nobody can tell the
// engine's end from that of the network: the socket still accepts.
func (r *relay) part() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cut = true
	for c := range r.conns {
		c.Close()
	}
}

// heal lets connections through again.
func (r *relay) heal() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cut = false
}

// drop loses the next n messages of the engine.
func (r *relay) drop(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lose, r.lost = n, 0
}

// dropped tells how many were lost since.
func (r *relay) dropped() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lost
}

// inject sends bytes to the agents between two messages of the engine, and
// tells how many agents there are.
func (r *relay) inject(raw []byte) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.ready {
		_, _ = c.Write(raw)
	}
	return len(r.ready)
}

func (r *relay) accept() {
	for {
		agent, err := r.listener.Accept()
		if err != nil {
			return
		}
		r.group.Go(func() { r.serve(agent) })
	}
}

func (r *relay) serve(agent net.Conn) {
	defer agent.Close()
	if !r.enter(agent) {
		return
	}
	defer r.leave(agent)
	engine, err := net.Dial("tcp", r.target)
	if err != nil {
		return
	}
	defer engine.Close()
	if !r.enter(engine) {
		return
	}
	defer r.leave(engine)
	r.group.Go(func() {
		_, _ = io.Copy(engine, agent)
		engine.Close()
	})
	in := bufio.NewReader(engine)
	greeting := make([]byte, 64)
	if _, err := io.ReadFull(in, greeting); err != nil {
		return
	}
	if _, err := agent.Write(greeting); err != nil {
		return
	}
	for {
		message, command, err := readMessage(in)
		if err != nil {
			return
		}
		r.mu.Lock()
		r.ready[agent] = true
		if !command && r.lose > 0 {
			r.lose--
			r.lost++
			r.mu.Unlock()
			continue
		}
		_, err = agent.Write(message)
		r.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (r *relay) enter(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.cut {
		r.conns[c] = true
	}
	return !r.cut
}

func (r *relay) leave(c net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, c)
	delete(r.ready, c)
}

// Flags of a ZMTP frame.
const (
	frameMore    = 1
	frameLong    = 2
	frameCommand = 4
)

// readMessage reads all frames of a message, or one command, as they are.
func readMessage(in *bufio.Reader) (raw []byte, command bool, err error) {
	for {
		flags, err := in.ReadByte()
		if err != nil {
			return nil, false, err
		}
		raw = append(raw, flags)
		width := 1
		if flags&frameLong != 0 {
			width = 8
		}
		length := make([]byte, 8)
		if _, err := io.ReadFull(in, length[8-width:]); err != nil {
			return nil, false, err
		}
		raw = append(raw, length[8-width:]...)
		body := make([]byte, binary.BigEndian.Uint64(length))
		if _, err := io.ReadFull(in, body); err != nil {
			return nil, false, err
		}
		raw = append(raw, body...)
		if flags&frameMore == 0 {
			return raw, flags&frameCommand != 0, nil
		}
	}
}

// message is the bytes of a message with these frames.
func message(frames ...[]byte) []byte {
	var raw []byte
	for i, f := range frames {
		flags := byte(frameLong)
		if i < len(frames)-1 {
			flags |= frameMore
		}
		raw = append(binary.BigEndian.AppendUint64(append(raw, flags), uint64(len(f))), f...)
	}
	return raw
}
