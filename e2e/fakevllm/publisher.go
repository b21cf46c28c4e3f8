package fakevllm

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

// PublisherConfig configures a Publisher.
type PublisherConfig struct {
	// Endpoint to bind: tcp://HOST:PORT or ipc://PATH. Host * is every
	// interface, port 0 a free one. Empty: tcp://127.0.0.1:0.
	Endpoint string
	// ReplayEndpoint to bind; empty: no replay.
	ReplayEndpoint string
	// Topic of what Publish sends.
	Topic string
	// BufferSteps is how many messages can be replayed; 0: 10,000.
	BufferSteps int
	// HWM is how many messages may wait for a slow subscriber before it loses
	// some, silently; 0: 100,000.
	HWM int
	// ReplayHWM is the same for a replay, where libzmq has 1,000; 0: nothing
	// of one replay is lost.
	ReplayHWM int
	// ThreeFrameReplay leaves the topic out of replayed messages, as vLLM did
	// before 0.26.
	ThreeFrameReplay bool
}

// Publisher is the event side of an engine: a PUB socket, and a ROUTER socket
// that sends again what the PUB socket sent. It speaks ZMTP 3.1 to libzmq and
// everybody else.
//
//   - Messages are [topic][sequence, 8 bytes big-endian][payload].
//   - Nothing blocks the caller of Publish; slow subscribers lose messages, and
//     so do those who connect late.
//   - Sockets are bound by NewPublisher, served by Run, and closed when Run ends.
type Publisher struct {
	cfg    PublisherConfig
	events net.Listener
	replay net.Listener // nil: none
	group  sync.WaitGroup

	mu      sync.Mutex // guards what follows
	closed  bool
	peers   map[*peer]*subscriptions // nil for those of the replay socket
	ring    []sent                   // a ring once it is full
	oldest  int
	next    uint64
	dropped uint64
	bad     uint64
}

// sent is a message as it left, and where its topic frame ends.
type sent struct {
	sequence uint64
	wire     []byte
	topicEnd int
}

// subscriptions of one subscriber, with multiplicity.
type subscriptions map[string]int

func (s subscriptions) match(topic []byte) bool {
	for prefix := range s {
		if bytes.HasPrefix(topic, []byte(prefix)) {
			return true
		}
	}
	return false
}

// NewPublisher binds the sockets.
func NewPublisher(cfg PublisherConfig) (*Publisher, error) {
	if cfg.Endpoint == "" {
		cfg.Endpoint = "tcp://127.0.0.1:0"
	}
	if cfg.BufferSteps == 0 {
		cfg.BufferSteps = 10000
	}
	if cfg.HWM == 0 {
		cfg.HWM = 100000
	}
	p := &Publisher{cfg: cfg, peers: make(map[*peer]*subscriptions)}
	var err error
	if p.events, err = listen(cfg.Endpoint); err != nil {
		return nil, fmt.Errorf("bind events: %w", err)
	}
	if cfg.ReplayEndpoint != "" {
		if p.replay, err = listen(cfg.ReplayEndpoint); err != nil {
			p.events.Close()
			return nil, fmt.Errorf("bind replay: %w", err)
		}
	}
	return p, nil
}

func listen(endpoint string) (net.Listener, error) {
	scheme, address, ok := strings.Cut(endpoint, "://")
	switch {
	case ok && scheme == "tcp":
		if rest, any := strings.CutPrefix(address, "*"); any {
			address = rest
		}
		return net.Listen("tcp", address)
	case ok && scheme == "ipc":
		if err := os.Remove(address); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		return net.Listen("unix", address)
	}
	return nil, fmt.Errorf("endpoint %q is neither tcp:// nor ipc://", endpoint)
}

// Endpoint is where a subscriber connects to.
func (p *Publisher) Endpoint() string { return endpointOf(p.events) }

// ReplayEndpoint is where a replay can be asked for; empty: nowhere.
func (p *Publisher) ReplayEndpoint() string {
	if p.replay == nil {
		return ""
	}
	return endpointOf(p.replay)
}

func endpointOf(l net.Listener) string {
	if a, ok := l.Addr().(*net.TCPAddr); ok {
		if a.IP.IsUnspecified() {
			return fmt.Sprintf("tcp://127.0.0.1:%d", a.Port)
		}
		return "tcp://" + a.String()
	}
	return "ipc://" + l.Addr().String()
}

// Run serves clients until ctx ends, then closes everything.
func (p *Publisher) Run(ctx context.Context) error {
	p.group.Go(func() { p.accept(p.events, "PUB") })
	if p.replay != nil {
		p.group.Go(func() { p.accept(p.replay, "ROUTER") })
	}
	<-ctx.Done()
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.events.Close()
	if p.replay != nil {
		p.replay.Close()
	}
	p.Disconnect()
	p.group.Wait()
	return nil
}

// Close releases the sockets of a Publisher that never ran.
func (p *Publisher) Close() {
	p.events.Close()
	if p.replay != nil {
		p.replay.Close()
	}
}

func (p *Publisher) accept(l net.Listener, kind string) {
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, or gone again
			time.Sleep(10 * time.Millisecond)
			continue
		}
		limit := p.cfg.HWM
		if kind == "ROUTER" {
			// A client that asks again and again without reading must not make
			// us hold more than a few replies.
			limit = 4 * (p.cfg.BufferSteps + 1)
			if p.cfg.ReplayHWM > 0 {
				limit = p.cfg.ReplayHWM
			}
		}
		q := newPeer(conn, limit)
		p.mu.Lock()
		if p.closed {
			p.mu.Unlock()
			conn.Close()
			return
		}
		p.peers[q] = nil
		p.group.Add(1)
		p.mu.Unlock()
		go func() {
			defer p.group.Done()
			p.serve(q, kind)
		}()
	}
}

// serve runs one connection to its end.
func (p *Publisher) serve(q *peer, kind string) {
	var writer sync.WaitGroup
	err := q.handshake(kind)
	if err == nil {
		writer.Go(func() {
			if q.write() != nil {
				q.close()
			}
		})
		if kind == "PUB" {
			err = p.subscriber(q)
		} else {
			err = p.requester(q)
		}
	}
	q.close()
	writer.Wait()
	p.mu.Lock()
	delete(p.peers, q)
	p.dropped += q.dropped
	if err != nil && !closedByPeer(err) {
		p.bad++
	}
	p.mu.Unlock()
}

// subscriber follows the subscriptions of one client.
func (p *Publisher) subscriber(q *peer) error {
	subs := make(subscriptions)
	for {
		cmd, parts, err := q.receive()
		if err != nil {
			return err
		}
		var topic string
		var join bool
		switch {
		case cmd == "SUBSCRIBE":
			topic, join = string(parts[0]), true
		case cmd == "CANCEL":
			topic = string(parts[0])
		case cmd == "" && len(parts) == 1 && len(parts[0]) > 0 && parts[0][0] <= 1:
			topic, join = string(parts[0][1:]), parts[0][0] == 1
		default:
			continue
		}
		p.mu.Lock()
		if join {
			subs[topic]++
		} else if subs[topic]--; subs[topic] <= 0 {
			delete(subs, topic)
		}
		if len(subs) > 0 {
			p.peers[q] = &subs
		} else {
			p.peers[q] = nil
		}
		p.mu.Unlock()
		if len(subs) > 1000 {
			return errors.New("more than 1000 subscriptions")
		}
	}
}

var endMarker = bytes.Repeat([]byte{0xff}, 8)

// requester answers the replay requests of one client. A malformed one gets
// no answer.
func (p *Publisher) requester(q *peer) error {
	delimiter := appendFrame(nil, flagMore, nil)
	end := appendFrame(nil, flagMore, nil)
	if !p.cfg.ThreeFrameReplay {
		end = appendFrame(end, flagMore, nil)
	}
	end = appendFrame(end, flagMore, endMarker)
	end = appendFrame(end, 0, nil)
	for {
		cmd, parts, err := q.receive()
		if err != nil {
			return err
		}
		if cmd != "" || len(parts) != 2 || len(parts[0]) != 0 || len(parts[1]) != 8 {
			p.mu.Lock()
			p.bad++
			p.mu.Unlock()
			continue
		}
		for _, m := range p.since(binary.BigEndian.Uint64(parts[1])) {
			body := m.wire
			if p.cfg.ThreeFrameReplay {
				body = body[m.topicEnd:]
			}
			q.send(wire{head: delimiter, body: body}, false)
		}
		q.send(wire{head: end}, false)
	}
}

// since returns the buffered messages from a sequence on.
func (p *Publisher) since(sequence uint64) []sent {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []sent
	for i := range p.ring {
		m := p.ring[(p.oldest+i)%len(p.ring)]
		if m.sequence >= sequence {
			out = append(out, m)
		}
	}
	return out
}

// Publish sends the next message under the configured topic and returns its
// sequence. It keeps no reference to payload.
func (p *Publisher) Publish(payload []byte) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	sequence := p.next
	p.sendLocked([]byte(p.cfg.Topic), sequence, payload)
	return sequence
}

// PublishFrames sends a message as it is. The next Publish counts from it.
func (p *Publisher) PublishFrames(topic []byte, sequence uint64, payload []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sendLocked(topic, sequence, payload)
}

func (p *Publisher) sendLocked(topic []byte, sequence uint64, payload []byte) {
	b := make([]byte, 0, len(topic)+len(payload)+32)
	b = appendFrame(b, flagMore, topic)
	topicEnd := len(b)
	b = appendFrame(b, flagMore, binary.BigEndian.AppendUint64(nil, sequence))
	b = appendFrame(b, 0, payload)
	m := sent{sequence: sequence, wire: b, topicEnd: topicEnd}
	if len(p.ring) < p.cfg.BufferSteps {
		p.ring = append(p.ring, m)
	} else {
		p.ring[p.oldest] = m
		p.oldest = (p.oldest + 1) % len(p.ring)
	}
	p.next = sequence + 1
	for q, subs := range p.peers {
		if subs != nil && subs.match(topic) {
			q.send(wire{body: b}, false)
		}
	}
}

// Disconnect drops every connection, as a broken network does. The life of the
// stream goes on.
func (p *Publisher) Disconnect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.disconnectLocked()
}

func (p *Publisher) disconnectLocked() {
	for q, subs := range p.peers {
		if subs != nil {
			p.peers[q] = nil
		}
		q.close()
	}
}

// Restart drops every connection and forgets all messages, as the death of an
// engine does; the next one starts at sequence 0 on the same ports.
func (p *Publisher) Restart() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.disconnectLocked()
	p.ring, p.oldest, p.next = nil, 0, 0
}

// PublisherStats is what a Publisher counted.
type PublisherStats struct {
	// Subscribers that have a subscription now.
	Subscribers int
	// Pending messages not yet written to their connections.
	Pending int
	// Next is the sequence that follows the newest message.
	Next uint64
	// Dropped messages for slow clients.
	Dropped uint64
	// Malformed requests and connections that broke the protocol.
	Malformed uint64
}

// Stats returns a snapshot of the counts.
func (p *Publisher) Stats() PublisherStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := PublisherStats{Next: p.next, Dropped: p.dropped, Malformed: p.bad}
	for q, subs := range p.peers {
		if subs != nil {
			s.Subscribers++
		}
		q.mu.Lock()
		s.Pending += len(q.outbox)
		s.Dropped += q.dropped
		q.mu.Unlock()
	}
	return s
}

// closedByPeer: the connection ended, with no offence against the protocol.
func closedByPeer(err error) bool {
	return errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
