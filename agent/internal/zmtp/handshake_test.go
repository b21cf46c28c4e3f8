package zmtp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// greet is a greeting of the given version and mechanism.
func greet(major, minor byte, mechanism string) []byte {
	b := greeting()
	b[10], b[11] = major, minor
	copy(b[12:32], make([]byte, 20))
	copy(b[12:32], mechanism)
	return b
}

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func TestHandshake(t *testing.T) {
	ready := func(props ...[]byte) []byte {
		return appendCommand(nil, "READY", join(props...)...)
	}
	pub := property("Socket-Type", "PUB")
	for name, c := range map[string]struct {
		own  SocketType
		peer []byte
		want peer
	}{
		"PUB of 3.1":   {SUB, hello("PUB"), peer{socket: "PUB", major: 3, minor: 1}},
		"XPUB of 3.0":  {SUB, join(greet(3, 0, "NULL"), appendReady(nil, "XPUB")), peer{socket: "XPUB", major: 3}},
		"PUB of 4.2":   {SUB, join(greet(4, 2, "NULL"), ready(pub)), peer{socket: "PUB", major: 4, minor: 2}},
		"ROUTER":       {DEALER, hello("ROUTER"), peer{socket: "ROUTER", major: 3, minor: 1}},
		"REP":          {DEALER, hello("REP"), peer{socket: "REP", major: 3, minor: 1}},
		"DEALER":       {DEALER, hello("DEALER"), peer{socket: "DEALER", major: 3, minor: 1}},
		"with more":    {SUB, join(greet(3, 1, "NULL"), ready(property("X-Y", ""), pub, property("identity", "me"))), peer{socket: "PUB", major: 3, minor: 1}},
		"long READY":   {SUB, join(greet(3, 1, "NULL"), ready(property("X", strings.Repeat("x", 300)), pub)), peer{socket: "PUB", major: 3, minor: 1}},
		"lower case":   {SUB, join(greet(3, 1, "NULL"), ready(property("socket-type", "PUB"))), peer{socket: "PUB", major: 3, minor: 1}},
		"server's bit": {SUB, join(greet(3, 1, "NULL")[:32], []byte{1}, make([]byte, 31), ready(pub)), peer{socket: "PUB", major: 3, minor: 1}},
	} {
		conn, _ := playTape(t, bytes.NewReader(c.peer), Options{Type: c.own})
		if err := conn.Handshake(context.Background()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := conn.peer; got != c.want {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
		conn.Close()
	}
}

func TestBadHandshakeIsExplained(t *testing.T) {
	type kind int
	const (
		protocol kind = iota
		limit
		refused
		cut
		gone
	)
	null := greet(3, 1, "NULL")
	for name, c := range map[string]struct {
		peer []byte
		kind kind
		want string
	}{
		"silence":                {nil, gone, "0 of 64 bytes"},
		"half a greeting":        {null[:40], cut, "40 of 64 bytes"},
		"half a signature":       {null[:5], cut, "5 of 64 bytes"},
		"HTTP":                   {[]byte("HTTP/1.1 400 Bad Request\r\n"), protocol, `not ZeroMQ: it began with "HTTP/1.1 400 Bad"`},
		"ZMTP 1.0":               {[]byte{1, 0}, protocol, "ZMTP 1.0"},
		"wrong signature":        {append([]byte{0xff}, make([]byte, 63)...), protocol, "ZMTP 1.0"},
		"ZMTP 2.0":               {[]byte("\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x01"), protocol, "ZMTP 2.x"},
		"CURVE":                  {greet(3, 1, "CURVE"), protocol, `mechanism "CURVE"`},
		"PLAIN of 3.0":           {greet(3, 0, "PLAIN"), protocol, `mechanism "PLAIN"`},
		"NULLs":                  {greet(3, 1, "NULLIFY"), protocol, `mechanism "NULLIFY"`},
		"no READY":               {null, gone, "read READY: EOF"},
		"half a READY":           {hello("PUB")[:80], cut, "read READY: unexpected EOF"},
		"message first":          {join(null, appendMessage(nil, []byte("hi"))), protocol, "a message before READY"},
		"other command first":    {join(null, appendCommand(nil, "PING", 0, 0)), protocol, `command "PING" before READY`},
		"ERROR":                  {join(null, appendCommand(nil, "ERROR", []byte("\x02no")...)), refused, `peer refuses: "no"`},
		"cut ERROR":              {join(null, appendCommand(nil, "ERROR", []byte("\x09no")...)), protocol, "reason is cut"},
		"READY without type":     {join(null, appendCommand(nil, "READY")), protocol, "no Socket-Type"},
		"cut property name":      {join(null, appendCommand(nil, "READY", 11, 'S')), protocol, "cut property name"},
		"nameless property":      {join(null, appendCommand(nil, "READY", 0, 0, 0, 0, 0, 0)), protocol, "cut property name"},
		"huge property":          {join(null, appendCommand(nil, "READY", 1, 'S', 0xff, 0xff, 0xff, 0xff)), protocol, "claims 4294967295 bytes"},
		"huge READY":             {join(null, []byte{6, 0, 0, 1, 0, 0, 0, 0, 0}), limit, "1099511627776 command bytes exceed"},
		"empty command":          {join(null, []byte{4, 0}), protocol, "command is empty"},
		"name beyond command":    {join(null, []byte{4, 2, 9, 'R'}), protocol, "has a name of 9"},
		"reserved flags":         {join(null, []byte{0x84, 0}), protocol, "flags 0x84"},
		"command with more":      {join(null, []byte{5, 0}), protocol, "flags 0x05"},
		"size with reserved bit": {join(null, []byte{6, 0x80, 0, 0, 0, 0, 0, 0, 0}), protocol, "frame size 0x8000000000000000"},
		"other SUB":              {hello("SUB"), protocol, `peer is a "SUB" socket, which a SUB cannot talk to`},
		"ROUTER for a SUB":       {hello("ROUTER"), protocol, `peer is a "ROUTER" socket`},
	} {
		conn, _ := playTape(t, bytes.NewReader(c.peer), Options{Type: SUB})
		err := conn.Handshake(context.Background())
		var got kind = -1
		var protocolErr *ProtocolError
		var limitErr *LimitError
		var peerErr *PeerError
		switch {
		case errors.As(err, &protocolErr):
			got = protocol
		case errors.As(err, &limitErr):
			got = limit
		case errors.As(err, &peerErr):
			got = refused
		case errors.Is(err, io.ErrUnexpectedEOF):
			got = cut
		case errors.Is(err, io.EOF):
			got = gone
		}
		if got != c.kind || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v (kind %d), want kind %d with %q", name, err, got, c.kind, c.want)
		}
		if again := conn.Recv(new(Message)); !errors.Is(again, err) {
			t.Errorf("%s: Recv then gives %v, want the handshake's error", name, again)
		}
	}
}

func TestWrongTypeIsReported(t *testing.T) {
	conn, tp := playTape(t, bytes.NewReader(hello("PUB")), Options{Type: DEALER})
	if err := conn.Handshake(context.Background()); err == nil {
		t.Fatal("a DEALER took a PUB")
	}
	if want := []byte("\x05ERROR\x13Invalid socket type"); !bytes.HasSuffix(tp.said.Bytes(), want) {
		t.Errorf("said %q, want it to end in %q", tp.said.Bytes(), want)
	}
}

func TestStallingPeerIsGivenUp(t *testing.T) {
	for name, said := range map[string][]byte{
		"no greeting": nil,
		"no READY":    greet(3, 1, "NULL"),
	} {
		synctest.Test(t, func(t *testing.T) {
			ours, theirs := net.Pipe()
			go io.Copy(io.Discard, theirs)
			go theirs.Write(said)
			opt, _ := Options{Type: SUB, HandshakeTimeout: 3 * time.Second}.withDefaults()
			c := newConn(ours, "pipe", opt)
			began := time.Now()
			err := c.Recv(new(Message))
			if !errors.Is(err, ErrUnresponsive) || time.Since(began) != 3*time.Second {
				t.Errorf("%s: %v after %v, want ErrUnresponsive after 3s", name, err, time.Since(began))
			}
			theirs.Close()
		})
	}
}

func TestContextEndsHandshake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		go io.Copy(io.Discard, theirs)
		opt, _ := Options{Type: SUB}.withDefaults()
		c := newConn(ours, "pipe", opt)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := c.Handshake(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the context's error", err)
		}
		theirs.Close()
	})
}

func TestBadOptionsAreExplained(t *testing.T) {
	for name, c := range map[string]struct {
		opt  Options
		want string
	}{
		"no type":   {Options{}, "neither SUB nor DEALER"},
		"topics":    {Options{Type: DEALER, Topics: frames("kv")}, "no topics"},
		"size":      {Options{Type: SUB, MaxMessage: -1}, "MaxMessage is negative"},
		"heartbeat": {Options{Type: SUB, Heartbeat: -1}, "Heartbeat is negative"},
	} {
		if _, err := Dial(context.Background(), "tcp://127.0.0.1:1", c.opt); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: Dial gives %v, want %q", name, err, c.want)
		}
		if _, err := Listen(context.Background(), "tcp://127.0.0.1:0", c.opt); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: Listen gives %v, want %q", name, err, c.want)
		}
	}
}
