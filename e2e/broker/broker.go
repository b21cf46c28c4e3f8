// Package broker is a NATS server for tests, which keeps its address while it is
// stopped.
package broker

import (
	"net"
	"strconv"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/loopback"
)

// port is the server's where nobody chose another; its host is its own.
const port = 24222

// Broker is a NATS server, the one that runs or ran last. It ends with the test.
type Broker struct {
	*server.Server
	// Options that it is started with.
	Options server.Options

	t testing.TB
}

// New starts a server, which everybody may use unless options say otherwise.
// Options without a host get one of their own; nil: none.
func New(t testing.TB, options *server.Options) *Broker {
	t.Helper()
	b := Absent(t, options)
	b.Start()
	return b
}

// Absent is a server whose address is known and which does not run yet.
func Absent(t testing.TB, options *server.Options) *Broker {
	t.Helper()
	b := &Broker{t: t}
	if options != nil {
		b.Options = *options
	}
	b.Options.NoSigs, b.Options.NoLog = true, true
	if b.Options.Host == "" {
		b.Options.Host, b.Options.Port = loopback.Host(t), port
	}
	t.Cleanup(b.Stop)
	return b
}

// Start runs it, again if it has been stopped.
func (b *Broker) Start() {
	b.t.Helper()
	options := b.Options
	s, err := server.NewServer(&options)
	if err != nil {
		b.t.Fatal(err)
	}
	b.Server = s
	s.Start()
	if !s.ReadyForConnections(await.Patience) {
		b.t.Fatal("the NATS server did not start")
	}
	b.Options.Port = s.Addr().(*net.TCPAddr).Port
}

// Stop ends it, if it runs.
func (b *Broker) Stop() {
	if b.Server != nil {
		b.Shutdown()
		b.WaitForShutdown()
	}
}

// Address is host:port of it, also before it runs.
func (b *Broker) Address() string {
	return net.JoinHostPort(b.Options.Host, strconv.Itoa(b.Options.Port))
}

// URL is where clients find it.
func (b *Broker) URL() string { return "nats://" + b.Address() }
