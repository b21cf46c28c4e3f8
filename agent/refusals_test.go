package agent

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvscout/kvscout/e2e/authority"
	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/journal"
)

// speaker is a user that may speak for one pod of pool blue.
func speaker(key, pod string) *server.NkeyUser {
	return &server.NkeyUser{Nkey: key, Permissions: &server.Permissions{
		Publish:   &server.SubjectPermission{Allow: []string{"kvscout.v1.blue.blocks.default." + pod + ".*", "kvscout.v1.blue.load.default." + pod + ".*"}},
		Subscribe: &server.SubjectPermission{Allow: []string{"kvscout.v1.blue.snapshot.default." + pod + ".*", "kvscout.v1.blue.verdict.default." + pod + ".*"}},
		Response:  &server.ResponsePermission{MaxMsgs: 1024, Expires: time.Minute},
	}}
}

// eventless is an engine without events, whose agent is ready at once.
func eventless(t *testing.T) string {
	e := newEngineStub(t)
	e.set("/kv_event_sources", `{}`)
	return e.URL
}

// unrefused: NATS refuses nothing, and only a scheduler is missing.
func unrefused(t *testing.T, a *Agent) func() bool {
	return func() bool {
		_, text := fetch(t, a, "/believed")
		return strings.Contains(text, "no scheduler has sent")
	}
}

func refusal(a *Agent, want string) func() bool {
	return func() bool { s := a.Status(); return !s.Believed && strings.Contains(s.Reason, want) }
}

func TestAgentSaysThatItSpeaksForAnother(t *testing.T) {
	key, seed := authority.User(t)
	s := broker.New(t, &server.Options{Nkeys: []*server.NkeyUser{speaker(key, "other")}})
	var log journal.Journal
	a, _ := runAgent(t, Config{NATSURL: s.URL(), NATSSeed: seed, Engine: eventless(t), Log: log.Logger()})
	await.True(t, "refusal", refusal(a, `Publish to "kvscout.v1.blue.load.default.p.0"`))
	// A refused heartbeat counts until the next one is overdue.
	await.True(t, "it says so", func() bool {
		status, text := fetch(t, a, "/believed")
		return status == http.StatusServiceUnavailable && strings.Contains(text, "NATS does not let this agent publish for its member")
	})
	// Each refusal is logged once, however often it comes.
	await.True(t, "second heartbeat", func() bool { return a.watch.Ranks()[0].Published().Heartbeats > 5 })
	for _, subject := range []string{"kvscout.v1.blue.load.default.p.0", "kvscout.v1.blue.snapshot.default.p.0"} {
		if n := strings.Count(log.String(), subject+`\"`); n != 1 {
			t.Errorf("%s: logged %d times in\n%s", subject, n, log.String())
		}
	}

	// With the rights of its member the agent speaks at once, and is asked after
	// the next connection.
	opts := s.Options
	opts.Nkeys = []*server.NkeyUser{speaker(key, "p")}
	if err := s.ReloadOptions(&opts); err != nil {
		t.Fatal(err)
	}
	await.True(t, "publishing", refusal(a, `Subscription to "kvscout.v1.blue.snapshot.default.p.0"`))
	// It is asked for again by a new connection, half a minute later or at once.
	if err := a.conn.Load().ForceReconnect(); err != nil {
		t.Fatal(err)
	}
	await.True(t, "ready", unrefused(t, a))
	if s.NumSubscriptions() == 0 {
		t.Error("the agent cannot be asked")
	}
}

func TestAgentSaysThatItsKeyIsUnknown(t *testing.T) {
	key, seed := authority.User(t)
	_, stranger := authority.User(t)
	url := broker.New(t, &server.Options{Nkeys: []*server.NkeyUser{speaker(key, "p")}}).URL()
	for name, wrong := range map[string]string{"wrong key": stranger, "no key": ""} {
		var log journal.Journal
		a, stop := runAgent(t, Config{NATSURL: url, NATSSeed: wrong, Engine: eventless(t), Log: log.Logger()})
		await.True(t, name, refusal(a, "Authorization Violation"))
		if !strings.Contains(log.String(), "cannot connect to NATS") {
			t.Errorf("%s: %s", name, log.String())
		}
		stop()
	}
	a, _ := runAgent(t, Config{NATSURL: url, NATSSeed: seed, Engine: eventless(t)})
	await.True(t, "ready with the right key", unrefused(t, a))
}

func TestAgentAndCertificates(t *testing.T) {
	ca, stranger := authority.New(t), authority.New(t)
	hour, past := time.Now().Add(time.Hour), time.Now().Add(-time.Minute)
	serve := func(pair authority.Pair) string {
		certificate, err := tls.LoadX509KeyPair(pair.Cert, pair.Key)
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(ca.CA)
		if err != nil {
			t.Fatal(err)
		}
		config := &tls.Config{Certificates: []tls.Certificate{certificate}, ClientCAs: x509.NewCertPool(), ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS12}
		config.ClientCAs.AppendCertsFromPEM(text)
		// The certificate is for this address.
		url := broker.New(t, &server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, TLSConfig: config, TLSTimeout: 20}).URL()
		return strings.Replace(url, "nats:", "tls:", 1)
	}
	url, expired := serve(ca.Issue(t, hour)), serve(ca.Issue(t, past))
	files := func(a, trust *authority.Authority, until time.Time) TLS {
		p := a.Issue(t, until)
		return TLS{Cert: p.Cert, Key: p.Key, CA: trust.CA}
	}
	for _, c := range []struct {
		name, url string
		tls       TLS
		want      string
	}{
		{"no certificate", url, TLS{CA: ca.CA}, "certificate required"},
		{"expired certificate", url, files(ca, ca, past), "expired"},
		{"foreign certificate", url, files(stranger, ca, hour), "cannot connect to NATS: "},
		{"unknown server", url, files(ca, stranger, hour), "unknown authority"},
		{"expired server", expired, files(ca, ca, hour), "expired"},
		{"plain text", strings.Replace(url, "tls:", "nats:", 1), TLS{}, "cannot connect to NATS: "},
	} {
		var log journal.Journal
		a, stop := runAgent(t, Config{NATSURL: c.url, NATSTLS: c.tls, Engine: eventless(t), Log: log.Logger()})
		await.True(t, c.name, refusal(a, c.want))
		if !strings.Contains(log.String(), "cannot connect to NATS") {
			t.Errorf("%s is not logged: %s", c.name, log.String())
		}
		stop()
	}

	// A certificate that is mended while the agent runs is taken.
	pair := ca.Issue(t, past)
	a, _ := runAgent(t, Config{NATSURL: url, NATSTLS: TLS{Cert: pair.Cert, Key: pair.Key, CA: ca.CA}, Engine: eventless(t)})
	await.True(t, "expired", refusal(a, "expired"))
	ca.Renew(t, pair, hour)
	await.True(t, "ready", unrefused(t, a))
}

func TestFilesThatAreNotThereAreNamed(t *testing.T) {
	for key, cfg := range map[string]Config{
		"-nats-seed":     {NATSSeed: "/nowhere"},
		"-nats-tls-ca":   {NATSTLS: TLS{CA: "/nowhere"}},
		"-nats-tls-cert": {NATSTLS: TLS{Cert: "/nowhere", Key: "/nowhere"}},
	} {
		cfg.NATSURL = "nats://127.0.0.1:1"
		a, err := New(cfg)
		if err == nil {
			err = a.Run(t.Context())
		}
		if err == nil || !strings.Contains(err.Error(), key) || !strings.Contains(err.Error(), "/nowhere") {
			t.Errorf("%s: %v", key, err)
		}
	}
	for _, cfg := range []Config{{NATSSeed: "s", NATSCredentials: "c"}, {NATSTLS: TLS{Cert: "c"}}, {NATSTLS: TLS{Key: "k"}}} {
		cfg.NATSURL = "nats://127.0.0.1:1"
		if err := cfg.Validate(); err == nil {
			t.Errorf("%v is valid", cfg)
		}
	}
}

func TestSecretsAreNotPrinted(t *testing.T) {
	var log journal.Journal
	cfg := Config{
		NATSURL: "nats://user:s3cret@127.0.0.1:1,nats://t0ken@127.0.0.1:2", Engine: "http://x:s3cret@127.0.0.1:3", EngineAPIKey: "s3cret-key", Log: log.Logger(),
	}
	cfg.Log.Info("configuration", "config", cfg, "pointer", &cfg)
	a, stop := runAgent(t, cfg)
	await.True(t, "not connected", func() bool { return strings.Contains(log.String(), "cannot connect") })
	_, page := fetch(t, a, "/readyz")
	stop()
	for form, text := range map[string]string{
		"String": cfg.String(), "%v": fmt.Sprintf("%v", cfg), "%+v": fmt.Sprintf("%+v", &cfg), "%#v": fmt.Sprintf("%#v", cfg), "log": log.String(), "/readyz": page,
	} {
		if strings.Contains(text, "s3cret") || strings.Contains(text, "t0ken") {
			t.Errorf("%s tells a secret: %s", form, text)
		}
	}
}
