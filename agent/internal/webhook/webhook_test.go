package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvscout/kvscout/agent/internal/inject"
	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/kubeapi"
	"github.com/kvscout/kvscout/protocol/kube"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func always(inject.Pod) inject.Decision {
	return inject.Decision{
		Changes: []inject.Change{{Op: inject.Add, Path: "/metadata/labels", Value: map[string]string{"a": "b"}}}, Engines: []string{"vllm"},
		Warnings: []string{"short", strings.Repeat("ü", 300)},
	}
}

func config(api *kubeapi.Server) Config {
	return Config{
		Address: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", Kubernetes: api.URL, ServiceAccount: api.Folder,
		Service: "kvscout-webhook", Secret: kubeapi.Secret, Configuration: kubeapi.Configuration, Decide: always, Log: slog.New(slog.DiscardHandler),
	}
}

func newServer(t *testing.T, api *kubeapi.Server) *Server {
	t.Helper()
	s, err := New(config(api))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const created = `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u1","operation":"CREATE","namespace":"prod","kind":{"group":"","version":"v1","kind":"Pod"},"object":{"metadata":{"generateName":"llama-"},"spec":{"containers":[]}}}}`

// TestReviewsAreAnswered in the form of admission.k8s.io/v1.
func TestReviewsAreAnswered(t *testing.T) {
	text, what, err := answer([]byte(created), always)
	if err != nil {
		t.Fatal(err)
	}
	var out struct {
		APIVersion, Kind string
		Request          any
		Response         struct {
			UID       string
			Allowed   bool
			PatchType string
			Patch     []byte
			Warnings  []string
		}
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&out); err != nil {
		t.Fatal(err)
	}
	r := out.Response
	if out.APIVersion != reviewVersion || out.Kind != reviewKind || out.Request != nil || r.UID != "u1" || !r.Allowed || r.PatchType != "JSONPatch" ||
		string(r.Patch) != `[{"op":"add","path":"/metadata/labels","value":{"a":"b"}}]` || what.name != "llama-" || what.namespace != "prod" {
		t.Errorf("%s, %+v", text, what)
	}
	if len(r.Warnings) != 2 || r.Warnings[0] != "kvscout: short" || len(r.Warnings[1]) > maxWarning || !strings.HasSuffix(r.Warnings[1], "ü...") {
		t.Errorf("%q", r.Warnings)
	}
	// What is not a new pod is admitted as it is.
	for _, other := range []string{strings.Replace(created, "CREATE", "UPDATE", 1), strings.Replace(created, `"kind":"Pod"`, `"kind":"Binding"`, 1), strings.Replace(created, `"group":""`, `"group":"ours"`, 1)} {
		text, _, err := answer([]byte(other), always)
		if err != nil || !strings.Contains(string(text), `"allowed":true`) || strings.Contains(string(text), "patch") {
			t.Errorf("%s: %s, %v", other, text, err)
		}
	}
	for body, want := range map[string]string{
		"": "read the review", "[]": "read the review", "{}": "want AdmissionReview", strings.Replace(created, "/v1", "/v1beta1", 1): "want AdmissionReview",
		`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}`:  "without a request",
		strings.Replace(created, `"containers":[]`, `"containers":7`, 1): "read the pod",
	} {
		if _, _, err := answer([]byte(body), always); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func FuzzAnswer(f *testing.F) {
	f.Add([]byte(created))
	f.Fuzz(func(t *testing.T, body []byte) {
		text, _, err := answer(body, always)
		if err == nil && !json.Valid(text) {
			t.Fatalf("%q", text)
		}
	})
}

// TestCertificatesAreRenewedWithoutAGap plays two replicas, of which one looks
// seldom, and an API server that has read its configuration some time ago,
// through 130 days: what is served is always valid, and trusted by all.
func TestCertificatesAreRenewedWithoutAGap(t *testing.T) {
	names := []string{"kvscout-webhook.kvscout.svc"}
	start := time.Date(2026, 11, 22, 0, 0, 0, 0, time.UTC)
	var stored, served []pair
	var trusted []byte
	verified := make(map[string]bool) // certificate and bundle
	made := 0
	for at := start; at.Before(start.AddDate(0, 0, 130)); at = at.Add(20 * time.Minute) {
		old := trusted // the API server's, 20 minutes late
		pairs, changed, err := renew(stored, names, at)
		if err != nil {
			t.Fatal(err)
		}
		if changed {
			made++
			text, err := encodePairs(pairs)
			if err != nil {
				t.Fatal(err)
			}
			if pairs, err = parsePairs(text); err != nil {
				t.Fatal(err)
			}
		}
		stored, trusted = pairs, bundle(pairs)
		if old == nil {
			old = trusted
		}
		if served == nil || at.Sub(start)%(40*time.Minute) == 0 {
			served = stored // the replica that looks seldom
		}
		for _, replica := range [][]pair{stored, served} {
			for _, by := range [][]byte{old, trusted} {
				leaf := serving(replica, at).Leaf
				if at.Before(leaf.NotBefore) || at.After(leaf.NotAfter) {
					t.Fatalf("at %v one is served that is valid until %v", at, leaf.NotAfter)
				}
				if verified[string(leaf.Raw)+string(by)] {
					continue
				}
				roots := x509.NewCertPool()
				roots.AppendCertsFromPEM(by)
				if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: names[0], CurrentTime: at}); err != nil {
					t.Fatalf("at %v: %v", at, err)
				}
				verified[string(leaf.Raw)+string(by)] = true
			}
		}
		if len(stored) > maxPairs {
			t.Fatalf("%d certificates", len(stored))
		}
	}
	if made != 4 { // one at the start, the next after 60 and 120 days, the first dropped after 90
		t.Errorf("certificates changed %d times", made)
	}
	// Another name: another certificate, at once.
	if pairs, changed, err := renew(stored, []string{"other.svc"}, start.AddDate(1, 0, 0)); err != nil || !changed || len(pairs) != 1 || pairs[0].Leaf.VerifyHostname("other.svc") != nil {
		t.Errorf("%v %v", changed, err)
	}
	for _, text := range []string{"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "-----BEGIN A-----\nAAAA\n-----END A-----\n-----BEGIN B-----\nAAAA\n-----END B-----\n"} {
		if _, err := parsePairs([]byte(text)); err == nil {
			t.Errorf("%q is taken for a certificate", text)
		}
	}
	if pairs, err := parsePairs([]byte("nothing")); err != nil || len(pairs) > 0 {
		t.Errorf("%v %v", pairs, err)
	}
}

// TestReplicasShareOneCertificate: the one that comes second takes the first
// one's, and writes nothing while there is nothing to write.
func TestReplicasShareOneCertificate(t *testing.T) {
	api := kubeapi.New(t, "36")
	a, b := newServer(t, api), newServer(t, api)
	now := time.Now()
	// b reads the empty Secret before a writes.
	stale, err := b.api.secret(t.Context(), b.namespace, kubeapi.Secret)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.sync(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	stale.APIVersion, stale.Kind = "v1", "Secret"
	if err := b.api.keep(t.Context(), b.namespace, kubeapi.Secret, stale); !kube.IsCode(err, http.StatusConflict) {
		t.Fatalf("a stale Secret is written: %v", err)
	}
	if err := b.sync(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a.certificate.Load().Certificate[0], b.certificate.Load().Certificate[0]) {
		t.Error("two certificates")
	}
	for i := range 2 {
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(api.Bundle(i)) {
			t.Fatalf("webhook %d trusts nobody", i)
		}
		if _, err := a.certificate.Load().Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: "kvscout-webhook.kvscout.svc"}); err != nil {
			t.Error(err)
		}
	}
	puts, patches := api.Count(http.MethodPut), api.Count(http.MethodPatch)
	if err := a.sync(t.Context(), now.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if api.Count(http.MethodPut) != puts || api.Count(http.MethodPatch) != patches {
		t.Error("written although nothing changed")
	}
	// Rubbish in the Secret is an error that names it, and what is served stays.
	api.SetData(pairsKey, []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"))
	if err := a.sync(t.Context(), now); err == nil || !strings.Contains(err.Error(), kubeapi.Secret) || a.certificate.Load() == nil {
		t.Errorf("%v", err)
	}
}

// started runs a server until the test ends.
func started(t *testing.T, s *Server) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	await.True(t, "as wanted", func() bool { reviews, _ := s.Addrs(); return reviews != "" })
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	http.DefaultClient.CloseIdleConnections()
	return resp.StatusCode, string(text)
}

// TestServerAnswersTheAPIServer over TLS that its configuration trusts; before
// that it is alive, and not ready; and when the API server goes away it serves.
func TestServerAnswersTheAPIServer(t *testing.T) {
	api := kubeapi.New(t, "29")
	api.Down(true)
	s := newServer(t, api)
	started(t, s)
	reviews, probes := s.Addrs()
	await.True(t, "as wanted", func() bool { return s.Stats().SyncFailures > 0 })
	if code, _ := get(t, "http://"+probes+"/healthz"); code != http.StatusOK {
		t.Errorf("healthz %d", code)
	}
	if code, _ := get(t, "http://"+probes+"/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("readyz %d", code)
	}
	api.Down(false)
	await.True(t, "as wanted", func() bool { code, _ := get(t, "http://"+probes+"/readyz"); return code == http.StatusOK })
	api.Down(true)

	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(api.Bundle(0))
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "kvscout-webhook.kvscout.svc"}, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	post := func(body io.Reader) (int, string) {
		resp, err := client.Post("https://"+reviews+"/mutate?timeout=5s", "application/json", body)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(text)
	}
	if code, text := post(strings.NewReader(created)); code != http.StatusOK || !strings.Contains(text, `"patchType":"JSONPatch"`) {
		t.Errorf("%d %s", code, text)
	}
	if code, text := post(strings.NewReader("{}")); code != http.StatusBadRequest || !strings.Contains(text, reviewKind) {
		t.Errorf("%d %s", code, text)
	}
	if code, _ := post(strings.NewReader(strings.Repeat(" ", maxReview+1))); code != http.StatusBadRequest {
		t.Errorf("a review without end: %d", code)
	}
	if got := s.Stats(); got.Injected != 1 || got.Malformed != 2 || got.LeftAlone != 0 {
		t.Errorf("%+v", got)
	}
	if _, text := get(t, "http://"+probes+"/metrics"); !strings.Contains(text, `kvscout_agent_webhook_reviews_total{outcome="malformed"} 2`) {
		t.Errorf("%s", text)
	}
}

// TestOldKubernetesIsRefused: an init container that never ends would keep every
// pod from starting.
func TestOldKubernetesIsRefused(t *testing.T) {
	for minor, fits := range map[string]bool{"28": false, "9+": false, "29": true, "33+": true} {
		err := newServer(t, kubeapi.New(t, minor)).api.hasSidecars(t.Context())
		if (err == nil) != fits {
			t.Errorf("1.%s: %v", minor, err)
		}
	}
	s := newServer(t, kubeapi.New(t, "28"))
	if err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "1.29") {
		t.Errorf("%v", err)
	}
}
