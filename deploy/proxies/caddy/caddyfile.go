package kvscout

import (
	"strconv"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func init() {
	httpcaddyfile.RegisterHandlerDirective("kvscout", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		handler := new(Handler)
		return handler, handler.UnmarshalCaddyfile(h.Dispenser)
	})
	httpcaddyfile.RegisterDirectiveOrder("kvscout", httpcaddyfile.Before, "reverse_proxy")
}

// UnmarshalCaddyfile reads
//
//	kvscout [<matcher>] <scheduler>... {
//	    timeout         <duration>
//	    attempts        <number>
//	    tls
//	    tls_ca          <file>
//	    tls_client_auth <certificate file> <key file>
//	    tls_server_name <name>
//	}
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the directive's name
	if h.Schedulers = d.RemainingArgs(); len(h.Schedulers) == 0 {
		return d.Err("kvscout: no scheduler is named")
	}
	secure := func() *TLS {
		if h.TLS == nil {
			h.TLS = new(TLS)
		}
		return h.TLS
	}
	for d.NextBlock(0) {
		name, args := d.Val(), d.RemainingArgs()
		want := 1
		switch name {
		case "tls":
			want = 0
		case "tls_client_auth":
			want = 2
		}
		if len(args) != want {
			return d.Errf("%s: want %d values, got %d", name, want, len(args))
		}
		switch name {
		case "timeout":
			t, err := caddy.ParseDuration(args[0])
			if err != nil || t <= 0 {
				return d.Errf("timeout: want a duration above 0, got %q", args[0])
			}
			h.Timeout = caddy.Duration(t)
		case "attempts":
			n, err := strconv.Atoi(args[0])
			if err != nil || n < 1 {
				return d.Errf("attempts: want a number above 0, got %q", args[0])
			}
			h.Attempts = n
		case "tls":
			secure()
		case "tls_ca":
			secure().CA = args[0]
		case "tls_client_auth":
			secure().Certificate, secure().Key = args[0], args[1]
		case "tls_server_name":
			secure().ServerName = args[0]
		default:
			return d.Errf("kvscout has no option %q", name)
		}
	}
	return nil
}

// UnmarshalCaddyfile reads
//
//	lb_policy kvscout {
//	    fallback <policy>
//	}
func (s *Selection) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the policy's name
	if d.NextArg() {
		return d.ArgErr()
	}
	for d.NextBlock(0) {
		switch d.Val() {
		case "fallback":
			if !d.NextArg() {
				return d.ArgErr()
			}
			if s.FallbackRaw != nil {
				return d.Err("fallback is given twice")
			}
			name := d.Val()
			id := "http.reverse_proxy.selection_policies." + name
			module, err := caddyfile.UnmarshalModule(d, id)
			if err != nil {
				return err
			}
			policy, ok := module.(reverseproxy.Selector)
			if !ok {
				return d.Errf("%s is no selection policy", id)
			}
			s.FallbackRaw = caddyconfig.JSONModuleObject(policy, "policy", name, nil)
		default:
			return d.Errf("lb_policy kvscout has no option %q", d.Val())
		}
	}
	return nil
}

var (
	_ caddyfile.Unmarshaler = (*Handler)(nil)
	_ caddyfile.Unmarshaler = (*Selection)(nil)
)
