package wire

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// echo is a server that sends back what it gets.
func echo(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				c.Close()
			}()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return l.Addr().String()
}

func proxy(t *testing.T, up, down func() Split) *Proxy {
	t.Helper()
	p, err := New(echo(t), up, down)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

func dial(t *testing.T, p *Proxy) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func send(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
}

// expect reads the text within a time; without it, nothing may come.
func expect(t *testing.T, c net.Conn, text string, within time.Duration) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(within))
	b := make([]byte, max(len(text), 1))
	n, err := io.ReadFull(c, b)
	if string(b[:n]) != text || (err != nil) != (text == "") {
		t.Fatalf("%q %v instead of %q", b[:n], err, text)
	}
}

const (
	enough = 10 * time.Second
	moment = 50 * time.Millisecond
)

func TestStallHoldsUpWithoutLoss(t *testing.T) {
	p := proxy(t, nil, nil)
	c := dial(t, p)
	send(t, c, "one")
	expect(t, c, "one", enough)
	p.Stall(true)
	send(t, c, "two")
	expect(t, c, "", moment)
	p.Stall(false)
	expect(t, c, "two", enough)
}

func TestDelayKeepsTheOrder(t *testing.T) {
	p := proxy(t, nil, nil)
	c := dial(t, p)
	p.Delay(2 * moment)
	start := time.Now()
	send(t, c, "one")
	expect(t, c, "one", enough)
	if took := time.Since(start); took < 2*moment {
		t.Errorf("after %v", took)
	}
	send(t, c, "two")
	p.Delay(0)
	send(t, c, "three")
	expect(t, c, "twothree", enough)
}

func TestRefuseAndCut(t *testing.T) {
	p := proxy(t, nil, nil)
	c := dial(t, p)
	send(t, c, "one")
	expect(t, c, "one", enough)
	p.Refuse(true)
	if n, err := c.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes", n)
	}
	c = dial(t, p)
	if n, err := c.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes", n)
	}
	p.Refuse(false)
	c = dial(t, p)
	send(t, c, "two")
	expect(t, c, "two", enough)
	p.Cut()
	if n, err := c.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes", n)
	}
}

func TestTamperWithNATS(t *testing.T) {
	p := proxy(t, NATS, nil)
	c := dial(t, p)
	p.Tamper(func(m []byte) [][]byte {
		switch payload := Payload(m); string(payload) {
		case "lose":
			return nil
		case "double":
			return [][]byte{m, m}
		default:
			return [][]byte{WithPayload(m, payload[:2])}
		}
	})
	pub := func(payload string) string { return fmt.Sprintf("PUB a.b %d\r\n%s\r\n", len(payload), payload) }
	send(t, c, "CONNECT {}\r\n"+pub("lose")+pub("double")+pub("cut\r\nPUB x 1")+"PING\r\n")
	expect(t, c, "CONNECT {}\r\n"+pub("double")+pub("double")+pub("cu")+"PING\r\n", enough)
	p.Tamper(nil)
	send(t, c, pub("lose"))
	expect(t, c, pub("lose"), enough)
}

func TestZMTPIsSplit(t *testing.T) {
	greeting := strings.Repeat("g", 64)
	command := "\x04\x03xyz"
	short := "\x01\x01t\x00\x02ab"
	long := "\x02\x00\x00\x00\x00\x00\x00\x01\x00" + strings.Repeat("l", 256)
	split := ZMTP()
	in := bufio.NewReader(strings.NewReader(greeting + command + short + long + "\x00\x05tr"))
	for _, want := range []struct {
		text string
		free bool
	}{{greeting, false}, {command, false}, {short, true}, {long, true}} {
		got, free, err := split(in)
		if err != nil || string(got) != want.text || free != want.free {
			t.Errorf("%q %v %v instead of %q", got, free, err, want.text)
		}
	}
	if got, _, err := split(in); err == nil {
		t.Errorf("%q from a torn frame", got)
	}
	for _, bad := range []string{"PUB a\r\n", "PUB a -1\r\n", "PUB a 99999999999\r\n", "PUB a 5\r\nab"} {
		if got, _, err := NATS()(bufio.NewReader(bytes.NewReader([]byte(bad)))); err == nil {
			t.Errorf("%q from %q", got, bad)
		}
	}
}
