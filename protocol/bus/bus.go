// Package bus is how agents and schedulers connect to NATS: who they are there,
// whom they take the server for, that nothing is kept while it is away, and what
// they are refused there.
package bus

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/nats-io/nats.go"
)

// Login names the files that say who we are at a server. They are read again
// for every connection, so that they can be renewed.
type Login struct {
	// Credentials or Seed of an nkey; empty: none.
	Credentials, Seed string
	// Token is a file with a token, as of a service account of Kubernetes; empty: none.
	Token string
	// CA that signed the server's certificate; empty: the system's.
	CA string
	// Cert and Key are our certificate; empty: none.
	Cert, Key string
}

// Connect to a server, now or whenever it is there. An error names what is
// wrong by the flag that both programs have for it.
func (l Login) Connect(url string, options ...nats.Option) (*nats.Conn, error) {
	options = append(options, nats.RetryOnFailedConnect(true))
	add := func(key string, option nats.Option) {
		options = append(options, func(o *nats.Options) error {
			if err := option(o); err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
			return nil
		})
	}
	if l.Credentials != "" {
		add("-nats-credentials", nats.UserCredentials(l.Credentials))
	}
	key := &seed{file: l.Seed, dialer: net.Dialer{Timeout: nats.DefaultTimeout}}
	if l.Seed != "" {
		add("-nats-seed", key.identify)
		add("-nats-seed", nats.SetCustomDialer(key))
	}
	if l.Token != "" {
		t := &token{file: l.Token, dialer: net.Dialer{Timeout: nats.DefaultTimeout}}
		for _, option := range t.options() {
			add("-nats-token-file", option)
		}
	}
	if l.CA != "" {
		add("-nats-tls-ca", nats.RootCAs(l.CA))
	}
	if l.Cert != "" {
		add("-nats-tls-cert and -nats-tls-key", nats.ClientCert(l.Cert, l.Key))
	}
	conn, err := nats.Connect(url, options...)
	if err != nil {
		return nil, fmt.Errorf("connect to NATS: %w", err)
	}
	key.conn.Store(conn)
	return conn, nil
}

// Events of a connection, for its owner.
type Events struct {
	// Connected is told of every connection, NotConnected why there is none, as
	// often as it is tried. That it is logged is seen to by Outage.
	Connected    func()
	NotConnected func(error)
	// Failed is told of what goes wrong while there is one.
	Failed func(*nats.Conn, *nats.Subscription, error)
	Log    *slog.Logger
}

// Options of every connection. It is tried for ever, and nothing is kept while
// it is away: what the other side misses it asks for. closed is closed when the
// connection is for good. The outage is to be told of failures that are found
// otherwise than by the Events.
func Options(name string, e Events) (options []nats.Option, outage *Outage, closed chan struct{}) {
	closed = make(chan struct{})
	outage = &Outage{log: e.Log}
	connected := func(what string) nats.ConnHandler {
		return func(c *nats.Conn) {
			e.Connected()
			_, err := c.TLSConnectionState()
			attempts, lasted := outage.over()
			e.Log.Info(what, "server", c.ConnectedUrlRedacted(), "tls", err == nil, "attempts", attempts, "after", lasted.Round(time.Millisecond))
		}
	}
	return []nats.Option{
		nats.Name(name),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1),
		nats.IgnoreAuthErrorAbort(), // credentials are mended while we run
		nats.CustomReconnectDelay(outage.delay),
		nats.PingInterval(10 * time.Second),
		nats.ClosedHandler(func(*nats.Conn) { close(closed) }),
		nats.ConnectHandler(connected("connected to NATS")),
		nats.ReconnectHandler(connected("connected to NATS again")),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) {
			outage.Failed(err)
			e.NotConnected(err)
		}),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			outage.lost()
			if err != nil {
				e.Log.Warn("connection to NATS lost", "error", err, "do", "nothing unless it lasts: it is tried again at once")
			}
		}),
		nats.ErrorHandler(func(c *nats.Conn, s *nats.Subscription, err error) {
			if !c.IsConnected() && !errors.Is(err, nats.ErrPermissionViolation) {
				outage.Failed(err)
				e.NotConnected(err)
				return
			}
			e.Failed(c, s, err)
		}),
	}, outage, closed
}
