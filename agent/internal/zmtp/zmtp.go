// Package zmtp reads ZeroMQ publishers and asks ZeroMQ routers: the SUB and
// DEALER ends of ZMTP 3.1 with the NULL mechanism, over tcp and ipc, dialing
// or listening.
//
// One [Conn] is one connection. Whatever ends it is returned by [Conn.Recv],
// because to the reader of an engine's events a lost connection is news: the
// engine may have restarted. So nothing here reconnects; the caller dials
// again. Messages are lists of opaque frames; what they mean is for the caller.
package zmtp

import (
	"errors"
	"fmt"
	"time"
)

// SocketType is the ZeroMQ type of an end, as READY names it.
type SocketType string

// The types that a [Conn] can be.
const (
	SUB    SocketType = "SUB"
	DEALER SocketType = "DEALER"
)

// accepts says whether a socket of type t may talk to one of type peer.
func (t SocketType) accepts(peer SocketType) bool {
	switch t {
	case SUB:
		return peer == "PUB" || peer == "XPUB"
	case DEALER:
		return peer == "ROUTER" || peer == "DEALER" || peer == "REP"
	}
	return false
}

const (
	defaultMaxMessage       = 64 << 20
	defaultMaxFrames        = 64
	defaultMaxPeers         = 64
	defaultHandshakeTimeout = 5 * time.Second
	defaultWriteTimeout     = 10 * time.Second
)

// Options say what a connection is and what it tolerates. Only Type is
// required.
type Options struct {
	// Type is SUB or DEALER.
	Type SocketType
	// Topics are the prefixes that a SUB asks for; nil asks for everything.
	Topics [][]byte
	// MaxMessage bounds the payload bytes of one message, all frames together;
	// 0 means 64 MiB. Memory grows with what arrives, not with what is claimed.
	MaxMessage int
	// MaxFrames bounds the frames of one message; 0 means 64.
	MaxFrames int
	// MaxPeers bounds the open connections of one Listener; 0 means 64.
	MaxPeers int
	// HandshakeTimeout bounds connecting, and again the time from there to the
	// peer's READY; 0 means 5 s.
	HandshakeTimeout time.Duration
	// WriteTimeout bounds each write to a peer that does not read; 0 means 10 s.
	WriteTimeout time.Duration
	// Heartbeat is the silence after which Recv sends a PING; 0 sends none.
	// ZMTP 3.0 has no PING, so such peers are never asked.
	Heartbeat time.Duration
	// HeartbeatTimeout is the further silence after which the peer counts as
	// dead; 0 means as long as Heartbeat.
	HeartbeatTimeout time.Duration
}

// withDefaults fills the zero values and reports every problem.
func (o Options) withDefaults() (Options, error) {
	var errs []error
	if o.Type != SUB && o.Type != DEALER {
		errs = append(errs, fmt.Errorf("socket type %q is neither SUB nor DEALER", o.Type))
	}
	if o.Type == DEALER && o.Topics != nil {
		errs = append(errs, errors.New("a DEALER has no topics"))
	}
	size := func(name string, v *int, def int) {
		switch {
		case *v < 0:
			errs = append(errs, fmt.Errorf("%s is negative: %d", name, *v))
		case *v == 0:
			*v = def
		}
	}
	size("MaxMessage", &o.MaxMessage, defaultMaxMessage)
	size("MaxFrames", &o.MaxFrames, defaultMaxFrames)
	size("MaxPeers", &o.MaxPeers, defaultMaxPeers)
	wait := func(name string, v *time.Duration, def time.Duration) {
		switch {
		case *v < 0:
			errs = append(errs, fmt.Errorf("%s is negative: %v", name, *v))
		case *v == 0:
			*v = def
		}
	}
	wait("HandshakeTimeout", &o.HandshakeTimeout, defaultHandshakeTimeout)
	wait("WriteTimeout", &o.WriteTimeout, defaultWriteTimeout)
	wait("Heartbeat", &o.Heartbeat, 0)
	wait("HeartbeatTimeout", &o.HeartbeatTimeout, o.Heartbeat)
	if o.Type == SUB && o.Topics == nil {
		o.Topics = [][]byte{nil}
	}
	return o, errors.Join(errs...)
}
