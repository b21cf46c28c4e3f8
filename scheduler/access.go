package scheduler

import (
	"fmt"
	"log/slog"
	"net"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvscout/kvscout/protocol/settings"
)

// validateAccess says what is wrong with who may connect, and how.
func (c Config) validateAccess(bad func(key, format string, v ...any)) {
	for _, t := range []struct {
		key string
		tls TLS
	}{{"GRPCTLS", c.GRPCTLS}, {"NATSTLS", c.NATSTLS}} {
		if (t.tls.Cert == "") != (t.tls.Key == "") {
			bad(t.key, "Cert and Key belong together")
		}
	}
	if c.GRPCTLS.CA != "" && c.GRPCTLS.Cert == "" {
		bad("GRPCTLS", "CA is for callers' certificates, and needs Cert and Key of the server")
	}
	if !c.Insecure && beyond(c.GRPCAddress) && c.GRPCTLS.Cert == "" {
		bad("GRPCAddress", "%s can be reached from elsewhere: set GRPCTLS, or Insecure to serve plain text", c.GRPCAddress)
	}
	if c.NATSURL == "" {
		if c.NATSCredentials != "" {
			bad("NATSCredentials", "are for a server named by NATSURL")
		}
		if c.NATSSeed != "" {
			bad("NATSSeed", "is for a server named by NATSURL")
		}
		if c.NATSTLS.CA != "" && c.NATSTLS.Cert == "" {
			bad("NATSTLS", "CA is for clients' certificates, and needs Cert and Key of the server")
		}
		if !c.Insecure && beyond(c.NATSAddress) && (c.NATSTLS.Cert == "" || c.NATSUsers == "") {
			bad("NATSAddress", "%s can be reached from elsewhere: set NATSTLS and NATSUsers, or Insecure to serve anybody in plain text", c.NATSAddress)
		}
		return
	}
	if c.NATSUsers != "" {
		bad("NATSUsers", "are of the embedded server; the one named by NATSURL has users of its own")
	}
	if c.NATSCredentials != "" && c.NATSSeed != "" {
		bad("NATSSeed", "and NATSCredentials are two ways to say who we are; set one")
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

// transport is how the API is served.
func (c *Config) transport() (credentials.TransportCredentials, error) {
	if c.GRPCTLS.Cert == "" {
		return insecure.NewCredentials(), nil
	}
	files, err := newCertificates(c.GRPCTLS, c.Log.With("room", "grpc"))
	if err != nil {
		return nil, fmt.Errorf("GRPCTLS: %w", err)
	}
	return credentials.NewTLS(files.server()), nil
}

// warnInsecure says what Insecure admits.
func (c *Config) warnInsecure() {
	if beyond(c.GRPCAddress) && c.GRPCTLS.Cert == "" {
		c.Log.Warn("gRPC is served in plain text beyond this machine", "address", c.GRPCAddress)
	}
	if c.NATSURL != "" || !beyond(c.NATSAddress) {
		return
	}
	if c.NATSTLS.Cert == "" {
		c.Log.Warn("NATS is served in plain text beyond this machine", "address", c.NATSAddress)
	}
	if c.NATSUsers == "" {
		c.Log.Warn("NATS asks nobody who he is, and listens beyond this machine", "address", c.NATSAddress)
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
