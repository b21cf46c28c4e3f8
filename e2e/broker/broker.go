// Package broker is a NATS server for tests and tools, which keeps its address
// while it is stopped.
package broker

import (
	"errors"
	"net"
	"strconv"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/loopback"
)

// port is the server's where nobody chose another; its host is its own.
const port = 24222

// Broker is a NATS server, the one that runs or ran last.
type Broker struct {
	*server.Server
	// Options that it is started with.
	Options server.Options

	t       testing.TB // nil: no test
	release func()     // the host
}

// New starts a server until the test ends, which everybody may use unless options
// say otherwise. Options without a host get one of their own; nil: none.
func New(t testing.TB, options *server.Options) *Broker {
	t.Helper()
	b := Absent(t, options)
	b.Start()
	return b
}

// Absent is a server whose address is known and which does not run yet.
func Absent(t testing.TB, options *server.Options) *Broker {
	t.Helper()
	b, err := configure(options)
	if err != nil {
		t.Fatal(err)
	}
	b.t = t
	t.Cleanup(b.Close)
	return b
}

// Open starts a server that everybody may use, until it is closed.
func Open() (*Broker, error) {
	b, err := configure(nil)
	if err != nil {
		return nil, err
	}
	if err := b.Run(); err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

func configure(options *server.Options) (b *Broker, err error) {
	b = &Broker{release: func() {}}
	if options != nil {
		b.Options = *options
	}
	b.Options.NoSigs, b.Options.NoLog = true, true
	if b.Options.Host == "" {
		b.Options.Port = port
		b.Options.Host, b.release, err = loopback.Claim()
	}
	return b, err
}

// Run starts the server, again if it has been stopped.
func (b *Broker) Run() error {
	options := b.Options
	s, err := server.NewServer(&options)
	if err != nil {
		return err
	}
	b.Server = s
	s.Start()
	if !s.ReadyForConnections(await.Patience) {
		return errors.New("the NATS server did not start")
	}
	b.Options.Port = s.Addr().(*net.TCPAddr).Port
	return nil
}

// Start is Run, in a test.
func (b *Broker) Start() {
	b.t.Helper()
	if err := b.Run(); err != nil {
		b.t.Fatal(err)
	}
}

// Close stops the server and gives its address up.
func (b *Broker) Close() {
	b.Stop()
	b.release()
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
