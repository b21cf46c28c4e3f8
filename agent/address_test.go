package agent

import (
	"net"
	"net/netip"
	"strings"
	"testing"
)

// An address of this machine alone is no use to schedulers on another one.
func TestLoopbackIsNoticedWhenNATSIsElsewhere(t *testing.T) {
	own := "127.0.0.1"
	if list, err := net.InterfaceAddrs(); err == nil {
		for _, a := range list {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() {
				own = p.Addr().String()
			}
		}
	}
	for _, c := range []struct {
		announced, server string
		bad               bool
	}{
		{"127.0.0.1:8000", "192.0.2.77:4222", true},
		{"localhost:8000", "[2001:db8::77]:4222", true},
		{"127.0.0.1:8000", "127.0.0.1:4222", false},
		{"127.0.0.1:8000", "[::1]:4222", false},
		{"127.0.0.1:8000", own + ":4222", false},
		{"10.0.0.7:8000", "192.0.2.77:4222", false},
		{"vllm-0.prod.svc:8000", "192.0.2.77:4222", false},
		{"127.0.0.1:8000", "", false}, // not known
	} {
		why := unreachable(c.announced, c.server)
		if (why != "") != c.bad || c.bad && !strings.Contains(why, "-address") {
			t.Errorf("%s with NATS at %q: %q", c.announced, c.server, why)
		}
	}
}

func TestOnlyAddressesThatSchedulersTakeAreAnnounced(t *testing.T) {
	for address, good := range map[string]bool{
		"10.0.0.7:8000": true, "vllm:8000": true, "host:0": false, "u@host:1": false, "http://host:1": false, "0.0.0.0:8000": false,
	} {
		err := Config{NATSURL: "nats://127.0.0.1:1", Address: address}.Validate()
		if (err == nil) != good || err != nil && !strings.Contains(err.Error(), `-address, KVSCOUT_ADDRESS or "address" in the file`) {
			t.Errorf("%s: %v", address, err)
		}
	}
	// What the engine's URL gives is announced too.
	if err := (Config{NATSURL: "nats://127.0.0.1:1", Engine: "http://0.0.0.0:8000"}).Validate(); err == nil || !strings.Contains(err.Error(), "-address") {
		t.Error(err)
	}
}
