// Package bus is a scheduler's connection to NATS, with the server behind it when
// that one is embedded, and who may use that server for what.
package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

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
	// TLS of the embedded server, or of us at another one.
	TLS certs.Files
	Log *slog.Logger
}

// Bus is the connection to NATS, with the server behind it when that one is
// embedded.
type Bus struct {
	Conn    *nats.Conn
	Closed  chan struct{} // closed when the connection is closed for good
	Refused *Refusals
	server  *embedded // nil when the server is somebody else's
	outage  *natsbus.Outage
}

// Open starts the embedded server unless cfg names another one, and
// connects. A server of others need not be there yet.
func Open(cfg Config) (*Bus, error) {
	log := cfg.Log
	subjects, err := protocol.NewSubjects(cfg.Pool)
	if err != nil {
		return nil, err
	}
	b := &Bus{Refused: &Refusals{log: log, said: make(map[string]struct{}), picks: strconv.Quote(subjects.Picks())}}
	options, outage, closed := natsbus.Options("kvscout-scheduler", natsbus.Events{
		Connected:    b.Refused.forget,
		NotConnected: b.Refused.notConnected,
		Failed: func(_ *nats.Conn, s *nats.Subscription, err error) {
			switch {
			case errors.Is(err, nats.ErrPermissionViolation):
				b.Refused.forbidden(err, time.Now())
			case s == nil:
				b.Refused.report("NATS reports an error", err)
			default:
				log.Warn("NATS reports an error", "subject", s.Subject, "error", err, "do", "nothing unless it stays: what is lost is asked for again")
			}
		},
		Log: log,
	})
	b.Closed, b.outage = closed, outage
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
	look := time.NewTicker(refusalsEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
			err := b.Conn.LastError()
			switch {
			case b.Conn.IsReconnecting() && err != nil:
				b.outage.Failed(err)
				b.Refused.notConnected(err)
			case b.Conn.IsConnected() && b.Refused.due(time.Now()):
				if err := b.Conn.ForceReconnect(); err != nil {
					b.Refused.log.Warn("connect again", "error", err)
				}
			}
		}
	}
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

const (
	// maxRefusals bounds what is remembered as said.
	maxRefusals = 64
	// refusalsEvery is how often the connection is asked why it is not there.
	refusalsEvery = 500 * time.Millisecond
	// askAgain is how long a refused subscription waits for other rights: NATS
	// does not say when it would allow it.
	askAgain = 30 * time.Second
)

// Refusals are logged once for a connection each: they come again with every
// message or attempt.
type Refusals struct {
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
func (r *Refusals) forbidden(err error, now time.Time) {
	if text := err.Error(); strings.Contains(strings.ToLower(text), "subscription") && !strings.Contains(text, r.picks) {
		r.mu.Lock()
		r.unheard = now
		r.mu.Unlock()
	}
	r.report("NATS denies permissions that a scheduler needs", err)
}

// Deaf tells that NATS does not let this scheduler hear its members.
func (r *Refusals) Deaf() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.unheard.IsZero()
}

// due tells whether a refused subscription has waited long enough.
func (r *Refusals) due(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.unheard.IsZero() && now.Sub(r.unheard) >= askAgain
}

// notConnected takes why an attempt to connect failed.
func (r *Refusals) notConnected(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last = "cannot connect to NATS: " + err.Error()
}

func (r *Refusals) report(what string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last = what + ": " + err.Error()
	if _, known := r.said[err.Error()]; known || len(r.said) >= maxRefusals {
		return
	}
	r.said[err.Error()] = struct{}{}
	r.log.Error(what, "error", err)
}

func (r *Refusals) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.said)
	r.last, r.unheard = "", time.Time{}
}

// Reason says what NATS refused since the last connection; empty: nothing.
func (r *Refusals) Reason() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}
