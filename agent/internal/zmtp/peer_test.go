package zmtp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// hello is what a well-behaved peer of type t says until the handshake ends.
func hello(t SocketType) []byte { return appendReady(greeting(), t) }

// tape is a connection whose peer has said all it will ever say and swallows
// what it is told.
type tape struct {
	io.Reader
	said bytes.Buffer // by us
}

func (c *tape) Write(p []byte) (int, error)      { return c.said.Write(p) }
func (c *tape) Close() error                     { return nil }
func (c *tape) LocalAddr() net.Addr              { return &net.UnixAddr{} }
func (c *tape) RemoteAddr() net.Addr             { return &net.UnixAddr{} }
func (c *tape) SetDeadline(time.Time) error      { return nil }
func (c *tape) SetReadDeadline(time.Time) error  { return nil }
func (c *tape) SetWriteDeadline(time.Time) error { return nil }

// playTape gives a Conn whose peer says bytes from r.
func playTape(t testing.TB, r io.Reader, opt Options) (*Conn, *tape) {
	t.Helper()
	opt, err := opt.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	tp := &tape{Reader: r}
	return newConn(tp, "tape", opt), tp
}

// drip hands out single bytes, and a passed deadline before every one: the
// worst that Recv must be able to resume from.
type drip struct {
	r     io.Reader
	tired bool
}

func (d *drip) Read(p []byte) (int, error) {
	if d.tired = !d.tired; d.tired {
		return 0, os.ErrDeadlineExceeded
	}
	return d.r.Read(p[:1])
}

// dialPipe gives a Conn of ours that has shaken hands, and the peer's end. All
// that we say goes to the channel.
func dialPipe(t *testing.T, opt Options, peer SocketType) (*Conn, net.Conn, <-chan []byte) {
	t.Helper()
	opt, err := opt.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := net.Pipe()
	said := make(chan []byte, 1000)
	done := make(chan struct{})
	go func() {
		defer close(said)
		for {
			b := make([]byte, 1000)
			n, err := theirs.Read(b)
			if err != nil {
				return
			}
			said <- b[:n]
		}
	}()
	go func() {
		defer close(done)
		theirs.Write(hello(peer))
	}()
	c := newConn(ours, "pipe", opt)
	t.Cleanup(func() { c.Close(); theirs.Close() })
	if err := c.Handshake(context.Background()); err != nil {
		t.Fatal(err)
	}
	<-done
	want := appendReady(greeting(), opt.Type)
	for _, topic := range opt.Topics {
		want = appendMessage(want, append([]byte{1}, topic...))
	}
	var got []byte
	for len(got) < len(want) {
		got = append(got, <-said...)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("said\n%q, want\n%q", got, want)
	}
	return c, theirs, said
}

// expected says whether err is one of those that Recv promises.
func expected(err error) bool {
	var protocol *ProtocolError
	var limit *LimitError
	var peer *PeerError
	return errors.As(err, &protocol) || errors.As(err, &limit) || errors.As(err, &peer) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, ErrUnresponsive)
}

func frames(ss ...string) [][]byte {
	var out [][]byte
	for _, s := range ss {
		out = append(out, []byte(s))
	}
	return out
}
