package scheduler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
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
	outage  *natsbus.Outage
}

// openBus starts the embedded server unless cfg names another one, and
// connects. A server of others need not be there yet.
func openBus(cfg *Config) (*bus, error) {
	log := cfg.Log.With("room", "nats")
	subjects, err := protocol.NewSubjects(cfg.Pool)
	if err != nil {
		return nil, err
	}
	b := &bus{refused: &refusals{log: log, said: make(map[string]struct{}), picks: strconv.Quote(subjects.Picks())}}
	options, outage, closed := natsbus.Options("kvscout-scheduler", natsbus.Events{
		Connected:    b.refused.forget,
		NotConnected: b.refused.notConnected,
		Failed: func(_ *nats.Conn, s *nats.Subscription, err error) {
			switch {
			case errors.Is(err, nats.ErrPermissionViolation):
				b.refused.forbidden(err, time.Now())
			case s == nil:
				b.refused.report("NATS reports an error", err)
			default:
				log.Warn("NATS reports an error", "subject", s.Subject, "error", err, "do", "nothing unless it stays: what is lost is asked for again")
			}
		},
		Log: log,
	})
	b.closed, b.outage = closed, outage
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
			err := b.conn.LastError()
			switch {
			case b.conn.IsReconnecting() && err != nil:
				b.outage.Failed(err)
				b.refused.notConnected(err)
			case b.conn.IsConnected() && b.refused.due(time.Now()):
				if err := b.conn.ForceReconnect(); err != nil {
					b.refused.log.Warn("connect again", "error", err)
				}
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
	bound := b.server.server.Addr().String()
	host, _, err := net.SplitHostPort(b.server.cfg.NATSAddress)
	_, port, e := net.SplitHostPort(bound)
	if err != nil || e != nil {
		return bound
	}
	return net.JoinHostPort(host, port)
}

const (
	// maxRefusals bounds what is remembered as said.
	maxRefusals = 64
	// refusalsEvery is how often the connection is asked why it is not there.
	refusalsEvery = 500 * time.Millisecond
	// askAgain is how long a refused subscription waits for other rights: NATS
	// does not say when it would allow it.
	askAgain = 30 * time.Second
)

// refusals are logged once for a connection each: they come again with every
// message or attempt.
type refusals struct {
	log *slog.Logger

	mu   sync.Mutex // guards what follows
	said map[string]struct{}
	last string // what was refused last, and why; empty: nothing since the last connection
	// unheard is when a subscription was refused by which members are heard;
	// zero: none was since the last connection.
	unheard time.Time

	picks string // subject of other schedulers, as NATS quotes it: without it members are heard
}

// forbidden takes a violation of the rights that we have at the server.
func (r *refusals) forbidden(err error, now time.Time) {
	if text := err.Error(); strings.Contains(strings.ToLower(text), "subscription") && !strings.Contains(text, r.picks) {
		r.mu.Lock()
		r.unheard = now
		r.mu.Unlock()
	}
	r.report("NATS refuses what a scheduler must be allowed to", err)
}

// deaf tells that NATS does not let this scheduler hear its members.
func (r *refusals) deaf() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.unheard.IsZero()
}

// due tells whether a refused subscription has waited long enough.
func (r *refusals) due(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.unheard.IsZero() && now.Sub(r.unheard) >= askAgain
}

// notConnected takes why an attempt to connect failed.
func (r *refusals) notConnected(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last = "cannot connect to NATS: " + err.Error()
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
	r.last, r.unheard = "", time.Time{}
}

// reason says what NATS refused since the last connection; empty: nothing.
func (r *refusals) reason() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}
