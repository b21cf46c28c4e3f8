package agent

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvscout/kvscout/protocol/bus"
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

// refusals is what NATS does not let this agent do. Each is logged once for a
// connection, because it comes again with every message or attempt.
type refusals struct {
	log      *slog.Logger
	outage   *bus.Outage
	lifetime time.Duration // of a refusal to publish that does not come again

	mu          sync.Mutex // guards what follows
	said        map[string]struct{}
	connect     string // why there is no connection
	publish     string // what may not be published
	publishAt   time.Time
	subscribe   string // what may not be subscribed to
	subscribeAt time.Time
	unanswered  string // why verdicts may not be heard
}

func newRefusals(log *slog.Logger, heartbeat time.Duration) *refusals {
	return &refusals{log: log, lifetime: 3 * heartbeat, said: make(map[string]struct{})}
}

// notConnected takes why an attempt to connect failed.
func (r *refusals) notConnected(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.connect = err.Error()
}

// forbidden takes a violation of the rights that we have at the server.
func (r *refusals) forbidden(err error, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch text := strings.ToLower(err.Error()); {
	case strings.Contains(text, "subscription") && strings.Contains(text, ".verdict."):
		r.unanswered = err.Error() // the member is believed all the same
	case strings.Contains(text, "subscription"):
		r.subscribe, r.subscribeAt = err.Error(), now
	default:
		r.publish, r.publishAt = err.Error(), now
	}
	r.sayLocked("NATS does not let this agent publish for its member: its key has other permissions", err)
}

func (r *refusals) sayLocked(what string, err error) {
	if _, known := r.said[err.Error()]; known || len(r.said) >= maxRefusals {
		return
	}
	r.said[err.Error()] = struct{}{}
	r.log.Error(what, "error", err)
}

// connected forgets: the server may think otherwise by now.
func (r *refusals) connected() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.said)
	r.connect, r.publish, r.subscribe, r.unanswered = "", "", "", ""
}

// reason says what NATS refuses; empty: nothing that is known. Why there is no
// connection may be heard after there is one, and counts for nothing then.
func (r *refusals) reason(connected bool, now time.Time) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !connected && r.connect != "":
		return "NATS is not connected: " + r.connect
	case r.publish != "" && now.Sub(r.publishAt) < r.lifetime:
		return "NATS does not let this agent publish for its member: " + r.publish
	case r.subscribe != "":
		return "NATS does not let this agent answer snapshot requests: " + r.subscribe
	case r.unanswered != "":
		return "NATS does not let this agent receive verdicts on its member: " + r.unanswered
	}
	return ""
}

// due tells whether a refused subscription has waited long enough.
func (r *refusals) due(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.subscribe != "" && now.Sub(r.subscribeAt) >= askAgain
}

// watch asks why there is no connection, which NATS's client does not tell in
// every case, and begins a new one where a subscription was refused.
func (r *refusals) watch(ctx context.Context, conn *nats.Conn) {
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
