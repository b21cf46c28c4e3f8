package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
)

// Try connects to a server once and hangs up again. It gives which server that
// was and the time of a round trip, or why there is none.
func (l Login) Try(ctx context.Context, url string) (server string, trip time.Duration, err error) {
	failed := make(chan error, 1)
	tell := func(err error) {
		if errors.Is(err, nats.ErrNoServers) {
			return // the next attempt says why
		}
		select {
		case failed <- err:
		default:
		}
	}
	connected := make(chan struct{}, 1)
	conn, err := l.Connect(url, nats.Name("kvscout"), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(), nats.ReconnectWait(10*time.Millisecond), nats.ReconnectJitter(0, 0),
		nats.ConnectHandler(func(*nats.Conn) { connected <- struct{}{} }),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { tell(err) }))
	if err != nil {
		return "", 0, err
	}
	defer conn.Close()
	select {
	case <-connected:
		trip, err = conn.RTT()
		return conn.ConnectedUrlRedacted(), trip, err
	case err = <-failed:
	case <-ctx.Done():
		err = errors.New("no answer in time")
	}
	return "", 0, fmt.Errorf("connect to NATS: %w", err)
}
