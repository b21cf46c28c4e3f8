package kvscout

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Selection goes where the handler was told, whether the address is among the
// upstreams or not, unless it is one of them that Caddy knows to be down. The
// fallback policy serves what the handler has no answer for.
type Selection struct {
	// FallbackRaw is the policy among the upstreams; least_conn.
	FallbackRaw json.RawMessage `json:"fallback,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`

	fallback reverseproxy.Selector
}

// CaddyModule says what it is.
func (Selection) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.reverse_proxy.selection_policies.kvscout", New: func() caddy.Module { return new(Selection) }}
}

// Provision loads the fallback.
func (s *Selection) Provision(ctx caddy.Context) error {
	if s.FallbackRaw == nil {
		s.FallbackRaw = caddyconfig.JSONModuleObject(reverseproxy.LeastConnSelection{}, "policy", "least_conn", nil)
	}
	mod, err := ctx.LoadModule(s, "FallbackRaw")
	if err != nil {
		return fmt.Errorf("fallback: %w", err)
	}
	s.fallback = mod.(reverseproxy.Selector)
	return nil
}

// Select returns the upstream for one attempt.
func (s *Selection) Select(pool reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *reverseproxy.Upstream {
	p := placeOf(r.Context())
	if p == nil {
		return s.fallback.Select(pool, r, w)
	}
	if p.taken.Swap(true) {
		// The reverse proxy's own retries go elsewhere.
		p.left.Store(true)
		return s.fallback.Select(pool, r, w)
	}
	for _, u := range pool {
		if u.Dial != p.Address {
			continue
		}
		if u.Available() {
			return u
		}
		p.left.Store(true)
		return s.fallback.Select(pool, r, w)
	}
	if _, _, err := net.SplitHostPort(p.Address); err != nil || strings.ContainsAny(p.Address, "{}/") {
		p.left.Store(true)
		return s.fallback.Select(pool, r, w)
	}
	return &reverseproxy.Upstream{Dial: p.Address, Host: new(reverseproxy.Host)}
}

var (
	_ caddy.Provisioner     = (*Selection)(nil)
	_ reverseproxy.Selector = (*Selection)(nil)
)
