package agent

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kvscout/kvscout/agent/internal/rank"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/agent/internal/watch"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/protocol/tlsclient"
)

// NoReplay as Config.Replay says that the engine has no replay socket.
const NoReplay = watch.NoReplay

// Config of an agent. Every zero value stands for the default named; only
// NATSURL has none.
type Config struct {
	// NATSURL of the server to publish to, or several separated by commas.
	NATSURL string
	// NATSCredentials is a file with credentials for NATSURL; empty: none.
	NATSCredentials string
	// NATSSeed is a file with the seed of our nkey for NATSURL; empty: none.
	NATSSeed string
	// NATSToken is a file with the pod's token for NATSURL, which may be renewed at any
	// time; empty: none.
	NATSToken string
	// NATSTLS: CA for the server's certificate, and ours. Zero: by the system's
	// CAs where the server speaks TLS.
	NATSTLS TLS
	// Pool of engines that a scheduler serves together; "default".
	Pool string

	// Engine is the URL of the engine's HTTP server; http://127.0.0.1:8000.
	Engine string
	// EngineAPIKey of the engine; empty: none.
	EngineAPIKey string
	// EngineTLS is how to know the engine where the URL begins with https; zero: by
	// the system's authorities and the URL's host.
	EngineTLS tlsclient.Trust
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
	// with the engine's port behind it if that is not 8000; like Pod. What no
	// member's name can hold protocol.Identity replaces.
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
	// on with its cache state although the engine cannot replay everything any
	// more. Empty: nothing is kept.
	StateDir string

	// Speculative is the engine's method of speculative decoding, as given to its
	// --speculative-config, or "none"; empty: as the engine reports.
	Speculative string
	// AttentionChunk of a model with chunked-local attention, in tokens; 0: as
	// the engine tells.
	AttentionChunk int
	// Groups are the kinds of the engine's KV-cache groups in its order, such as
	// "sliding:128,full", for releases whose events name groups and no kinds (0.20
	// and 0.21); empty: as the events tell.
	Groups string
	// HashSeed is the value of PYTHONHASHSEED in the engine's environment; empty:
	// the engine's default, or a common one. It counts for models no part of which
	// needs a whole prompt, and for hits inside blocks.
	HashSeed string
	// Audit is the time between two audits, which ask the engine while it is
	// idle for one token, to see whether a prefix believed held really is. 0:
	// none. While it is on, the tokens of a few first blocks are kept in memory.
	Audit time.Duration

	// AdminAddress of /healthz, /readyz, /believed, /metrics and /config; empty: none.
	AdminAddress string
	// Heartbeat is the time between two signs of life; 300 ms. Schedulers suspect
	// who misses three of them.
	Heartbeat time.Duration
	// Probe is the time between two polls of the engine's metrics; 1 s.
	Probe time.Duration
	// ProbeTimeout is how long the engine may take to answer one; 2 s.
	// ProbeFailures in a row make a member unreachable, which is then not
	// chosen; 3.
	ProbeTimeout  time.Duration
	ProbeFailures int
	// Told is what the program was told, by name and without secrets, to be shown
	// at /config; empty: nothing.
	Told []settings.Setting
	// Version of the program, for telemetry and schedulers.
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
	defaultEngine = "http://127.0.0.1:8000"
	// maxLabels of a member, maxLabel bytes of one.
	maxLabels, maxLabel = 64, 256
	// roleLabel says what a member is for.
	roleLabel = "kvscout.role"
)

// Settings are what is in force, by name and without secrets: what the program
// was told, with what became of what it was not.
func (c Config) Settings() []settings.Setting {
	d := c.withDefaults()
	list := slices.Clone(c.Told)
	for i := range list {
		switch s := &list[i]; s.Name {
		case "pod":
			s.Value = d.Pod
		case "pod-uid":
			s.Value = d.PodUID
		case "address":
			s.Value = d.Address
		}
	}
	return list
}

// Defaults returns a Config with every default filled in that does not depend
// on another value.
func Defaults() Config {
	return Config{Pool: "default", Engine: defaultEngine, Namespace: "default", Heartbeat: protocol.HeartbeatEvery, Probe: time.Second, ProbeTimeout: 2 * time.Second, ProbeFailures: 3}
}

func (c Config) withDefaults() Config {
	d := Defaults()
	c.Pool = cmp.Or(c.Pool, d.Pool)
	c.Engine = cmp.Or(c.Engine, d.Engine)
	c.Namespace = cmp.Or(c.Namespace, d.Namespace)
	c.Heartbeat = cmp.Or(c.Heartbeat, d.Heartbeat)
	c.Probe = cmp.Or(c.Probe, d.Probe)
	c.ProbeTimeout = cmp.Or(c.ProbeTimeout, d.ProbeTimeout)
	c.ProbeFailures = cmp.Or(c.ProbeFailures, d.ProbeFailures)
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
	id := protocol.Identity(c.Namespace, cmp.Or(c.PodUID, c.Pod), 0)
	c.Namespace, c.PodUID = id.Namespace, id.PodUID
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate names everything that is wrong, after the defaults.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	bad := func(name, example, format string, v ...any) {
		errs = append(errs, &settings.Error{Name: name, Why: fmt.Sprintf(format, v...), Example: example})
	}
	if c.NATSURL == "" {
		bad("nats-url", "nats://nats:4222", "is missing")
	}
	for part := range strings.SplitSeq(c.NATSURL, ",") {
		// The URL may hold a password: it is never quoted.
		if u, err := url.Parse(strings.TrimSpace(part)); c.NATSURL != "" && (err != nil || u.Host == "" ||
			u.Scheme != "nats" && u.Scheme != "tls" && u.Scheme != "ws" && u.Scheme != "wss") {
			bad("nats-url", "nats://nats:4222", "must look like nats://host:4222")
		}
	}
	if c.NATSCredentials != "" && c.NATSSeed != "" {
		bad("nats-seed", "", "and -nats-credentials are two ways to say who we are; set one")
	}
	if c.NATSToken != "" && c.NATSCredentials+c.NATSSeed != "" {
		bad("nats-token-file", "", "and -nats-seed or -nats-credentials are two ways to say who we are; set one")
	}
	switch {
	case c.NATSTLS.Cert != "" && c.NATSTLS.Key == "":
		bad("nats-tls-key", "/etc/kvscout/tls.key", "is missing: -nats-tls-cert is set, and the two belong together")
	case c.NATSTLS.Cert == "" && c.NATSTLS.Key != "":
		bad("nats-tls-cert", "/etc/kvscout/tls.crt", "is missing: -nats-tls-key is set, and the two belong together")
	}
	if _, err := protocol.NewSubjects(c.Pool); err != nil {
		bad("pool", "default", "%v", err)
	}
	if _, err := vllm.NewEngine(vllm.EngineConfig{URL: c.Engine}); err != nil {
		bad("engine", "http://127.0.0.1:8000", "%v", err)
	}
	if c.Events == "" && c.EventsBind {
		bad("events", "tcp://127.0.0.1:5557", "must name the address to listen on with -events-mode bind")
	}
	for _, e := range []struct{ name, example, value string }{{"events", "tcp://127.0.0.1:5557", c.Events}, {"replay", "tcp://127.0.0.1:5657", c.Replay}} {
		if e.value == "" || e.name == "replay" && e.value == NoReplay {
			continue
		}
		if err := vllm.CheckEndpoint(e.value, e.name == "events" && c.EventsBind); err != nil {
			bad(e.name, e.example, "%v", err)
		}
	}
	if c.Address != "" {
		if _, err := protocol.ParseAddress(c.Address); err != nil {
			bad("address", "10.0.0.7:8000", "%v", err)
		}
	} else if engine, err := vllm.NewEngine(vllm.EngineConfig{URL: c.Engine}); err == nil {
		if _, err := protocol.ParseAddress(engine.Address()); err != nil {
			bad("address", "10.0.0.7:8000", "is not set, and that of -engine cannot be announced: %v", err)
		}
	}
	if len(c.Labels) > maxLabels {
		bad("label", "kvscout.gpu=H100", "%d of them, at most %d", len(c.Labels), maxLabels)
	}
	for key, value := range c.Labels {
		if key == "" || len(key)+len(value) > maxLabel || !utf8.ValidString(key+value) {
			bad("label", "kvscout.gpu=H100", "%.80q: a label is text of at most %d bytes with a key", key, maxLabel)
		}
	}
	switch role := c.Labels[roleLabel]; role {
	case "", "prefill", "decode", "both":
	default:
		bad("label", "kvscout.gpu=H100", "%s is %.80q: it must be prefill, decode or both", roleLabel, role)
	}
	if c.AdminAddress != "" {
		if _, _, err := net.SplitHostPort(c.AdminAddress); err != nil {
			bad("admin-address", "127.0.0.1:9478", "%v", err)
		}
	}
	if c.BlockSize < 0 || c.BlockSize > 1<<20 {
		bad("block-size", "16", "%d is not between 0 and %d", c.BlockSize, 1<<20)
	}
	if c.Heartbeat < 10*time.Millisecond || c.Heartbeat > time.Minute {
		bad("heartbeat", "300ms", "%v is not between 10ms and 1m", c.Heartbeat)
	}
	if !rank.KnowsMethod(c.Speculative) {
		bad("speculative", "eagle3", "%q is no method that is known: eagle, eagle3, mtp, ngram, draft_model, medusa, suffix or none", c.Speculative)
	}
	if c.AttentionChunk < 0 {
		bad("attention-chunk", "8192", "%d is negative", c.AttentionChunk)
	}
	if _, err := rank.ParseGroups(c.Groups); err != nil {
		bad("groups", "sliding:128,full", "%v", err)
	}
	if c.Audit != 0 && (c.Audit < 10*time.Millisecond || c.Audit > 24*time.Hour) {
		bad("audit", "1m", "%v is neither 0 nor between 10ms and 24h", c.Audit)
	}
	if c.ProbeTimeout < 10*time.Millisecond || c.ProbeTimeout > time.Minute {
		bad("probe-timeout", "2s", "%v is not between 10ms and 1m", c.ProbeTimeout)
	}
	if c.ProbeFailures < 1 || c.ProbeFailures > 1000 {
		bad("probe-failures", "3", "%d is not between 1 and 1000", c.ProbeFailures)
	}
	if c.Probe < 10*time.Millisecond || c.Probe > time.Minute {
		bad("probe", "1s", "%v is not between 10ms and 1m", c.Probe)
	}
	return errors.Join(errs...)
}

// logIdentity says what became of names that no member's name can hold: rights
// at NATS must name what they became.
func (c Config) logIdentity(given Config) {
	for _, n := range []struct{ what, given, used string }{
		{"namespace", given.Namespace, c.Namespace}, {"pod uid", cmp.Or(given.PodUID, c.Pod), c.PodUID},
	} {
		if n.given != "" && n.given != n.used {
			c.Log.Warn("a name was cleaned up, NATS permissions must use the new form", "what", n.what, "given", n.given, "used", n.used)
		}
	}
}

// member is the name of a rank, after the defaults.
func (c Config) member(rank int) (string, error) {
	return protocol.Member{Namespace: c.Namespace, PodUID: c.PodUID, Rank: uint32(rank)}.Name()
}

// String is the configuration without its secrets.
func (c Config) String() string {
	type plain Config // without this method
	p := plain(c)
	p.NATSURL, p.Engine = settings.RedactURLs(c.NATSURL), settings.RedactURLs(c.Engine)
	p.EngineAPIKey = settings.Secret(c.EngineAPIKey)
	p.Log = nil
	return fmt.Sprintf("%+v", p)
}

// GoString is String.
func (c Config) GoString() string { return c.String() }

// LogValue is String.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }
