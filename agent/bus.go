package agent

import (
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvscout/kvscout/protocol/bus"
)

// newRefusals is what NATS may refuse an agent.
func newRefusals(log *slog.Logger, heartbeat time.Duration) *bus.Refusals {
	return bus.NewRefusals(log,
		// The member is believed all the same.
		bus.Right{In: []string{"subscription", ".verdict."}, Lacking: "NATS does not let this agent receive verdicts on its member"},
		bus.Right{In: []string{"subscription"}, Lacking: "NATS does not let this agent answer snapshot requests", Retried: true},
		bus.Right{Lacking: "NATS does not let this agent publish for its member", Lives: 3 * heartbeat})
}

// openBus connects to NATS, now or whenever it is there.
func openBus(cfg *Config, refused *bus.Refusals) (conn *nats.Conn, closed <-chan struct{}, err error) {
	options, done := refused.Options("kvscout-agent " + cfg.Namespace + "/" + cfg.Pod)
	conn, err = bus.Login{
		Credentials: cfg.NATSCredentials, Seed: cfg.NATSSeed, Token: cfg.NATSToken, CA: cfg.NATSTLS.CA, Cert: cfg.NATSTLS.Cert, Key: cfg.NATSTLS.Key,
	}.Connect(cfg.NATSURL, options...)
	return conn, done, err
}
