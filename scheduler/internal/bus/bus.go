// Package bus is a scheduler's connection to NATS, with the server behind it when
// that one is embedded, and who may use that server for what.
package bus

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"

	"github.com/nats-io/nats.go"

	"github.com/kvscout/kvscout/protocol"
	natsbus "github.com/kvscout/kvscout/protocol/bus"
	"github.com/kvscout/kvscout/scheduler/internal/certs"
)

// Config of a Bus.
type Config struct {
	// Pool whose subjects the users of the embedded server have rights to.
	Pool string
	// URL of a server of others, with Credentials or Seed to say who we are;
	// empty: an embedded one.
	URL, Credentials, Seed string
	// Address of the embedded server, and the file of its Users; empty: anybody.
	Address, Users string
	// Tokens tells whose token an agent shows to the embedded server; nil: nobody
	// comes by one.
	Tokens Review
	// TLS of the embedded server, or of us at another one.
	TLS certs.Files
	Log *slog.Logger
}

// Bus is the connection to NATS, with the server behind it when that one is
// embedded.
type Bus struct {
	Conn    *nats.Conn
	Closed  chan struct{} // closed when the connection is closed for good
	Refused *natsbus.Refusals
	server  *embedded // nil when the server is somebody else's
}

// members is the right to hear them, by its number in Refused. Without that to the
// picks of other schedulers, which comes first, they are heard.
const members = 1

// Deaf tells that NATS does not let this scheduler hear its members.
func (b *Bus) Deaf() bool { return b.Refused.Lacks(members, b.Conn.LastError()) }

// Open starts the embedded server unless cfg names another one, and
// connects. A server of others need not be there yet.
func Open(cfg Config) (*Bus, error) {
	log := cfg.Log
	subjects, err := protocol.NewSubjects(cfg.Pool)
	if err != nil {
		return nil, err
	}
	const lacking = "NATS denies permissions that a scheduler needs"
	b := &Bus{Refused: natsbus.NewRefusals(log,
		natsbus.Right{In: []string{"subscription", strconv.Quote(subjects.Picks())}, Lacking: lacking},
		natsbus.Right{In: []string{"subscription"}, Lacking: lacking, Retried: true},
		natsbus.Right{Lacking: lacking})}
	options, closed := b.Refused.Options("kvscout-scheduler")
	b.Closed = closed
	options = append(options, nats.CustomInboxPrefix(subjects.Inbox()))
	if cfg.URL != "" {
		b.Conn, err = natsbus.Login{
			Credentials: cfg.Credentials, Seed: cfg.Seed, CA: cfg.TLS.CA, Cert: cfg.TLS.Cert, Key: cfg.TLS.Key,
		}.Connect(cfg.URL, options...)
		return b, err
	}
	if b.server, err = startEmbedded(&cfg, subjects, log); err != nil {
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	client, err := b.server.client()
	if err == nil {
		b.Conn, err = nats.Connect("", append(options, client...)...)
	}
	if err != nil {
		b.server.stop()
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	return b, nil
}

// Follow keeps the embedded server's users up to date, or says why there is no
// connection to another one, which NATS's client does not tell in every case.
func (b *Bus) Follow(ctx context.Context) {
	if b.server != nil {
		b.server.follow(ctx)
		return
	}
	b.Refused.Watch(ctx, b.Conn)
}

// CutPods cuts the connections that stand on tokens of pods which are gone.
func (b *Bus) CutPods(gone func(namespace, uid string) bool) {
	if b.server != nil && b.server.gate != nil {
		b.server.gate.cutPods(b.server.server, gone)
	}
}

// TokenStats as of now; zero where nobody comes by a token.
func (b *Bus) TokenStats() TokenStats {
	if b.server == nil || b.server.gate == nil {
		return TokenStats{}
	}
	return b.server.gate.statsNow()
}

// Close ends the connection and then the server, and waits for both.
func (b *Bus) Close() {
	b.Conn.Close()
	<-b.Closed
	if b.server != nil {
		b.server.stop()
	}
}

// Address of the embedded server; empty when there is none.
func (b *Bus) Address() string {
	if b.server == nil {
		return ""
	}
	bound := b.server.server.Addr().String()
	host, _, err := net.SplitHostPort(b.server.cfg.Address)
	_, port, e := net.SplitHostPort(bound)
	if err != nil || e != nil {
		return bound
	}
	return net.JoinHostPort(host, port)
}

// Origins tells from where members connect, see embedded.origins; nil: the
// server is another, which does not tell.
func (b *Bus) Origins() func() map[string][]netip.Addr {
	if b.server == nil {
		return nil
	}
	return b.server.origins
}
