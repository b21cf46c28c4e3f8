package agent

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol"
)

// NoReplay as Config.Replay says that the engine has no replay socket.
const NoReplay = "none"

// Config of an agent. Every zero value stands for the default named; only
// NATSURL has none.
type Config struct {
	// NATSURL of the server to publish to, or several with commas between.
	NATSURL string
	// NATSCredentials is a file with credentials for NATSURL; empty: none.
	NATSCredentials string
	// NATSSeed is a file with the seed of our nkey for NATSURL; empty: none.
	NATSSeed string
	// NATSTLS: CA for the server's certificate, and ours. Zero: by the system's
	// CAs where the server speaks TLS.
	NATSTLS TLS
	// Pool of engines that a scheduler serves together; "default".
	Pool string

	// Engine is the URL of the engine's HTTP server; http://127.0.0.1:8000.
	Engine string
	// EngineAPIKey of the engine; empty: none.
	EngineAPIKey string
	// Events is where rank 0 publishes its events; other ranks add their number
	// to the port. Empty: what the engine says (0.31 and later), else port 5557
	// on the engine's host.
	Events string
	// EventsBind listens on Events, for engines that connect to a subscriber.
	EventsBind bool
	// Replay is where rank 0 replays its events; NoReplay: nowhere. Empty: what
	// the engine says, else the port of Events + 100 on the engine's host.
	Replay string
	// Topic to subscribe to, a prefix; empty: everything.
	Topic string
	// Model is the identity of the block keys. Empty: the engine's first served
	// name, as it should be unless two pools must agree on another one.
	Model string
	// BlockSize in tokens; 0: learned from the engine.
	BlockSize int

	// Namespace, Pod and PodUID name the member. "default"; the host's name,
	// with the engine's port behind it if that is not 8000; like Pod.
	Namespace, Pod, PodUID string
	// Address that requests are sent to, host:port; the engine's, on PodIP if
	// that is known.
	Address string
	PodIP   string

	// Labels say more about the member; the scheduler gives a meaning to those in
	// docs/OPERATIONS.md. At most 64, of 256 bytes each.
	Labels map[string]string

	// StateDir is a folder that outlives the agent's process, not the pod (an
	// emptyDir), for one file a rank: with it an agent that restarts alone goes
	// on with its picture although the engine cannot replay everything any
	// more. Empty: nothing is kept.
	StateDir string

	// Audit is the time between two audits, which ask the engine while it is
	// idle for one token, to see whether a prefix believed held really is. 0:
	// none. While it is on, the tokens of a few first blocks are kept in memory.
	Audit time.Duration

	// Listen is the address of /healthz, /readyz and /metrics; empty: none.
	Listen string
	// Heartbeat is the time between two signs of life; 300 ms. Schedulers doubt
	// who misses three of them.
	Heartbeat time.Duration
	// Probe is the time between two looks at the engine's metrics; 1 s.
	Probe time.Duration
	// Version of the program, for telemetry.
	Version string
	// Log; nil: nothing is logged.
	Log *slog.Logger
}

// TLS names PEM files. They are read again for every new connection, so that
// a renewed certificate is used without a restart.
type TLS struct {
	// Cert and Key are our certificate, with its chain, and its private key.
	Cert, Key string
	// CA holds the certificates of those whom we trust to have signed the
	// server's.
	CA string
}

const (
	defaultEngine     = "http://127.0.0.1:8000"
	defaultEventsPort = "5557"
	replayOffset      = 100
	// maxLabels of a member, maxLabel bytes of one.
	maxLabels, maxLabel = 64, 256
	// roleLabel says what a member is for.
	roleLabel = "kvscout.role"
)

// Defaults returns a Config with every default filled in that does not depend
// on another value.
func Defaults() Config {
	return Config{Pool: "default", Engine: defaultEngine, Namespace: "default", Heartbeat: protocol.HeartbeatEvery, Probe: time.Second}
}

func (c Config) withDefaults() Config {
	d := Defaults()
	c.Pool = cmp.Or(c.Pool, d.Pool)
	c.Engine = cmp.Or(c.Engine, d.Engine)
	c.Namespace = cmp.Or(c.Namespace, d.Namespace)
	c.Heartbeat = cmp.Or(c.Heartbeat, d.Heartbeat)
	c.Probe = cmp.Or(c.Probe, d.Probe)
	port := ""
	if u, err := url.Parse(c.Engine); err == nil {
		port = u.Port()
		if c.PodIP != "" {
			c.Address = cmp.Or(c.Address, net.JoinHostPort(c.PodIP, cmp.Or(port, "80")))
		}
	}
	if c.Pod == "" {
		host, err := os.Hostname()
		if err != nil || host == "" {
			host = "localhost"
		}
		c.Pod = host
		if port != "" && port != "8000" {
			c.Pod += "-" + port
		}
	}
	c.PodUID = cmp.Or(c.PodUID, c.Pod)
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
	if c.NATSURL == "" {
		bad("NATSURL", "is missing; it looks like nats://host:4222")
	}
	for part := range strings.SplitSeq(c.NATSURL, ",") {
		// The URL may hold a password: it is never quoted.
		if u, err := url.Parse(strings.TrimSpace(part)); c.NATSURL != "" && (err != nil || u.Host == "" ||
			u.Scheme != "nats" && u.Scheme != "tls" && u.Scheme != "ws" && u.Scheme != "wss") {
			bad("NATSURL", "must look like nats://host:4222")
		}
	}
	if c.NATSCredentials != "" && c.NATSSeed != "" {
		bad("NATSSeed", "and NATSCredentials are two ways to say who we are; set one")
	}
	if (c.NATSTLS.Cert == "") != (c.NATSTLS.Key == "") {
		bad("NATSTLS", "Cert and Key belong together")
	}
	if _, err := protocol.NewSubjects(c.Pool); err != nil {
		bad("Pool", "%v", err)
	}
	if _, err := vllm.NewEngine(vllm.EngineConfig{URL: c.Engine}); err != nil {
		bad("Engine", "%v", err)
	}
	if c.Events == "" && c.EventsBind {
		bad("Events", "must name the address to listen on when EventsBind is set")
	}
	for _, e := range []struct{ key, value string }{{"Events", c.Events}, {"Replay", c.Replay}} {
		if e.value == "" || e.key == "Replay" && e.value == NoReplay {
			continue
		}
		if err := vllm.CheckEndpoint(e.value, e.key == "Events" && c.EventsBind); err != nil {
			bad(e.key, "%v", err)
		}
	}
	if _, err := c.member(0); err != nil {
		bad("Namespace, PodUID", "%v", err)
	}
	if c.Address != "" {
		if host, port, err := net.SplitHostPort(c.Address); err != nil || host == "" || port == "" {
			bad("Address", "%q is not host:port", c.Address)
		}
	}
	if len(c.Labels) > maxLabels {
		bad("Labels", "%d of them, at most %d", len(c.Labels), maxLabels)
	}
	for key, value := range c.Labels {
		if key == "" || len(key)+len(value) > maxLabel || !utf8.ValidString(key+value) {
			bad("Labels", "%.80q: a label is text of at most %d bytes with a key", key, maxLabel)
		}
	}
	switch role := c.Labels[roleLabel]; role {
	case "", "prefill", "decode", "both":
	default:
		bad("Labels", "%s is %.80q: it must be prefill, decode or both", roleLabel, role)
	}
	if c.Listen != "" {
		if _, _, err := net.SplitHostPort(c.Listen); err != nil {
			bad("Listen", "%v", err)
		}
	}
	if c.BlockSize < 0 || c.BlockSize > 1<<20 {
		bad("BlockSize", "%d is not between 0 and %d", c.BlockSize, 1<<20)
	}
	if c.Heartbeat < 10*time.Millisecond || c.Heartbeat > time.Minute {
		bad("Heartbeat", "%v is not between 10ms and 1m", c.Heartbeat)
	}
	if c.Audit != 0 && (c.Audit < 10*time.Millisecond || c.Audit > 24*time.Hour) {
		bad("Audit", "%v is neither 0 nor between 10ms and 24h", c.Audit)
	}
	if c.Probe < 10*time.Millisecond || c.Probe > time.Minute {
		bad("Probe", "%v is not between 10ms and 1m", c.Probe)
	}
	return errors.Join(errs...)
}

// member is the name of a rank. What a subject does not allow becomes '-'.
func (c Config) member(rank int) (string, error) {
	clean := func(s string) string {
		return strings.Map(func(r rune) rune {
			switch {
			case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', r == '-':
				return r
			}
			return '-'
		}, s)
	}
	return protocol.Member{Namespace: clean(c.Namespace), PodUID: clean(c.PodUID), Rank: uint32(rank)}.Name()
}
