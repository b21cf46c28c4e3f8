package zmtp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// readBuffer holds about a hundred small messages, so that system calls are
// rare next to messages.
const readBuffer = 64 << 10

// keepAlive notices a vanished host within half a minute.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// Conn is one connection to one peer.
//
//   - One goroutine at a time calls Recv. Send, SetMaxMessage, Unanswered and
//     Close may be called by any, at any time.
//   - The first failure closes the connection and is what every later call
//     returns.
//   - PINGs are answered, and sent, while Recv runs. Nothing runs in between:
//     a Conn has no goroutine.
type Conn struct {
	conn    net.Conn
	name    string // the peer, for errors
	opt     Options
	onClose func() // tells the Listener; may be nil

	state atomic.Int32 // fresh, ready or dead

	handshakeMu sync.Mutex // held during the handshake, guards writes to peer
	peer        peer       // not written any more once ready

	// Owned by the goroutine that receives.
	in      *bufio.Reader
	silence time.Duration // spent waiting since the last bytes
	pinged  bool          // and we have asked meanwhile
	ttl     time.Duration // silence after which the peer said to give it up
	limited bool          // the socket has a read deadline

	writeMu sync.Mutex // guards out, and orders writes
	out     []byte

	failMu sync.Mutex // guards failed
	failed error

	// asked is when a PING was sent that no sign of life came after; nil: none is
	// waited for. It carries the monotonic clock.
	asked atomic.Pointer[time.Time]

	maxMessage atomic.Int64
}

// The states of a Conn; they only go up.
const (
	fresh = iota // no handshake yet
	ready
	dead // failed or closed, the reason is in failed
)

// Dial connects to endpoint and completes the handshake. ctx bounds both, not
// the incarnation of the Conn.
func Dial(ctx context.Context, endpoint string, opt Options) (*Conn, error) {
	e, err := ParseEndpoint(endpoint)
	if err != nil {
		return nil, err
	}
	if err := e.dialable(); err != nil {
		return nil, err
	}
	if opt, err = opt.withDefaults(); err != nil {
		return nil, fmt.Errorf("dial %s: %w", e, err)
	}
	dialer := net.Dialer{Timeout: opt.HandshakeTimeout, KeepAliveConfig: keepAlive}
	conn, err := dialer.DialContext(ctx, e.Network, e.address())
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", e, err)
	}
	c := newConn(conn, e.String(), opt)
	if err := c.Handshake(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// newConn wraps conn. opt has its defaults filled in.
func newConn(conn net.Conn, name string, opt Options) *Conn {
	c := &Conn{conn: conn, name: name, opt: opt}
	c.maxMessage.Store(int64(opt.MaxMessage))
	c.in = bufio.NewReaderSize(readerFunc(c.wait), readBuffer)
	return c
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// Recv reads the next message into m.
//
// It waits until a message is whole or the connection has ended, whichever end
// that came from; to make a context end it, use context.AfterFunc with Close. An
// error is the end of the connection: io.EOF if the peer hung up between
// messages, io.ErrUnexpectedEOF if within one, net.ErrClosed after Close,
// ErrUnresponsive, or a *ProtocolError, *LimitError, *PeerError or error of the
// network. In steady state Recv allocates nothing.
func (c *Conn) Recv(m *Message) error {
	if c.state.Load() != ready {
		if err := c.Handshake(context.Background()); err != nil {
			return err
		}
	}
	m.reset()
	if err := c.receive(m); err != nil {
		return c.fail(fmt.Errorf("receive from %s: %w", c.name, err))
	}
	m.finish()
	return nil
}

// receive reads frames into m until it holds a whole message. Commands are
// obeyed wherever they come: the specification wants them between messages,
// but libzmq's heartbeat timer also puts a PING between two frames of one.
func (c *Conn) receive(m *Message) error {
	for {
		flags, left, err := c.beginFrame(m)
		if err != nil {
			return err
		}
		if flags&flagCommand != 0 {
			b, err := c.in.Peek(left)
			if err != nil {
				return torn(true, err)
			}
			if err := c.obey(b); err != nil {
				return err
			}
			_, _ = c.in.Discard(left) // cannot fail: these bytes were peeked
			continue
		}
		for left > 0 {
			if len(m.data) == cap(m.data) {
				m.grow(left, int(c.maxMessage.Load()))
			}
			have := len(m.data)
			n, err := c.in.Read(m.data[have:min(cap(m.data), have+left)])
			m.data = m.data[:have+n]
			left -= n
			if err != nil {
				return torn(true, err)
			}
		}
		m.endFrame()
		if flags&flagMore == 0 {
			return nil
		}
	}
}

// beginFrame reads a header and holds it against the limits.
func (c *Conn) beginFrame(m *Message) (flags byte, left int, err error) {
	flags, size, err := c.header(len(m.ends) > 0)
	if err != nil {
		return 0, 0, err
	}
	if flags&flagCommand != 0 {
		if size > maxCommand {
			return 0, 0, &LimitError{What: "command bytes", Got: size, Limit: maxCommand}
		}
	} else {
		if len(m.ends) >= c.opt.MaxFrames {
			return 0, 0, &LimitError{What: "message frames", Got: uint64(len(m.ends)) + 1, Limit: uint64(c.opt.MaxFrames)}
		}
		have := uint64(len(m.data))
		if limit := uint64(c.maxMessage.Load()); have > limit || size > limit-have {
			return 0, 0, &LimitError{What: "message bytes", Got: have + size, Limit: limit}
		}
	}
	c.ttl = 0
	return flags, int(size), nil
}

// torn turns the end of the stream into an unexpected one if a frame or message
// has begun.
func torn(begun bool, err error) error {
	if errors.Is(err, io.EOF) && begun {
		return io.ErrUnexpectedEOF
	}
	return err
}

// wait reads from the socket, minding the peer's silence: the time spent in here
// without bytes. A caller that was busy elsewhere has no ground to complain of a
// silent peer.
func (c *Conn) wait(p []byte) (int, error) {
	for {
		now := time.Now()
		patience := c.patience()
		// The handshake has set a deadline of its own.
		if c.state.Load() != fresh && (c.limited || patience > 0) {
			var limit time.Time
			if c.limited = patience > 0; c.limited {
				limit = now.Add(patience - c.silence)
			}
			if err := c.conn.SetReadDeadline(limit); err != nil {
				return 0, err
			}
		}
		n, err := c.conn.Read(p)
		if n > 0 {
			if c.pinged {
				c.asked.Store(nil)
			}
			c.silence, c.pinged = 0, false
			return n, err
		}
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) || c.state.Load() != ready {
			return n, err
		}
		if c.silence += time.Since(now); patience == 0 || c.silence < patience {
			continue
		}
		if c.pinged || c.ttl > 0 && c.silence >= c.ttl {
			return 0, fmt.Errorf("nothing heard for %v: %w", c.silence.Round(time.Millisecond), ErrUnresponsive)
		}
		if err := c.writeCommand("PING", 0, 0); err != nil {
			return 0, fmt.Errorf("send PING: %w", err)
		}
		c.pinged = true
		sent := time.Now()
		c.asked.Store(&sent)
	}
}

// patience is the silence at which something must be done: ask, or give up.
// Zero is without end.
func (c *Conn) patience() time.Duration {
	var d time.Duration
	if c.opt.Heartbeat > 0 && c.peer.speaks31() {
		d = c.opt.Heartbeat
		if c.pinged {
			d += c.opt.HeartbeatTimeout
		}
	}
	if c.ttl > 0 && (d == 0 || c.ttl < d) {
		d = c.ttl
	}
	return d
}

// Unanswered is the time since a PING was sent that nothing has come after; 0
// when there is none. Whoever does not read lets answers wait, too.
func (c *Conn) Unanswered() time.Duration {
	at := c.asked.Load()
	if at == nil {
		return 0
	}
	return max(time.Since(*at), 1)
}

// SetMaxMessage replaces Options.MaxMessage from the next frame on.
func (c *Conn) SetMaxMessage(size int) { c.maxMessage.Store(int64(size)) }

// Send writes frames as one message. It keeps none of them.
func (c *Conn) Send(frames ...[]byte) error {
	if c.opt.Type != DEALER {
		return fmt.Errorf("send to %s: a %s socket does not send", c.name, c.opt.Type)
	}
	if len(frames) == 0 {
		return fmt.Errorf("send to %s: a message has at least one frame", c.name)
	}
	if c.state.Load() != ready {
		if err := c.Handshake(context.Background()); err != nil {
			return err
		}
	}
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	c.out = appendMessage(c.out[:0], frames...)
	if err := c.flushLocked(); err != nil {
		return c.fail(fmt.Errorf("send to %s: %w", c.name, err))
	}
	return nil
}

func (c *Conn) writeCommand(name string, body ...byte) error {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	c.out = appendCommand(c.out[:0], name, body...)
	return c.flushLocked()
}

func (c *Conn) flushLocked() error {
	if err := c.conn.SetWriteDeadline(time.Now().Add(c.opt.WriteTimeout)); err != nil {
		return err
	}
	_, err := c.conn.Write(c.out)
	if cap(c.out) > keptBuffer {
		c.out = nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// Not wrapped: a cut write cannot be resumed, unlike a read.
		return fmt.Errorf("nothing read for %v: %w", c.opt.WriteTimeout, ErrUnresponsive)
	}
	return err
}

// Close ends the connection and any Recv or Send that waits on it.
func (c *Conn) Close() error {
	_ = c.fail(fmt.Errorf("connection to %s: %w", c.name, net.ErrClosed))
	return nil
}

// fail closes the connection and gives the reason that stands: the first.
func (c *Conn) fail(err error) error {
	c.failMu.Lock()
	defer c.failMu.Unlock()
	if c.failed == nil {
		c.failed = err
		c.state.Store(dead)
		c.conn.Close() // nothing more to write, so nothing to be told
		if c.onClose != nil {
			c.onClose()
		}
	}
	return c.failed
}

func (c *Conn) cause() error {
	c.failMu.Lock()
	defer c.failMu.Unlock()
	return c.failed
}
