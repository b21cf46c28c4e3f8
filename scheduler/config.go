package scheduler

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// Config of a scheduler. Every zero value stands for the default named.
// Addresses are host:port; port 0 takes any free port (see Scheduler.Addrs).
type Config struct {
	// Pool of engines to serve: the agents' pool; "default".
	Pool string
	// GRPCAddress to serve the API on; 127.0.0.1:50051.
	GRPCAddress string
	// AdminAddress for /healthz, /readyz, /metrics and /fleet; 127.0.0.1:9090.
	AdminAddress string
	// NATSURL of the server to use, or several with commas between; empty:
	// an embedded one.
	NATSURL string
	// NATSCredentials is a file with credentials for NATSURL; empty: none.
	NATSCredentials string
	// NATSSeed is a file with the seed of our nkey for NATSURL; empty: none.
	NATSSeed string
	// NATSAddress of the embedded server; 127.0.0.1:4222.
	NATSAddress string
	// NATSUsers is a file that says who may use the embedded server and for
	// what (see parseUsers); empty: everybody for everything.
	NATSUsers string
	// NATSTLS of the embedded server: its certificate, and with CA clients must
	// have one too. With NATSURL: CA for that server's certificate, and ours.
	// Zero: the embedded server is plain, another one trusted by the system's CAs.
	NATSTLS TLS
	// GRPCTLS is the certificate of the API; with CA callers must have one too.
	// Zero: plain.
	GRPCTLS TLS
	// Insecure admits GRPCAddress and NATSAddress beyond this machine without
	// TLS, and NATS without users.
	Insecure bool
	// IndexBytes bounds the memory of the index; 1 GiB.
	IndexBytes int64
	// Policy of requests that name none; empty: by predicted time.
	Policy string
	// ShadowPolicy is asked about every request and does not decide: what it
	// would have changed is counted; empty: none.
	ShadowPolicy string
	// MaxMembers bounds the members at a time; 4096.
	MaxMembers int
	// Grace is how long a silent member is remembered; 30 s.
	Grace time.Duration
	// ReadyWait bounds the wait for members that are not exact yet, before the
	// scheduler calls itself ready; 10 s.
	ReadyWait time.Duration
	// EngineAPIKey for asking engines to render and tokenize; empty: none.
	EngineAPIKey string
	// TokenizeTimeout for turning text into tokens; 3 s.
	TokenizeTimeout time.Duration
	// TokenizeCacheBytes bounds the cache of prompts turned into tokens;
	// 64 MiB, negative: no cache.
	TokenizeCacheBytes int64
	// CallTimeout of calls whose caller names none; 5 s.
	CallTimeout time.Duration
	// StopWait bounds the graceful stop; 10 s.
	StopWait time.Duration
	// Version of the program, for telemetry.
	Version string
	// Log; nil: nothing is logged.
	Log *slog.Logger
}

// Defaults returns a Config with every default filled in.
func Defaults() Config { return Config{}.withDefaults() }

func (c Config) withDefaults() Config {
	c.Pool = cmp.Or(c.Pool, "default")
	c.GRPCAddress = cmp.Or(c.GRPCAddress, "127.0.0.1:50051")
	c.AdminAddress = cmp.Or(c.AdminAddress, "127.0.0.1:9090")
	c.NATSAddress = cmp.Or(c.NATSAddress, "127.0.0.1:4222")
	c.IndexBytes = cmp.Or(c.IndexBytes, 1<<30)
	c.MaxMembers = cmp.Or(c.MaxMembers, 4096)
	c.Grace = cmp.Or(c.Grace, 30*time.Second)
	c.ReadyWait = cmp.Or(c.ReadyWait, 10*time.Second)
	c.TokenizeTimeout = cmp.Or(c.TokenizeTimeout, 3*time.Second)
	c.TokenizeCacheBytes = cmp.Or(c.TokenizeCacheBytes, 64<<20)
	c.CallTimeout = cmp.Or(c.CallTimeout, 5*time.Second)
	c.StopWait = cmp.Or(c.StopWait, 10*time.Second)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate names everything that is wrong, after the defaults.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	bad := func(key, format string, v ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", key, fmt.Sprintf(format, v...)))
	}
	if strings.ContainsAny(c.Pool, ". *>\t\r\n") || len(c.Pool) > 100 {
		bad("Pool", "%q must be one NATS subject token of at most 100 bytes", c.Pool)
	}
	for _, a := range []struct{ key, address string }{
		{"GRPCAddress", c.GRPCAddress}, {"AdminAddress", c.AdminAddress}, {"NATSAddress", c.NATSAddress},
	} {
		if _, err := net.ResolveTCPAddr("tcp", a.address); err != nil {
			bad(a.key, "%v", err)
		} else if host, _, _ := net.SplitHostPort(a.address); host == "" {
			bad(a.key, "%q has no host; 0.0.0.0 stands for all of them", a.address)
		}
	}
	if c.NATSURL != "" {
		for part := range strings.SplitSeq(c.NATSURL, ",") {
			if u, err := url.Parse(strings.TrimSpace(part)); err != nil {
				bad("NATSURL", "not a URL") // it may hold a password
			} else if u.Scheme != "nats" && u.Scheme != "tls" && u.Scheme != "ws" && u.Scheme != "wss" || u.Host == "" {
				bad("NATSURL", "must look like nats://host:4222")
			}
		}
	}
	if _, err := policy.Named(c.Policy); err != nil {
		bad("Policy", "%v", err)
	}
	if _, err := policy.Named(c.ShadowPolicy); err != nil {
		bad("ShadowPolicy", "%v", err)
	}
	c.validateAccess(bad)
	for _, n := range []struct {
		key   string
		value int64
	}{
		{"IndexBytes", c.IndexBytes}, {"MaxMembers", int64(c.MaxMembers)}, {"Grace", int64(c.Grace)},
		{"ReadyWait", int64(c.ReadyWait)}, {"TokenizeTimeout", int64(c.TokenizeTimeout)},
		{"CallTimeout", int64(c.CallTimeout)}, {"StopWait", int64(c.StopWait)},
	} {
		if n.value < 0 {
			bad(n.key, "must not be negative")
		}
	}
	return errors.Join(errs...)
}
