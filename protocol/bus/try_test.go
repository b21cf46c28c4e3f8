package bus_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"go.uber.org/goleak"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/protocol/bus"
)

func TestTrySaysWhyNot(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	nats := broker.New(t, &server.Options{Username: "agent", Password: "right"})
	before := goleak.IgnoreCurrent() // what the server runs
	address := nats.Address()
	if on, trip, err := (bus.Login{}).Try(ctx, "nats://agent:right@"+address); err != nil || !strings.Contains(on, address) || strings.Contains(on, "right") || trip <= 0 {
		t.Errorf("%q, %v, %v", on, trip, err)
	}
	for url, want := range map[string]string{
		"nats://agent:wrong@" + address: "uthorization",
		"nats://127.0.0.1:1":            "connection refused",
		"nonsense://":                   "",
	} {
		if _, _, err := (bus.Login{}).Try(ctx, url); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", url, err)
		}
	}
	if _, _, err := (bus.Login{Credentials: "/nope"}).Try(ctx, "nats://"+address); err == nil || !strings.Contains(err.Error(), "-nats-credentials") {
		t.Error(err)
	}
	nats.Stop()
	goleak.VerifyNone(t, before)
}
