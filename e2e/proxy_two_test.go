package e2e

import (
	"bytes"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/proxies"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// runTwoSchedulers has a proxy ask two schedulers: whoever of them is asked, and
// whichever hears the report, nothing stays reserved at either, and when one goes no
// request fails and those after it are picked by the other.
func runTwoSchedulers(t *testing.T, with func(second string) reverseProxy) {
	r := with("")
	r.need(t)
	nats := broker.New(t, nil)
	one, two := open(t, stage.Options{NATS: nats.URL()}), open(t, stage.Options{NATS: nats.URL()})
	x := with(two.HTTP).before(t, &site{play: one}, nil, fakevllm.Config{}, fakevllm.Config{})
	for _, e := range x.engines {
		two.untilMember(e.id(), "be exact", stage.Exact)
	}
	q := random(1, 5000)
	for round := range 10 {
		x.complete(q, "", min(round, 1)*q.cacheable())
		settled(q, x.engines, one, two)
	}
	var counted uint64
	one.until("the reports are there, at one scheduler or the other", func() bool {
		counted = 0
		for _, p := range []*play{one, two} {
			list, err := p.Operator.ListMembers(t.Context(), &api.ListMembersRequest{})
			if err != nil {
				return false
			}
			for _, m := range list.GetMembers() {
				counted += m.GetReportedRequests()
			}
		}
		return counted >= 10
	})
	if counted != 10 {
		t.Errorf("%d requests are reported, of 10", counted)
	}

	var failed, served atomic.Int64
	ended := make(chan struct{})
	var callers sync.WaitGroup
	for caller := range uint64(4) {
		callers.Go(func() {
			for i := uint64(0); ; i++ {
				select {
				case <-ended:
					return
				default:
				}
				status, text, err := x.try(t.Context(), bytes.NewReader(random(1000*caller+i, 500).completion("")))
				if err != nil || status != http.StatusOK {
					failed.Add(1)
					t.Errorf("while a scheduler goes: %d %.300s %v", status, text, err)
					return
				}
				served.Add(1)
			}
		})
	}
	one.StopScheduler()
	before := served.Load()
	two.until("requests go on", func() bool { return served.Load() > before+20 || failed.Load() > 0 })
	two.until("the other picks", func() bool {
		answer, err := x.client.Post(x.url+"/v1/completions", "application/json", bytes.NewReader(q.completion("")))
		if err != nil {
			return false
		}
		answer.Body.Close()
		return answer.Header.Get("X-Kvscout-Decision") != ""
	})
	close(ended)
	callers.Wait()
	x.complete(q, "", q.cacheable())
}

// settled waits until all schedulers know that the last request has ended, and what it
// left: before that another member is the better one for its prompt, with reason.
func settled(q prompt, engines []*engine, all ...*play) {
	for _, p := range all {
		for _, e := range engines {
			p.untilMember(e.id(), "hold nothing back", idleAgain)
		}
		p.until("the prompt is known to be held", func() bool {
			return int(p.score(q.request()).GetCandidates()[0].GetCachedTokens().GetGpu()) == q.cacheable()
		})
	}
}

func TestTwoSchedulersBehindHAProxy(t *testing.T) {
	runTwoSchedulers(t, func(second string) reverseProxy {
		return haproxyWith(proxies.Edit{File: "haproxy.cfg", Old: "    server scheduler0", New: "    server scheduler1 " + second + "\n    server scheduler0"})
	})
}

func TestTwoSchedulersBehindNginx(t *testing.T) {
	runTwoSchedulers(t, func(second string) reverseProxy {
		return nginxWith(proxies.Edit{File: "nginx.conf", Old: " fail_timeout=1s; keepalive 64; }", New: " fail_timeout=1s; server " + second + " fail_timeout=1s backup; keepalive 64; }"})
	})
}
