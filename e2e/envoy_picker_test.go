package e2e

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/authority"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler"
)

// What tests change in the configuration of deploy/proxies/envoy.
const (
	duplexModes = "processing_mode: {request_header_mode: SEND, request_body_mode: FULL_DUPLEX_STREAMED, request_trailer_mode: SEND, response_header_mode: SEND, response_body_mode: FULL_DUPLEX_STREAMED, response_trailer_mode: SEND}\n              message_timeout: 5s"
	// modesOverridden is what docs/PROXIES.md says for -extproc-mode-override.
	modesOverridden = "processing_mode: {request_header_mode: SEND, request_body_mode: NONE, request_trailer_mode: SEND, response_header_mode: SEND, response_body_mode: NONE, response_trailer_mode: SEND}\n              allow_mode_override: true\n              message_timeout: 1s"
	modesStreamed   = "processing_mode: {request_header_mode: SEND, request_body_mode: STREAMED, request_trailer_mode: SKIP, response_header_mode: SEND, response_body_mode: STREAMED, response_trailer_mode: SKIP}\n              send_body_without_waiting_for_header_response: true\n              message_timeout: 5s"
	beforeFilters   = "          http_filters:\n"
	inCluster       = "    connect_timeout: 0.5s\n    common_lb_config"
)

// behindEnvoy is an Envoy before engines, with edits of its configuration.
func behindEnvoy(t *testing.T, change func(*scheduler.Config), edits ...string) *proxied {
	t.Helper()
	needEnvoy(t)
	r := reverseProxy{name: "Envoy", configure: change}
	s := r.site(t)
	r.start = func(t *testing.T, s *site) served {
		return startEnvoy(t, s.play, "engines", []string{s.picker}, s.engines, edits...).served()
	}
	return r.before(t, s, nil, fakevllm.Config{MaxModelLen: 1 << 20, Blocks: 100_000}, fakevllm.Config{MaxModelLen: 1 << 20, Blocks: 100_000})
}

func TestEnvoyIsToldToShowBodies(t *testing.T) {
	x := behindEnvoy(t, func(c *scheduler.Config) { c.ExtProcModeOverride = true }, duplexModes, modesOverridden)
	x.cachesWell()
	q := random(77, 500_000)
	for round := range 2 {
		x.complete(q, "", round*q.cacheable())
		for _, e := range x.engines {
			e.truth(patience, q)
		}
	}
	x.checked()
	// Without a scheduler a POST goes on at once, whatever its length, before any
	// health check has found that out.
	x.StopScheduler()
	for seed, length := range map[uint64]int{1: 100, 2: 400_000} {
		status, text, err := x.try(t.Context(), bytes.NewReader(random(seed, length).completion("")))
		if err != nil || status != http.StatusOK {
			t.Errorf("%d tokens: %d %.300s %v", length, status, text, err)
		}
	}
}

// Bodies that come before the headers are answered are picked by, up to what Envoy
// keeps of them.
func TestEnvoyStreamsBodies(t *testing.T) {
	x := behindEnvoy(t, nil, duplexModes, modesStreamed)
	x.cachesWell()
	q := random(77, 60_000) // 400 KB
	for round := range 2 {
		x.complete(q, "", round*q.cacheable())
		for _, e := range x.engines {
			e.truth(patience, q)
		}
	}
	x.checked()
}

// A scheduler that hangs costs a request ten seconds, and others nothing once the
// health check has seen it.
func TestEnvoyGoesRoundASchedulerThatHangs(t *testing.T) {
	for name, c := range map[string]struct {
		edits  []string
		most   time.Duration
		status int
	}{
		"duplex":     {nil, 10 * time.Second, http.StatusInternalServerError},
		"overridden": {[]string{duplexModes, modesOverridden}, time.Second, http.StatusOK},
	} {
		t.Run(name, func(t *testing.T) {
			needEnvoy(t)
			r := reverseProxy{name: "Envoy", configure: func(cfg *scheduler.Config) { cfg.ExtProcModeOverride = c.edits != nil }}
			s := r.site(t)
			link := proxy(t, "tcp://"+s.picker, nil, nil)
			var front *envoy
			r.start = func(t *testing.T, s *site) served {
				front = startEnvoy(t, s.play, "engines", []string{link.Addr()}, s.engines, c.edits...)
				return front.served()
			}
			x := r.before(t, s, nil, fakevllm.Config{})
			x.complete(random(1, 1000), "", 0)
			x.until("the first request has ended for the picker, too", func() bool { return front.stat("cluster.kvscout.upstream_rq_active") == "0" })
			link.Stall(true)
			watch := newStopwatch()
			status, text, err := x.try(t.Context(), bytes.NewReader(random(2, 1000).completion("")))
			if err != nil || status != c.status {
				t.Errorf("%d %s %v", status, text, err)
			}
			t.Logf("it cost %v", time.Since(watch.start).Round(time.Millisecond))
			if watch.over(c.most) {
				t.Errorf("it cost %v, not %v", watch.ours(), c.most)
			}
			serves := func(seed uint64) bool {
				status, _, err := x.try(t.Context(), bytes.NewReader(random(seed, 100).completion("")))
				return err == nil && status == http.StatusOK
			}
			x.until("Envoy serves by itself", func() bool { return serves(3) })
			watch = newStopwatch()
			for seed := range uint64(5) {
				if !serves(10 + seed) {
					t.Error("a request fails")
				}
			}
			if watch.over(time.Second) {
				t.Errorf("five requests take %v while a scheduler hangs", watch.ours())
			}
			link.Stall(false)
			x.until("the scheduler is asked again", func() bool {
				answer, err := x.client.Post(x.url+"/v1/completions", "application/json", bytes.NewReader(random(99, 100).completion("")))
				if err != nil {
					return false
				}
				answer.Body.Close()
				return answer.Header.Get("X-Kvscout-Decision") != ""
			})
		})
	}
}

// A scheduler that hardly gets on, as one on a machine that others fill, costs a
// request at most what one that hangs does, and no request is lost to it: what the
// health check finds too slow, Envoy serves by itself.
func TestEnvoyBesideASchedulerThatHardlyGetsOn(t *testing.T) {
	needEnvoy(t)
	r := reverseProxy{name: "Envoy"}
	s := r.site(t)
	link := proxy(t, "tcp://"+s.picker, nil, nil)
	r.start = func(t *testing.T, s *site) served {
		return startEnvoy(t, s.play, "engines", []string{link.Addr()}, s.engines).served()
	}
	x := r.before(t, s, nil, fakevllm.Config{}, fakevllm.Config{})
	x.complete(random(1, 1000), "", 0)
	var g sync.WaitGroup
	ended := make(chan struct{})
	g.Go(func() { // a tenth of the time is the scheduler's
		for {
			for _, turn := range []struct {
				stalls bool
				lasts  time.Duration
			}{{true, 450 * time.Millisecond}, {false, 50 * time.Millisecond}} {
				link.Stall(turn.stalls)
				select {
				case <-ended:
					link.Stall(false)
					return
				case <-time.After(turn.lasts):
				}
			}
		}
	})
	var callers sync.WaitGroup
	for caller := range uint64(8) {
		callers.Go(func() {
			for i := range uint64(4) {
				watch := newStopwatch()
				status, text, err := x.try(t.Context(), bytes.NewReader(random(100*caller+i, 1000).completion("")))
				if err != nil || status != http.StatusOK {
					t.Errorf("caller %d, request %d: %d %.300s %v", caller, i, status, text, err)
				}
				if watch.over(10 * time.Second) {
					t.Errorf("caller %d, request %d: it cost %v", caller, i, watch.ours())
				}
			}
		})
	}
	callers.Wait()
	close(ended)
	g.Wait()
	x.checked()
}

// listening stands in for an engine and keeps what it was sent.
func listening(t *testing.T, answer string) (address string, came chan *http.Request) {
	t.Helper()
	came = make(chan *http.Request, 10)
	address = standIn(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			return // a probe
		}
		body, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(bytes.NewReader(body))
		came <- r
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, answer)
	})
	return address, came
}

// One trace leads from the client by way of Envoy and the picker to the engine.
func TestEnvoyTraces(t *testing.T) {
	needEnvoy(t)
	const tracing = `          tracing:
            random_sampling: {value: 100}
            provider:
              name: envoy.tracers.opentelemetry
              typed_config:
                "@type": type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig
                service_name: gateway
                grpc_service: {envoy_grpc: {cluster_name: otel}}
`
	for name, traced := range map[string]bool{"by Envoy too": true, "not by Envoy": false} {
		t.Run(name, func(t *testing.T) {
			r := collector(t)
			var edits []string
			if traced {
				host, port, _ := strings.Cut(strings.TrimPrefix(r.address, "http://"), ":")
				edits = []string{beforeFilters, tracing + beforeFilters, "  # The scheduler, or several.\n", `  - name: otel
    type: STATIC
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment: {cluster_name: otel, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: ` + host + `, port_value: ` + port + `}}}}]}]}
`}
			}
			x := reverseProxy{name: "Envoy"}
			s := x.site(t)
			address, came := listening(t, `{"choices":[]}`)
			s.announce("witness", address)
			x.start = func(t *testing.T, s *site) served {
				return startEnvoy(t, s.play, "engines", []string{s.picker}, s.engines, edits...).served()
			}
			y := x.before(t, s, []string{address})
			if status, text, err := y.try(t.Context(), bytes.NewReader(random(1, 100).completion("")), "Traceparent", "00-"+callerTrace+"-"+callerSpan+"-01"); err != nil || status != http.StatusOK {
				t.Fatalf("%d %s %v", status, text, err)
			}
			if at := (<-came).Header.Get("Traceparent"); !strings.HasPrefix(at, "00-"+callerTrace+"-") || !strings.HasSuffix(at, "-01") {
				t.Errorf("the engine is told %q", at)
			}
			// parents of the spans of this trace, by span.
			parents := func() (parents map[string]string, decision string) {
				r.mu.Lock()
				defer r.mu.Unlock()
				parents = make(map[string]string)
				for _, s := range r.spans {
					if hex.EncodeToString(s.GetTraceId()) == callerTrace {
						parents[string(s.GetSpanId())] = string(s.GetParentSpanId())
						if s.GetName() == "kvscout.decision" {
							decision = string(s.GetSpanId())
						}
					}
				}
				return parents, decision
			}
			s.until("the spans lead from the decision to the client", func() bool {
				parents, at := parents()
				steps := 0
				for at != "" && hex.EncodeToString([]byte(at)) != callerSpan {
					at = parents[at]
					steps++
				}
				// The call of the picker stands between, and Envoy's two spans.
				return at != "" && (!traced && steps == 2 || traced && steps >= 4)
			})
		})
	}
}

// Envoy and the picker encrypt; each may ask who the other one is.
func TestEnvoyAndThePickerEncrypt(t *testing.T) {
	needEnvoy(t)
	ca := authority.New(t)
	pair, mine := ca.Issue(t, time.Now().Add(time.Hour)), ca.Issue(t, time.Now().Add(time.Hour))
	const socket = `    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        sni: localhost
        common_tls_context:
          alpn_protocols: [h2]
`
	verifies := socket + fmt.Sprintf("          validation_context: {trusted_ca: {filename: %s}, match_typed_subject_alt_names: [{san_type: DNS, matcher: {exact: localhost}}]}\n", ca.CA)
	mutual := verifies + fmt.Sprintf("          tls_certificates: [{certificate_chain: {filename: %s}, private_key: {filename: %s}}]\n", mine.Cert, mine.Key)
	for name, c := range map[string]struct {
		tls    scheduler.TLS
		socket string
		served bool
	}{
		"not verified":    {scheduler.TLS{Cert: pair.Cert, Key: pair.Key}, socket, true},
		"verified":        {scheduler.TLS{Cert: pair.Cert, Key: pair.Key}, verifies, true},
		"both":            {scheduler.TLS{Cert: pair.Cert, Key: pair.Key, CA: ca.CA}, mutual, true},
		"without its own": {scheduler.TLS{Cert: pair.Cert, Key: pair.Key, CA: ca.CA}, verifies, false},
		"in plain text":   {scheduler.TLS{Cert: pair.Cert, Key: pair.Key}, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			p := open(t, stage.Options{})
			e := p.engine(fakevllm.Config{}).watched("pod")
			e.untilMember(e.id(), "be exact", stage.Exact)
			picker := net.JoinHostPort(loopback.Host(t), "29002")
			sched, err := scheduler.New(scheduler.Config{NATSURL: p.NATS, GRPCAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", GRPCTLS: c.tls,
				ExtProcAddress: picker, ExtProcEndpoints: 2, StopWait: time.Second, Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			run(t, sched.Run)
			healthy := 1
			if !c.served {
				healthy = 0
			}
			x := newEnvoy(t, p, "engines", []string{picker}, []string{e.Addr()}, inCluster, c.socket+inCluster)
			x.untilStat("cluster.kvscout.membership_healthy", fmt.Sprint(healthy))
			y := &proxied{site: &site{play: p}, served: x.served(), client: x.http}
			if !c.served {
				p.until("Envoy sees that it cannot ask", func() bool {
					status, _, err := y.try(t.Context(), bytes.NewReader(random(1, 100).completion("")))
					return err == nil && status == http.StatusOK && x.stat("cluster.kvscout.health_check.failure") != "0"
				})
				if n := x.stat("http.gateway.ext_proc.immediate_responses_sent"); n != "0" {
					t.Errorf("%s answers of the picker", n)
				}
				return
			}
			q := random(1, 1000)
			for round := range 2 {
				p.until("it is served as it was picked", func() bool {
					answer, err := x.http.Post(x.url+"/v1/completions", "application/json", bytes.NewReader(q.completion("")))
					if err != nil {
						t.Fatal(err)
					}
					defer answer.Body.Close()
					text, _ := io.ReadAll(answer.Body)
					return answer.Header.Get("X-Kvscout-Decision") != "" && (round == 0 || bytes.Contains(text, fmt.Appendf(nil, `"cached_tokens":%d,`, q.cacheable())))
				})
			}
			x.unharmed()
		})
	}
}

// What the picker tells the engine arrives there.
func TestEnvoyTellsTheEngine(t *testing.T) {
	needEnvoy(t)
	front := func(t *testing.T, configure func(*scheduler.Config), announce func(s *site, address string)) (*proxied, chan *http.Request) {
		t.Helper()
		r := throughEnvoy
		r.configure = configure
		s := r.site(t)
		address, came := listening(t, `{"model":"lora","choices":[]}`)
		announce(s, address)
		return r.before(t, s, []string{address}), came
	}
	alone := func(s *site, address string) { s.announce("witness", address) }
	bodyOf := func(r *http.Request) (m map[string]any) {
		_ = json.NewDecoder(r.Body).Decode(&m)
		return m
	}
	t.Run("priority", func(t *testing.T) {
		x, came := front(t, func(c *scheduler.Config) { c.ExtProcPriority = true }, alone)
		for more, own := range map[string]any{"": nil, `,"priority":-3`: -3.0} {
			if status, text, err := x.try(t.Context(), bytes.NewReader(random(1, 100).completion(more))); err != nil || status != http.StatusOK {
				t.Fatalf("%d %s %v", status, text, err)
			}
			got, ok := bodyOf(<-came)["priority"]
			if !ok || own != nil && got != own {
				t.Errorf("%q: the engine is told %v", more, got)
			}
		}
		x.checked()
	})
	t.Run("another name of the model", func(t *testing.T) {
		x, came := front(t, nil, func(s *site, address string) {
			m := s.announce("witness", address)
			m.tell(func(info *pb.MemberInfo) { info.Models = []string{model, "lora"} })
			s.untilMember(m.id, "serve both", func(st *api.MemberState) bool { return len(st.GetModels()) == 2 })
		})
		status, text, err := x.try(t.Context(), bytes.NewReader(random(1, 100).completion("")), "X-Llm-D-Model-Name-Rewrite", "lora")
		if err != nil || status != http.StatusOK || string(text) != fmt.Sprintf(`{"model":%q,"choices":[]}`, model) {
			t.Fatalf("%d %s %v", status, text, err)
		}
		r := <-came
		if got := bodyOf(r)["model"]; got != "lora" || r.Header.Get("X-Llm-D-Model-Name-Rewrite") != "" {
			t.Errorf("the engine is asked for %v, with %v", got, r.Header)
		}
		x.checked()
	})
	t.Run("who prefills", func(t *testing.T) {
		x, came := front(t, func(c *scheduler.Config) { c.Disaggregate = 100 }, func(s *site, address string) {
			for pod, at := range map[string]string{"prefill": "10.0.0.1:8000", "decode": address} {
				s.announce(pod, at).tell(func(info *pb.MemberInfo) { info.Labels = map[string]string{"kvscout.role": pod} })
			}
			s.until("both have roles", func() bool {
				p, err := s.Client.Score(s.t.Context(), &api.ScoreRequest{Request: question(random(1, 1000))})
				return err == nil && p.GetRanking().GetDecode().GetMember().GetAddress() == address
			})
		})
		if status, text, err := x.try(t.Context(), bytes.NewReader(random(1, 1000).completion(""))); err != nil || status != http.StatusOK {
			t.Fatalf("%d %s %v", status, text, err)
		}
		if got := (<-came).Header.Get("X-Prefiller-Host-Port"); got != "10.0.0.1:8000" {
			t.Errorf("%q prefills", got)
		}
		x.checked()
	})
	t.Run("whose blocks can be pulled", func(t *testing.T) {
		q := random(1, 20_000)
		x, came := front(t, func(c *scheduler.Config) { c.PullTokenTime, c.Policy = time.Nanosecond, "least-requests" }, func(s *site, address string) {
			busy := s.announce("holder", "10.0.0.1:8000", q)
			busy.loaded(&pb.Load{Running: proto.Uint32(200), Waiting: proto.Uint32(500), KvUsage: proto.Float64(1)})
			s.announce("free", address)
			s.until("another one is to pull", func() bool {
				p, err := s.Client.Score(s.t.Context(), &api.ScoreRequest{Request: question(q)})
				return err == nil && p.GetRanking().GetCandidates()[0].GetPull().GetFrom().GetAddress() == "10.0.0.1:8000"
			})
		})
		if status, text, err := x.try(t.Context(), bytes.NewReader(q.completion(""))); err != nil || status != http.StatusOK {
			t.Fatalf("%d %s %v", status, text, err)
		}
		if got := (<-came).Header.Get("X-Kv-Cache-Source-Host-Port"); got != "10.0.0.1:8000" {
			t.Errorf("%q has the blocks", got)
		}
		x.checked()
	})
}

// tell changes what the member says of itself.
func (s *speaker) tell(change func(*pb.MemberInfo)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.info = proto.Clone(s.info).(*pb.MemberInfo)
	change(s.info)
}
