package e2e

import (
	"testing"

	"github.com/kvscout/kvscout/e2e/proxies"
)

var throughHAProxy = haproxyWith()

// haproxyWith is the real HAProxy with the configuration of deploy/proxies/haproxy,
// and with these edits of it.
func haproxyWith(edits ...proxies.Edit) reverseProxy {
	return reverseProxy{
		name: "HAProxy",
		need: func(t *testing.T) { needProxy(t, proxies.HAProxy) },
		lacks: map[feature]string{
			hidesUsage: "a script reads what passes, and does not change it",
			readsLarge: "a body is read as far as `tune.bufsize` goes",
		},
		start: func(t *testing.T, s *site) served { return runProxy(t, proxies.HAProxy, s, edits...) },
	}
}

func TestProxyHAProxy(t *testing.T) { runProxyCases(t, throughHAProxy) }

func TestProxyScriptHAProxy(t *testing.T) {
	runScriptCases(t, throughHAProxy, haproxyWith(proxies.Edit{File: "kvscout.lua", Old: "ranks = false", New: "ranks = true"}))
}

func TestProxyLatencyHAProxy(t *testing.T) { measureProxy(t, throughHAProxy) }
