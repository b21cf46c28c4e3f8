package bus

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	// Connections are tried shortest apart at first and longest in the end:
	// a server that is away shall find us soon when it is back. One that refuses
	// us stays of its opinion until somebody mends it, and pays for every attempt.
	shortest       = 100 * time.Millisecond
	longest        = 400 * time.Millisecond
	longestRefused = 5 * time.Second
	// firstReminder and reminders are how long a standing outage is not spoken of.
	firstReminder = time.Minute
	reminders     = 5 * time.Minute
	// maxReasons bounds what is remembered of an outage.
	maxReasons = 16
)

// Outage is the time without a connection to NATS: how often one was tried, and
// what is said of it. Its zero value is not usable.
type Outage struct {
	log *slog.Logger

	mu       sync.Mutex // guards what follows
	since    time.Time  // zero: there is none
	attempts int
	refused  bool // by a server that is there
	// remindAt is when a reason, without numbers, is said again. What fails by
	// turns in two ways is two reasons.
	remindAt map[string]time.Time
}

// Failed takes why there is no connection, as often as it is found. It is logged
// when it is another reason than before, and again from time to time.
func (o *Outage) Failed(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	o.beginLocked(now)
	o.refused = refuses(err)
	what := strings.Map(func(r rune) rune {
		if '0' <= r && r <= '9' {
			return -1
		}
		return r
	}, err.Error())
	at, known := o.remindAt[what]
	if known && now.Before(at) || !known && len(o.remindAt) >= maxReasons {
		return
	}
	wait := firstReminder
	if known {
		wait = reminders
	}
	if o.remindAt == nil {
		o.remindAt = make(map[string]time.Time)
	}
	o.remindAt[what] = now.Add(wait)
	o.log.Error("cannot connect to NATS", "error", err, "attempts", o.attempts, "for", now.Sub(o.since).Round(time.Millisecond),
		"do", "check the address, the credentials and the certificates, and that the server runs; it is tried again all the time")
}

// lost is the end of a connection.
func (o *Outage) lost() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.beginLocked(time.Now())
}

func (o *Outage) beginLocked(now time.Time) {
	if o.since.IsZero() {
		o.since = now
	}
}

// over ends the outage and says how long it was.
func (o *Outage) over() (attempts int, lasted time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.since.IsZero() {
		lasted = time.Since(o.since)
	}
	attempts = o.attempts
	o.since, o.attempts, o.refused, o.remindAt = time.Time{}, 0, false, nil
	return attempts, lasted
}

// delay is called by NATS's client before it tries all servers for the nth time.
func (o *Outage) delay(n int) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.attempts++
	return pauseBefore(n, o.refused)
}

// pauseBefore the nth attempt, a quarter more or less.
func pauseBefore(n int, refused bool) time.Duration {
	most := longest
	if refused {
		most = longestRefused
	}
	d := min(shortest<<min(max(n-5, 0), 10), most)
	return d*3/4 + rand.N(d/2)
}

// refuses tells that a server is there and does not let us in.
func refuses(err error) bool {
	for _, e := range []error{nats.ErrAuthorization, nats.ErrAuthExpired, nats.ErrAuthRevoked, nats.ErrAccountAuthExpired, nats.ErrSecureConnRequired} {
		if errors.Is(err, e) {
			return true
		}
	}
	var alert tls.AlertError
	var certificate *tls.CertificateVerificationError
	var authority x509.UnknownAuthorityError
	return errors.As(err, &alert) || errors.As(err, &certificate) || errors.As(err, &authority)
}
