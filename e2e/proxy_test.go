package e2e

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/proxies"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler"
)

// reverseProxy is a program that stands in front of engines and asks kvscout.
// Each has to pass the cases of this file (runProxyCases).
type reverseProxy struct {
	name string
	// need skips the test where the program is not installed; nil: it always is.
	need func(*testing.T)
	// configure changes what the scheduler is configured with; nil: nothing.
	configure func(*scheduler.Config)
	// start runs it, with the configuration that people have, in front of the site's
	// engines, until the test ends.
	start func(*testing.T, *site) served
	// lacks says for each feature that the program does not have why. The cases about
	// it are skipped, and docs/PROXIES.md has the same words.
	lacks map[feature]string
}

// feature that a proxy may lack.
type feature string

const (
	speaksHTTP2  feature = "HTTP/2"       // to clients
	fallsBack    feature = "fallback"     // serves by itself while no scheduler answers
	triesOthers  feature = "other member" // where one cannot be reached, before the answer has begun
	reportsEnd   feature = "end"          // the reservation ends when the request does
	reportsCount feature = "counts"       // the scheduler learns what the engine counted
	hidesUsage   feature = "hidden usage" // and of streams too, without showing it to clients that did not ask
	readsLarge   feature = "20 MB"        // of a body that goes where its prompt is cached
)

// site is where a proxy is put.
type site struct {
	*play
	// picker is host:port of the scheduler's endpoint picker. The API is at GRPC and
	// HTTP.
	picker string
	// engines are the addresses of the engines, host:port, in their order.
	engines []string
	// plain: without kvscout, by the program's own round robin, for comparison.
	plain bool
}

// served is where a proxy serves.
type served struct {
	// url without a path. http2 is where it speaks HTTP/2: by prior knowledge if it
	// begins with http:, by TLS with any certificate if with https:; empty: see lacks.
	url, http2 string
	// pid of the program; what it uses counts with that of its children.
	pid int
	// check fails the test if the proxy says that anything is wrong; nil: it has
	// nothing to say.
	check func()
}

// proxied is a proxy that runs in front of fake engines.
type proxied struct {
	*site
	served
	reverseProxy
	engines []*engine
	client  *http.Client
}

// site opens a stage for the proxy, with a scheduler that serves in every way.
func (r reverseProxy) site(t *testing.T) *site {
	t.Helper()
	s := &site{picker: net.JoinHostPort(loopback.Host(t), "29002")}
	s.play = open(t, stage.Options{Change: func(c *scheduler.Config) {
		c.ExtProcAddress, c.ExtProcEndpoints = s.picker, 3
		if r.configure != nil {
			r.configure(c)
		}
	}})
	return s
}

// before puts the proxy in front of new engines, and of other addresses.
func (r reverseProxy) before(t *testing.T, s *site, others []string, configs ...fakevllm.Config) *proxied {
	t.Helper()
	x := &proxied{site: s, reverseProxy: r}
	s.engines = others
	for i, cfg := range configs {
		e := s.engine(cfg).watched(fmt.Sprint("pod-", i))
		e.untilMember(e.id(), "be exact", stage.Exact)
		x.engines, s.engines = append(x.engines, e), append(s.engines, e.Addr())
	}
	s.ready()
	x.served = r.start(t, s)
	x.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 300}, Timeout: patience}
	t.Cleanup(x.client.CloseIdleConnections)
	x.until(r.name+" serves", func() bool {
		answer, err := x.client.Get(x.url + "/v1/models")
		if err == nil {
			answer.Body.Close()
		}
		return err == nil && answer.StatusCode < 500
	})
	return x
}

// needProxy skips a test where the program is not installed, unless KVSCOUT_REQUIRE_
// and its name say that it must be there.
func needProxy(t *testing.T, p *proxies.Proxy) {
	t.Helper()
	switch _, err := p.Find(); {
	case err == nil:
	case os.Getenv("KVSCOUT_REQUIRE_"+strings.ToUpper(p.Name)) != "":
		t.Fatal(err)
	default:
		t.Skipf("skipped: %v", err)
	}
}

// runProxy starts a proxy's program in front of the site's engines, with these edits
// of its configuration, until the test ends.
func runProxy(t *testing.T, p *proxies.Proxy, s *site, edits ...proxies.Edit) served {
	t.Helper()
	needProxy(t, p)
	x, err := p.Prepare(context.Background(), t.TempDir(), proxies.Site{Root: "..", Host: loopback.Host(t), Engines: s.engines,
		GRPC: s.GRPC, HTTP: s.HTTP, Pickers: []string{s.picker}, Plain: s.plain}, edits...)
	if err != nil {
		t.Fatal(err)
	}
	runProgram(t, x.Command)
	return served{url: "http://" + x.Address, http2: "http://" + x.HTTP2, pid: x.Command.Process.Pid}
}

// runProgram starts a proxy's program. It is asked to end when the test does, and
// what it said is shown if that failed.
func runProgram(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		late := time.AfterFunc(patience/4, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		late.Stop()
		if t.Failed() {
			said := log.Bytes()
			t.Logf("%s says at last:\n%s", cmd.Path, said[max(0, len(said)-4000):])
		}
	})
}

// try sends a completion and returns the status and the body.
func (x *proxied) try(ctx context.Context, body io.Reader, header ...string) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, x.url+"/v1/completions", body)
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	answer, err := x.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return answer.StatusCode, text, err
}

// complete sends a completion, which must be served from so many cached tokens.
func (x *proxied) complete(q prompt, more string, cached int) []byte {
	x.t.Helper()
	status, text, err := x.try(x.t.Context(), bytes.NewReader(q.completion(more)))
	if err != nil || status != http.StatusOK || !bytes.Contains(text, fmt.Appendf(nil, `"cached_tokens":%d,`, cached)) {
		x.t.Fatalf("%d %.500s %v, want %d cached tokens", status, text, err, cached)
	}
	return text
}

// stream begins a long answer and reads its first event.
func (x *proxied) stream(ctx context.Context, q prompt) *bufio.Reader {
	x.t.Helper()
	body := bytes.Replace(q.completion(`,"stream":true`), []byte(`"max_tokens":3`), []byte(`"max_tokens":100000`), 1)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, x.url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		x.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	answer, err := x.client.Do(req)
	if err != nil {
		x.t.Fatal(err)
	}
	x.t.Cleanup(func() { answer.Body.Close() })
	reader := bufio.NewReader(answer.Body)
	if line, err := reader.ReadString('\n'); err != nil || !strings.HasPrefix(line, "data: ") {
		x.t.Fatalf("%d %q %v", answer.StatusCode, line, err)
	}
	return reader
}

// free waits until the engines run nothing and nothing is reserved on them.
func (x *proxied) free() {
	x.t.Helper()
	for _, e := range x.engines {
		x.until("the engine is idle", func() bool { return e.State(0).Running == 0 && e.State(0).Waiting == 0 })
		if x.lacks[reportsEnd] == "" {
			e.untilMember(e.id(), "hold nothing back", idleAgain)
		}
	}
}

func idleAgain(m *api.MemberState) bool {
	return m.GetReservedRequests() == 0 && m.GetReservedTokens() == 0
}

// cacheable are the tokens of a prompt that can be found cached.
func (q prompt) cacheable() int { return (len(q.tokens) - 1) / size * size }

// slow is an engine that takes its time for tokens.
var slow = fakevllm.Config{Speedup: 1}

const withUsage = `,"stream":true,"stream_options":{"include_usage":true}`

// announce makes a member of an address that holds these prompts.
func (p *play) announce(pod, address string, prompts ...prompt) *speaker {
	p.t.Helper()
	s := p.speaker(p.bus(), pod, prompts...)
	s.mu.Lock()
	s.info = proto.Clone(s.info).(*pb.MemberInfo)
	s.info.Address = address
	s.mu.Unlock()
	p.untilMember(s.id, "have its address", func(m *api.MemberState) bool { return m.GetMember().GetAddress() == address })
	return s
}

// standIn serves in an engine's place and returns its address.
func standIn(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(loopback.Host(t), "28000"))
	if err != nil {
		t.Fatal(err)
	}
	s := &httptest.Server{Listener: l, Config: &http.Server{Handler: h}}
	s.Start()
	t.Cleanup(s.Close)
	return l.Addr().String()
}

// runProxyCases is what is asked of every proxy.
func runProxyCases(t *testing.T, r reverseProxy) {
	page := strings.Join(strings.Fields(read(t, "../docs/PROXIES.md")), " ")
	for what, why := range r.lacks {
		if !strings.Contains(page, why) {
			t.Errorf("%s lacks %s: docs/PROXIES.md does not say %q", r.name, what, why)
		}
	}
	if r.need != nil {
		r.need(t)
	}
	for _, c := range []struct {
		name  string
		needs feature
		run   func(reverseProxy, *testing.T)
	}{
		{"sends where it is cached", "", (reverseProxy).testCached},
		{"speaks HTTP/2", speaksHTTP2, (reverseProxy).testHTTP2},
		{"hides usage", hidesUsage, (reverseProxy).testHidesUsage},
		{"leaves bodies as they are", "", (reverseProxy).testBodies},
		{"picks by large bodies", readsLarge, (reverseProxy).testLarge},
		{"passes errors on", "", (reverseProxy).testErrors},
		{"keeps connections", "", (reverseProxy).testKeepAlive},
		{"many at once", "", (reverseProxy).testMany},
		{"clients go away", "", (reverseProxy).testClientsGoAway},
		{"an engine dies before", triesOthers, (reverseProxy).testEngineDead},
		{"an engine dies in the middle", "", (reverseProxy).testEngineDies},
		{"the scheduler dies and is back", "", (reverseProxy).testWithoutScheduler},
		{"bad input", "", (reverseProxy).testBadInput},
	} {
		t.Run(c.name, func(t *testing.T) {
			if why := r.lacks[c.needs]; why != "" {
				t.Skipf("%s lacks it: %s", r.name, why)
			}
			c.run(r, t)
		})
	}
}

// checked is the end of a case in which the proxy had nothing to complain about.
func (x *proxied) checked() {
	x.t.Helper()
	if x.check != nil {
		x.check()
	}
}

// What is predicted is what the engines count, for JSON and for events.
func (r reverseProxy) testCached(t *testing.T) {
	x := r.before(t, r.site(t), nil, fakevllm.Config{}, fakevllm.Config{}, fakevllm.Config{})
	x.cachesWell()
}

func (r reverseProxy) testHTTP2(t *testing.T) {
	x := r.before(t, r.site(t), nil, fakevllm.Config{}, fakevllm.Config{})
	protocols := new(http.Protocols)
	if strings.HasPrefix(x.http2, "https:") {
		protocols.SetHTTP2(true)
	} else {
		protocols.SetUnencryptedHTTP2(true)
	}
	transport := x.client.Transport.(*http.Transport)
	transport.Protocols, transport.TLSClientConfig = protocols, &tls.Config{InsecureSkipVerify: true}
	x.url = x.http2
	answer, err := x.client.Get(x.url + "/v1/models")
	if err != nil || answer.ProtoMajor != 2 {
		t.Fatalf("%v %v", answer, err)
	}
	answer.Body.Close()
	x.cachesWell()
}

func (x *proxied) cachesWell() {
	t := x.t
	t.Helper()
	requests, cached := uint64(0), uint64(0)
	for round, more := range []string{"", withUsage, ""} {
		for seed := range uint64(5) {
			q := random(seed, 2000+100*int(seed))
			want := min(round, 1) * q.cacheable()
			// Until the request before is reported, its member is the busier one.
			x.until(fmt.Sprintf("round %d: %d tokens are predicted", round, want), func() bool {
				return int(x.score(q.request()).GetCandidates()[0].GetCachedTokens().GetGpu()) == want
			})
			text := x.complete(q, more, want)
			if events := bytes.Count(text, []byte("data: ")); more == withUsage && events < 3 {
				t.Fatalf("%d events: %s", events, text)
			}
			requests, cached = requests+1, cached+uint64(want)
			for _, e := range x.engines {
				e.truth(soon, q)
			}
		}
	}
	if x.lacks[reportsCount] == "" {
		x.until("all is reported as the engines counted, and as it was predicted", func() bool {
			var sum, counted, predicted uint64
			for _, e := range x.engines {
				m := x.member(e.id())
				sum, counted, predicted = sum+m.GetReportedRequests(), counted+m.GetReportedCachedTokens(), predicted+m.GetPredictedCachedTokens()
			}
			return sum == requests && counted == cached && predicted == cached
		})
	}
	answer, err := x.client.Get(x.url + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	var models struct{ Data []struct{ ID string } }
	if err := json.NewDecoder(answer.Body).Decode(&models); err != nil || len(models.Data) != 1 || models.Data[0].ID != model {
		t.Errorf("the models: %v %+v %v", answer, models, err)
	}
	x.free()
	x.checked()
}

// The engine's counts are known even of clients that do not ask for them, and
// such a client gets what it would get without kvscout.
func (r reverseProxy) testHidesUsage(t *testing.T) {
	x := r.before(t, r.site(t), nil, fakevllm.Config{})
	e := x.engines[0]
	var through []byte
	for round := range uint64(3) {
		q := random(min(round, 1), 2000)
		var status int
		var err error
		status, through, err = x.try(t.Context(), bytes.NewReader(q.completion(`,"stream":true`)))
		if err != nil || status != http.StatusOK || bytes.Contains(through, []byte(`"usage"`)) || !bytes.HasSuffix(through, []byte("data: [DONE]\n\n")) {
			t.Fatalf("%d %s %v", status, through, err)
		}
		e.untilMember(e.id(), "be reported", func(m *api.MemberState) bool {
			cached := max(int(round)-1, 0) * q.cacheable()
			return m.GetReportedRequests() == round+1 && m.GetReportedPromptTokens() == 2000*(round+1) &&
				m.GetReportedCachedTokens() == uint64(cached) && m.GetPredictedCachedTokens() == uint64(cached)
		})
		e.truth(soon, q)
	}
	// The same from the engine itself: how many events it makes of it is a matter of time.
	_, direct := x.post(e.URL()+"/v1/completions", nil, map[string]any{"model": model, "prompt": random(1, 2000).tokens, "max_tokens": 3, "stream": true})
	if got, want := streamed(t, through), streamed(t, direct); got != want {
		t.Errorf("%q through %s, %q without:\n%s\n%s", got, r.name, want, through, direct)
	}
	x.checked()
}

// streamed is the text of a stream of events, each of which must have some.
func streamed(t *testing.T, events []byte) string {
	t.Helper()
	var text strings.Builder
	for event := range bytes.SplitSeq(bytes.TrimSuffix(events, []byte("data: [DONE]\n\n")), []byte("\n\n")) {
		if len(event) == 0 {
			continue
		}
		var e struct{ Choices []struct{ Text string } }
		if err := json.Unmarshal(bytes.TrimPrefix(event, []byte("data: ")), &e); err != nil || len(e.Choices) != 1 || e.Choices[0].Text == "" {
			t.Fatalf("%q: %v", event, err)
		}
		text.WriteString(e.Choices[0].Text)
	}
	return text.String()
}

// Bodies reach the engine byte for byte, with the path, the query and the headers
// that are the engine's; so does the answer reach the client.
func (r reverseProxy) testBodies(t *testing.T) {
	type seen struct {
		sum                     [sha256.Size]byte
		length                  int
		path, content, password string
	}
	came := make(chan seen, 1)
	reply := fmt.Appendf(nil, `{"choices":[{"text":%q}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`, strings.Repeat("y", 2_000_000))
	address := standIn(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			return // a probe
		}
		body, _ := io.ReadAll(r.Body)
		came <- seen{sha256.Sum256(body), len(body), r.URL.RequestURI(), r.Header.Get("Content-Type"), r.Header.Get("Authorization")}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(reply)
	})
	s := r.site(t)
	s.announce("witness", address)
	x := r.before(t, s, []string{address})
	for length, chunked := range map[int]bool{100: false, 5_000_000: false, 50_000: true} {
		body := fmt.Appendf(nil, `{"model":%q,"prompt":[1,2,3],  "user":%q}`, model, strings.Repeat("ü x", length/4))
		var from io.Reader = bytes.NewReader(body)
		if chunked {
			from = io.MultiReader(from)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, x.url+"/v1/completions?a=b&c=%20", from)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json; charset=utf-8")
		req.Header.Set("Authorization", "Bearer of news")
		answer, err := x.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil || answer.StatusCode != http.StatusOK || !bytes.Equal(text, reply) {
			t.Fatalf("%d bytes: %v %v, %d bytes of %d", len(body), answer.Status, err, len(text), len(reply))
		}
		want := seen{sha256.Sum256(body), len(body), "/v1/completions?a=b&c=%20", "application/json; charset=utf-8", "Bearer of news"}
		if got := <-came; got != want {
			t.Errorf("%d bytes, chunked %t: the engine got %+v, want %+v", len(body), chunked, got, want)
		}
	}
	x.checked()
}

func (r reverseProxy) testLarge(t *testing.T) {
	x := r.before(t, r.site(t), nil, fakevllm.Config{MaxModelLen: 1 << 20, Blocks: 100_000}, fakevllm.Config{MaxModelLen: 1 << 20, Blocks: 100_000})
	q := random(1, 900_000)
	for round, more := range []string{"", `,"user":"` + strings.Repeat("x", 15_000_000) + `"`} {
		if n := len(q.completion(more)); n < 5_000_000+round*15_000_000 {
			t.Fatalf("only %d bytes", n)
		}
		x.complete(q, more, round*q.cacheable())
		for _, e := range x.engines {
			e.truth(patience, q)
		}
	}
	x.checked()
}

// What an engine says against a request is what the client hears.
func (r reverseProxy) testErrors(t *testing.T) {
	address := standIn(t, func(w http.ResponseWriter, r *http.Request) {
		var body struct{ User int }
		if json.NewDecoder(r.Body).Decode(&body) != nil {
			return // a probe
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(body.User)
		fmt.Fprintf(w, `{"error":{"message":"no %d"}}`, body.User)
	})
	s := r.site(t)
	m := s.announce("grumbler", address)
	x := r.before(t, s, []string{address})
	for _, status := range []int{400, 404, 422, 429, 500, 503} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, x.url+"/v1/completions", bytes.NewReader(random(1, 100).completion(fmt.Sprintf(`,"user":%d`, status))))
		if err != nil {
			t.Fatal(err)
		}
		answer, err := x.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if want := fmt.Sprintf(`{"error":{"message":"no %d"}}`, status); err != nil || answer.StatusCode != status || string(text) != want || answer.Header.Get("Retry-After") != "7" {
			t.Errorf("%d: %v %s %v", status, answer, text, err)
		}
	}
	if r.lacks[reportsEnd] == "" {
		x.untilMember(m.id, "hold nothing back", idleAgain)
	}
	x.checked()
}

func (r reverseProxy) testKeepAlive(t *testing.T) {
	x := r.before(t, r.site(t), nil, fakevllm.Config{})
	fresh := 0
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		if !i.Reused {
			fresh++
		}
	}})
	x.client.CloseIdleConnections()
	for i := range uint64(20) {
		more := ""
		if i%2 == 0 {
			more = withUsage
		}
		if status, text, err := x.try(ctx, bytes.NewReader(random(i, 100).completion(more))); err != nil || status != http.StatusOK {
			t.Fatalf("request %d: %d %s %v", i, status, text, err)
		}
	}
	if fresh != 1 {
		t.Errorf("%d connections for requests one after another", fresh)
	}
}

func (r reverseProxy) testMany(t *testing.T) {
	x := r.before(t, r.site(t), nil, fakevllm.Config{}, fakevllm.Config{}, fakevllm.Config{})
	var all sync.WaitGroup
	for i := range 200 {
		all.Go(func() {
			more := ""
			if i%2 == 0 {
				more = withUsage
			}
			status, text, err := x.try(t.Context(), bytes.NewReader(random(uint64(i%20), 1000).completion(more)))
			if err != nil || status != http.StatusOK || !bytes.Contains(text, []byte(`"prompt_tokens":1000`)) {
				t.Errorf("request %d: %d %s %v", i, status, text, err)
			}
		})
	}
	all.Wait()
	if r.lacks[reportsCount] == "" {
		x.until("all is reported", func() bool {
			sum := uint64(0)
			for _, e := range x.engines {
				sum += x.member(e.id()).GetReportedRequests()
			}
			return sum == 200
		})
	}
	x.free()
	x.checked()
}

func (r reverseProxy) testClientsGoAway(t *testing.T) {
	x := r.before(t, r.site(t), nil, slow)
	e := x.engines[0]
	for seed := range uint64(3) {
		ctx, cancel := context.WithCancel(t.Context())
		x.stream(ctx, random(seed, 100))
		cancel()
		x.free()
	}
	// Before anything of an answer has come.
	e.act("/pause", url.Values{"mode": {"keep"}})
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_, _, _ = x.try(ctx, bytes.NewReader(random(9, 100).completion("")))
	}()
	x.until("the request waits at the engine", func() bool { return e.State(0).Running+e.State(0).Waiting > 0 })
	cancel()
	<-gone
	e.act("/resume", nil)
	x.free()
	x.checked()
}

// A member that is believed to hold all cannot be reached: another one serves.
func (r reverseProxy) testEngineDead(t *testing.T) {
	s := r.site(t)
	nobody := net.JoinHostPort(loopback.Host(t), "8000")
	q := random(1, 50_000)
	dead := s.announce("dead", nobody, q)
	x := r.before(t, s, []string{nobody}, fakevllm.Config{})
	if first := x.score(q.request()).GetCandidates()[0].GetMember().GetId(); first != dead.id {
		t.Fatalf("the first is %s", first)
	}
	x.complete(q, "", 0)
	x.free()
	if r.lacks[reportsEnd] == "" {
		x.untilMember(dead.id, "hold nothing back", idleAgain)
	}
	x.checked()
}

// An answer that breaks off breaks off for the client, and is not begun again.
func (r reverseProxy) testEngineDies(t *testing.T) {
	x := r.before(t, r.site(t), nil, slow)
	reader := x.stream(t.Context(), random(1, 100))
	x.engines[0].stop()
	if _, err := io.Copy(io.Discard, reader); err == nil {
		t.Error("the answer of a dead engine ends well")
	}
	x.client.CloseIdleConnections()
	if r.lacks[reportsEnd] == "" {
		x.engines[0].untilMember(x.engines[0].id(), "hold nothing back", idleAgain)
	}
}

// Without the scheduler the proxy's own choice serves, and the scheduler's again
// when it is back.
func (r reverseProxy) testWithoutScheduler(t *testing.T) {
	x := r.before(t, r.site(t), nil, fakevllm.Config{}, fakevllm.Config{})
	q := random(1, 5000)
	x.complete(q, "", 0)
	x.StopScheduler()
	serves := func(seed uint64) bool {
		status, _, err := x.try(t.Context(), bytes.NewReader(random(seed, 100).completion("")))
		return err == nil && status == http.StatusOK
	}
	if r.lacks[fallsBack] == "" {
		x.until(r.name+" serves by itself", func() bool { return serves(99) })
		for seed := range uint64(10) {
			if !serves(100 + seed) {
				t.Fatal("a request fails, without a scheduler")
			}
		}
	} else if serves(99) {
		t.Errorf("it serves, although %s", r.lacks[fallsBack])
	}
	if err := x.StartScheduler(); err != nil {
		t.Fatal(err)
	}
	for _, e := range x.engines {
		e.untilMember(e.id(), "be exact", stage.Exact)
		e.truth(patience, q)
	}
	x.until("the scheduler is asked again", func() bool {
		return serves(99) && x.counted(x.Admin, "kvscout_scheduler_reservations_total", "") > 0
	})
	for range 5 {
		x.complete(q, "", q.cacheable())
	}
}

// Whatever comes, the answer is clear, others are served, and nothing is left.
func (r reverseProxy) testBadInput(t *testing.T) {
	s := r.site(t)
	x := r.before(t, s, nil, fakevllm.Config{})
	var misled atomic.Int64
	liar := standIn(t, func(http.ResponseWriter, *http.Request) { misled.Add(1) })
	good := string(random(1, 100).completion(""))
	var zipped bytes.Buffer
	zip := gzip.NewWriter(&zipped)
	_, _ = zip.Write([]byte(good))
	_ = zip.Close()
	for name, c := range map[string]struct {
		method, path, body string
		header             [2]string
		want               []int
	}{
		"not JSON":         {"POST", "/v1/completions", "hello", [2]string{}, []int{400}},
		"cut off":          {"POST", "/v1/completions", good[:len(good)-5], [2]string{}, []int{400}},
		"empty":            {"POST", "/v1/completions", "", [2]string{}, []int{400}},
		"no model":         {"POST", "/v1/completions", `{"prompt":[1,2]}`, [2]string{}, []int{200, 400}}, // an engine takes its own
		"unknown model":    {"POST", "/v1/completions", `{"model":"x","prompt":[1,2]}`, [2]string{}, []int{404}},
		"compressed":       {"POST", "/v1/completions", zipped.String(), [2]string{"Content-Encoding", "gzip"}, []int{400, 415}},
		"unknown path":     {"POST", "/v1/nothing", good, [2]string{}, []int{404}},
		"nothing there":    {"GET", "/nothing", "", [2]string{}, []int{404}},
		"a lying endpoint": {"POST", "/v1/completions", good, [2]string{"X-Gateway-Destination-Endpoint", liar}, []int{200}},
		"a lying subset":   {"POST", "/v1/completions", good, [2]string{"X-Gateway-Destination-Endpoint-Subset", liar}, []int{200}},
		"a lying host":     {"POST", "/v1/completions", good, [2]string{"Host", liar}, []int{200}},
		"a lying decision": {"POST", "/v1/completions", good, [2]string{"X-Kvscout-Endpoint", liar}, []int{200}},
	} {
		req, err := http.NewRequestWithContext(t.Context(), c.method, x.url+c.path, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		switch c.header[0] {
		case "":
		case "Host":
			req.Host = c.header[1]
		default:
			req.Header.Set(c.header[0], c.header[1])
		}
		answer, err := x.client.Do(req)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		text, _ := io.ReadAll(answer.Body)
		answer.Body.Close()
		ok := false
		for _, status := range c.want {
			ok = ok || status == answer.StatusCode
		}
		if !ok {
			t.Errorf("%s: %d %.300s, want %v", name, answer.StatusCode, text, c.want)
		}
	}
	if n := misled.Load(); n > 0 {
		t.Errorf("%d requests went where the client said", n)
	}
	// 100 MB: refused, or cut off while it is sent.
	if status, text, err := x.try(t.Context(), io.LimitReader(blanks{}, 100<<20)); err == nil && (status < 400 || status > 499) {
		t.Errorf("100 MB: %d %s", status, text)
	}
	x.client.CloseIdleConnections() // the one on which that came may be about to end
	// A client that says more than it sends.
	where, err := url.Parse(x.url)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("tcp", where.Host)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(good)+1, good)
	conn.Close()
	if status, text, err := x.try(t.Context(), strings.NewReader(good)); err != nil || status != http.StatusOK {
		t.Errorf("another one: %d %s %v", status, text, err)
	}
	x.free()
}

// blanks without end.
type blanks struct{}

func (blanks) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}
