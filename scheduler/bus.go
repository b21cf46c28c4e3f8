package scheduler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvscout/kvscout/protocol"
)

// bus is the connection to NATS, with the server behind it when that one is
// embedded.
type bus struct {
	conn    *nats.Conn
	server  *embedded     // nil when the server is somebody else's
	closed  chan struct{} // the connection is closed for good
	refused refusals
}

// openBus starts the embedded server unless cfg names another one, and
// connects. A server of others need not be there yet.
func openBus(cfg *Config) (*bus, error) {
	log := cfg.Log.With("room", "nats")
	b := &bus{closed: make(chan struct{}), refused: refusals{log: log, said: make(map[string]struct{})}}
	subjects, err := protocol.NewSubjects(cfg.Pool)
	if err != nil {
		return nil, err
	}
	options := []nats.Option{
		nats.Name("kvscout-scheduler"),
		nats.CustomInboxPrefix(subjects.Inbox()),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1),
		nats.IgnoreAuthErrorAbort(), // credentials are mended while we run
		nats.ReconnectWait(100 * time.Millisecond),
		nats.ReconnectJitter(50*time.Millisecond, 50*time.Millisecond),
		nats.PingInterval(10 * time.Second),
		nats.ClosedHandler(func(*nats.Conn) { close(b.closed) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("connection lost", "error", err)
			}
		}),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { b.refused.report("cannot connect", err) }),
		nats.ReconnectHandler(func(c *nats.Conn) {
			b.refused.forget()
			log.Info("connected again", "server", c.ConnectedUrlRedacted())
		}),
		nats.ErrorHandler(func(_ *nats.Conn, s *nats.Subscription, err error) {
			switch {
			case errors.Is(err, nats.ErrPermissionViolation):
				b.refused.report("NATS refuses what a scheduler must be allowed to", err)
			case s == nil:
				b.refused.report("asynchronous error", err)
			default:
				log.Warn("asynchronous error", "subject", s.Subject, "error", err)
			}
		}),
	}
	url := cfg.NATSURL
	if url == "" {
		if b.server, err = startEmbedded(cfg, subjects, log); err != nil {
			return nil, fmt.Errorf("embedded NATS: %w", err)
		}
		client, err := b.server.client()
		if err != nil {
			b.server.stop()
			return nil, fmt.Errorf("embedded NATS: %w", err)
		}
		options = append(options, client...)
	} else {
		options = append(options, nats.RetryOnFailedConnect(true),
			nats.ConnectHandler(func(c *nats.Conn) {
				b.refused.forget()
				log.Info("connected", "server", c.ConnectedUrlRedacted())
			}))
		options = append(options, login(cfg)...)
	}
	conn, err := nats.Connect(url, options...)
	if err != nil {
		if b.server != nil {
			b.server.stop()
		}
		return nil, fmt.Errorf("connect to NATS: %w", err)
	}
	b.conn = conn
	return b, nil
}

// login is who we are at a server of others, and whom we take it for. All
// files but the seed's key are read again for every connection.
func login(cfg *Config) []nats.Option {
	var options []nats.Option
	add := func(key string, option nats.Option) {
		options = append(options, func(o *nats.Options) error {
			if err := option(o); err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
			return nil
		})
	}
	if cfg.NATSCredentials != "" {
		add("NATSCredentials", nats.UserCredentials(cfg.NATSCredentials))
	}
	if cfg.NATSSeed != "" {
		add("NATSSeed", func(o *nats.Options) error {
			seed, err := nats.NkeyOptionFromSeed(cfg.NATSSeed)
			if err != nil {
				return err
			}
			return seed(o)
		})
	}
	if cfg.NATSTLS.CA != "" {
		add("NATSTLS", nats.RootCAs(cfg.NATSTLS.CA))
	}
	if cfg.NATSTLS.Cert != "" {
		add("NATSTLS", nats.ClientCert(cfg.NATSTLS.Cert, cfg.NATSTLS.Key))
	}
	return options
}

// follow keeps the embedded server's users up to date, or says why there is no
// connection to another one, which NATS's client does not tell in every case.
func (b *bus) follow(ctx context.Context) {
	if b.server != nil {
		b.server.follow(ctx)
		return
	}
	look := time.NewTicker(refusalsEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
			if err := b.conn.LastError(); err != nil && b.conn.IsReconnecting() {
				b.refused.report("cannot connect", err)
			}
		}
	}
}

// close ends the connection and then the server, and waits for both.
func (b *bus) close() {
	b.conn.Close()
	<-b.closed
	if b.server != nil {
		b.server.stop()
	}
}

// address of the embedded server; empty when there is none.
func (b *bus) address() string {
	if b.server == nil {
		return ""
	}
	return b.server.server.Addr().String()
}

const (
	// maxRefusals bounds what is remembered as said.
	maxRefusals = 64
	// refusalsEvery is how often the connection is asked why it is not there.
	refusalsEvery = 500 * time.Millisecond
)

// refusals are logged once for a connection each: they come again with every
// message or attempt.
type refusals struct {
	log *slog.Logger

	mu   sync.Mutex // guards said
	said map[string]struct{}
}

func (r *refusals) report(what string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, known := r.said[err.Error()]; known || len(r.said) >= maxRefusals {
		return
	}
	r.said[err.Error()] = struct{}{}
	r.log.Error(what, "error", err)
}

func (r *refusals) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.said)
}
