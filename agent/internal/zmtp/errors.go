package zmtp

import (
	"errors"
	"fmt"
)

// ErrUnresponsive marks a connection given up because the peer did not do its
// part in time: no handshake, no sign of life, or nothing read of what we sent.
var ErrUnresponsive = errors.New("peer is unresponsive")

// ProtocolError says how the peer's bytes break ZMTP, or which part of it they
// use that is not spoken here.
type ProtocolError struct{ Problem string }

func (e *ProtocolError) Error() string { return "zmtp: " + e.Problem }

func protocolErrorf(format string, args ...any) error {
	return &ProtocolError{Problem: fmt.Sprintf(format, args...)}
}

// LimitError says which limit the peer's message would exceed.
type LimitError struct {
	What       string // "message bytes", "message frames" or "command bytes"
	Got, Limit uint64
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("zmtp: %d %s exceed the limit of %d", e.Got, e.What, e.Limit)
}

// PeerError is an ERROR command: the peer's own reason for refusing us.
type PeerError struct{ Reason string }

func (e *PeerError) Error() string { return fmt.Sprintf("zmtp: peer refuses: %q", e.Reason) }
