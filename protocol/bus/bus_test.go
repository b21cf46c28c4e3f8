package bus_test

import (
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/kvscout/kvscout/e2e/authority"
	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/protocol/bus"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// users are those who have these keys.
func users(keys ...string) (list []*server.NkeyUser) {
	for _, k := range keys {
		list = append(list, &server.NkeyUser{Nkey: k})
	}
	return list
}

// member connects and tells of every connection, and why there is none.
func member(t *testing.T, url string, login bus.Login) (connected chan struct{}, refused chan error) {
	t.Helper()
	connected, refused = make(chan struct{}, 16), make(chan error, 1024)
	options, _, closed := bus.Options("test", bus.Events{
		Connected:    func() { connected <- struct{}{} },
		NotConnected: func(err error) { refused <- err },
		Failed:       func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err },
		Log:          slog.New(slog.DiscardHandler),
	})
	conn, err := login.Connect(url, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); <-closed })
	return connected, refused
}

func receive[T any](t *testing.T, from chan T, what string, fits func(T) bool) {
	t.Helper()
	for end := time.After(await.Patience); ; {
		select {
		case v := <-from:
			if fits(v) {
				return
			}
		case <-end:
			t.Fatalf("never: %s", what)
		}
	}
}

func anything[T any](T) bool { return true }

func TestSeedIsReadAgainForEveryConnection(t *testing.T) {
	old, file := authority.User(t)
	renewed, other := authority.User(t)
	s := broker.New(t, &server.Options{Nkeys: users(old, renewed)})
	connected, refused := member(t, s.URL(), bus.Login{Seed: file})
	receive(t, connected, "connected with the first seed", anything)
	// who is connected, as the server sees it.
	who := func() (keys []string) {
		z, err := s.Connz(&server.ConnzOptions{Username: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range z.Conns {
			keys = append(keys, c.AuthorizedUser)
		}
		return keys
	}
	if got := who(); !slices.Equal(got, []string{old}) {
		t.Fatalf("%q are connected, want %s", got, old)
	}

	// A file that is no seed, as in the middle of a renewal: the connection that
	// is there goes on, and what a new one lacks is said.
	if err := os.WriteFile(file, []byte("half a seed"), 0o600); err != nil {
		t.Fatal(err)
	}
	options := s.Options
	options.Nkeys = users(renewed)
	if err := s.ReloadOptions(&options); err != nil {
		t.Fatal(err)
	}
	receive(t, refused, "the torn file is named", func(err error) bool { return strings.HasPrefix(err.Error(), "-nats-seed: ") })

	text, err := os.ReadFile(other)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	receive(t, connected, "connected with the renewed seed", anything)
	if got := who(); !slices.Equal(got, []string{renewed}) {
		t.Errorf("%q are connected, want %s", got, renewed)
	}
	for len(refused) > 0 {
		err := (<-refused).Error()
		if strings.Contains(err, "half a seed") || strings.Contains(err, strings.TrimSpace(string(text))) {
			t.Errorf("the seed is told: %s", err)
		}
	}
}
