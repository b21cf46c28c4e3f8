package bus

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	// maxRefusals bounds what is remembered as said.
	maxRefusals = 64
	// refusalsEvery is how often the connection is asked why it is not there.
	refusalsEvery = 500 * time.Millisecond
	// askAgain is how long a refused subscription waits for other rights: NATS
	// does not say when it would allow it.
	askAgain = 30 * time.Second
)

// Right is one that a program needs at a server.
type Right struct {
	// In finds the right in a violation, as NATS words it; empty: any. All must be
	// there, in whatever case.
	In []string
	// Lacking is what it means to lack it, for people.
	Lacking string
	// Lives is how long a violation counts; 0: until the next connection.
	Lives time.Duration
	// Retried: the server is asked again now and then, by a new connection.
	Retried bool
}

// lack is a violation of a right.
type lack struct {
	text string // empty: none
	at   time.Time
}

// Refusals is what a server does not let a program do. Each is logged once for a
// connection, because it comes again with every message or attempt.
type Refusals struct {
	log    *slog.Logger
	rights []Right
	outage *Outage

	mu      sync.Mutex // guards what follows
	said    map[string]struct{}
	connect string // why there is no connection
	newest  string // violation taken
	lacks   []lack // by right
}

// NewRefusals of a program that needs these rights. Of a violation the first
// counts that it fits.
func NewRefusals(log *slog.Logger, rights ...Right) *Refusals {
	return &Refusals{log: log, rights: rights, said: make(map[string]struct{}), lacks: make([]lack, len(rights))}
}

// Options of a connection whose refusals these are; see the function Options.
func (r *Refusals) Options(name string) (options []nats.Option, closed chan struct{}) {
	options, r.outage, closed = Options(name, Events{
		Connected: r.connected, NotConnected: r.notConnected, Log: r.log,
		Failed: func(_ *nats.Conn, s *nats.Subscription, err error) {
			if errors.Is(err, nats.ErrPermissionViolation) {
				r.forbidden(err, time.Now())
				return
			}
			subject := ""
			if s != nil {
				subject = s.Subject
			}
			r.log.Warn("NATS reports an error", "subject", subject, "error", err, "do", "nothing unless it stays: what is lost is asked for again")
		},
	})
	return options, closed
}

// notConnected takes why an attempt to connect failed.
func (r *Refusals) notConnected(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.connect = err.Error()
}

// forbidden takes a violation of the rights that we have at the server.
func (r *Refusals) forbidden(err error, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.newest = err.Error()
	text := strings.ToLower(r.newest)
	i := slices.IndexFunc(r.rights, func(right Right) bool {
		return !slices.ContainsFunc(right.In, func(part string) bool { return !strings.Contains(text, strings.ToLower(part)) })
	})
	if i < 0 {
		return
	}
	r.lacks[i] = lack{err.Error(), now}
	if _, known := r.said[err.Error()]; known || len(r.said) >= maxRefusals {
		return
	}
	r.said[err.Error()] = struct{}{}
	r.log.Error("NATS denies a permission", "means", r.rights[i].Lacking, "error", err)
}

// connected forgets: the server may think otherwise by now.
func (r *Refusals) connected() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.said)
	clear(r.lacks)
	r.connect, r.newest = "", ""
}

// Lacks tells whether a right was refused since the last connection. What the
// connection has heard last and was not told here yet may be that.
func (r *Refusals) Lacks(right int, heard error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lacks[right].text != "" || errors.Is(heard, nats.ErrPermissionViolation) && heard.Error() != r.newest
}

// Reason says what is refused, the last of the rights first; empty: nothing that
// is known. Why there is no connection may be heard after there is one, and
// counts for nothing then.
func (r *Refusals) Reason(connected bool, now time.Time) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !connected && r.connect != "" {
		return "cannot connect to NATS: " + r.connect
	}
	for i, right := range slices.Backward(r.rights) {
		if l := r.lacks[i]; l.text != "" && (right.Lives == 0 || now.Sub(l.at) < right.Lives) {
			return right.Lacking + ": " + l.text
		}
	}
	return ""
}

// due tells whether a refused right has waited long enough.
func (r *Refusals) due(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, right := range r.rights {
		if l := r.lacks[i]; right.Retried && l.text != "" && now.Sub(l.at) >= askAgain {
			return true
		}
	}
	return false
}

// Watch asks why there is no connection, which NATS's client does not tell in
// every case, and begins a new one where a right is to be asked for again.
func (r *Refusals) Watch(ctx context.Context, conn *nats.Conn) {
	look := time.NewTicker(refusalsEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-look.C:
			err := conn.LastError()
			switch {
			case conn.IsReconnecting() && err != nil:
				r.outage.Failed(err)
				r.notConnected(err)
			case conn.IsConnected() && r.due(now):
				if err := conn.ForceReconnect(); err != nil {
					r.log.Warn("connect again", "error", err)
				}
			}
		}
	}
}
