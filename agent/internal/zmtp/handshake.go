package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"
)

const (
	greetingSize  = 64
	mechanismSize = 20
	mechanism     = "NULL"
)

// peer is what the handshake told about the other end.
type peer struct {
	socket       SocketType
	major, minor int // ZMTP version that it announced
}

// speaks31 says whether the peer knows PING.
func (p peer) speaks31() bool { return p.major > 3 || p.minor >= 1 }

// greeting is our 64 bytes: signature, version 3.1, NULL, not a
// server (which NULL does not care about), filler.
func greeting() []byte {
	b := make([]byte, greetingSize)
	copy(b, "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01"+mechanism)
	return b
}

// appendReady appends the READY command of a socket of type t.
func appendReady(dst []byte, t SocketType) []byte {
	return appendCommand(dst, "READY", property("Socket-Type", string(t))...)
}

// property is one property of READY.
func property(name, value string) []byte {
	b := append([]byte{byte(len(name))}, name...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	return append(b, value...)
}

// parseReady reads READY's properties into p. Unknown ones are for others.
func parseReady(body []byte, p *peer) error {
	for len(body) > 0 {
		n := int(body[0])
		if n == 0 || len(body) < 1+n+4 {
			return protocolErrorf("READY holds a cut property name")
		}
		name := string(body[1 : 1+n])
		size := binary.BigEndian.Uint32(body[1+n:])
		body = body[1+n+4:]
		if uint64(size) > uint64(len(body)) {
			return protocolErrorf("READY property %q claims %d bytes, %d are left", name, size, len(body))
		}
		value := string(body[:size])
		body = body[size:]
		if strings.EqualFold(name, "Socket-Type") {
			p.socket = SocketType(value)
		}
	}
	if p.socket == "" {
		return protocolErrorf("READY names no Socket-Type")
	}
	return nil
}

// Handshake makes an accepted connection usable: greetings, READY, and a SUB's
// topics. It runs once; later calls return its result. Dial has done it, and
// Recv and Send do it if need be; calling it keeps its errors apart from
// theirs. A peer that fails it is closed.
func (c *Conn) Handshake(ctx context.Context) error {
	c.handshakeMu.Lock()
	defer c.handshakeMu.Unlock()
	switch c.state.Load() {
	case ready:
		return nil
	case dead:
		return c.cause()
	}
	fail := func(err error) error { return c.fail(fmt.Errorf("handshake with %s: %w", c.name, err)) }
	if err := c.conn.SetDeadline(time.Now().Add(c.opt.HandshakeTimeout)); err != nil {
		return fail(err)
	}
	stop := context.AfterFunc(ctx, func() { _ = fail(context.Cause(ctx)) })
	err := c.shakeHands()
	if !stop() {
		return fail(context.Cause(ctx))
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// Not wrapped: after this there is nothing to resume.
		err = fmt.Errorf("%s: %w", err.Error(), ErrUnresponsive)
	}
	if err == nil {
		err = c.conn.SetDeadline(time.Time{})
	}
	if err != nil {
		return fail(err)
	}
	if !c.state.CompareAndSwap(fresh, ready) {
		return c.cause()
	}
	return nil
}

func (c *Conn) shakeHands() error {
	if _, err := c.conn.Write(greeting()); err != nil {
		return fmt.Errorf("write greeting: %w", err)
	}
	if err := c.readGreeting(); err != nil {
		return err
	}
	if _, err := c.conn.Write(appendReady(nil, c.opt.Type)); err != nil {
		return fmt.Errorf("write READY: %w", err)
	}
	if err := c.readReady(); err != nil {
		return err
	}
	if !c.opt.Type.accepts(c.peer.socket) {
		// The specification asks for a word before hanging up. Should it not
		// get through, the peer still sees the closed connection.
		_, _ = c.conn.Write(appendCommand(nil, "ERROR", append([]byte{19}, "Invalid socket type"...)...))
		return protocolErrorf("peer is a %q socket, which a %s cannot talk to", c.peer.socket, c.opt.Type)
	}
	// Subscriptions go as messages: 3.0 peers know no other way, and 3.1 peers
	// take both.
	var out []byte
	for _, topic := range c.opt.Topics {
		out = appendMessage(out, append([]byte{1}, topic...))
	}
	if len(out) > 0 {
		if _, err := c.conn.Write(out); err != nil {
			return fmt.Errorf("write subscriptions: %w", err)
		}
	}
	return nil
}

// readGreeting judges each part as soon as it is there, because an old or
// foreign peer may never send all 64 bytes.
func (c *Conn) readGreeting() error {
	peek := func(n int) ([]byte, error) {
		b, err := c.in.Peek(n)
		if err != nil {
			hint := ""
			if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
				hint = " (libzmq hangs up here if it wants another mechanism than " + mechanism + ")"
			}
			return nil, fmt.Errorf("read greeting, %d of %d bytes came%s: %w", len(b), greetingSize, hint, torn(len(b) > 0, err))
		}
		return b, nil
	}
	b, err := peek(1)
	if err != nil {
		return err
	}
	if b[0] != 0xff {
		b, _ = c.in.Peek(min(c.in.Buffered(), 16))
		return protocolErrorf("peer speaks ZMTP 1.0 or is not ZeroMQ: it began with %q", b)
	}
	if b, err = peek(10); err != nil {
		return err
	}
	if b[9] != 0x7f {
		return protocolErrorf("peer speaks ZMTP 1.0 or is not ZeroMQ: it began with %q", b)
	}
	if b, err = peek(11); err != nil {
		return err
	}
	if b[10] < 3 {
		return protocolErrorf("peer speaks ZMTP 2.x (revision %d), 3.0 or later is needed", b[10])
	}
	if b, err = peek(12 + mechanismSize); err != nil {
		return err
	}
	c.peer.major, c.peer.minor = int(b[10]), int(b[11])
	if name := string(bytes.TrimRight(b[12:12+mechanismSize], "\x00")); name != mechanism {
		return protocolErrorf("peer wants the mechanism %q, only %s is spoken here", name, mechanism)
	}
	if _, err = peek(greetingSize); err != nil {
		return err
	}
	_, _ = c.in.Discard(greetingSize) // cannot fail: these bytes were peeked
	return nil
}

func (c *Conn) readReady() error {
	flags, size, err := c.header(false)
	if err != nil {
		return fmt.Errorf("read READY: %w", err)
	}
	if flags&flagCommand == 0 {
		return protocolErrorf("peer sent a message before READY")
	}
	if size > maxCommand {
		return &LimitError{What: "command bytes", Got: size, Limit: maxCommand}
	}
	b, err := c.in.Peek(int(size))
	if err != nil {
		return fmt.Errorf("read READY: %w", torn(true, err))
	}
	defer func() { _, _ = c.in.Discard(int(size)) }() // cannot fail: these bytes were peeked
	name, body, err := splitCommand(b)
	if err != nil {
		return err
	}
	switch string(name) {
	case "READY":
		return parseReady(body, &c.peer)
	case "ERROR":
		return peerError(body)
	}
	return protocolErrorf("peer sent the command %q before READY", name)
}
