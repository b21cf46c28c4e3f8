package e2e

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
)

// plainRoute is Envoy without kvscout, for requests with the header x-plain.
const plainRoute = `              - match: {prefix: /, headers: [{name: x-plain, present_match: true}]}
                route: {cluster: engines, timeout: 0s}
                typed_per_filter_config: {envoy.filters.http.ext_proc: {"@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute, disabled: true}}
`

// ticking is an engine's HTTP side that sends an event every 5 ms, each with the
// time at which it leaves.
func ticking(t *testing.T, events int) string {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(loopback.Host(t), "0"))
	if err != nil {
		t.Fatal(err)
	}
	s := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for range events {
			fmt.Fprintf(w, "data: {\"choices\":[{\"text\":\"%d\"}]}\n\n", time.Now().UnixNano())
			if http.NewResponseController(w).Flush() != nil {
				return
			}
			<-tick.C
		}
	})}}
	s.Start()
	t.Cleanup(s.Close)
	return l.Addr().String()
}

// percentiles of times, the half and 99 of 100.
func percentiles(list []time.Duration) string {
	slices.Sort(list)
	at := func(p float64) time.Duration { return list[int(p*float64(len(list)-1))].Round(10 * time.Microsecond) }
	return fmt.Sprintf("%8v %8v", at(0.5), at(0.99))
}

// TestEnvoyLatency measures what kvscout adds to a request until its first event,
// and to each event: with it and without it in turn, through the same Envoy.
func TestEnvoyLatency(t *testing.T) {
	if os.Getenv("KVSCOUT_MEASURE") == "" {
		t.Skip("skipped: make bench-envoy measures")
	}
	needEnvoy(t)
	const events, requests = 20, 100
	p, g := picking(t, stage.Options{})
	address := ticking(t, events)
	s := p.speaker(p.bus(), "ticking")
	s.mu.Lock()
	s.info = proto.Clone(s.info).(*pb.MemberInfo)
	s.info.Address = address
	s.mu.Unlock()
	p.untilMember(s.id, "have its address", func(m *api.MemberState) bool { return m.GetMember().GetAddress() == address })
	g.routes = plainRoute
	x := startEnvoy(t, g, "engines", address)
	for _, kilobytes := range []int{1, 32, 256} {
		q := random(uint64(kilobytes), kilobytes*1024/6)
		body := q.completion(`,"stream":true`)
		var first, each [2][]time.Duration
		for i := range 2 * requests {
			way := i % 2
			req, err := http.NewRequestWithContext(context.Background(), http.MethodPost, x.url+"/v1/completions", bytes.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			if way == 0 {
				req.Header.Set("X-Plain", "1")
			}
			start := time.Now()
			answer, err := x.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
				_, text, ok := strings.Cut(lines.Text(), `"text":"`)
				if !ok {
					continue
				}
				now := time.Now()
				text, _, _ = strings.Cut(text, `"`)
				left, err := strconv.ParseInt(text, 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				if n++; n == 1 {
					first[way] = append(first[way], now.Sub(start))
				}
				each[way] = append(each[way], now.Sub(time.Unix(0, left)))
			}
			answer.Body.Close()
			if picked := answer.Header.Get("X-Kvscout-Decision") != ""; n != events || picked != (way == 1) {
				t.Fatalf("%d events, picked %t", n, picked)
			}
		}
		for way, name := range []string{"Envoy alone", "with kvscout"} {
			t.Logf("%3d KB, %-12s p50 p99: to the first event %s, each event %s", kilobytes, name, percentiles(first[way]), percentiles(each[way]))
		}
	}
	x.unharmed()
}
