package scheduler

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/kvscout/kvscout/e2e/authority"
	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/journal"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

func write(t testing.TB, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// join connects to a NATS server. A lost connection stays lost.
func join(t testing.TB, address, seed string, options ...nats.Option) (*nats.Conn, error) {
	t.Helper()
	closed := make(chan struct{})
	options = append(options, nats.NoReconnect(), nats.ClosedHandler(func(*nats.Conn) { close(closed) }),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if seed != "" {
		nkey, err := nats.NkeyOptionFromSeed(seed)
		if err != nil {
			t.Fatal(err)
		}
		options = append(options, nkey)
	}
	c, err := nats.Connect("nats://"+address, options...)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { c.Close(); <-closed })
	return c, nil
}

func mustJoin(t testing.TB, address, seed string, options ...nats.Option) *nats.Conn {
	t.Helper()
	c, err := join(t, address, seed, options...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// refused tells whether NATS has refused the last use of the subject.
func refused(t testing.TB, c *nats.Conn, subject string) bool {
	t.Helper()
	if err := c.Flush(); err != nil { // a refusal comes before the answer to this
		t.Fatal(err)
	}
	err := c.LastError()
	return errors.Is(err, nats.ErrPermissionViolation) && strings.Contains(err.Error(), "\""+subject+"\"")
}

const base = "kvscout.v1.default."

func TestNATSGivesEachItsRights(t *testing.T) {
	pod, podSeed := authority.User(t)
	team, teamSeed := authority.User(t)
	peer, peerSeed := authority.User(t)
	file := filepath.Join(t.TempDir(), "users")
	write(t, file, fmt.Sprintf("# who may say what\nagent %s prod/9b2c\nagent %s prod\nscheduler %s # another replica\n", pod, team, peer))
	s, _ := start(t, Config{NATSUsers: file})
	address := s.Addrs().NATS

	type rights struct {
		who     string
		conn    *nats.Conn
		publish bool // else subscribe
		subject string
		refusal bool
	}
	agent, namespace, scheduler := mustJoin(t, address, podSeed), mustJoin(t, address, teamSeed), mustJoin(t, address, peerSeed)
	for _, c := range []rights{
		{"agent", agent, true, "blocks.prod.9b2c.0", false},
		{"agent", agent, true, "blocks.prod.9b2c.200", false},
		{"agent", agent, true, "load.prod.9b2c.7", false},
		{"agent", agent, true, "blocks.prod.other.0", true},
		{"agent", agent, false, "verdict.prod.9b2c.0", false},
		{"agent", agent, false, "verdict.prod.other.0", true},
		{"agent", agent, true, "verdict.prod.9b2c.0", true},
		{"agent", agent, true, "load.prod.other.0", true},
		{"agent", agent, true, "load.dev.9b2c.0", true},
		{"agent", agent, true, "snapshot.prod.9b2c.0", true},
		{"agent", agent, true, "snapshot.prod.other.0", true},
		{"agent", agent, true, "inbox.x.prod_other_0.1", true},
		{"agent", agent, false, "snapshot.prod.9b2c.0", false},
		{"agent", agent, false, "snapshot.prod.9b2c.3", false},
		{"agent", agent, false, "snapshot.prod.other.0", true},
		{"agent", agent, false, "snapshot.prod.*.0", true},
		{"agent", agent, false, "blocks.prod.9b2c.0", true},
		{"agent", agent, false, "blocks.*.*.*", true},
		{"agent", agent, false, "load.prod.other.0", true},
		{"agent", agent, false, "inbox.>", true},
		{"agent", agent, false, ">", true},
		{"namespace", namespace, true, "blocks.prod.any.0", false},
		{"namespace", namespace, true, "blocks.dev.any.0", true},
		{"namespace", namespace, false, "snapshot.prod.any.0", false},
		{"namespace", namespace, false, "snapshot.dev.any.0", true},
		{"scheduler", scheduler, true, "snapshot.prod.9b2c.0", false},
		{"scheduler", scheduler, true, "blocks.prod.9b2c.0", true},
		{"scheduler", scheduler, true, "load.prod.9b2c.0", true},
		{"scheduler", scheduler, false, "blocks.*.*.*", false},
		{"scheduler", scheduler, false, "load.*.*.*", false},
		{"scheduler", scheduler, false, "inbox.mine.*.*", false},
		{"scheduler", scheduler, false, "snapshot.*.*.*", true},
		{"scheduler", scheduler, false, ">", true},
	} {
		subject := base + c.subject
		if c.subject == ">" {
			subject = ">"
		}
		verb := "subscribe to"
		if c.publish {
			verb = "publish to"
			if err := c.conn.Publish(subject, nil); err != nil {
				t.Fatal(err)
			}
		} else if _, err := c.conn.SubscribeSync(subject); err != nil {
			t.Fatal(err)
		}
		if refused(t, c.conn, subject) != c.refusal {
			t.Errorf("%s may %s %s: %v, want %v", c.who, verb, subject, c.refusal, !c.refusal)
		}
	}
	for _, subject := range []string{"elsewhere", "kvscout.v1.other.blocks.prod.9b2c.0", "$SYS.REQ.SERVER.PING", "_INBOX.x"} {
		_ = agent.Publish(subject, nil)
		if !refused(t, agent, subject) {
			t.Errorf("agent may publish to %s", subject)
		}
	}
}

// TestAgentAnswersWhoAsks in as many messages as a snapshot may have, and
// nobody else.
func TestAgentAnswersWhoAsks(t *testing.T) {
	public, seed := authority.User(t)
	peer, peerSeed := authority.User(t)
	file := filepath.Join(t.TempDir(), "users")
	write(t, file, "agent "+public+" prod/9b2c\nscheduler "+peer+"\n")
	s, _ := start(t, Config{NATSUsers: file})
	agent := mustJoin(t, s.Addrs().NATS, seed)
	if _, err := agent.Subscribe(base+"snapshot.prod.9b2c.0", func(m *nats.Msg) {
		for range 1024 {
			_ = agent.Publish(m.Reply, nil)
		}
	}); err != nil {
		t.Fatal(err)
	}
	if err := agent.Flush(); err != nil {
		t.Fatal(err)
	}
	scheduler := mustJoin(t, s.Addrs().NATS, peerSeed, nats.CustomInboxPrefix(base+"inbox"))
	answers, err := scheduler.SubscribeSync(base + "inbox.me.*")
	if err == nil {
		err = scheduler.PublishRequest(base+"snapshot.prod.9b2c.0", base+"inbox.me.1", nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	for i := range 1024 {
		if _, err := answers.NextMsg(await.Patience); err != nil {
			t.Fatalf("answer %d: %v", i, err)
		}
	}
	_ = agent.Publish(base+"inbox.me.2", nil)
	if !refused(t, agent, base+"inbox.me.2") {
		t.Error("an agent speaks to a scheduler that did not ask")
	}
}

func TestNATSKnowsNobodyElse(t *testing.T) {
	public, _ := authority.User(t)
	_, stranger := authority.User(t)
	file := filepath.Join(t.TempDir(), "users")
	write(t, file, "agent "+public+" prod\n")
	s, _ := start(t, Config{NATSUsers: file})
	for what, seed := range map[string]string{"an unknown key": stranger, "no key": ""} {
		if _, err := join(t, s.Addrs().NATS, seed); !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := join(t, s.Addrs().NATS, "", nats.UserInfo("scheduler", "")); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("a name without a password: %v", err)
	}
}

func TestUsersFileIsReadAgain(t *testing.T) {
	first, firstSeed := authority.User(t)
	second, secondSeed := authority.User(t)
	file := filepath.Join(t.TempDir(), "users")
	write(t, file, "agent "+first+" prod\n")
	var log journal.Journal
	s, _ := start(t, Config{NATSUsers: file, Log: log.Logger()})
	conn := mustJoin(t, s.Addrs().NATS, firstSeed)

	seed, err := os.ReadFile(secondSeed)
	if err != nil {
		t.Fatal(err)
	}
	write(t, file, "agent "+string(seed))
	await.True(t, "said that the file is bad", func() bool { return strings.Contains(log.String(), "line 1: the second word") })
	if strings.Contains(log.String(), strings.TrimSpace(string(seed))) {
		t.Error("the seed is in the log")
	}
	if !conn.IsConnected() {
		t.Error("a bad file cut the connections")
	}

	write(t, file, "agent "+second+" prod\n")
	await.True(t, "revoked", conn.IsClosed)
	mustJoin(t, s.Addrs().NATS, secondSeed)
	if _, err := join(t, s.Addrs().NATS, firstSeed); err == nil {
		t.Error("a revoked key connects")
	}
	await.True(t, "said that the file is read", func() bool { return strings.Contains(log.String(), "NATS users read") })
}

func TestBadUsers(t *testing.T) {
	key, _ := authority.User(t)
	for text, want := range map[string]string{
		"agent":                                    "line 1: the second word",
		"\nagent UXYZ prod":                        "line 2: the second word",
		"agent " + key:                             "must be",
		"admin " + key:                             "must be",
		"scheduler " + key + " prod":               "must be",
		"agent " + key + " *":                      "*",
		"agent " + key + " prod/":                  "prod/",
		"agent " + key + " prod/*":                 "prod/*",
		"agent " + key + " a\nagent " + key + " b": "line 2: the key of line 1",
	} {
		file := filepath.Join(t.TempDir(), "users")
		write(t, file, text)
		s, err := New(Config{NATSUsers: file, GRPCAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", NATSAddress: "127.0.0.1:0"})
		if err == nil {
			err = s.Run(t.Context())
		}
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "-nats-users") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// clients are those who come with all kinds of certificates.
func clients(t *testing.T, ours *authority.Authority) map[string]struct {
	tls  *tls.Config
	good bool
} {
	t.Helper()
	type client = struct {
		tls  *tls.Config
		good bool
	}
	hour := time.Now().Add(time.Hour)
	return map[string]client{
		"a good certificate":     {ours.Client(t, ours.Issue(t, hour)), true},
		"no certificate":         {ours.Client(t, authority.Pair{}), false},
		"an expired certificate": {ours.Client(t, ours.Issue(t, time.Now().Add(-time.Minute))), false},
		"a foreign certificate":  {ours.Client(t, authority.New(t).Issue(t, hour)), false},
		"trust in another CA":    {authority.New(t).Client(t, ours.Issue(t, hour)), false},
		"plain text":             {nil, false},
	}
}

func TestNATSWantsCertificates(t *testing.T) {
	ca := authority.New(t)
	pair := ca.Issue(t, time.Now().Add(time.Hour))
	var log journal.Journal
	s, _ := start(t, Config{NATSTLS: TLS{Cert: pair.Cert, Key: pair.Key, CA: ca.CA}, Log: log.Logger()})
	for name, c := range clients(t, ca) {
		var options []nats.Option
		if c.tls != nil {
			options = append(options, nats.Secure(c.tls))
		}
		if _, err := join(t, s.Addrs().NATS, "", options...); (err == nil) != c.good {
			t.Errorf("%s: %v", name, err)
		}
	}
	if !strings.Contains(log.String(), "TLS handshake error") {
		t.Error("who is refused is not logged")
	}
}

func check(t *testing.T, address string, config *tls.Config) error {
	t.Helper()
	option := grpc.WithTransportCredentials(insecure.NewCredentials())
	if config != nil {
		option = grpc.WithTransportCredentials(credentials.NewTLS(config))
	}
	conn, err := grpc.NewClient(address, option)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), await.Patience)
	defer cancel()
	_, err = healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
	return err
}

// page asks for one of the API as HTTP/JSON, by a connection of its own.
func page(t *testing.T, address, path string, config *tls.Config) (code, version int, err error) {
	t.Helper()
	url := "http://" + address + path
	transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
	if config != nil {
		url = "https://" + address + path
	}
	defer transport.CloseIdleConnections()
	answer, err := (&http.Client{Transport: transport, Timeout: await.Patience}).Get(url)
	if err != nil {
		return 0, 0, err
	}
	defer answer.Body.Close()
	return answer.StatusCode, answer.ProtoMajor, nil
}

func TestHTTPWantsCertificates(t *testing.T) {
	ca := authority.New(t)
	pair := ca.Issue(t, time.Now().Add(time.Hour))
	mutual, _ := start(t, Config{GRPCTLS: TLS{Cert: pair.Cert, Key: pair.Key, CA: ca.CA}})
	for name, c := range clients(t, ca) {
		code, version, err := page(t, mutual.Addrs().HTTP, "/v1/members", c.tls)
		if served := err == nil && code == http.StatusOK; served != c.good || served && version != 2 {
			t.Errorf("mTLS, %s: %d by HTTP/%d, %v", name, code, version, err)
		}
	}
}

func TestGRPCWantsCertificates(t *testing.T) {
	ca := authority.New(t)
	pair := ca.Issue(t, time.Now().Add(time.Hour))
	mutual, _ := start(t, Config{GRPCTLS: TLS{Cert: pair.Cert, Key: pair.Key, CA: ca.CA}})
	for name, c := range clients(t, ca) {
		if err := check(t, mutual.Addrs().GRPC, c.tls); (err == nil) != c.good {
			t.Errorf("mTLS, %s: %v", name, err)
		}
	}
	plain, _ := start(t, Config{GRPCTLS: TLS{Cert: pair.Cert, Key: pair.Key}})
	if err := check(t, plain.Addrs().GRPC, ca.Client(t, authority.Pair{})); err != nil {
		t.Errorf("TLS, no certificate asked for: %v", err)
	}
	if err := check(t, plain.Addrs().GRPC, authority.New(t).Client(t, authority.Pair{})); err == nil {
		t.Error("TLS, trust in another CA: served")
	}
	if err := check(t, plain.Addrs().GRPC, nil); err == nil {
		t.Error("TLS, plain text: served")
	}
}

// A proxy's right is not an operator's.
func TestAdminIsForOperators(t *testing.T) {
	ca := authority.New(t)
	pair := ca.Issue(t, time.Now().Add(time.Hour)) // names localhost
	for operators, want := range map[string]codes.Code{"": codes.OK, "somebody, localhost": codes.OK, "somebody": codes.PermissionDenied} {
		s, _ := start(t, Config{GRPCTLS: TLS{Cert: pair.Cert, Key: pair.Key, CA: ca.CA}, Operators: operators})
		conn, err := grpc.NewClient(s.Addrs().GRPC, grpc.WithTransportCredentials(credentials.NewTLS(ca.Client(t, pair))))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		admin := api.NewAdminClient(conn)
		_, list := admin.ListMembers(t.Context(), &api.ListMembersRequest{})
		watch, err := admin.WatchMembers(t.Context(), &api.WatchMembersRequest{})
		if err == nil {
			_, err = watch.Recv()
		}
		if status.Code(list) != want || status.Code(err) != want {
			t.Errorf("operators %q: list %v, watch %v; want %v", operators, list, err, want)
		}
		if code, _, err := page(t, s.Addrs().HTTP, "/v1/members", ca.Client(t, pair)); err != nil || (code == http.StatusOK) != (want == codes.OK) || want != codes.OK && code != http.StatusForbidden {
			t.Errorf("operators %q, HTTP: %d %v", operators, code, err)
		}
		if code, _, err := page(t, s.Addrs().HTTP, "/v1/members:watch?interval_ms=-", ca.Client(t, pair)); err != nil || code != http.StatusBadRequest {
			t.Errorf("operators %q, HTTP: %d %v", operators, code, err)
		}
		if _, err := api.NewSchedulerClient(conn).Report(t.Context(), &api.ReportRequest{}); err != nil {
			t.Errorf("operators %q: a proxy is refused: %v", operators, err)
		}
	}
}

// shown is the serial number of the certificate that a listener shows.
func shown(t *testing.T, dial func() (*tls.ConnectionState, error)) string {
	t.Helper()
	state, err := dial()
	if err != nil {
		t.Fatal(err)
	}
	return state.PeerCertificates[0].SerialNumber.String()
}

func TestCertificatesAreReadAgain(t *testing.T) {
	ca := authority.New(t)
	hour := time.Now().Add(time.Hour)
	pair := ca.Issue(t, hour)
	clientCA := authority.New(t)
	anchors := filepath.Join(t.TempDir(), "clients.pem")
	copyFile(t, anchors, clientCA.CA)
	var log journal.Journal
	files := TLS{Cert: pair.Cert, Key: pair.Key, CA: anchors}
	s, _ := start(t, Config{GRPCTLS: files, NATSTLS: files, Log: log.Logger()})
	mine := ca.Client(t, clientCA.Issue(t, hour))
	dials := map[string]func() (*tls.ConnectionState, error){
		"gRPC": func() (*tls.ConnectionState, error) {
			config := mine.Clone()
			config.NextProtos = []string{"h2"}
			conn, err := tls.Dial("tcp", s.Addrs().GRPC, config)
			if err != nil {
				return nil, err
			}
			defer conn.Close()
			conn.SetReadDeadline(time.Now().Add(await.Patience))
			if _, err := conn.Read(make([]byte, 1)); err != nil { // the server took ours
				return nil, err
			}
			state := conn.ConnectionState()
			return &state, nil
		},
		"HTTP": func() (*tls.ConnectionState, error) {
			conn, err := tls.Dial("tcp", s.Addrs().HTTP, mine.Clone())
			if err != nil {
				return nil, err
			}
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(await.Patience))
			fmt.Fprint(conn, "GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
			if _, err := conn.Read(make([]byte, 1)); err != nil { // the server took ours
				return nil, err
			}
			state := conn.ConnectionState()
			return &state, nil
		},
		"NATS": func() (*tls.ConnectionState, error) {
			conn, err := join(t, s.Addrs().NATS, "", nats.Secure(mine))
			if err != nil {
				return nil, err
			}
			state, err := conn.TLSConnectionState()
			return &state, err
		},
	}
	before := make(map[string]string)
	for name, dial := range dials {
		before[name] = shown(t, dial)
	}
	// A connection that is there stays, whatever becomes of its certificate.
	old := mustJoin(t, s.Addrs().NATS, "", nats.Secure(mine))

	// Half of a renewal: the last good pair is shown.
	good, err := os.ReadFile(pair.Key)
	if err != nil {
		t.Fatal(err)
	}
	ca.Renew(t, pair, hour)
	renewed, err := os.ReadFile(pair.Key)
	if err != nil {
		t.Fatal(err)
	}
	write(t, pair.Key, string(good))
	for name, dial := range dials {
		if shown(t, dial) != before[name] {
			t.Errorf("%s shows half of a renewal", name)
		}
	}
	if !strings.Contains(log.String(), "the last good ones are") {
		t.Error("half of a renewal is not logged")
	}
	write(t, pair.Key, string(renewed))
	for name, dial := range dials {
		if shown(t, dial) == before[name] {
			t.Errorf("%s shows the old certificate", name)
		}
	}
	// Other clients are trusted from now on.
	other := authority.New(t)
	copyFile(t, anchors, other.CA)
	for name, dial := range dials {
		if _, err := dial(); err == nil {
			t.Errorf("%s trusts the old CA", name)
		}
	}
	mine = ca.Client(t, other.Issue(t, hour))
	for name, dial := range dials {
		if _, err := dial(); err != nil {
			t.Errorf("%s does not trust the new CA: %v", name, err)
		}
	}
	if !old.IsConnected() {
		t.Error("a connection was cut")
	}
}

func copyFile(t testing.TB, to, from string) {
	t.Helper()
	text, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	write(t, to, string(text))
}

// Gateways encrypt and do not verify: beyond this machine they find a certificate
// in any case, unless the operator says otherwise.
func TestGatewaysFindTLS(t *testing.T) {
	ca := authority.New(t)
	pair := ca.Issue(t, time.Now().Add(time.Hour))
	unverified := credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})
	for name, c := range map[string]struct {
		cfg   Config
		creds credentials.TransportCredentials
		works bool
	}{
		"on this machine":        {Config{ExtProcAddress: "127.0.0.1:0"}, insecure.NewCredentials(), true},
		"beyond":                 {Config{ExtProcAddress: "0.0.0.0:0"}, unverified, true},
		"beyond, plain":          {Config{ExtProcAddress: "0.0.0.0:0"}, insecure.NewCredentials(), false},
		"beyond, insecure":       {Config{ExtProcAddress: "0.0.0.0:0", Insecure: true}, insecure.NewCredentials(), true},
		"certificate":            {Config{ExtProcAddress: "127.0.0.1:0", GRPCTLS: TLS{Cert: pair.Cert, Key: pair.Key}}, unverified, true},
		"callers need one":       {Config{ExtProcAddress: "127.0.0.1:0", GRPCTLS: TLS{Cert: pair.Cert, Key: pair.Key, CA: ca.CA}}, unverified, false},
		"callers have one":       {Config{ExtProcAddress: "127.0.0.1:0", GRPCTLS: TLS{Cert: pair.Cert, Key: pair.Key, CA: ca.CA}}, credentials.NewTLS(ca.Client(t, pair)), true},
		"certificate, but plain": {Config{ExtProcAddress: "127.0.0.1:0", GRPCTLS: TLS{Cert: pair.Cert, Key: pair.Key}}, insecure.NewCredentials(), false},
	} {
		t.Run(name, func(t *testing.T) {
			c.cfg.StopWait = 100 * time.Millisecond
			s, _ := start(t, c.cfg)
			_, port, err := net.SplitHostPort(s.Addrs().ExtProc)
			if err != nil {
				t.Fatal(err)
			}
			conn, err := grpc.NewClient("127.0.0.1:"+port, grpc.WithTransportCredentials(c.creds))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_, err = healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: "liveness"})
			if (err == nil) != c.works {
				t.Error(err)
			}
		})
	}
}

func TestPlainOnlyOnThisMachine(t *testing.T) {
	secure := TLS{Cert: "c", Key: "k"}
	for name, c := range map[string]struct {
		cfg  Config
		want string // in the error; empty: valid
	}{
		"defaults":             {Config{}, ""},
		"loopback":             {Config{GRPCAddress: "[::1]:1", NATSAddress: "localhost:1"}, ""},
		"gRPC beyond":          {Config{GRPCAddress: "0.0.0.0:1"}, "-grpc-address, "},
		"gRPC on IPv6":         {Config{GRPCAddress: "[::]:1"}, "-grpc-address, "},
		"HTTP beyond":          {Config{HTTPAddress: "0.0.0.0:1"}, "-http-address, "},
		"HTTP with TLS":        {Config{HTTPAddress: "0.0.0.0:1", GRPCTLS: secure}, ""},
		"HTTP, no host":        {Config{HTTPAddress: ":1", Insecure: true}, "-http-address, "},
		"gRPC with TLS":        {Config{GRPCAddress: "0.0.0.0:1", GRPCTLS: secure}, ""},
		"NATS beyond":          {Config{NATSAddress: "10.0.0.1:1"}, "-nats-address, "},
		"NATS, no users":       {Config{NATSAddress: "10.0.0.1:1", NATSTLS: secure}, "-nats-address, "},
		"NATS, no TLS":         {Config{NATSAddress: "10.0.0.1:1", NATSUsers: "u"}, "-nats-address, "},
		"NATS with both":       {Config{NATSAddress: "10.0.0.1:1", NATSUsers: "u", NATSTLS: secure}, ""},
		"not embedded":         {Config{NATSAddress: "10.0.0.1:1", NATSURL: "nats://x:1"}, ""},
		"insecure":             {Config{GRPCAddress: "0.0.0.0:1", NATSAddress: "0.0.0.0:1", Insecure: true}, ""},
		"probes beyond":        {Config{AdminAddress: "0.0.0.0:1"}, ""},
		"half a pair":          {Config{GRPCTLS: TLS{Cert: "c"}}, "-grpc-tls-key, "},
		"half a NATS pair":     {Config{NATSURL: "nats://x:1", NATSTLS: TLS{Key: "k"}}, "-nats-tls-cert, "},
		"callers' CA alone":    {Config{GRPCTLS: TLS{CA: "a"}}, "-grpc-tls-cert, "},
		"operators, no CA":     {Config{Operators: "o", GRPCTLS: secure}, "-grpc-tls-ca, "},
		"clients' CA alone":    {Config{NATSTLS: TLS{CA: "a"}}, "-nats-tls-cert, "},
		"CA of another server": {Config{NATSURL: "nats://x:1", NATSTLS: TLS{CA: "a"}}, ""},
		"users of another":     {Config{NATSURL: "nats://x:1", NATSUsers: "u"}, "-nats-users, "},
		"seed for ourselves":   {Config{NATSSeed: "s"}, "-nats-seed, "},
		"seed and credentials": {Config{NATSURL: "nats://x:1", NATSSeed: "s", NATSCredentials: "c"}, "-nats-seed, "},
	} {
		err := c.cfg.Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

func TestInsecureIsSaid(t *testing.T) {
	var log journal.Journal
	cfg := Config{GRPCAddress: "0.0.0.0:0", HTTPAddress: "0.0.0.0:0", AdminAddress: "127.0.0.1:0", NATSAddress: "0.0.0.0:0", Insecure: true, Log: log.Logger()}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-s.Started(); cancel() }()
	if err := s.Run(ctx); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"gRPC is served without TLS", "HTTP is served without TLS", "NATS is served without TLS", "unauthenticated clients"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("%q is not in\n%s", want, log.String())
		}
	}
}

func TestFilesThatAreNotThereAreNamed(t *testing.T) {
	for key, cfg := range map[string]Config{
		"-grpc-tls-cert": {GRPCTLS: TLS{Cert: "/nowhere", Key: "/nowhere"}},
		"-nats-tls-cert": {NATSTLS: TLS{Cert: "/nowhere", Key: "/nowhere"}},
		"-nats-tls-ca":   {NATSURL: "tls://127.0.0.1:1", NATSTLS: TLS{CA: "/nowhere"}},
		"-nats-seed":     {NATSURL: "nats://127.0.0.1:1", NATSSeed: "/nowhere"},
	} {
		cfg.GRPCAddress, cfg.AdminAddress, cfg.NATSAddress = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
		s, err := New(cfg)
		if err == nil {
			err = s.Run(t.Context())
		}
		if err == nil || !strings.Contains(err.Error(), key) || !strings.Contains(err.Error(), "/nowhere") {
			t.Errorf("%s: %v", key, err)
		}
	}
}

func TestSecretsAreNotPrinted(t *testing.T) {
	var log journal.Journal
	cfg := Config{
		NATSURL: "nats://user:s3cret@127.0.0.1:1,nats://t0ken@127.0.0.1:2", EngineAPIKey: "s3cret-key", Log: log.Logger(),
	}
	cfg.Log.Info("configuration", "config", cfg, "pointer", &cfg)
	s, stop := start(t, cfg)
	await.True(t, "not connected", func() bool { return strings.Contains(log.String(), "cannot connect") })
	_ = s
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	for form, text := range map[string]string{
		"String": cfg.String(), "%v": fmt.Sprintf("%v", cfg), "%+v": fmt.Sprintf("%+v", &cfg), "%#v": fmt.Sprintf("%#v", cfg), "log": log.String(),
	} {
		if strings.Contains(text, "s3cret") || strings.Contains(text, "t0ken") {
			t.Errorf("%s tells a secret: %s", form, text)
		}
		if !strings.Contains(text, "127.0.0.1:1") {
			t.Errorf("%s tells nothing: %s", form, text)
		}
	}
}
