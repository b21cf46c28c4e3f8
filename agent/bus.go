package agent

import (
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
)

// openBus connects to NATS, now or whenever it is there. Nothing is kept while
// it is away: what the scheduler misses it asks for.
func openBus(cfg *Config) (conn *nats.Conn, closed <-chan struct{}, err error) {
	log := cfg.Log.With("room", "nats")
	done := make(chan struct{})
	options := []nats.Option{
		nats.Name("kvscout-agent " + cfg.Namespace + "/" + cfg.Pod),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1),
		nats.ReconnectWait(250 * time.Millisecond),
		nats.PingInterval(10 * time.Second),
		nats.ClosedHandler(func(*nats.Conn) { close(done) }),
		nats.ConnectHandler(func(c *nats.Conn) { log.Info("connected", "server", c.ConnectedUrlRedacted()) }),
		nats.ReconnectHandler(func(c *nats.Conn) { log.Info("connected again", "server", c.ConnectedUrlRedacted()) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("connection lost", "error", err)
			}
		}),
		nats.ErrorHandler(func(_ *nats.Conn, s *nats.Subscription, err error) {
			subject := ""
			if s != nil {
				subject = s.Subject
			}
			log.Warn("asynchronous error", "subject", subject, "error", err)
		}),
	}
	if cfg.NATSCredentials != "" {
		options = append(options, nats.UserCredentials(cfg.NATSCredentials))
	}
	if conn, err = nats.Connect(cfg.NATSURL, options...); err != nil {
		return nil, nil, fmt.Errorf("connect to NATS: %w", err)
	}
	return conn, done, nil
}
