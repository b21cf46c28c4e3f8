// Package wire is a network that can be broken: a proxy in front of one TCP
// server that cuts, refuses, holds up and delays connections, and that can lay
// hands on single messages of the protocol that it carries.
package wire

import (
	"bufio"
	"io"
	"net"
	"sync"
	"time"
)

// inFlight is how many messages of one direction may be under way.
const inFlight = 128

// Split reads the next message and tells whether a Tamper may touch it.
type Split func(r *bufio.Reader) (message []byte, free bool, err error)

// Tamper gives what is to be sent instead of a message: nothing, the message,
// several. It is called in the order of the messages of a connection.
type Tamper func(message []byte) [][]byte

// Proxy stands between clients and one server. It begins to serve at once and
// ends with Close.
type Proxy struct {
	target   string
	up, down func() Split
	listener net.Listener
	group    sync.WaitGroup

	mu      sync.Mutex // guards what follows
	changed chan struct{}
	closed  bool
	refuse  bool
	stalled bool
	delay   time.Duration
	tamper  Tamper
	conns   map[net.Conn]struct{}
}

// New listens on a free port for clients of the server at host:port. up splits
// what clients send on a connection, down what the server does; nil: in any
// pieces.
func New(target string, up, down func() Split) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{target: target, up: up, down: down, listener: l, changed: make(chan struct{}), conns: make(map[net.Conn]struct{})}
	p.group.Go(p.accept)
	return p, nil
}

// Addr is host:port of the proxy.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Close breaks everything and waits for its end.
func (p *Proxy) Close() {
	p.change(func() { p.closed = true })
	p.listener.Close()
	p.Cut()
	p.group.Wait()
}

// Cut breaks every connection.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
	}
}

// Refuse breaks every connection and lets no other in, until told otherwise.
// Clients find a socket that accepts and hangs up.
func (p *Proxy) Refuse(on bool) {
	p.change(func() { p.refuse = on })
	if on {
		p.Cut()
	}
}

// Stall holds all bytes up, and keeps the connections, until told otherwise:
// nobody can tell it from a partition.
func (p *Proxy) Stall(on bool) { p.change(func() { p.stalled = on }) }

// Delay makes every message arrive later by so much.
func (p *Proxy) Delay(d time.Duration) { p.change(func() { p.delay = d }) }

// Tamper lays hands on the messages that New lets it split; nil ends it.
func (p *Proxy) Tamper(t Tamper) { p.change(func() { p.tamper = t }) }

func (p *Proxy) change(do func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	do()
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.group.Go(func() { p.serve(client) })
	}
}

func (p *Proxy) serve(client net.Conn) {
	defer client.Close()
	if !p.enter(client) {
		return
	}
	defer p.leave(client)
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer server.Close()
	if !p.enter(server) {
		return
	}
	defer p.leave(server)
	var pumps sync.WaitGroup
	over := make(chan struct{})
	var once sync.Once
	end := func() {
		once.Do(func() { close(over) })
		client.Close()
		server.Close()
	}
	pumps.Go(func() { defer end(); p.pump(server, client, p.up, over) })
	pumps.Go(func() { defer end(); p.pump(client, server, p.down, over) })
	pumps.Wait()
}

type packet struct {
	data []byte
	at   time.Time // of arrival
}

// pump carries one direction.
func (p *Proxy) pump(to io.Writer, from io.Reader, split func() Split, over <-chan struct{}) {
	next := pieces
	if split != nil {
		next = split()
	}
	queue := make(chan packet, inFlight)
	var reader sync.WaitGroup
	reader.Go(func() {
		defer close(queue)
		in := bufio.NewReaderSize(from, 64<<10)
		for {
			data, free, err := next(in)
			if err != nil {
				return
			}
			list := [][]byte{data}
			p.mu.Lock()
			if free && p.tamper != nil {
				list = p.tamper(data)
			}
			at := time.Now().Add(p.delay)
			p.mu.Unlock()
			for _, d := range list {
				select {
				case queue <- packet{d, at}:
				case <-over:
					return
				}
			}
		}
	})
	for k := range queue {
		if !p.due(k.at, over) {
			break
		}
		if _, err := to.Write(k.data); err != nil {
			break
		}
	}
	p.due(time.Time{}, over) // the end of a connection is held up too
	if c, ok := from.(io.Closer); ok {
		c.Close()
	}
	for range queue { // until the reader has noticed
	}
	reader.Wait()
}

// due waits until a packet may arrive; false: it never will.
func (p *Proxy) due(at time.Time, over <-chan struct{}) bool {
	for {
		p.mu.Lock()
		stalled, closed, changed := p.stalled, p.closed, p.changed
		p.mu.Unlock()
		if closed {
			return false
		}
		wait := time.Until(at)
		if !stalled && wait <= 0 {
			return true
		}
		var timer <-chan time.Time
		if !stalled {
			timer = time.After(wait)
		}
		select {
		case <-changed:
		case <-timer:
		case <-over:
			return false
		}
	}
}

func (p *Proxy) enter(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.refuse {
		return false
	}
	p.conns[c] = struct{}{}
	return true
}

func (p *Proxy) leave(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}
