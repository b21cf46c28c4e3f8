package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/proxies"
	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/scheduler"
)

// needEnvoy skips a test where there is no Envoy, unless it must be there.
func needEnvoy(t *testing.T) {
	t.Helper()
	needProxy(t, proxies.Envoy)
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
	needEnvoy(t)
	const file = "envoy.yaml"
	site := proxies.Site{Root: "..", Host: loopback.Host(t), Engines: engines, Pickers: pickers, Plain: cluster == "plain"}
	var changes []proxies.Edit
	if !site.Plain {
		changes = append(changes, proxies.Edit{File: file, Old: "cluster: engines # or: destination", New: "cluster: " + cluster})
	}
	for edit := range slices.Chunk(edits, 2) {
		changes = append(changes, proxies.Edit{File: file, Old: edit[0], New: edit[1]})
	}
	x, err := proxies.Envoy.Prepare(context.Background(), t.TempDir(), site, changes...)
	if err != nil {
		t.Fatal(err)
	}
	e := &envoy{play: p, url: "http://" + x.Address, admin: x.Admin}
	e.http = &http.Client{Transport: &http.Transport{}, Timeout: patience}
	runProgram(t, x.Command)
	e.pid = x.Command.Process.Pid
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
	var engines []*engine
	for i := range 2 {
		e := one.engine(fakevllm.Config{}).watched(fmt.Sprint("pod-", i))
		engines = append(engines, e)
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
		settled(q, engines, one, two)
	}
	stopped := make(chan struct{})
	go func() { defer close(stopped); one.StopScheduler() }()
	for round := 1; x.stat("cluster.kvscout.membership_healthy") != "1"; round++ {
		serve(round)
		settled(q, engines, two)
	}
	<-stopped
	for round := range 10 {
		serve(1 + round)
		settled(q, engines, two)
	}
	x.unharmed()
}
