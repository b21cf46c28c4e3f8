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
	natsbus "github.com/kvscout/kvscout/protocol/bus"
)

// bus is the connection to NATS, with the server behind it when that one is
// embedded.
type bus struct {
	conn    *nats.Conn
	server  *embedded     // nil when the server is somebody else's
	closed  chan struct{} // the connection is closed for good
	refused *refusals
}

// openBus starts the embedded server unless cfg names another one, and
// connects. A server of others need not be there yet.
func openBus(cfg *Config) (*bus, error) {
	log := cfg.Log.With("room", "nats")
	b := &bus{refused: &refusals{log: log, said: make(map[string]struct{})}}
	subjects, err := protocol.NewSubjects(cfg.Pool)
	if err != nil {
		return nil, err
	}
	options, closed := natsbus.Options("kvscout-scheduler", natsbus.Events{
		Connected:    b.refused.forget,
		NotConnected: func(err error) { b.refused.report("cannot connect to NATS", err) },
		Failed: func(_ *nats.Conn, s *nats.Subscription, err error) {
			switch {
			case errors.Is(err, nats.ErrPermissionViolation):
				b.refused.report("NATS refuses what a scheduler must be allowed to", err)
			case s == nil:
				b.refused.report("asynchronous error of NATS", err)
			default:
				log.Warn("asynchronous error", "subject", s.Subject, "error", err)
			}
		},
		Log: log,
	})
	b.closed = closed
	options = append(options, nats.CustomInboxPrefix(subjects.Inbox()))
	if cfg.NATSURL != "" {
		b.conn, err = natsbus.Login{
			Credentials: cfg.NATSCredentials, Seed: cfg.NATSSeed, CA: cfg.NATSTLS.CA, Cert: cfg.NATSTLS.Cert, Key: cfg.NATSTLS.Key,
		}.Connect(cfg.NATSURL, options...)
		return b, err
	}
	if b.server, err = startEmbedded(cfg, subjects, log); err != nil {
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	client, err := b.server.client()
	if err == nil {
		b.conn, err = nats.Connect("", append(options, client...)...)
	}
	if err != nil {
		b.server.stop()
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	return b, nil
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
				b.refused.report("cannot connect to NATS", err)
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

	mu   sync.Mutex // guards what follows
	said map[string]struct{}
	last string // what was refused last, and why; empty: nothing since the last connection
}

func (r *refusals) report(what string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last = what + ": " + err.Error()
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
	r.last = ""
}

// reason says what NATS refused since the last connection; empty: nothing.
func (r *refusals) reason() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}
