package zmtp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestRecv(t *testing.T) {
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<13) // 128 KiB
	sent := [][][]byte{
		frames("kv", "\x00\x00\x00\x00\x00\x00\x00\x01", "payload"),
		frames(""),
		frames("", "", ""),
		{big, nil, big[:255], big[:256]},
		frames("after"),
	}
	stream := hello("PUB")
	for i, m := range sent {
		if i == 3 {
			stream = appendCommand(stream, "SUBSCRIBE", 'k')
		}
		stream = appendMessage(stream, m...)
	}
	start, rest := stream[:len(hello("PUB"))], stream[len(hello("PUB")):]
	for name, r := range map[string]io.Reader{
		"at once":                             bytes.NewReader(stream),
		"byte by byte, with deadlines passed": io.MultiReader(bytes.NewReader(start), &drip{r: bytes.NewReader(rest)}),
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := playTape(t, r, Options{Type: SUB})
			var m Message
			for i := range sent {
				if err := c.Recv(&m); err != nil {
					t.Fatal(err)
				}
				if len(m.Frames) != len(sent[i]) {
					t.Fatalf("message %d has %d frames, want %d", i, len(m.Frames), len(sent[i]))
				}
				for j := range m.Frames {
					if !bytes.Equal(m.Frames[j], sent[i][j]) {
						t.Fatalf("message %d, frame %d differs", i, j)
					}
				}
			}
			if err := c.Recv(&m); !errors.Is(err, io.EOF) {
				t.Errorf("at the end: %v, want io.EOF", err)
			}
		})
	}
}

func TestMessagesKeepTheirMemoryApart(t *testing.T) {
	stream := hello("PUB")
	for _, s := range []string{"one", "two", "three", "four"} {
		stream = appendMessage(stream, []byte(s))
	}
	c, _ := playTape(t, bytes.NewReader(stream), Options{Type: SUB})
	var kept [4]Message
	for i := range kept {
		if err := c.Recv(&kept[i]); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range []string{"one", "two", "three", "four"} {
		if got := string(kept[i].Frames[0]); got != want {
			t.Errorf("message %d became %q, want %q", i, got, want)
		}
	}
}

func TestBadBytesEndTheConnection(t *testing.T) {
	for name, c := range map[string]struct {
		bytes []byte
		want  string
	}{
		"reserved flags":       {[]byte{0x08, 0}, "flags 0x08 use reserved bits"},
		"command with more":    {[]byte{0x05, 0}, "a command has no more frames"},
		"reserved bit of size": {[]byte{2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, "uses the reserved bit"},
		"huge frame":           {[]byte{2, 0x10, 0, 0, 0, 0, 0, 0, 0}, "1152921504606846976 message bytes exceed the limit of 1000"},
		"one byte too many":    {appendMessage(nil, make([]byte, 500), make([]byte, 501)), "1001 message bytes exceed"},
		"one frame too many":   {bytes.Repeat([]byte{1, 0}, 5), "5 message frames exceed the limit of 4"},
		"huge command":         {[]byte{6, 0, 0, 0, 0, 0, 0, 0x20, 1}, "8193 command bytes exceed"},
		"empty command":        {[]byte{4, 0}, "command is empty"},
		"nameless command":     {[]byte{4, 1, 0}, "name of 0"},
		"short PING":           {appendCommand(nil, "PING", 0), "PING has a body of 1"},
		"long PING":            {appendCommand(nil, "PING", make([]byte, 19)...), "PING has a body of 19"},
		"ERROR":                {appendCommand(nil, "ERROR", []byte("\x03bad")...), `peer refuses: "bad"`},
		"cut ERROR":            {appendCommand(nil, "ERROR"), "reason is cut"},
		"cut header":           {[]byte{0}, "unexpected EOF"},
		"cut long header":      {[]byte{2, 0, 0}, "unexpected EOF"},
		"cut frame":            {[]byte{0, 3, 'a'}, "unexpected EOF"},
		"cut message":          {[]byte{1, 1, 'a'}, "unexpected EOF"},
		"cut command":          {[]byte{4, 5, 4, 'P'}, "unexpected EOF"},
	} {
		good := appendMessage(nil, []byte("good"))
		conn, _ := playTape(t, bytes.NewReader(join(hello("PUB"), good, c.bytes, good)), Options{Type: SUB, MaxMessage: 1000, MaxFrames: 4})
		if strings.HasPrefix(c.want, "unexpected") {
			conn, _ = playTape(t, bytes.NewReader(join(hello("PUB"), good, c.bytes)), Options{Type: SUB, MaxMessage: 1000, MaxFrames: 4})
		}
		var m Message
		if err := conn.Recv(&m); err != nil {
			t.Fatal(err)
		}
		err := conn.Recv(&m)
		if err == nil || !strings.Contains(err.Error(), c.want) || !expected(err) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
		if again := conn.Recv(&m); !errors.Is(again, err) {
			t.Errorf("%s: then %v, want the same error again", name, again)
		}
	}
}

func TestClaimCostsNothing(t *testing.T) {
	claim := join(hello("PUB"), []byte{2, 0, 0, 0, 0, 0x40, 0, 0, 0}, []byte("but this is all")) // 1 GiB
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	c, _ := playTape(t, bytes.NewReader(claim), Options{Type: SUB, MaxMessage: 2 << 30})
	if err := c.Recv(new(Message)); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if got := after.TotalAlloc - before.TotalAlloc; got > 1<<20 {
		t.Errorf("15 bytes of a claimed GiB made us allocate %d bytes", got)
	}
}

func TestBigBufferIsGivenBack(t *testing.T) {
	stream := appendMessage(hello("PUB"), make([]byte, 8<<20))
	for range 5 {
		stream = appendMessage(stream, []byte("small"))
	}
	c, _ := playTape(t, bytes.NewReader(stream), Options{Type: SUB})
	var m Message
	for range 6 {
		if err := c.Recv(&m); err != nil {
			t.Fatal(err)
		}
	}
	if got := cap(m.data); got > keptBuffer {
		t.Errorf("%d bytes are still held after small messages", got)
	}
}

func TestPingIsAnswered(t *testing.T) {
	// One PING between messages, one between two frames, one with an empty
	// context, one with the longest.
	stream := join(hello("PUB"),
		appendCommand(nil, "PING", []byte("\x00\x00ctx")...),
		[]byte{1, 1, 'a'}, appendCommand(nil, "PING", 0, 0), []byte{0, 1, 'b'},
		appendCommand(nil, "PING", []byte("\x00\x000123456789abcdef")...),
		appendCommand(nil, "PONG", []byte("nobody asked")...),
	)
	c, tp := playTape(t, bytes.NewReader(stream), Options{Type: SUB})
	var m Message
	if err := c.Recv(&m); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(frames("a", "b"), m.Frames); diff != "" {
		t.Error(diff)
	}
	if err := c.Recv(&m); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	want := join(hello(SUB), []byte{0, 1, 1},
		appendCommand(nil, "PONG", []byte("ctx")...),
		appendCommand(nil, "PONG"),
		appendCommand(nil, "PONG", []byte("0123456789abcdef")...))
	if !bytes.Equal(tp.said.Bytes(), want) {
		t.Errorf("said\n%q, want\n%q", tp.said.Bytes(), want)
	}
}

func TestCloseEndsRecv(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, _ := dialPipe(t, Options{Type: SUB}, "PUB")
		ctx, cancel := context.WithCancel(context.Background())
		stop := context.AfterFunc(ctx, func() { c.Close() })
		defer stop()
		got := make(chan error)
		go func() { got <- c.Recv(new(Message)) }()
		synctest.Wait()
		cancel()
		if err := <-got; !errors.Is(err, net.ErrClosed) {
			t.Errorf("got %v, want net.ErrClosed", err)
		}
		if err := c.Recv(new(Message)); !errors.Is(err, net.ErrClosed) {
			t.Errorf("then %v, want net.ErrClosed", err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestSilentPeerIsAskedThenGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, peer, said := dialPipe(t, Options{Type: SUB, Heartbeat: 2 * time.Second, HeartbeatTimeout: 3 * time.Second}, "PUB")
		ping := appendCommand(nil, "PING", 0, 0)
		answers := 3
		go func() {
			for b := range said {
				if !bytes.Equal(b, ping) {
					t.Errorf("said %q, want a PING", b)
				}
				if answers--; answers >= 0 {
					time.Sleep(2 * time.Second)
					peer.Write(appendCommand(nil, "PONG"))
				}
			}
		}()
		began := time.Now()
		err := c.Recv(new(Message))
		if want := 3*4*time.Second + 5*time.Second; !errors.Is(err, ErrUnresponsive) || time.Since(began) != want {
			t.Errorf("%v after %v, want ErrUnresponsive after %v", err, time.Since(began), want)
		}
	})
}

func TestBusyCallerDoesNotBlameThePeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, peer, _ := dialPipe(t, Options{Type: SUB, Heartbeat: time.Second}, "PUB")
		go peer.Write(appendMessage(nil, []byte("waiting")))
		time.Sleep(time.Minute)
		var m Message
		if err := c.Recv(&m); err != nil || string(m.Frames[0]) != "waiting" {
			t.Errorf("got %q, %v", m.Frames, err)
		}
	})
}

func TestPeersOwnTimeToLive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, peer, _ := dialPipe(t, Options{Type: SUB}, "PUB")
		began := time.Now()
		go func() {
			ping := appendCommand(nil, "PING", 0, 25) // 2.5 s
			peer.Write(ping)
			time.Sleep(2 * time.Second)
			peer.Write(ping)
			time.Sleep(2 * time.Second)
			// Traffic in the same write takes the PING's threat back.
			peer.Write(append(ping, appendMessage(nil, []byte("alive"))...))
			time.Sleep(time.Minute)
			peer.Write(ping)
		}()
		var m Message
		if err := c.Recv(&m); err != nil {
			t.Fatal(err)
		}
		if err, want := c.Recv(&m), 64*time.Second+2500*time.Millisecond; !errors.Is(err, ErrUnresponsive) || time.Since(began) != want {
			t.Errorf("%v after %v, want ErrUnresponsive after %v", err, time.Since(began), want)
		}
	})
}

func TestPeerThatNeverReadsIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer theirs.Close()
		opt, _ := Options{Type: SUB, WriteTimeout: 4 * time.Second}.withDefaults()
		c := newConn(ours, "pipe", opt)
		go func() {
			theirs.Write(hello("PUB"))
			theirs.Write(appendCommand(nil, "PING", 0, 0))
		}()
		go io.CopyN(io.Discard, theirs, int64(len(hello(SUB))+3))
		began := time.Now()
		err := c.Recv(new(Message))
		if !errors.Is(err, ErrUnresponsive) || errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) != 4*time.Second {
			t.Errorf("%v after %v, want ErrUnresponsive after 4s", err, time.Since(began))
		}
	})
}

func TestOldPeerIsNotPinged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		opt, _ := Options{Type: SUB, Heartbeat: time.Second}.withDefaults()
		c := newConn(ours, "pipe", opt)
		go theirs.Write(join(greet(3, 0, "NULL"), appendReady(nil, "PUB")))
		go io.CopyN(io.Discard, theirs, int64(len(hello(SUB))+3))
		time.AfterFunc(time.Minute, func() { c.Close() })
		if err := c.Recv(new(Message)); !errors.Is(err, net.ErrClosed) {
			t.Errorf("got %v, want a minute of peace", err)
		}
	})
}

func TestSend(t *testing.T) {
	c, tp := playTape(t, bytes.NewReader(hello("ROUTER")), Options{Type: DEALER})
	if err := c.Handshake(context.Background()); err != nil {
		t.Fatal(err)
	}
	tp.said.Reset()
	long := bytes.Repeat([]byte{'x'}, 300)
	if err := c.Send(nil, []byte("12345678")); err != nil {
		t.Fatal(err)
	}
	if err := c.Send(long); err != nil {
		t.Fatal(err)
	}
	want := join([]byte{1, 0, 0, 8}, []byte("12345678"), []byte{2, 0, 0, 0, 0, 0, 0, 1, 44}, long)
	if !bytes.Equal(tp.said.Bytes(), want) {
		t.Errorf("said\n%q, want\n%q", tp.said.Bytes(), want)
	}
	if err := c.Send(); err == nil {
		t.Error("a message without frames was sent")
	}
	c.Close()
	if err := c.Send(long); !errors.Is(err, net.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	s, _ := playTape(t, bytes.NewReader(hello("PUB")), Options{Type: SUB})
	if err := s.Send(long); err == nil {
		t.Error("a SUB sent")
	}
}
