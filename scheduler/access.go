package scheduler

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/scheduler/internal/certs"
)

// validateAccess says what is wrong with who may connect, and how.
func (c Config) validateAccess(bad func(name, format string, v ...any)) {
	for _, t := range []struct {
		name string
		tls  TLS
	}{{"grpc-tls", c.GRPCTLS}, {"nats-tls", c.NATSTLS}} {
		switch {
		case t.tls.Cert != "" && t.tls.Key == "":
			bad(t.name+"-key", "is missing: -%s-cert is set, and the two belong together", t.name)
		case t.tls.Cert == "" && t.tls.Key != "":
			bad(t.name+"-cert", "is missing: -%s-key is set, and the two belong together", t.name)
		}
	}
	if c.GRPCTLS.CA != "" && c.GRPCTLS.Cert == "" {
		bad("grpc-tls-cert", "is missing: -grpc-tls-ca is for callers' certificates, and needs that of the server")
	}
	if c.Operators != "" && c.GRPCTLS.CA == "" {
		bad("grpc-tls-ca", "is missing: -grpc-operators are told by their certificates")
	}
	for _, a := range []struct{ name, address string }{{"grpc-address", c.GRPCAddress}, {"http-address", c.HTTPAddress}, {"gateway", c.GatewayAddress}} {
		if !c.Insecure && beyond(a.address) && c.GRPCTLS.Cert == "" {
			bad(a.name, "%s can be reached from elsewhere: set -grpc-tls-cert and -grpc-tls-key, or -insecure to serve plain text", a.address)
		}
	}
	if c.NATSURL == "" {
		if c.NATSCredentials != "" {
			bad("nats-credentials", "are for a server named by -nats-url")
		}
		if c.NATSSeed != "" {
			bad("nats-seed", "is for a server named by -nats-url")
		}
		if c.NATSTLS.CA != "" && c.NATSTLS.Cert == "" {
			bad("nats-tls-cert", "is missing: -nats-tls-ca is for clients' certificates, and needs that of the server")
		}
		if !c.Insecure && beyond(c.NATSAddress) && (c.NATSTLS.Cert == "" || c.NATSUsers+c.NATSTokenAudience == "") {
			bad("nats-address", "%s can be reached from elsewhere: set -nats-tls-cert, -nats-tls-key and -nats-users or -nats-token-audience, or -insecure to serve anybody in plain text", c.NATSAddress)
		}
		return
	}
	if c.NATSUsers != "" {
		bad("nats-users", "are of the embedded server; the one named by -nats-url has users of its own")
	}
	if c.NATSTokenAudience != "" {
		bad("nats-token-audience", "is of the embedded server; the one named by -nats-url has users of its own")
	}
	if c.NATSCredentials != "" && c.NATSSeed != "" {
		bad("nats-seed", "and -nats-credentials are two ways to say who we are; set one")
	}
}

// beyond tells whether others than this machine may reach the address.
func beyond(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil || host == "localhost" {
		return false
	}
	ip := net.ParseIP(host)
	return ip == nil || !ip.IsLoopback()
}

// openToPeople tells whether the admin address, where nobody shows a certificate,
// may answer what the API does: to whom the API would not ask for one either, and
// who can reach it.
func (c *Config) openToPeople() bool {
	return c.GRPCTLS.CA == "" && (!beyond(c.AdminAddress) || beyond(c.GRPCAddress) || beyond(c.HTTPAddress))
}

// natsHere tells whether all servers of NATSURL are on this machine: so are
// those who use them, or they came through something that is.
func (c *Config) natsHere() bool {
	for part := range strings.SplitSeq(c.NATSURL, ",") {
		u, err := url.Parse(strings.TrimSpace(part))
		if err != nil || beyond(net.JoinHostPort(u.Hostname(), "1")) {
			return false
		}
	}
	return c.NATSURL != ""
}

// transport is how the API and gateways are served; nil: plain. Gateways want TLS
// and do not verify: beyond this machine there is a certificate in any case.
func (c *Config) transport() (callers, gateways *tls.Config, err error) {
	if c.GRPCTLS.Cert != "" {
		if callers, err = certs.Server(c.GRPCTLS, c.Log.With("component", "grpc"), "h2", "http/1.1"); err != nil {
			return nil, nil, fmt.Errorf("-grpc-tls-cert, -grpc-tls-key and -grpc-tls-ca: %w", err)
		}
		return callers, callers, nil
	}
	if beyond(c.ExtProcAddress) && !c.Insecure {
		if gateways, err = certs.SelfSigned(time.Now()); err != nil {
			return nil, nil, fmt.Errorf("-extproc-address: %w", err)
		}
	}
	return nil, gateways, nil
}

// warnInsecure says what Insecure admits.
func (c *Config) warnInsecure() {
	if beyond(c.GRPCAddress) && c.GRPCTLS.Cert == "" {
		c.Log.Warn("gRPC is served without TLS on a non-loopback address", "address", c.GRPCAddress)
	}
	if beyond(c.HTTPAddress) && c.GRPCTLS.Cert == "" {
		c.Log.Warn("HTTP is served without TLS on a non-loopback address", "address", c.HTTPAddress)
	}
	if beyond(c.GatewayAddress) && c.GRPCTLS.Cert == "" {
		c.Log.Warn("the gateway serves without TLS on a non-loopback address", "address", c.GatewayAddress)
	}
	if c.Insecure && c.ExtProcAddress != "" && beyond(c.ExtProcAddress) && c.GRPCTLS.Cert == "" {
		c.Log.Warn("external processing is served without TLS on a non-loopback address", "address", c.ExtProcAddress)
	}
	if c.NATSURL != "" || !beyond(c.NATSAddress) {
		return
	}
	if c.NATSTLS.Cert == "" {
		c.Log.Warn("NATS is served without TLS on a non-loopback address", "address", c.NATSAddress)
	}
	if c.NATSUsers+c.NATSTokenAudience == "" {
		c.Log.Warn("NATS accepts unauthenticated clients on a non-loopback address", "address", c.NATSAddress)
	}
}

// String is the configuration without its secrets.
func (c Config) String() string {
	type plain Config // without this method
	p := plain(c)
	p.NATSURL = settings.RedactURLs(c.NATSURL)
	p.EngineAPIKey = settings.Secret(c.EngineAPIKey)
	p.Log = nil
	return fmt.Sprintf("%+v", p)
}

// GoString is String.
func (c Config) GoString() string { return c.String() }

// LogValue is String.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }
