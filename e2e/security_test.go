package e2e

import (
	"context"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/kvscout/kvscout/agent"
	"github.com/kvscout/kvscout/e2e/authority"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler"
)

// secured is a scheduler behind TLS with agents that must say who they are.
type secured struct {
	t      *testing.T
	ca     *authority.Authority
	nats   string // URL
	client api.SchedulerClient
	admin  api.AdminClient
}

// run runs something until the test ends.
func run(t *testing.T, do func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- do(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func (s *secured) tls() authority.Pair { return s.ca.Issue(s.t, time.Now().Add(time.Hour)) }

// serve starts a NATS server of others.
func (s *secured) serve(opts *server.Options) {
	s.t.Helper()
	n, err := server.NewServer(opts)
	if err != nil {
		s.t.Fatal(err)
	}
	n.Start()
	s.t.Cleanup(func() { n.Shutdown(); n.WaitForShutdown() })
	if !n.ReadyForConnections(patience) {
		s.t.Fatal("NATS does not start")
	}
	s.nats = "tls://" + n.Addr().String()
}

// schedule starts the scheduler. A NATS server named by cfg is that, else the
// scheduler's own.
func (s *secured) schedule(cfg scheduler.Config) {
	s.t.Helper()
	pair := s.tls()
	cfg.GRPCAddress, cfg.AdminAddress, cfg.NATSAddress, cfg.StopWait = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", time.Second
	cfg.GRPCTLS = scheduler.TLS{Cert: pair.Cert, Key: pair.Key, CA: s.ca.CA}
	cfg.NATSTLS = cfg.GRPCTLS
	sched, err := scheduler.New(cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	run(s.t, sched.Run)
	if s.nats == "" {
		s.nats = "tls://" + sched.Addrs().NATS
	}
	conn, err := grpc.NewClient(sched.Addrs().GRPC, grpc.WithTransportCredentials(credentials.NewTLS(s.ca.Client(s.t, s.tls()))))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = conn.Close() })
	s.client, s.admin = api.NewSchedulerClient(conn), api.NewAdminClient(conn)
}

// key is a file that says who somebody is on NATS, of either kind.
type key struct{ seed, credentials string }

// agent starts one beside an engine.
func (s *secured) agent(engine *engine, namespace, uid string, who key) *agent.Agent {
	s.t.Helper()
	pair := s.tls()
	a, err := agent.New(agent.Config{
		NATSURL: s.nats, NATSSeed: who.seed, NATSCredentials: who.credentials, NATSTLS: agent.TLS{Cert: pair.Cert, Key: pair.Key, CA: s.ca.CA},
		Engine: engine.URL(), Events: engine.Events(0).Endpoint(), Replay: engine.Events(0).ReplayEndpoint(),
		Namespace: namespace, PodUID: uid, AdminAddress: "127.0.0.1:0", Heartbeat: 50 * time.Millisecond, Probe: 50 * time.Millisecond, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		s.t.Fatal(err)
	}
	run(s.t, a.Run)
	return a
}

// members are those that the scheduler knows, with their cache states.
func (s *secured) members() map[string]*api.CacheState {
	s.t.Helper()
	fleet, err := s.admin.ListMembers(s.t.Context(), &api.ListMembersRequest{}, grpc.WaitForReady(true))
	if err != nil {
		s.t.Fatal(err)
	}
	known := make(map[string]*api.CacheState)
	for _, m := range fleet.GetMembers() {
		known[m.GetMember().GetId()] = m.GetCacheState()
	}
	return known
}

// proven says that the cache state is known to be true, and not an empty one.
func proven(p *api.CacheState) bool {
	return p.GetTrust() == api.Trust_TRUST_EXACT && p.GetSequence() > 0
}

func (s *secured) until(what string, holds func() bool) {
	s.t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatalf("never: %s; members %v", what, s.members())
		}
	}
}

// engine starts one that has served something.
func (s *secured) engine(seed uint64) *engine {
	s.t.Helper()
	p := &play{t: s.t, http: &http.Client{Transport: &http.Transport{}, Timeout: patience}}
	s.t.Cleanup(p.http.CloseIdleConnections)
	e := p.engine(fakevllm.Config{})
	e.complete(several(seed, 5)...)
	return e
}

// holds shows that an honest agent is believed, and that one that takes another name is not heard and says why.
func (s *secured) holds(who key, uid string) {
	s.t.Helper()
	engine := s.engine(77)
	honest := s.agent(engine, "prod", uid, who)
	name := "prod_" + uid + "_0"
	s.until("the honest agent is believed", func() bool { return proven(s.members()[name]) && honest.Status().Believed })
	liar := s.agent(engine, "dev", uid, who)
	s.until("the liar says that it is refused", func() bool {
		st := liar.Status()
		return !st.Believed && strings.Contains(st.Reason, "kvscout.v1.default.load.dev."+uid+".0")
	})
	if got := s.members(); len(got) != 1 || !proven(got[name]) {
		s.t.Errorf("members %v", got)
	}
}

func TestWhoMaySayWhatOnTheEmbeddedNATS(t *testing.T) {
	t.Parallel()
	public, seed := authority.User(t)
	file := filepath.Join(t.TempDir(), "users")
	if err := os.WriteFile(file, []byte("agent "+public+" prod/pod\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &secured{t: t, ca: authority.New(t)}
	s.schedule(scheduler.Config{NATSUsers: file})
	s.holds(key{seed: seed}, "pod")
}

// TestWhoMaySayWhatOnTheDocumentedNATS runs a server with the configuration
// that docs/SECURITY.md shows, and a second scheduler that starts late and so
// must ask for the cache state.
func TestWhoMaySayWhatOnTheDocumentedNATS(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/SECURITY.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "```conf\n")
	text, _, _ = strings.Cut(text, "```")
	s := &secured{t: t, ca: authority.New(t)}
	pair := s.tls()
	text = strings.NewReplacer("0.0.0.0:4222", "127.0.0.1:-1", "/etc/nats/tls.crt", pair.Cert, "/etc/nats/tls.key", pair.Key, "/etc/nats/clients.crt", s.ca.CA).Replace(text)
	var seeds []string
	parts := strings.Split(text, `nkey: "`)
	for i := range parts[1:] {
		public, seed := authority.User(t)
		seeds = append(seeds, seed)
		parts[i+1] = public + parts[i+1][len(public):]
	}
	if len(seeds) != 3 {
		t.Fatalf("%d users in the configuration", len(seeds))
	}
	conf := filepath.Join(t.TempDir(), "nats-server.conf")
	if err := os.WriteFile(conf, []byte(strings.Join(parts, `nkey: "`)), 0o600); err != nil {
		t.Fatal(err)
	}
	opts, err := server.ProcessConfigFile(conf)
	if err != nil {
		t.Fatal(err)
	}
	opts.NoSigs, opts.NoLog = true, true
	s.serve(opts)
	cfg := scheduler.Config{NATSURL: s.nats, NATSSeed: seeds[0]}
	s.schedule(cfg)
	const uid = "0f3c6c1e-6c54-4a2c-9b2e-5e9c0a7d1b11"
	s.holds(key{seed: seeds[2]}, uid) // the key of one pod
	late := &secured{t: t, ca: s.ca, nats: s.nats}
	late.schedule(cfg)
	late.until("the late scheduler was answered", func() bool { return proven(late.members()["prod_"+uid+"_0"]) })
}

// TestOneSigningKeyServesAllPods runs a server in operator mode with the
// templates that docs/SECURITY.md shows.
func TestOneSigningKeyServesAllPods(t *testing.T) {
	t.Parallel()
	page := read(t, "../docs/SECURITY.md")
	subjects := func(role, flag string) []string {
		_, command, _ := strings.Cut(page, "--role "+role)
		_, list, _ := strings.Cut(command, flag+" '")
		list, _, found := strings.Cut(list, "'")
		if !found {
			t.Fatalf("the page has no %s for %s", flag, role)
		}
		return strings.Split(list, ",")
	}
	operator := authority.NewOperator(t)
	agents := operator.Role(t, authority.Template{Publish: subjects("agent", "--allow-pub"), Subscribe: subjects("agent", "--allow-sub"), Answers: 1024})
	schedulers := operator.Role(t, authority.Template{Publish: subjects("scheduler", "--allow-pub"), Subscribe: subjects("scheduler", "--allow-sub")})

	s := &secured{t: t, ca: authority.New(t)}
	pair := s.tls()
	config, err := server.GenTLSConfig(&server.TLSConfigOpts{CertFile: pair.Cert, KeyFile: pair.Key, CaFile: s.ca.CA, Verify: true})
	if err != nil {
		t.Fatal(err)
	}
	opts := operator.Server(t)
	opts.Host, opts.Port, opts.NoSigs, opts.NoLog, opts.TLSConfig = "127.0.0.1", -1, true, true, config
	s.serve(opts)
	s.schedule(scheduler.Config{NATSURL: s.nats, NATSCredentials: schedulers.User(t, "scheduler")})
	first, second := agents.User(t, "first", "namespace:prod"), agents.User(t, "second", "namespace:prod")
	s.holds(key{credentials: first}, "first")

	// Another pod, without a word to the server; and one that takes its name.
	engine := s.engine(78)
	s.agent(engine, "prod", "second", key{credentials: second})
	s.until("the second pod is believed", func() bool { return proven(s.members()["prod_second_0"]) })
	for name, c := range map[string]struct{ uid, credentials string }{
		"another's key": {"second", first}, "no namespace": {"third", agents.User(t, "third")},
	} {
		a := s.agent(engine, "prod", c.uid, key{credentials: c.credentials})
		s.until(name+" is refused", func() bool {
			st := a.Status()
			return !st.Believed && strings.Contains(st.Reason, "kvscout.v1.default.load.prod."+c.uid+".0")
		})
	}
	if got := s.members(); len(got) != 2 || !proven(got["prod_first_0"]) || !proven(got["prod_second_0"]) {
		t.Errorf("members %v", got)
	}
}
