package agent

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvscout/kvscout/protocol"
)

// addressEvery is how often the announced address is held against where NATS is.
const addressEvery = time.Second

// address is what the members announce.
func (a *Agent) address() string { return cmp.Or(a.cfg.Address, a.engine.Address()) }

// unreachable says that the announced address cannot be reached from other machines, as far as
// that can be told from here; empty: they can.
func (a *Agent) unreachable() string {
	conn := a.conn.Load()
	if conn == nil || !conn.IsConnected() {
		return ""
	}
	return unreachable(a.address(), conn.ConnectedAddr())
}

// unreachable: an address of this machine alone, while NATS, and with it
// whoever asks schedulers, is on another one.
func unreachable(announced, server string) string {
	address, err := protocol.ParseAddress(announced)
	if err != nil || !address.Loopback() {
		return ""
	}
	at, err := netip.ParseAddrPort(server)
	if err != nil || here(at.Addr().Unmap()) {
		return ""
	}
	return fmt.Sprintf("requests are sent to %s, which reaches the engine from its own machine only, and NATS is at %s: set -address or -pod-ip", announced, server)
}

// here tells whether an IP address is one of this machine.
func here(ip netip.Addr) bool {
	if ip.IsLoopback() {
		return true
	}
	list, err := net.InterfaceAddrs()
	if err != nil {
		return true // not known: no alarm
	}
	for _, a := range list {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Unmap() == ip.WithZone("") {
			return true
		}
	}
	return false
}

// watchAddress logs when the announced address turns out to be out of others'
// reach, until ctx is done.
func (a *Agent) watchAddress(ctx context.Context, conn *nats.Conn) {
	a.cfg.Log.Info("announcing members", "address", a.address(), "namespace", a.cfg.Namespace, "pod_uid", a.cfg.PodUID)
	look := time.NewTicker(addressEvery)
	defer look.Stop()
	said := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
		if !conn.IsConnected() {
			continue
		}
		if why := a.unreachable(); why != said {
			if why != "" {
				a.cfg.Log.Warn("the announced address cannot be reached from other machines", "why", why)
			}
			said = why
		}
	}
}
