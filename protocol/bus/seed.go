package bus

import (
	"fmt"
	"net"
	"sync/atomic"

	"github.com/nats-io/nats.go"
)

// seed is the file of an nkey. NATS's client signs with what the file holds,
// but says whose signature it is once and for all; so that is set anew while
// it dials.
type seed struct {
	file   string
	dialer net.Dialer
	conn   atomic.Pointer[nats.Conn] // nil while it is opened
}

// identify says whose key the file holds.
func (s *seed) identify(o *nats.Options) error {
	option, err := nats.NkeyOptionFromSeed(s.file)
	if err != nil {
		return err
	}
	return option(o)
}

// Dial is called by NATS's client, which holds the lock that guards Opts and
// logs in next.
func (s *seed) Dial(network, address string) (net.Conn, error) {
	if conn := s.conn.Load(); conn != nil {
		if err := s.identify(&conn.Opts); err != nil {
			return nil, fmt.Errorf("-nats-seed: %w", err)
		}
	}
	return s.dialer.Dial(network, address)
}
