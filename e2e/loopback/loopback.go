// Package loopback gives tests addresses of this machine that are theirs alone,
// so that a server may stop and come back: between the two nobody else gets its
// port, neither another test nor a connection that begins on this machine.
package loopback

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

const (
	// claim is the port that whoever has an address holds. It is below those
	// that systems give away.
	claim = "29999"
	// tries bounds the search: of 16 million addresses few are in use.
	tries = 100
)

// Claim takes an address of 127.0.0.0/8 that nobody else has claimed, in
// whatever process, until it is released. Connections to it begin at 127.0.0.1,
// so all its ports are free until their owner listens there.
func Claim() (host string, release func(), err error) {
	for range tries {
		n := rand.Uint32N(1<<24-1<<16) + 1<<16 // not 127.0, which others use by name
		host = fmt.Sprintf("127.%d.%d.%d", n>>16, n>>8&0xff, n&0xff)
		var l net.Listener
		if l, err = net.Listen("tcp", net.JoinHostPort(host, claim)); err == nil {
			return host, func() { l.Close() }, nil
		}
	}
	return "", nil, fmt.Errorf("no address of 127.0.0.0/8 can be had for a test, as on Linux: %w", err)
}

// Host claims an address until the test ends.
func Host(t testing.TB) string {
	t.Helper()
	host, release, err := Claim()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return host
}
