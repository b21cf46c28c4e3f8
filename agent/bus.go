package agent

import (
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
)

// openBus connects to NATS, now or whenever it is there. Nothing is kept while
// it is away: what the scheduler misses it asks for.
func openBus(cfg *Config, refused *refusals) (conn *nats.Conn, closed <-chan struct{}, err error) {
	log := refused.log
	done := make(chan struct{})
	options := []nats.Option{
		nats.Name("kvscout-agent " + cfg.Namespace + "/" + cfg.Pod),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1),
		nats.IgnoreAuthErrorAbort(), // credentials are mended while we run
		nats.ReconnectWait(100 * time.Millisecond),
		nats.ReconnectJitter(50*time.Millisecond, 50*time.Millisecond),
		nats.PingInterval(10 * time.Second),
		nats.ClosedHandler(func(*nats.Conn) { close(done) }),
		nats.ConnectHandler(func(c *nats.Conn) {
			refused.connected()
			log.Info("connected", "server", c.ConnectedUrlRedacted(), "tls", encrypted(c))
		}),
		nats.ReconnectHandler(func(c *nats.Conn) {
			refused.connected()
			log.Info("connected again", "server", c.ConnectedUrlRedacted(), "tls", encrypted(c))
		}),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { refused.notConnected(err) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("connection lost", "error", err)
			}
		}),
		nats.ErrorHandler(func(c *nats.Conn, s *nats.Subscription, err error) {
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
				log.Warn("asynchronous error", "subject", subject, "error", err)
			}
		}),
	}
	options = append(options, login(cfg)...)
	if conn, err = nats.Connect(cfg.NATSURL, options...); err != nil {
		return nil, nil, fmt.Errorf("connect to NATS: %w", err)
	}
	return conn, done, nil
}

// login is who we are at the server, and whom we take it for. All files but
// the seed's key are read again for every connection.
func login(cfg *Config) []nats.Option {
	var options []nats.Option
	add := func(key string, option nats.Option) {
		options = append(options, func(o *nats.Options) error {
			if err := option(o); err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
			return nil
		})
	}
	if cfg.NATSCredentials != "" {
		add("NATSCredentials", nats.UserCredentials(cfg.NATSCredentials))
	}
	if cfg.NATSSeed != "" {
		add("NATSSeed", func(o *nats.Options) error {
			seed, err := nats.NkeyOptionFromSeed(cfg.NATSSeed)
			if err != nil {
				return err
			}
			return seed(o)
		})
	}
	if cfg.NATSTLS.CA != "" {
		add("NATSTLS", nats.RootCAs(cfg.NATSTLS.CA))
	}
	if cfg.NATSTLS.Cert != "" {
		add("NATSTLS", nats.ClientCert(cfg.NATSTLS.Cert, cfg.NATSTLS.Key))
	}
	return options
}

func encrypted(c *nats.Conn) bool {
	_, err := c.TLSConnectionState()
	return err == nil
}
