package scheduler

import (
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvscout/kvscout/e2e/authority"
	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/journal"
	"github.com/kvscout/kvscout/e2e/kubeapi"
	natsbus "github.com/kvscout/kvscout/protocol/bus"
)

// podTokens are those that a cluster has given to pods.
type podTokens struct {
	mu    sync.Mutex // guards given
	given map[string]kubeapi.Object
}

// review answers as the API server does.
func (g *podTokens) review(token string, audiences []string) kubeapi.Object {
	g.mu.Lock()
	defer g.mu.Unlock()
	user, is := g.given[token]
	if !is || !slices.Contains(audiences, user["audience"].(string)) {
		return kubeapi.Object{"error": "[invalid bearer token, token lookup failed]", "user": kubeapi.Object{}}
	}
	return kubeapi.Object{"authenticated": true, "audiences": []string{user["audience"].(string)}, "user": user}
}

// give a pod a token that ends at a time.
func (g *podTokens) give(namespace, pod, audience string, ends time.Time) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	claims := base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"exp":%d,"jti":"%d"}`, ends.Unix(), len(g.given)))
	token := "e30." + claims + ".c2ln"
	user := kubeapi.Object{"username": "system:serviceaccount:" + namespace + ":default", "audience": audience}
	if pod != "" {
		user["extra"] = kubeapi.Object{"authentication.kubernetes.io/pod-name": []string{pod}, "authentication.kubernetes.io/pod-uid": []string{"uid-" + pod}}
	}
	g.given[token] = user
	return token
}

// withdraw all tokens.
func (g *podTokens) withdraw() {
	g.mu.Lock()
	defer g.mu.Unlock()
	clear(g.given)
}

// tokenServer starts a scheduler whose NATS server takes tokens.
func tokenServer(t *testing.T, cfg Config) (*Scheduler, *podTokens, *kubeapi.Objects, *journal.Journal) {
	t.Helper()
	given, log := &podTokens{given: make(map[string]kubeapi.Object)}, new(journal.Journal)
	api := kubeapi.NewObjects(t)
	api.Review = given.review
	cfg.NATSTokenAudience, cfg.Kubernetes, cfg.ServiceAccount, cfg.Log = "kvscout", api.URL, api.Folder, log.Logger()
	s, _ := start(t, cfg)
	return s, given, api, log
}

func TestTokenGivesThePodItsOwnSubjects(t *testing.T) {
	public, seed := authority.User(t)
	users := filepath.Join(t.TempDir(), "users")
	write(t, users, "agent "+public+" prod/by-key\n")
	s, given, api, log := tokenServer(t, Config{NATSUsers: users})
	soon := time.Now().Add(time.Hour)
	mine := mustJoin(t, s.Addrs().NATS, "", nats.Token(given.give("prod", "a", "kvscout", soon)))
	for subject, may := range map[string]bool{"load.prod.uid-a.0": true, "blocks.prod.uid-a.7": true, "load.prod.uid-b.0": false, "load.dev.uid-a.0": false, "picks": false, "snapshot.prod.uid-a.0": false} {
		if err := mine.Publish(base+subject, nil); err != nil {
			t.Fatal(err)
		}
		if refused(t, mine, base+subject) == may {
			t.Errorf("publish to %s: want %v", subject, may)
		}
	}
	if _, err := mine.SubscribeSync(base + "load.*.*.*"); err != nil || !refused(t, mine, base+"load.*.*.*") {
		t.Errorf("a pod may read all: %v", err)
	}
	// Who has a key comes by it, as without tokens, and is cut when it is withdrawn.
	key := mustJoin(t, s.Addrs().NATS, seed)
	_, stranger := authority.User(t)
	if _, err := join(t, s.Addrs().NATS, stranger); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("an unknown key: %v", err)
	}
	write(t, users, "# nobody\n")
	await.True(t, "the key is cut off", key.IsClosed)
	if !mine.IsConnected() {
		t.Error("the pod is cut off, too")
	}
	if n := api.Count("post tokenreviews"); n != 1 {
		t.Errorf("%d reviews of one token", n)
	}
	if strings.Contains(log.String(), "e30.") {
		t.Error("a token is in the log")
	}
}

func TestWrongTokensAreRefused(t *testing.T) {
	s, given, _, log := tokenServer(t, Config{})
	soon := time.Now().Add(time.Hour)
	right := given.give("prod", "a", "kvscout", soon)
	for why, token := range map[string]string{
		"made up":                      "e30.e30.c2ln",
		"no JWT":                       "secret",
		"of another audience":          given.give("prod", "b", "https://kubernetes.default.svc", soon),
		"of a service account, no pod": given.give("prod", "", "kvscout", soon),
		"expired":                      given.give("prod", "c", "kvscout", time.Now().Add(-time.Minute)),
		"too long":                     right + strings.Repeat("x", 20<<10),
		"none":                         "",
	} {
		options := []nats.Option{nats.Token(token)}
		if token == "" {
			options = nil
		}
		if _, err := join(t, s.Addrs().NATS, "", options...); err == nil {
			t.Errorf("%s: accepted", why)
		}
	}
	if _, err := join(t, s.Addrs().NATS, "", nats.UserInfo("prod/uid-a", right)); err == nil {
		t.Error("a password is accepted")
	}
	if len(log.Lines("level=WARN", "a token is not accepted", "not bound to a pod")) != 1 {
		t.Errorf("the reason is not said: %s", log)
	}
	if strings.Contains(log.String(), right) {
		t.Error("a token is in the log")
	}
	mustJoin(t, s.Addrs().NATS, "", nats.Token(right))
	if _, page := get(t, s, "/metrics"); !strings.Contains(page, `kvscout_scheduler_nats_tokens_total{outcome="accepted"} 1`) {
		t.Error("tokens are not counted")
	}
}

// agentOf connects as an agent does, with a file that is read for every connection.
func agentOf(t *testing.T, s *Scheduler, file string) (conn *nats.Conn, errs chan error) {
	t.Helper()
	errs = make(chan error, 1)
	failed := func(err error) {
		select {
		case errs <- err:
		default:
		}
	}
	options, _, closed := natsbus.Options("test", natsbus.Events{Connected: func() {}, NotConnected: failed, Failed: func(*nats.Conn, *nats.Subscription, error) {}, Log: slog.New(slog.DiscardHandler)})
	conn, err := natsbus.Login{Token: file}.Connect("nats://"+s.Addrs().NATS, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); <-closed })
	return conn, errs
}

// A connection ends with its token, and goes on by the one that is in the file then.
func TestRotatedTokenGoesOn(t *testing.T) {
	s, given, _, _ := tokenServer(t, Config{})
	file := filepath.Join(t.TempDir(), "token")
	write(t, file, given.give("prod", "a", "kvscout", time.Now().Add(3*time.Second))+"\n")
	conn, _ := agentOf(t, s, file)
	await.True(t, "connected", conn.IsConnected)
	write(t, file, given.give("prod", "a", "kvscout", time.Now().Add(time.Hour)))
	await.True(t, "connected again", func() bool { return conn.Stats().Reconnects > 0 && conn.IsConnected() })
	if err := conn.Publish(base+"load.prod.uid-a.0", nil); err != nil || refused(t, conn, base+"load.prod.uid-a.0") {
		t.Errorf("the rights are gone: %v", err)
	}
	// A file that is no token is no connection, and says so.
	write(t, file, "")
	waiting, errs := agentOf(t, s, file)
	await.True(t, "the file is named", func() bool { return strings.Contains((<-errs).Error(), "-nats-token-file: the file is empty") })
	if waiting.IsConnected() {
		t.Error("connected without a token")
	}
}

// The token of a pod that was deleted cuts its connection, as soon as the cluster
// says that it was, and lets nobody in.
func TestDeletedPodIsCutOff(t *testing.T) {
	s, given, api, log := tokenServer(t, Config{KubernetesNamespaces: "prod"})
	for _, name := range []string{"a", "b"} {
		api.Put("pods", kubeapi.Pod("prod", name, "uid-"+name, "127.0.0.1", "n"))
	}
	await.True(t, "the pods are known", func() bool { return s.cluster.Stats().Pods == 2 })
	soon := time.Now().Add(time.Hour)
	gone, stays := given.give("prod", "a", "kvscout", soon), mustJoin(t, s.Addrs().NATS, "", nats.Token(given.give("prod", "b", "kvscout", soon)))
	conn := mustJoin(t, s.Addrs().NATS, "", nats.Token(gone))
	given.withdraw() // the API server refuses tokens of pods that it has not
	api.Delete("pods", "prod", "a")
	await.True(t, "cut off", conn.IsClosed)
	if _, err := join(t, s.Addrs().NATS, "", nats.Token(gone)); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("it comes again: %v", err)
	}
	if !stays.IsConnected() {
		t.Error("the other is cut off, too")
	}
	if len(log.Lines("a connection is cut", "pod_uid=uid-a")) != 1 {
		t.Error("it is not said")
	}
}

// While the API server is away who is connected stays, who was lately comes again,
// and who is new waits until it is back.
func TestTokensWhileKubernetesIsAway(t *testing.T) {
	s, given, api, _ := tokenServer(t, Config{})
	soon := time.Now().Add(time.Hour)
	known, fresh := given.give("prod", "a", "kvscout", soon), given.give("prod", "b", "kvscout", soon)
	conn := mustJoin(t, s.Addrs().NATS, "", nats.Token(known))
	api.Down(true)
	mustJoin(t, s.Addrs().NATS, "", nats.Token(known))
	file := filepath.Join(t.TempDir(), "token")
	write(t, file, fresh)
	waiting, _ := agentOf(t, s, file)
	await.True(t, "a review fails", func() bool { return s.bus.Load().TokenStats().Unknown > 0 })
	if waiting.IsConnected() || !conn.IsConnected() {
		t.Errorf("who is new is connected: %v; who was there: %v", waiting.IsConnected(), conn.IsConnected())
	}
	api.Down(false)
	await.True(t, "who is new is connected", waiting.IsConnected)
}
