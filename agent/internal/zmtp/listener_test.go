package zmtp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
)

// say connects like a PUB and says hello and what.
func say(t *testing.T, addr net.Addr, what []byte) net.Conn {
	t.Helper()
	conn, err := net.Dial(addr.Network(), addr.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if _, err := conn.Write(append(hello("PUB"), what...)); err != nil {
		t.Fatal(err)
	}
	return conn
}

func listen(t *testing.T, endpoint string, opt Options) *Listener {
	t.Helper()
	l, err := Listen(t.Context(), endpoint, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func TestListenerServesPeersInAnyOrder(t *testing.T) {
	for _, endpoint := range []string{"tcp://127.0.0.1:0", "tcp://*:0", "ipc://" + filepath.Join(t.TempDir(), "s")} {
		t.Run(endpoint, func(t *testing.T) {
			l := listen(t, endpoint, Options{Type: SUB})
			// The first peer never shakes hands and must not be in the way.
			mute, err := net.Dial(l.Addr().Network(), l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer mute.Close()
			var conns [3]*Conn
			for i := range conns {
				if i > 0 {
					say(t, l.Addr(), appendMessage(nil, fmt.Append(nil, i)))
				}
				if conns[i], err = l.Accept(t.Context()); err != nil {
					t.Fatal(err)
				}
				defer conns[i].Close()
			}
			for i := len(conns) - 1; i > 0; i-- {
				var m Message
				if err := conns[i].Recv(&m); err != nil || string(m.Frames[0]) != fmt.Sprint(i) {
					t.Errorf("peer %d: %q, %v", i, m.Frames, err)
				}
			}
		})
	}
}

func TestListenerBoundsItsPeers(t *testing.T) {
	l := listen(t, "tcp://127.0.0.1:0", Options{Type: SUB, MaxPeers: 1})
	say(t, l.Addr(), nil)
	first, err := l.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	second := say(t, l.Addr(), nil)
	got := make(chan error)
	go func() {
		c, err := l.Accept(t.Context())
		if err == nil {
			c.Close()
		}
		got <- err
	}()
	// The listener hangs up before it reads, which the peer may see as a reset.
	if n, err := io.Copy(io.Discard, second); n != 0 {
		t.Errorf("the second peer got %d bytes, %v", n, err)
	}
	if n := l.Refused(); n != 1 {
		t.Errorf("%d refused, want 1", n)
	}
	first.Close()
	first.Close()
	say(t, l.Addr(), nil)
	if err := <-got; err != nil {
		t.Error(err)
	}
}

func TestAcceptEndsWithContextOrClose(t *testing.T) {
	l := listen(t, "tcp://127.0.0.1:0", Options{Type: SUB})
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan error)
	accept := func(ctx context.Context) {
		c, err := l.Accept(ctx)
		if err == nil {
			c.Close()
		}
		got <- err
	}
	go accept(ctx)
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's error", err)
	}
	go accept(t.Context())
	say(t, l.Addr(), nil)
	if err := <-got; err != nil {
		t.Errorf("after an ended context: %v", err)
	}
	go accept(t.Context())
	l.Close()
	if err := <-got; !errors.Is(err, net.ErrClosed) {
		t.Errorf("got %v, want net.ErrClosed", err)
	}
}

func TestStaleSocketFileIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	addr, _ := net.ResolveUnixAddr("unix", path)
	crashed, err := net.ListenUnix("unix", addr)
	if err != nil {
		t.Fatal(err)
	}
	crashed.SetUnlinkOnClose(false)
	if _, err := Listen(t.Context(), "ipc://"+path, Options{Type: SUB}); err == nil {
		t.Error("took the socket of a living process")
	}
	crashed.Close()
	l, err := Listen(t.Context(), "ipc://"+path, Options{Type: SUB})
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(t.Context(), "ipc://"+path, Options{Type: SUB}); err == nil {
		t.Error("took the place of a file")
	}
	if b, _ := os.ReadFile(path); string(b) != "precious" {
		t.Error("removed a file")
	}
}

func TestDialRefusesWildcards(t *testing.T) {
	for _, endpoint := range []string{"tcp://*:5557", "tcp://127.0.0.1:0", "nonsense"} {
		if _, err := Dial(t.Context(), endpoint, Options{Type: SUB}); err == nil {
			t.Errorf("dialed %s", endpoint)
		}
	}
}

func TestDialSaysThatNobodyListens(t *testing.T) {
	l := listen(t, "tcp://127.0.0.1:0", Options{Type: SUB})
	l.Close()
	_, err := Dial(t.Context(), "tcp://"+l.Addr().String(), Options{Type: SUB})
	var op *net.OpError
	if !errors.As(err, &op) {
		t.Errorf("got %v, want the network's error", err)
	}
}

func TestAcceptedPeerReadsWhatWeSay(t *testing.T) {
	l := listen(t, "tcp://127.0.0.1:0", Options{Type: SUB, Topics: frames("a", "bc")})
	peer := say(t, l.Addr(), nil)
	c, err := l.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Handshake(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := string(hello(SUB)) + "\x00\x02\x01a\x00\x03\x01bc"
	got := make([]byte, len(want))
	if _, err := io.ReadFull(peer, got); err != nil || string(got) != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
	if c.conn.RemoteAddr().String() != peer.LocalAddr().String() {
		t.Errorf("peer's address is %v, want %v", c.conn.RemoteAddr(), peer.LocalAddr())
	}
}

func TestMessageBoundCanBeReplaced(t *testing.T) {
	l := listen(t, "tcp://127.0.0.1:0", Options{Type: SUB, MaxMessage: 1000})
	for _, size := range []int{1000, 10} {
		say(t, l.Addr(), appendMessage(nil, make([]byte, 100)))
		c, err := l.Accept(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetMaxMessage(size)
		var m Message
		var limit *LimitError
		if err := c.Recv(&m); errors.As(err, &limit) == (size == 1000) {
			t.Errorf("100 bytes with a bound of %d: %v", size, err)
		}
	}
}
