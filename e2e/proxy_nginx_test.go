package e2e

import (
	"testing"

	"github.com/kvscout/kvscout/e2e/proxies"
)

var throughNginx = nginxWith()

// nginxWith is the real nginx with the configuration of deploy/proxies/nginx, and
// with these edits of it.
func nginxWith(edits ...proxies.Edit) reverseProxy {
	return reverseProxy{
		name: "nginx",
		need: func(t *testing.T) { needProxy(t, proxies.Nginx) },
		lacks: map[feature]string{
			hidesUsage: "a script reads what passes, and does not change it",
			readsLarge: "a body is read as far as `client_body_buffer_size` goes",
		},
		start: func(t *testing.T, s *site) served { return runProxy(t, proxies.Nginx, s, edits...) },
	}
}

func TestProxyNginx(t *testing.T) { runProxyCases(t, throughNginx) }

func TestProxyScriptNginx(t *testing.T) {
	runScriptCases(t, throughNginx, nginxWith(proxies.Edit{File: "kvscout.js", Old: "ranks = false", New: "ranks = true"}))
}

func TestProxyLatencyNginx(t *testing.T) { measureProxy(t, throughNginx) }
