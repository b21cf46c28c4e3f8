package fakevllm

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// ZMTP 3.1 frame flags.
const (
	flagMore    = 0x01
	flagLong    = 0x02
	flagCommand = 0x04
)

// maxIncoming bounds what a client may send in one frame: subscriptions,
// replay requests and commands are all tiny.
const maxIncoming = 64 << 10

// handshakeTime bounds the greeting and READY.
const handshakeTime = 5 * time.Second

// greeting of a NULL-mechanism ZMTP 3.1 peer that is not a server.
var greeting = func() []byte {
	g := make([]byte, 64)
	g[0], g[9], g[10], g[11] = 0xff, 0x7f, 3, 1
	copy(g[12:], "NULL")
	return g
}()

// peer is one connection of a client to a server socket: a reader that the
// owner runs, and an outbox of whole messages that never holds the sender up.
type peer struct {
	conn net.Conn
	in   *bufio.Reader

	wake chan struct{}

	mu      sync.Mutex // guards what follows
	outbox  []wire
	limit   int // messages in the outbox at most
	full    bool
	closed  bool
	dropped uint64
}

// wire is a whole multipart message in wire form, in two parts so that the
// second can be shared between clients.
type wire struct{ head, body []byte }

func newPeer(conn net.Conn, limit int) *peer {
	return &peer{conn: conn, in: bufio.NewReader(conn), wake: make(chan struct{}, 1), limit: limit}
}

// handshake exchanges greetings and READY commands. kind is our socket type.
func (p *peer) handshake(kind string) error {
	if err := p.conn.SetDeadline(time.Now().Add(handshakeTime)); err != nil {
		return err
	}
	if _, err := p.conn.Write(greeting); err != nil {
		return err
	}
	var theirs [64]byte
	if _, err := io.ReadFull(p.in, theirs[:]); err != nil {
		return fmt.Errorf("read greeting: %w", err)
	}
	if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 {
		return errors.New("greeting is not ZMTP 3")
	}
	if string(theirs[12:16]) != "NULL" {
		return fmt.Errorf("mechanism %q is not NULL", theirs[12:32])
	}
	body := append([]byte("\x05READY"), "\x0bSocket-Type"...)
	body = binary.BigEndian.AppendUint32(body, uint32(len(kind)))
	body = append(body, kind...)
	if kind == "ROUTER" {
		body = append(body, "\x08Identity\x00\x00\x00\x00"...)
	}
	if _, err := p.conn.Write(appendFrame(nil, flagCommand, body)); err != nil {
		return err
	}
	flags, ready, err := p.frame()
	if err != nil {
		return fmt.Errorf("read READY: %w", err)
	}
	if name, _ := command(ready); flags&flagCommand == 0 || name != "READY" {
		return errors.New("first command is not READY")
	}
	return p.conn.SetDeadline(time.Time{})
}

// frame reads one frame.
func (p *peer) frame() (flags byte, body []byte, err error) {
	flags, err = p.in.ReadByte()
	if err != nil {
		return 0, nil, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 {
		return 0, nil, fmt.Errorf("frame flags %#x", flags)
	}
	var size uint64
	if flags&flagLong != 0 {
		var b [8]byte
		if _, err = io.ReadFull(p.in, b[:]); err != nil {
			return 0, nil, err
		}
		size = binary.BigEndian.Uint64(b[:])
	} else {
		b, err := p.in.ReadByte()
		if err != nil {
			return 0, nil, err
		}
		size = uint64(b)
	}
	if size > maxIncoming {
		return 0, nil, fmt.Errorf("frame of %d bytes", size)
	}
	body = make([]byte, size)
	_, err = io.ReadFull(p.in, body)
	return flags, body, err
}

// receive reads until a message or a command other than PING is complete. A
// command comes as its name and its data.
func (p *peer) receive() (cmd string, parts [][]byte, err error) {
	for {
		flags, body, err := p.frame()
		if err != nil {
			return "", nil, err
		}
		if flags&flagCommand == 0 {
			parts = append(parts, body)
			if len(parts) > 16 {
				return "", nil, errors.New("message of more than 16 frames")
			}
			if flags&flagMore == 0 {
				return "", parts, nil
			}
			continue
		}
		name, data := command(body)
		switch {
		case name == "":
			return "", nil, errors.New("malformed command")
		case name == "PING" && len(data) >= 2:
			p.send(wire{head: appendFrame(nil, flagCommand, append([]byte("\x04PONG"), data[2:]...))}, true)
		case len(parts) == 0:
			return name, [][]byte{data}, nil
		}
	}
}

// command splits a command frame into name and data.
func command(body []byte) (name string, data []byte) {
	if len(body) == 0 || int(body[0]) >= len(body) {
		return "", nil
	}
	n := 1 + int(body[0])
	return string(body[1:n]), body[n:]
}

// send queues a message. When the outbox is full the message is dropped, and
// so are all until half of it is gone, unless it is urgent.
func (p *peer) send(m wire, urgent bool) {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return
	}
	if p.full && len(p.outbox) <= p.limit/2 {
		p.full = false
	}
	if p.full && !urgent {
		p.dropped++
		p.mu.Unlock()
		return
	}
	p.outbox = append(p.outbox, m)
	p.full = p.full || len(p.outbox) >= p.limit
	p.mu.Unlock()
	signal(p.wake)
}

// write sends what is queued until the peer is closed or the connection fails.
func (p *peer) write() error {
	const most = 64 // messages in one system call
	var list []wire
	for {
		p.mu.Lock()
		n := min(len(p.outbox), most)
		list = append(list[:0], p.outbox[:n]...)
		if n == len(p.outbox) {
			p.outbox = p.outbox[:0]
		} else {
			p.outbox = p.outbox[n:]
		}
		closed := p.closed
		p.mu.Unlock()
		if closed {
			return nil
		}
		if n == 0 {
			<-p.wake
			continue
		}
		buffers := make(net.Buffers, 0, 2*n)
		for _, m := range list {
			if len(m.head) > 0 {
				buffers = append(buffers, m.head)
			}
			if len(m.body) > 0 {
				buffers = append(buffers, m.body)
			}
		}
		clear(list)
		if _, err := buffers.WriteTo(p.conn); err != nil {
			return err
		}
	}
}

// close ends both directions; what is queued is lost.
func (p *peer) close() {
	p.mu.Lock()
	p.closed = true
	p.outbox = nil
	p.mu.Unlock()
	p.conn.Close()
	signal(p.wake)
}

func appendFrame(b []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		b = append(b, flags|flagLong)
		b = binary.BigEndian.AppendUint64(b, uint64(len(body)))
	} else {
		b = append(b, flags, byte(len(body)))
	}
	return append(b, body...)
}
