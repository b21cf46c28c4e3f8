package e2e

import (
	"testing"

	"github.com/kvscout/kvscout/e2e/proxies"
)

// throughCaddy is Caddy with the configuration of deploy/proxies/caddy, and with the
// scheduler's patience.
var throughCaddy = reverseProxy{
	name: "Caddy",
	need: func(t *testing.T) { needProxy(t, proxies.Caddy) },
	start: func(t *testing.T, s *site) served {
		var edits []proxies.Edit
		if !s.plain {
			edits = []proxies.Edit{{File: "Caddyfile", Old: "timeout 200ms", New: "timeout " + patience.String()}}
		}
		return runProxy(t, proxies.Caddy, s, edits...)
	},
	lacks: map[feature]string{readsLarge: "bodies of more than 15 MiB go where the fallback policy says"},
}

func TestProxyCaddy(t *testing.T) { runProxyCases(t, throughCaddy) }

func TestProxyLatencyCaddy(t *testing.T) { measureProxy(t, throughCaddy) }
