package scheduler

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kvscout/kvscout/protocol/settings"
)

// live are the settings that Reload changes.
var live = map[string]bool{"policy": true, "shadow-policy": true, "allowed-policies": true, "call-timeout": true, "stop-wait": true,
	"session-headers": true, "session-fields": true,
	"queue-length": true, "queue-memory": true, "queue-wait": true, "queue-age": true, "queue-budget": true,
	"ttft-target": true, "tpot-target": true, "e2e-target": true,
	"disaggregate": true, "pull-token-time": true}

// Live tells whether a setting can be changed while a scheduler runs.
func Live(name string) bool { return live[name] }

// Flags binds every setting to a flag: name, form and meaning of all of them
// stand here and nowhere else.
func (c *Config) Flags(fs *flag.FlagSet) {
	fs.StringVar(&c.Pool, "pool", c.Pool, "`name` of the pool of engines to serve, as given to the agents")
	fs.StringVar(&c.GRPCAddress, "grpc-address", c.GRPCAddress, "`host:port` to serve the gRPC API on")
	fs.StringVar(&c.HTTPAddress, "http-address", c.HTTPAddress, "`host:port` to serve the API on as HTTP/JSON, with the certificate and the rights of gRPC; empty: it is not")
	fs.StringVar(&c.GatewayAddress, "gateway", c.GatewayAddress, "`host:port` to serve OpenAI requests on, for whoever has no proxy (docs/PROXIES.md), with the certificate of -grpc-tls-cert; empty: not served")
	fs.StringVar(&c.ExtProcAddress, "extproc-address", c.ExtProcAddress, "`host:port` to serve Envoy's external processing on, for gateways (docs/PROXIES.md); with the certificate of -grpc-tls-cert, or beyond this machine with one of its own; empty: not served")
	fs.IntVar(&c.ExtProcEndpoints, "extproc-endpoints", c.ExtProcEndpoints, "`number` of endpoints that a gateway is told at most for a request, the best first; more than 1 only where it walks the list")
	fs.StringVar(&c.ExtProcObjectives, "extproc-objectives", c.ExtProcObjectives, "`list` separated by commas of the objectives that requests of gateways may name in x-llm-d-inference-objective, with their priorities from -100 to 100, like chat=10,batch=-10; others have 0")
	fs.BoolVar(&c.ExtProcPriority, "extproc-priority", c.ExtProcPriority, "put the order in which the engine is to serve it into each completion of a gateway that names no priority; for engines with --scheduling-policy priority")
	fs.BoolVar(&c.ExtProcModeOverride, "extproc-mode-override", c.ExtProcModeOverride, "tell gateways whose body modes are NONE to show bodies; for those with allow_mode_override, which others take for an error")
	fs.StringVar(&c.AdminAddress, "admin-address", c.AdminAddress, "`host:port` for /healthz, /readyz, /metrics, /v1/members and /config")
	fs.StringVar(&c.NATSURL, "nats-url", c.NATSURL, "`URL` of the NATS server to use, or several separated by commas; empty: an embedded one")
	fs.StringVar(&c.NATSCredentials, "nats-credentials", c.NATSCredentials, "`file` with credentials for -nats-url")
	fs.StringVar(&c.NATSAddress, "nats-address", c.NATSAddress, "`host:port` of the embedded NATS server, for the agents")
	fs.StringVar(&c.NATSSeed, "nats-seed", c.NATSSeed, "`file` with the nkey seed for -nats-url")
	fs.StringVar(&c.NATSUsers, "nats-users", c.NATSUsers, "`file` that says who may use the embedded NATS server, and for what; empty: everybody")
	fs.StringVar(&c.NATSTokenAudience, "nats-token-audience", c.NATSTokenAudience, "`audience` of the service-account tokens of Kubernetes by which agents may say to the embedded NATS server which pod they are, like kvscout (docs/SECURITY.md); empty: they may not")
	fs.StringVar(&c.NATSTLS.Cert, "nats-tls-cert", c.NATSTLS.Cert, "`file` with the certificate of the embedded NATS server, or for -nats-url")
	fs.StringVar(&c.NATSTLS.Key, "nats-tls-key", c.NATSTLS.Key, "`file` with the private key of -nats-tls-cert")
	fs.StringVar(&c.NATSTLS.CA, "nats-tls-ca", c.NATSTLS.CA, "`file` with the CA of the agents' certificates, which they must have then; with -nats-url of the server's")
	fs.StringVar(&c.GRPCTLS.Cert, "grpc-tls-cert", c.GRPCTLS.Cert, "`file` with the certificate of the API; empty: plain")
	fs.StringVar(&c.GRPCTLS.Key, "grpc-tls-key", c.GRPCTLS.Key, "`file` with the private key of -grpc-tls-cert")
	fs.StringVar(&c.GRPCTLS.CA, "grpc-tls-ca", c.GRPCTLS.CA, "`file` with the CA of the callers' certificates, which they must have then; empty: callers need none")
	fs.StringVar(&c.EngineAddresses, "engine-addresses", c.EngineAddresses, "`list` separated by commas of networks (10.0.0.0/8) and ends of names (.svc.cluster.local) that the members' addresses must lie in; empty: any, but the engine's API key and prompts go only where a member connects to the embedded NATS server from")
	fs.StringVar(&c.Namespaces, "namespaces", c.Namespaces, "`file` that says which namespaces may serve which models in which pools; empty: all may serve everything")
	fs.StringVar(&c.KubernetesNamespaces, "kubernetes-namespaces", c.KubernetesNamespaces, "`names` of Kubernetes' namespaces separated by commas, * for all, whose pods are followed: members must be pods of them, and those that are about to go are withdrawn (docs/KUBERNETES.md); empty: Kubernetes is not asked")
	fs.StringVar(&c.InferencePool, "inference-pool", c.InferencePool, "`NAMESPACE/NAME` of an InferencePool of the Gateway API, instead of -kubernetes-namespaces: members must be pods that it selects, at one of its target ports; empty: none")
	fs.StringVar(&c.Kubernetes, "kubernetes", c.Kubernetes, "`URL` of Kubernetes' API server; empty: that of the cluster it runs in")
	fs.StringVar(&c.ServiceAccount, "service-account", c.ServiceAccount, "`folder` with token and ca.crt of the service account, for Kubernetes' API server")
	fs.BoolVar(&c.Insecure, "insecure", c.Insecure, "serve gRPC and NATS on non-loopback addresses without TLS, and NATS without users")
	fs.StringVar(&c.Operators, "grpc-operators", c.Operators, "`names` separated by commas: callers whose certificate has one of them (common name, DNS name or URI) may use the service Admin; empty: all callers")
	fs.StringVar(&c.Policy, "policy", c.Policy, "scoring policy of requests that `name` none; empty: by predicted time; live")
	fs.StringVar(&c.ShadowPolicy, "shadow-policy", c.ShadowPolicy, "`name` of a second policy that is asked about every request and does not decide; what it would have changed is counted; empty: none; live")
	fs.StringVar(&c.AllowedPolicies, "allowed-policies", c.AllowedPolicies, "`names` of policies separated by commas, that requests may ask for besides -policy and -shadow-policy; empty: all; live")
	fs.StringVar(&c.SessionHeaders, "session-headers", c.SessionHeaders, "`names` of headers separated by commas, in which requests name their session if they do not do so themselves; live")
	fs.StringVar(&c.SessionFields, "session-fields", c.SessionFields, "`names` of fields of OpenAI bodies, likewise, behind the headers; metadata.id is a field in a field; live")
	fs.IntVar(&c.QueueLength, "queue-length", c.QueueLength, "`number` of requests that may wait for room, for each model; 0: none waits, every Pick is answered at once; live")
	fs.Var((*size)(&c.QueueBytes), "queue-memory", "`bytes` that waiting requests of one model may take, those of all models twice that; live")
	fs.DurationVar(&c.QueueWait, "queue-wait", c.QueueWait, "longest `time` that a request waits, 1h at most; live")
	fs.DurationVar(&c.QueueAge, "queue-age", c.QueueAge, "`time` by which a request may come later and still be served before one that waits; live")
	fs.DurationVar(&c.QueueBudget, "queue-budget", c.QueueBudget, "`time` of prefill that a member may have before requests wait for it; live")
	fs.StringVar(&c.Profiles, "profiles", c.Profiles, "`file` or folder with measured profiles of members, whose changes are followed; empty: all is learned")
	fs.DurationVar(&c.TTFTTarget, "ttft-target", c.TTFTTarget, "`time` to the first token that requests are to have that name no target; 0: none; live")
	fs.DurationVar(&c.TPOTTarget, "tpot-target", c.TPOTTarget, "`time` for a token of output, likewise; live")
	fs.DurationVar(&c.E2ETarget, "e2e-target", c.E2ETarget, "`time` to the end, likewise; live")
	fs.IntVar(&c.Disaggregate, "disaggregate", c.Disaggregate, "`tokens` that the decoding member would have to compute from which on another one prefills, where members have roles; 0: none does; live")
	fs.DurationVar(&c.PullTokenTime, "pull-token-time", c.PullTokenTime, "`time` that a token's blocks take from one member to another, where engines can pull them; 0: they cannot; live")
	fs.Var((*size)(&c.IndexBytes), "index-memory", "`bytes` that the index may take, like 512MiB")
	fs.IntVar(&c.MaxMembers, "max-members", c.MaxMembers, "largest `number` of members at a time")
	fs.IntVar(&c.MaxDecisions, "max-decisions", c.MaxDecisions, "largest `number` of decisions that are remembered for their reports at a time")
	fs.DurationVar(&c.Grace, "grace", c.Grace, "`time` after which a silent member is forgotten")
	fs.DurationVar(&c.ReadyWait, "ready-wait", c.ReadyWait, "longest `time` to wait for exact cache states before being ready")
	fs.StringVar(&c.EngineAPIKey, "engine-api-key", c.EngineAPIKey, "`key` for asking engines to render and tokenize; better given by the environment variable")
	fs.StringVar(&c.EngineTLS.CA, "engine-tls-ca", c.EngineTLS.CA, "`file` with the CA of the certificates of engines that speak TLS; empty: the system's")
	fs.StringVar(&c.EngineTLS.Name, "engine-tls-name", c.EngineTLS.Name, "`name` in the certificates of engines; empty: the host of each one's address")
	fs.DurationVar(&c.TokenizeTimeout, "tokenize-timeout", c.TokenizeTimeout, "longest `time` for turning text into tokens")
	fs.Var((*size)(&c.TokenizeCacheBytes), "tokenize-cache", "`bytes` for prompts that were turned into tokens")
	fs.DurationVar(&c.CallTimeout, "call-timeout", c.CallTimeout, "`time` for calls that have no deadline of their own; live")
	fs.DurationVar(&c.StopWait, "stop-wait", c.StopWait, "longest `time` for a graceful stop; live")
}

// Settings are the configuration by name, with what the program was told besides
// and without secrets.
func (c Config) Settings() []settings.Setting {
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	c.Flags(fs)
	list := append(settings.Effective(fs, func(name, value string) string {
		switch name {
		case "nats-url":
			return settings.RedactURLs(value)
		case "engine-api-key":
			return settings.Secret(value)
		}
		return value
	}), c.Told...)
	slices.SortFunc(list, func(a, b settings.Setting) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// raw are the settings as they are.
func (c Config) raw() map[string]string {
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	c.Flags(fs)
	values := make(map[string]string)
	fs.VisitAll(func(f *flag.Flag) { values[f.Name] = f.Value.String() })
	return values
}

// ErrNotLive says that a setting cannot be changed while the scheduler runs.
var ErrNotLive = errors.New("needs a restart")

// Reload changes the settings that can be changed while the scheduler runs. It
// changes all or nothing: a configuration that is wrong, or differs in anything
// else, is refused with the names.
func (s *Scheduler) Reload(cfg Config) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	cfg = cfg.withDefaults()
	s.reloading.Lock()
	defer s.reloading.Unlock()
	last := s.live.Load()
	was, is := last.raw(), cfg.raw()
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(is)) {
		if was[name] != is[name] && !Live(name) {
			errs = append(errs, fmt.Errorf("%s: %w", name, ErrNotLive))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := s.picker.Use(cfg.policies()); err != nil {
		return err
	}
	s.rpc.SetCallTimeout(cfg.CallTimeout)
	s.rpc.SetAdmission(cfg.admission())
	s.intake.SetSessions(cfg.sessions())
	s.live.Store(&cfg)
	if changed := settings.Changes(last.Settings(), cfg.Settings()); len(changed) > 0 {
		s.cfg.Log.Info("settings changed", changed...)
		s.noteChanges(last.Settings(), cfg.Settings())
	}
	return nil
}

// noteChanges shows people what is set otherwise.
func (s *Scheduler) noteChanges(was, is []settings.Setting) {
	old := make(map[string]string, len(was))
	for _, x := range was {
		old[x.Name] = x.Value
	}
	for _, x := range is {
		if old[x.Name] != x.Value {
			s.rpc.Changed("-"+x.Name, old[x.Name], x.Value)
		}
	}
}

// size is a number of bytes with an optional unit.
type size int64

var units = []struct {
	name  string
	shift int
}{{"GiB", 30}, {"MiB", 20}, {"KiB", 10}, {"", 0}}

func (s *size) String() string {
	for _, u := range units {
		if n := int64(*s); n != 0 && n%(1<<u.shift) == 0 {
			return strconv.FormatInt(n>>u.shift, 10) + u.name
		}
	}
	return "0"
}

func (s *size) Set(text string) error {
	shift := 0
	for _, u := range units {
		if digits, ok := strings.CutSuffix(text, u.name); ok {
			text, shift = digits, u.shift
			break
		}
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < -1 || n > math.MaxInt64>>shift {
		return errors.New("want a number of bytes like 1073741824, 512MiB or 1GiB")
	}
	*s = size(n << shift)
	return nil
}
