package agent

import (
	"errors"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvscout/kvscout/protocol/bus"
)

// openBus connects to NATS, now or whenever it is there.
func openBus(cfg *Config, refused *refusals) (conn *nats.Conn, closed <-chan struct{}, err error) {
	options, done := bus.Options("kvscout-agent "+cfg.Namespace+"/"+cfg.Pod, bus.Events{
		Connected:    refused.connected,
		NotConnected: refused.notConnected,
		Failed: func(c *nats.Conn, s *nats.Subscription, err error) {
			switch {
			case errors.Is(err, nats.ErrPermissionViolation):
				refused.forbidden(err, time.Now())
			case !c.IsConnected():
				refused.notConnected(err)
			default:
				subject := ""
				if s != nil {
					subject = s.Subject
				}
				refused.log.Warn("asynchronous error", "subject", subject, "error", err)
			}
		},
		Log: refused.log,
	})
	conn, err = bus.Login{
		Credentials: cfg.NATSCredentials, Seed: cfg.NATSSeed, CA: cfg.NATSTLS.CA, Cert: cfg.NATSTLS.Cert, Key: cfg.NATSTLS.Key,
	}.Connect(cfg.NATSURL, options...)
	return conn, done, err
}
