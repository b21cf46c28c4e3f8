// Package kubernetes runs a real control plane for tests, without containers:
// API server, etcd, controllers and scheduler of Kubernetes, and kwok, which
// says of pods on its nodes that they run. install.sh builds the programs.
package kubernetes

import (
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/journal"
	"github.com/kvscout/kvscout/e2e/loopback"
)

// patience bounds each wait for the control plane: a busy machine takes a minute
// to start what an idle one does in five seconds.
const patience = 3 * time.Minute

// Cluster is a control plane of its own, for one test.
type Cluster struct {
	// URL of the API server, CA that it is known by, and Token of an
	// administrator; Kubeconfig is a file with the three.
	URL, CA, Token, Kubeconfig string

	t        testing.TB
	programs string // folder
	folder   string // of this cluster
	host     string // an address of its own, so that ports need no search
	alone    bool   // the API server
	client   *http.Client
	server   *program
	routes   *routes
}

// Programs is the folder in which install.sh has put the programs. A test that
// asks is skipped where nobody says which it is.
func Programs(t testing.TB) string {
	t.Helper()
	folder := os.Getenv("KVSCOUT_KUBERNETES")
	if folder == "" {
		if os.Getenv("KVSCOUT_REQUIRE_KUBERNETES") != "" {
			t.Fatal("KVSCOUT_KUBERNETES does not name the folder of the control plane: make test-k8s does")
		}
		t.Skip("KVSCOUT_KUBERNETES does not name the folder of the control plane: make test-k8s does")
	}
	if _, err := os.Stat(filepath.Join(folder, "ready")); err != nil {
		t.Fatal(err)
	}
	return folder
}

// Start a control plane, empty but for the nodes, until the test ends. Without
// nodes it is the API server alone: objects are taken, and changed on their way
// in, and nothing happens to them.
func Start(t testing.TB, nodes int) *Cluster {
	t.Helper()
	c := &Cluster{t: t, programs: Programs(t), folder: t.TempDir(), host: loopback.Host(t), alone: nodes == 0, Token: rand.Text()}
	c.URL, c.CA, c.Kubeconfig = "https://"+c.host+":6443", c.path("apiserver.crt"), c.path("kubeconfig")
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	c.must(err)
	c.write("sa.key", pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	c.write("tokens.csv", []byte(c.Token+`,admin,admin,"system:masters"`+"\n"))
	c.routes = newRoutes(t, c.host+":3128")
	clients, peers := "http://"+c.host+":2379", "http://"+c.host+":2380"
	c.start("etcd", "--name=test", "--data-dir="+c.path("etcd"), "--unsafe-no-fsync", "--logger=zap", "--log-level=error", "--initial-cluster=test="+peers,
		"--listen-client-urls="+clients, "--advertise-client-urls="+clients, "--listen-peer-urls="+peers, "--initial-advertise-peer-urls="+peers)
	c.StartServer()
	if c.alone {
		return c
	}
	same := []string{"--kubeconfig=" + c.Kubeconfig, "--authentication-kubeconfig=" + c.Kubeconfig, "--authorization-kubeconfig=" + c.Kubeconfig,
		"--bind-address=" + c.host, "--leader-elect=false"}
	c.start("kube-controller-manager", append(same, "--service-account-private-key-file="+c.path("sa.key"), "--root-ca-file="+c.CA)...)
	c.start("kube-scheduler", same...)
	c.start("kwok", "--kubeconfig="+c.Kubeconfig, "--config="+filepath.Join(c.programs, "stages.yaml"), "--manage-all-nodes=true",
		"--node-lease-duration-seconds=40", "--server-address="+c.host+":10247")
	var list strings.Builder
	for i := range nodes {
		fmt.Fprintf(&list, "{apiVersion: v1, kind: Node, metadata: {name: node-%d, labels: {kubernetes.io/hostname: node-%d}}}\n---\n", i, i)
	}
	c.Apply(list.String())
	c.Until("nodes are ready, and namespaces have their service account", func() bool {
		ready := c.Kubectl("get", "nodes", "-o", `jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}`)
		_, err := c.Run("", "kubectl", "-n", "default", "get", "serviceaccount", "default")
		return err == nil && strings.Count(ready, "True") == nodes
	})
	return c
}

// StartServer starts the API server, at the address that it had before, and
// waits until it is ready.
func (c *Cluster) StartServer() {
	c.t.Helper()
	args := []string{"--etcd-servers=http://" + c.host + ":2379", "--bind-address=" + c.host, "--secure-port=6443", "--cert-dir=" + c.folder,
		// Nobody is at this address: what stands in the Service "kubernetes" may
		// not be one of the loopback.
		"--advertise-address=192.0.2.1", "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.0.0.0/16",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-signing-key-file=" + c.path("sa.key"),
		"--service-account-key-file=" + c.path("sa.key"), "--token-auth-file=" + c.path("tokens.csv"), "--authorization-mode=RBAC", "--allow-privileged"}
	if c.alone {
		// Nobody makes the service accounts that it would have pods have.
		args = append(args, "--disable-admission-plugins=ServiceAccount")
	}
	c.server = c.start("kube-apiserver", args...)
	c.Until("the API server has its certificate", func() bool { _, err := os.Stat(c.CA); return err == nil })
	ca, err := os.ReadFile(c.CA)
	c.must(err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}
	c.t.Cleanup(transport.CloseIdleConnections)
	c.client = &http.Client{Transport: transport}
	config, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "admin",
		"clusters": []any{map[string]any{"name": "test", "cluster": map[string]any{"server": c.URL, "certificate-authority": c.CA}}},
		"users":    []any{map[string]any{"name": "admin", "user": map[string]any{"token": c.Token}}},
		"contexts": []any{map[string]any{"name": "admin", "context": map[string]any{"cluster": "test", "user": "admin"}}},
	})
	c.must(err)
	c.write("kubeconfig", config)
	c.Until("the API server is ready", func() bool {
		request, err := http.NewRequestWithContext(c.t.Context(), http.MethodGet, c.URL+"/readyz", http.NoBody)
		c.must(err)
		request.Header.Set("Authorization", "Bearer "+c.Token)
		answer, err := c.client.Do(request)
		if err != nil {
			return false
		}
		defer answer.Body.Close()
		return answer.StatusCode == http.StatusOK
	})
}

// StopServer ends the API server; what it knows stays, in etcd.
func (c *Cluster) StopServer() { c.server.kill() }

// Route leads the API server's connections to a Service, NAME.NAMESPACE.svc:PORT,
// to an address of the test: no network of the cluster does. An empty address
// takes the way away.
func (c *Cluster) Route(service, address string) { c.routes.set(service, address) }

// ServiceAccount makes a folder as it is in pods of this account: token, ca.crt,
// namespace.
func (c *Cluster) ServiceAccount(namespace, name string) (folder string) {
	c.t.Helper()
	folder = c.t.TempDir()
	ca, err := os.ReadFile(c.CA)
	c.must(err)
	for file, text := range map[string]string{"token": c.Kubectl("-n", namespace, "create", "token", name), "ca.crt": string(ca), "namespace": namespace} {
		c.must(os.WriteFile(filepath.Join(folder, file), []byte(text), 0o600))
	}
	return folder
}

// Do asks the API server as the administrator. in is a document of JSON, or
// nil; out takes the answer, and may be nil. Whatever the status, it is returned
// with what the server says of it.
func (c *Cluster) Do(method, path, contentType string, in []byte, out any) (status int, text string) {
	c.t.Helper()
	request, err := http.NewRequestWithContext(c.t.Context(), method, c.URL+path, bytes.NewReader(in))
	c.must(err)
	request.Header.Set("Authorization", "Bearer "+c.Token)
	if contentType != "" {
		request.Header.Set("Content-Type", contentType)
	}
	answer, err := c.client.Do(request)
	c.must(err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	c.must(err)
	if out != nil && answer.StatusCode < 300 {
		c.must(json.Unmarshal(body, out))
	}
	return answer.StatusCode, string(body)
}

// Run one of the programs as the administrator, helm for example, and give what
// it writes to both outputs.
func (c *Cluster) Run(stdin, name string, args ...string) (out string, err error) {
	c.t.Helper()
	cmd := exec.CommandContext(c.t.Context(), filepath.Join(c.programs, name), args...)
	cmd.Env = c.Environment()
	cmd.Stdin = strings.NewReader(stdin)
	text, err := cmd.CombinedOutput()
	return string(text), err
}

// Environment for programs that use the cluster, with kubectl and helm in PATH
// and folders of their own.
func (c *Cluster) Environment() []string {
	return append(os.Environ(), "KUBECONFIG="+c.Kubeconfig, "PATH="+c.programs+string(os.PathListSeparator)+os.Getenv("PATH"), "HOME="+c.folder, "XDG_CACHE_HOME="+c.folder,
		"XDG_CONFIG_HOME="+c.folder, "XDG_DATA_HOME="+c.folder)
}

// Kubectl gives what kubectl says, which must not fail.
func (c *Cluster) Kubectl(args ...string) string {
	c.t.Helper()
	out, err := c.Run("", "kubectl", args...)
	if err != nil {
		c.t.Fatalf("kubectl %q: %v\n%s", args, err, out)
	}
	return out
}

// Apply manifests, of which none may be refused.
func (c *Cluster) Apply(manifests string) {
	c.t.Helper()
	if out, err := c.Run(manifests, "kubectl", "apply", "-f", "-"); err != nil {
		c.t.Fatalf("kubectl apply: %v\n%s\n%s", err, out, manifests)
	}
}

// Until waits for a condition.
func (c *Cluster) Until(what string, holds func() bool) {
	c.t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			c.t.Fatalf("waited in vain: %s", what)
		}
	}
}

func (c *Cluster) path(name string) string { return filepath.Join(c.folder, name) }

func (c *Cluster) write(name string, text []byte) {
	c.t.Helper()
	c.must(os.WriteFile(c.path(name), text, 0o600))
}

func (c *Cluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// program is a process of the control plane.
type program struct {
	cmd *exec.Cmd
	end sync.Once
	log journal.Journal
}

// start one, which ends with the test. Its log is shown if the test fails.
func (c *Cluster) start(name string, args ...string) *program {
	c.t.Helper()
	p := &program{cmd: exec.Command(filepath.Join(c.programs, name), args...)}
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	// Connections to loopback addresses are never led elsewhere.
	p.cmd.Env = append(os.Environ(), "HTTPS_PROXY=http://"+c.routes.address, "NO_PROXY=", "HOME="+c.folder)
	p.cmd.SysProcAttr = orphanless()
	c.must(p.cmd.Start())
	c.t.Cleanup(func() {
		p.kill()
		if c.t.Failed() {
			lines := strings.Split(p.log.String(), "\n")
			c.t.Logf("the last of %s:\n%s", name, strings.Join(lines[max(0, len(lines)-40):], "\n"))
		}
	})
	return p
}

func (p *program) kill() {
	p.end.Do(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	})
}
