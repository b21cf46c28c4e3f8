package scheduler

import (
	"cmp"
	"errors"
	"flag"
	"log/slog"
	"net"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/kvscout/kvscout/protocol/kube"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/protocol/tlsclient"
	"github.com/kvscout/kvscout/scheduler/internal/admission"
	"github.com/kvscout/kvscout/scheduler/internal/bus"
	"github.com/kvscout/kvscout/scheduler/internal/certs"
	"github.com/kvscout/kvscout/scheduler/internal/cluster"
	"github.com/kvscout/kvscout/scheduler/internal/extproc"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
	"github.com/kvscout/kvscout/scheduler/internal/membership"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/serve"
)

// TLS names PEM files of a certificate, its key and a CA.
type TLS = certs.Files

// Config of a scheduler. Every zero value stands for the default named.
// Addresses are host:port; port 0 takes any free port (see Scheduler.Addrs).
type Config struct {
	// Pool of engines to serve: the agents' pool; "default".
	Pool string
	// GRPCAddress to serve the API on; 127.0.0.1:50051.
	GRPCAddress string
	// HTTPAddress to serve the API on as HTTP/JSON; empty: it is not.
	HTTPAddress string
	// ExtProcAddress to serve Envoy's external processing on; empty: it is not served.
	ExtProcAddress string
	// ExtProcEndpoints are named at most to a gateway for each request; 1.
	ExtProcEndpoints int
	// ExtProcObjectives are the priorities of requests by the objective that they name
	// in a header, like chat=10,batch=-10; one that is not there is 0.
	ExtProcObjectives string
	// ExtProcPriority: the engines of a gateway serve by the priority in requests, and
	// get it there.
	ExtProcPriority bool
	// ExtProcModeOverride: a gateway that shows no bodies (NONE) allows that to be
	// overridden, and is told to show them.
	ExtProcModeOverride bool
	// GatewayAddress to serve OpenAI requests on, each sent to the member that is
	// picked; empty: they are not.
	GatewayAddress string
	// AdminAddress for /healthz, /readyz, /metrics and /v1/members; 127.0.0.1:9479.
	AdminAddress string
	// NATSURL of the server to use, or several separated by commas; empty:
	// an embedded one.
	NATSURL string
	// NATSCredentials is a file with credentials for NATSURL; empty: none.
	NATSCredentials string
	// NATSSeed is a file with the seed of our nkey for NATSURL; empty: none.
	NATSSeed string
	// NATSAddress of the embedded server; 127.0.0.1:4222.
	NATSAddress string
	// NATSUsers is a file that says who may use the embedded server and for
	// what (docs/SECURITY.md); empty: everybody for everything.
	NATSUsers string
	// NATSTokenAudience is the audience of service-account tokens of Kubernetes, by which
	// agents may say to the embedded server which pod they are; empty: they may not.
	NATSTokenAudience string
	// NATSTLS of the embedded server: its certificate, and with CA clients must
	// have one too. With NATSURL: CA for that server's certificate, and ours.
	// Zero: the embedded server is plain, another one trusted by the system's CAs.
	NATSTLS TLS
	// GRPCTLS is the certificate of the API, as HTTP/JSON too; with CA callers must
	// have one too. Zero: plain.
	GRPCTLS TLS
	// Operators names, separated by commas, whose certificates may use the service
	// Admin: common names, DNS names or URIs; empty: everybody who may call.
	Operators string
	// EngineAddresses are the networks (10.0.0.0/8) and ends of names
	// (.svc.cluster.local) separated by commas, that members' addresses may lie
	// in: who announces another one is refused. Empty: any, but EngineAPIKey and
	// prompts go only where a member connects from, as far as that is known.
	EngineAddresses string
	// Namespaces is a file that says which namespaces may serve which models in
	// which pools (docs/SECURITY.md); empty: all may serve everything.
	Namespaces string
	// KubernetesNamespaces are those, separated by commas, whose pods are followed
	// through Kubernetes' API, * for all: members must be pods of them, and pods that
	// are about to go are withdrawn (docs/KUBERNETES.md). Empty: nothing is asked there.
	KubernetesNamespaces string
	// InferencePool is NAMESPACE/NAME of one of the Gateway API: members must be pods that
	// it selects, at one of its target ports; empty: there is none.
	InferencePool string
	// Kubernetes is the URL of the API server; empty: that of the cluster that the
	// process runs in, by its environment.
	Kubernetes string
	// ServiceAccount is the folder with token and ca.crt for the API server;
	// kube.ServiceAccount.
	ServiceAccount string
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
	// AllowedPolicies names separated by commas, the policies that requests may
	// ask for besides Policy and ShadowPolicy, with any parameters; empty: all.
	AllowedPolicies string
	// SessionHeaders and SessionFields name separated by commas, the headers
	// and the fields of OpenAI bodies in which requests name their session, if
	// they do not do so themselves; empty: none.
	SessionHeaders, SessionFields string
	// QueueLength is how many requests may wait for room, for each model; 0: none
	// waits, every Pick is answered at once.
	QueueLength int
	// QueueBytes bounds what waiting requests of one model take, and twice that
	// what those of all models take; 256 MiB.
	QueueBytes int64
	// QueueWait bounds the wait of one request; 60 s.
	QueueWait time.Duration
	// QueueAge is how much later a request may come and still be served before
	// one that waits; 10 s.
	QueueAge time.Duration
	// QueueBudget is the prefill that a member may have before requests wait
	// for it; 1 s.
	QueueBudget time.Duration
	// Profiles is a file, or a folder of files, with what was measured of the
	// members (see docs/OPERATIONS.md); empty: all is learned.
	Profiles string
	// TTFTTarget, TPOTTarget and E2ETarget of requests that name none and whose
	// profile has none: to the first token, a token of output, to the end; 0:
	// none.
	TTFTTarget, TPOTTarget, E2ETarget time.Duration
	// Disaggregate: where members have roles, another one than the one that
	// decodes prefills from so many tokens on; 0: none does.
	Disaggregate int
	// PullTokenTime is the time that a token's blocks take from one member to
	// another, where engines can pull them; 0: they cannot.
	PullTokenTime time.Duration
	// MaxMembers bounds the members at a time; 4096.
	MaxMembers int
	// MaxDecisions bounds the decisions that are remembered at a time; 65536.
	MaxDecisions int
	// Grace is how long a silent member is remembered; 30 s.
	Grace time.Duration
	// ReadyWait bounds the wait for members that are not exact yet, before the
	// scheduler calls itself ready; 10 s.
	ReadyWait time.Duration
	// EngineTLS is how to know engines that speak TLS; zero: by the system's
	// authorities and their addresses.
	EngineTLS tlsclient.Trust
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
	// Told is what the program was told besides, to be shown with the rest.
	Told []settings.Setting
	// Version of the program, for telemetry and agents.
	Version string
	// Log; nil: nothing is logged.
	Log *slog.Logger
}

// Defaults returns a Config with every default filled in.
func Defaults() Config { return Config{}.withDefaults() }

func (c Config) withDefaults() Config {
	c.Pool = cmp.Or(c.Pool, "default")
	c.GRPCAddress = cmp.Or(c.GRPCAddress, "127.0.0.1:50051")
	c.ExtProcEndpoints = cmp.Or(c.ExtProcEndpoints, 1)
	c.AdminAddress = cmp.Or(c.AdminAddress, "127.0.0.1:9479")
	c.NATSAddress = cmp.Or(c.NATSAddress, "127.0.0.1:4222")
	c.ServiceAccount = cmp.Or(c.ServiceAccount, kube.ServiceAccount)
	c.IndexBytes = cmp.Or(c.IndexBytes, 1<<30)
	c.QueueBytes = cmp.Or(c.QueueBytes, 256<<20)
	c.QueueWait = cmp.Or(c.QueueWait, time.Minute)
	c.QueueAge = cmp.Or(c.QueueAge, 10*time.Second)
	c.QueueBudget = cmp.Or(c.QueueBudget, time.Second)
	c.MaxMembers = cmp.Or(c.MaxMembers, 4096)
	c.MaxDecisions = cmp.Or(c.MaxDecisions, 65536)
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

// admission is how requests wait.
func (c *Config) admission() admission.Rules {
	return admission.Rules{Length: c.QueueLength, Bytes: c.QueueBytes, Age: c.QueueAge, BudgetMS: ms(c.QueueBudget), Wait: c.QueueWait}
}

// gateway is what the endpoint picker goes by; the configuration is valid.
func (c *Config) gateway() extproc.Options {
	objectives, err := extproc.ParseObjectives(c.ExtProcObjectives)
	if err != nil {
		panic(err) // Validate has seen it
	}
	return extproc.Options{Endpoints: c.ExtProcEndpoints, Objectives: objectives, Priority: c.ExtProcPriority, ModeOverride: c.ExtProcModeOverride}
}

// sessions is where requests name theirs; the configuration is valid.
func (c *Config) sessions() intake.Sessions {
	s, err := intake.NewSessions(c.SessionHeaders, c.SessionFields)
	if err != nil {
		panic(err) // Validate has seen it
	}
	return s
}

// cluster follows the pods of KubernetesNamespaces; nil: there are none. The
// configuration is valid.
func (c *Config) cluster(client *kube.Client, changed func()) *cluster.Cluster {
	if c.KubernetesNamespaces+c.InferencePool == "" {
		return nil
	}
	pool, err := cluster.ParsePool(c.InferencePool)
	names := []string{pool.Namespace}
	if err == nil && c.InferencePool == "" {
		names, err = cluster.ParseNamespaces(c.KubernetesNamespaces)
	}
	if err != nil {
		panic(err) // Validate has seen it
	}
	return cluster.New(cluster.Config{Client: client, Namespaces: names, Pool: pool, Changed: changed, Log: c.Log.With("component", "kubernetes")})
}

// kube is who is asked about Kubernetes' objects; the configuration is valid.
func (c *Config) kube() *kube.Client {
	url, _ := kube.Discover(c.Kubernetes, os.Getenv) // empty where nobody is asked
	return kube.New(url, c.ServiceAccount)
}

// bus is the connection to NATS.
func (c *Config) bus(tokens bus.Review) bus.Config {
	return bus.Config{
		Pool: c.Pool, URL: c.NATSURL, Credentials: c.NATSCredentials, Seed: c.NATSSeed,
		Address: c.NATSAddress, Users: c.NATSUsers, Tokens: tokens, TLS: c.NATSTLS, Log: c.Log.With("component", "nats"),
	}
}

// policies that the picker uses.
func (c *Config) policies() pick.Policies {
	return pick.Policies{
		Policy: c.Policy, Shadow: c.ShadowPolicy, Allowed: c.allowed(), Targets: c.targets(),
		Disaggregate: c.Disaggregate, PullMS: ms(c.PullTokenTime),
	}
}

// allowed lists AllowedPolicies.
func (c *Config) allowed() []string {
	if c.AllowedPolicies == "" {
		return nil
	}
	list := strings.Split(c.AllowedPolicies, ",")
	for i := range list {
		list[i] = strings.TrimSpace(list[i])
	}
	return list
}

// targets of requests that have none.
func (c *Config) targets() policy.Targets {
	return policy.Targets{TTFT: ms(c.TTFTTarget), TPOT: ms(c.TPOTTarget), E2E: ms(c.E2ETarget)}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// wrong is an error about the setting of a name, as Flags has it.
func wrong(name, format string, v ...any) error {
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	d := Defaults()
	d.Flags(fs)
	return settings.Wrong(fs, name, format, v...)
}

// Validate names everything that is wrong, after the defaults, as settings.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	bad := func(name, format string, v ...any) { errs = append(errs, wrong(name, format, v...)) }
	if strings.ContainsAny(c.Pool, ". *>\t\r\n") || len(c.Pool) > 100 {
		bad("pool", "%q must be one NATS subject token of at most 100 bytes", c.Pool)
	}
	for _, a := range []struct{ key, address string }{
		{"grpc-address", c.GRPCAddress}, {"admin-address", c.AdminAddress}, {"nats-address", c.NATSAddress},
		{"http-address", c.HTTPAddress},
		{"extproc-address", c.ExtProcAddress}, {"gateway", c.GatewayAddress},
	} {
		if a.address == "" {
			continue // not served
		}
		if _, err := net.ResolveTCPAddr("tcp", a.address); err != nil {
			bad(a.key, "%v", err)
		} else if host, _, _ := net.SplitHostPort(a.address); host == "" {
			bad(a.key, "%q has no host; 0.0.0.0 stands for all of them", a.address)
		}
	}
	if c.NATSURL != "" {
		for part := range strings.SplitSeq(c.NATSURL, ",") {
			if u, err := url.Parse(strings.TrimSpace(part)); err != nil {
				bad("nats-url", "not a URL") // it may hold a password
			} else if u.Scheme != "nats" && u.Scheme != "tls" && u.Scheme != "ws" && u.Scheme != "wss" || u.Host == "" {
				bad("nats-url", "must look like nats://host:4222")
			}
		}
	}
	if _, err := policy.Named(c.Policy); err != nil {
		bad("policy", "%v", err)
	}
	if _, err := policy.Named(c.ShadowPolicy); err != nil {
		bad("shadow-policy", "%v", err)
	}
	if err := (&pick.Policies{Allowed: c.allowed()}).Check(); err != nil {
		bad("AllowedPolicies", "%v; want names separated by commas, like %s,session", err, policy.Default)
	}
	if _, err := extproc.ParseObjectives(c.ExtProcObjectives); err != nil {
		bad("extproc-objectives", "%v", err)
	}
	if _, err := intake.NewSessions(c.SessionHeaders, ""); err != nil {
		bad("session-headers", "%v", err)
	}
	if _, err := intake.NewSessions("", c.SessionFields); err != nil {
		bad("session-fields", "%v", err)
	}
	if err := membership.CheckAddresses(c.EngineAddresses); err != nil {
		bad("engine-addresses", "%v", err)
	}
	if c.KubernetesNamespaces != "" {
		if _, err := cluster.ParseNamespaces(c.KubernetesNamespaces); err != nil {
			bad("kubernetes-namespaces", "%v", err)
		}
	}
	if _, err := cluster.ParsePool(c.InferencePool); err != nil {
		bad("inference-pool", "%q: %v", c.InferencePool, err)
	} else if c.InferencePool != "" && c.KubernetesNamespaces != "" {
		bad("kubernetes-namespaces", "and -inference-pool are two ways to say whose pods are followed; set one")
	}
	if c.KubernetesNamespaces+c.InferencePool+c.NATSTokenAudience != "" {
		if _, err := kube.Discover(c.Kubernetes, os.Getenv); err != nil {
			bad("kubernetes", "%v", err)
		}
	}
	if c.QueueLength > longestQueue {
		bad("queue-length", "%d: want 0 to %d requests of a model", c.QueueLength, longestQueue)
	}
	if c.QueueWait > serve.LongestWait {
		bad("queue-wait", "%v: want at most %v, as connections do not last for ever", c.QueueWait, serve.LongestWait)
	}
	c.validateAccess(bad)
	for _, n := range []struct {
		key   string
		value int64
	}{
		{"extproc-endpoints", int64(c.ExtProcEndpoints)}, {"queue-length", int64(c.QueueLength)}, {"queue-memory", c.QueueBytes}, {"queue-wait", int64(c.QueueWait)},
		{"queue-age", int64(c.QueueAge)}, {"queue-budget", int64(c.QueueBudget)},
		{"ttft-target", int64(c.TTFTTarget)}, {"tpot-target", int64(c.TPOTTarget)}, {"e2e-target", int64(c.E2ETarget)},
		{"disaggregate", int64(c.Disaggregate)}, {"pull-token-time", int64(c.PullTokenTime)},
		{"index-memory", c.IndexBytes}, {"max-members", int64(c.MaxMembers)}, {"MaxDecisions", int64(c.MaxDecisions)}, {"grace", int64(c.Grace)},
		{"ready-wait", int64(c.ReadyWait)}, {"tokenize-timeout", int64(c.TokenizeTimeout)},
		{"call-timeout", int64(c.CallTimeout)}, {"stop-wait", int64(c.StopWait)},
	} {
		if n.value < 0 {
			bad(n.key, "must not be negative")
		}
	}
	return errors.Join(errs...)
}
