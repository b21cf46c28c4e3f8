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
//   - One goroutine at a time calls Recv and SetReadDeadline. Send, Stats,
//     SetMaxMessage, Unanswered and Close may be called by any, at any time.
//   - The first failure closes the connection and is what every later call
//     returns. The only error to go on after is a passed read deadline.
//   - PINGs are answered, and sent, while Recv runs. Nothing runs in between:
//     a Conn has no goroutine.
type Conn struct {
	conn    net.Conn
	name    string // the peer, for errors
	opt     Options
	onClose func() // tells the Listener; may be nil

	state atomic.Int32 // fresh, ready or dead

	handshakeMu sync.Mutex // held during the handshake, guards writes to peer
	peer        Peer       // not written any more once ready

	// Owned by the goroutine that receives.
	in       *bufio.Reader
	part     Message // the message being received
	inFrame  bool    // a header has been read, left bytes are missing
	flags    byte
	left     int
	deadline time.Time
	silence  time.Duration // spent waiting since the last bytes
	pinged   bool          // and we have asked meanwhile
	ttl      time.Duration // silence after which the peer said to give it up
	limited  bool          // the socket has a read deadline

	writeMu sync.Mutex // guards out, and orders writes
	out     []byte

	failMu sync.Mutex // guards failed
	failed error

	// asked is when a PING was sent that no sign of life came after; nil: none is
	// waited for. It carries the monotonic clock.
	asked atomic.Pointer[time.Time]

	maxMessage                             atomic.Int64
	messages, bytes, pings, pongs, ignored atomic.Uint64
}

// The states of a Conn; they only go up.
const (
	fresh = iota // no handshake yet
	ready
	dead // failed or closed, the reason is in failed
)

// Stats counts what a Conn has seen.
type Stats struct {
	Messages, Bytes uint64 // received messages and the payload bytes in them
	Pings, Pongs    uint64 // PINGs answered, PONGs received
	Ignored         uint64 // commands nobody here knows
}

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
// It waits until a message is whole, the read deadline has passed, or the
// connection has ended, whichever end that came from; to make a context end
// it, use context.AfterFunc with Close. After a passed deadline (an error that
// is os.ErrDeadlineExceeded) the next Recv goes on where this one stopped, even
// in the middle of a frame. Any other error is the end of the connection:
// io.EOF if the peer hung up between messages, io.ErrUnexpectedEOF if within
// one, net.ErrClosed after Close, ErrUnresponsive, or a *ProtocolError,
// *LimitError, *PeerError or error of the network. In steady state Recv
// allocates nothing.
func (c *Conn) Recv(m *Message) error {
	if c.state.Load() != ready {
		if err := c.Handshake(context.Background()); err != nil {
			return err
		}
	}
	if err := c.receive(); err != nil {
		err = fmt.Errorf("receive from %s: %w", c.name, err)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		return c.fail(err)
	}
	c.part.finish()
	*m, c.part = c.part, *m
	c.part.reset()
	size := len(m.data)
	if cap(c.part.data) > keptBuffer && size < cap(c.part.data)/4 {
		c.part.data = nil
	}
	c.messages.Add(1)
	c.bytes.Add(uint64(size))
	return nil
}

// receive reads frames into part until it holds a whole message. Commands are
// obeyed wherever they come: the specification wants them between messages,
// but libzmq's heartbeat timer also puts a PING between two frames of one.
func (c *Conn) receive() error {
	for {
		if !c.inFrame {
			if err := c.beginFrame(); err != nil {
				return err
			}
		}
		if c.flags&flagCommand != 0 {
			b, err := c.in.Peek(c.left)
			if err != nil {
				return c.torn(true, err)
			}
			if err := c.obey(b); err != nil {
				return err
			}
			_, _ = c.in.Discard(c.left) // cannot fail: these bytes were peeked
			c.inFrame = false
			continue
		}
		p := &c.part
		for c.left > 0 {
			if len(p.data) == cap(p.data) {
				p.grow(c.left, int(c.maxMessage.Load()))
			}
			have := len(p.data)
			n, err := c.in.Read(p.data[have:min(cap(p.data), have+c.left)])
			p.data = p.data[:have+n]
			c.left -= n
			if err != nil {
				return c.torn(true, err)
			}
		}
		p.endFrame()
		c.inFrame = false
		if c.flags&flagMore == 0 {
			return nil
		}
	}
}

// beginFrame reads a header and holds it against the limits.
func (c *Conn) beginFrame() error {
	flags, size, err := c.header()
	if err != nil {
		return err
	}
	if flags&flagCommand != 0 {
		if size > maxCommand {
			return &LimitError{What: "command bytes", Got: size, Limit: maxCommand}
		}
	} else {
		if len(c.part.ends) >= c.opt.MaxFrames {
			return &LimitError{What: "message frames", Got: uint64(len(c.part.ends)) + 1, Limit: uint64(c.opt.MaxFrames)}
		}
		have := uint64(len(c.part.data))
		if limit := uint64(c.maxMessage.Load()); have > limit || size > limit-have {
			return &LimitError{What: "message bytes", Got: have + size, Limit: limit}
		}
	}
	c.inFrame, c.flags, c.left = true, flags, int(size)
	c.ttl = 0
	return nil
}

// torn turns the end of the stream into an unexpected one if a message, or as
// the caller knows a frame, has begun.
func (c *Conn) torn(begun bool, err error) error {
	if errors.Is(err, io.EOF) && (begun || len(c.part.ends) > 0) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// wait reads from the socket, minding the read deadline and the peer's silence.
// Silence is the time spent in here without bytes: a caller that was busy
// elsewhere has no ground to complain of a silent peer.
func (c *Conn) wait(p []byte) (int, error) {
	for {
		now := time.Now()
		patience := c.patience()
		limit := c.deadline
		if patience > 0 {
			if t := now.Add(patience - c.silence); limit.IsZero() || t.Before(limit) {
				limit = t
			}
		}
		// The handshake has set a deadline of its own.
		if c.state.Load() != fresh && (c.limited || !limit.IsZero()) {
			if err := c.conn.SetReadDeadline(limit); err != nil {
				return 0, err
			}
			c.limited = !limit.IsZero()
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
		c.silence += time.Since(now)
		if patience > 0 && c.silence >= patience {
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
		if !c.deadline.IsZero() && !time.Now().Before(c.deadline) {
			return 0, os.ErrDeadlineExceeded
		}
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

// SetReadDeadline makes Recv return os.ErrDeadlineExceeded at t; the zero time
// lets it wait for ever. It counts from the next Recv on.
func (c *Conn) SetReadDeadline(t time.Time) { c.deadline = t }

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

// Peer tells what is known of the other end: everything once the handshake is
// done, and perhaps something after one that failed. It waits for a handshake
// under way.
func (c *Conn) Peer() Peer {
	c.handshakeMu.Lock()
	defer c.handshakeMu.Unlock()
	return c.peer
}

// RemoteAddr is the peer's address; that of a unix socket is mostly empty.
func (c *Conn) RemoteAddr() net.Addr { return c.conn.RemoteAddr() }

// Stats gives the counts so far.
func (c *Conn) Stats() Stats {
	return Stats{
		Messages: c.messages.Load(),
		Bytes:    c.bytes.Load(),
		Pings:    c.pings.Load(),
		Pongs:    c.pongs.Load(),
		Ignored:  c.ignored.Load(),
	}
}
