package zmtp

import (
	"encoding/binary"
	"fmt"
	"time"
)

const (
	// maxCommand bounds a command's body. It must fit into the read buffer.
	maxCommand = 8 << 10
	// maxPingContext is the specification's bound on what a PONG echoes.
	maxPingContext = 16
)

// appendCommand appends a command frame.
func appendCommand(dst []byte, name string, body ...byte) []byte {
	dst = appendHeader(dst, flagCommand, 1+len(name)+len(body))
	dst = append(dst, byte(len(name)))
	dst = append(dst, name...)
	return append(dst, body...)
}

// splitCommand parts a command frame's payload into name and body.
func splitCommand(b []byte) (name, body []byte, err error) {
	if len(b) == 0 {
		return nil, nil, protocolErrorf("command is empty")
	}
	n := int(b[0])
	if n == 0 || n > len(b)-1 {
		return nil, nil, protocolErrorf("command of %d bytes has a name of %d", len(b), n)
	}
	return b[1 : 1+n], b[1+n:], nil
}

// peerError reads the body of an ERROR command.
func peerError(body []byte) error {
	if len(body) == 0 || int(body[0]) != len(body)-1 {
		return protocolErrorf("ERROR command's reason is cut: %d bytes", len(body))
	}
	return &PeerError{Reason: string(body[1:])}
}

// obey acts on a command that came after the handshake. b is the payload.
func (c *Conn) obey(b []byte) error {
	name, body, err := splitCommand(b)
	if err != nil {
		return err
	}
	switch string(name) {
	case "PING":
		if len(body) < 2 || len(body) > 2+maxPingContext {
			return protocolErrorf("PING has a body of %d bytes, not 2 to %d", len(body), 2+maxPingContext)
		}
		c.ttl = time.Duration(binary.BigEndian.Uint16(body)) * 100 * time.Millisecond
		if err := c.writeCommand("PONG", body[2:]...); err != nil {
			return fmt.Errorf("answer PING: %w", err)
		}
	case "ERROR":
		return peerError(body)
	}
	return nil
}
