package bus

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync/atomic"

	"github.com/nats-io/nats.go"
)

// token is a file that is renewed, and says who we are. It is read whenever a
// connection is opened, which is when an error can still be told.
type token struct {
	file   string
	dialer net.Dialer
	text   atomic.Pointer[string]
}

func (t *token) read() error {
	text, err := os.ReadFile(t.file)
	if err != nil {
		return err
	}
	trimmed := strings.TrimSpace(string(text))
	if trimmed == "" {
		return errors.New("the file is empty")
	}
	t.text.Store(&trimmed)
	return nil
}

// options of a connection that shows the token.
func (t *token) options() []nats.Option {
	return []nats.Option{nats.TokenHandler(func() string { return *t.text.Load() }), nats.SetCustomDialer(t)}
}

// Dial is called by NATS's client, which shows the token next.
func (t *token) Dial(network, address string) (net.Conn, error) {
	if err := t.read(); err != nil {
		return nil, fmt.Errorf("-nats-token-file: %w", err)
	}
	return t.dialer.Dial(network, address)
}
