package agent

import (
	"errors"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvscout/kvscout/protocol/bus"
)

// openBus connects to NATS, now or whenever it is there.
func openBus(cfg *Config, refused *refusals) (conn *nats.Conn, closed <-chan struct{}, err error) {
	options, outage, done := bus.Options("kvscout-agent "+cfg.Namespace+"/"+cfg.Pod, bus.Events{
		Connected:    refused.connected,
		NotConnected: refused.notConnected,
		Failed: func(_ *nats.Conn, s *nats.Subscription, err error) {
			if errors.Is(err, nats.ErrPermissionViolation) {
				refused.forbidden(err, time.Now())
				return
			}
			subject := ""
			if s != nil {
				subject = s.Subject
			}
			refused.log.Warn("NATS reports an error", "subject", subject, "error", err, "do", "nothing unless it stays: what is lost is asked for again")
		},
		Log: refused.log,
	})
	refused.outage = outage
	conn, err = bus.Login{
		Credentials: cfg.NATSCredentials, Seed: cfg.NATSSeed, CA: cfg.NATSTLS.CA, Cert: cfg.NATSTLS.Cert, Key: cfg.NATSTLS.Key,
	}.Connect(cfg.NATSURL, options...)
	return conn, done, err
}
