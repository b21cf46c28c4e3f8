package e2e

import (
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// foreignWithin is the promise: how long an agent may believe the events of
// another engine than its own once one of the two has computed something.
const foreignWithin = 5 * time.Second

// alikeWithin is for two engines that compute equally much: they must drift apart
// by more than may be under way, and how soon they do is chance.
const alikeWithin = 90 * time.Second

// traffic asks an engine for prompts of all lengths, from a pool of them in a
// random order, until the test ends or it is told to stop.
func (e *engine) traffic(pool, order uint64, pause time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(e.t.Context())
	var group sync.WaitGroup
	group.Go(func() {
		r := rand.New(rand.NewPCG(order, 7))
		for ctx.Err() == nil {
			n := r.Uint64N(1000)
			q := random(pool+n, 50+int(n)*4/5)
			body, err := json.Marshal(map[string]any{"model": model, "prompt": q.tokens, "max_tokens": 1 + r.IntN(100)})
			if err != nil {
				panic(err) // numbers and a name
			}
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.URL()+"/v1/completions", strings.NewReader(string(body)))
			if err != nil {
				panic(err)
			}
			if answer, err := e.http.Do(req); err == nil {
				_, _ = io.Copy(io.Discard, answer.Body)
				answer.Body.Close()
			}
			select {
			case <-ctx.Done():
			case <-time.After(pause/2 + time.Duration(r.Int64N(int64(pause)))):
			}
		}
	})
	stop = sync.OnceFunc(func() { cancel(); group.Wait() })
	e.t.Cleanup(stop)
	return stop
}

// disowned waits until a member is UNKNOWN because the events are not its
// engine's, and holds that against the promise.
func (p *play) disowned(id string, within time.Duration, engine *engine, events string) {
	p.t.Helper()
	watch := newStopwatch()
	began := time.Now()
	if err := p.Until(p.t.Context(), crowded(within), id, "be disowned", func(m *api.MemberState) bool {
		return m.GetCacheState().GetTrust() == api.Trust_TRUST_UNKNOWN
	}); err != nil {
		p.t.Fatal(err)
	}
	took := time.Since(began)
	if watch.over(within) {
		p.t.Errorf("another engine's events were believed for %v", took)
	}
	m := p.member(id)
	p.t.Logf("after %v: %s", took.Round(time.Millisecond), m.GetCacheState().GetExplanation())
	if reason := m.GetCacheState().GetExplanation(); !strings.Contains(reason, engine.URL()) || !strings.Contains(reason, events) {
		p.t.Errorf("the reason names not both endpoints: %s", reason)
	}
	if m.GetHeldGpuBlocks() != 0 {
		p.t.Errorf("%d blocks of another engine are believed still", m.GetHeldGpuBlocks())
	}
}

// TestNeighboursEventsAreNotBelieved is an agent that listens to another
// engine than its own, whatever the two do, and an operator who then gives the
// right engine that address.
func TestNeighboursEventsAreNotBelieved(t *testing.T) {
	const (
		idle = 0
		slow = 60 * time.Millisecond
		fast = 20 * time.Millisecond
	)
	for _, c := range []struct {
		name        string
		ours, other time.Duration // between requests
		same        bool          // prompts, in another order
		before      bool          // both have a past when the agent comes
		noReplay    bool
	}{
		{name: "ours idle, the other busy", other: slow},
		{name: "ours busy, the other idle", ours: slow},
		{name: "both busy", ours: slow, other: slow},
		{name: "both busy, the other more", ours: slow, other: fast},
		{name: "both busy, ours more", ours: fast, other: slow},
		{name: "both busy with the same prompts", ours: slow, other: slow, same: true},
		{name: "both with a past", ours: slow, other: slow, before: true},
		{name: "with a past, idle", before: true},
		{name: "ours busy, the other idle, without replay", ours: slow, before: true, noReplay: true},
		{name: "ours idle, the other busy, without replay", other: slow, before: true, noReplay: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := open(t, stage.Options{})
			cfg := fakevllm.Config{Host: loopback.Host(t), NoSources: true, NoReplay: c.noReplay}
			ours := p.engine(cfg)
			cfg.Port, cfg.EventsPort, cfg.ReplayPort = httpPort+1, eventsPort+1, replayPort+1
			other := p.engine(cfg)
			if c.before {
				ours.complete(several(1, 10)...)
				other.complete(several(2, 30)...)
			}
			at := other.Events(0).Endpoint()
			replay := other.Events(0).ReplayEndpoint()
			if replay == "" {
				replay = "none"
			}
			ours.watchedBy(stage.AgentOptions{Pod: "pod", Events: at, Replay: replay})
			var stops []func()
			if c.ours != idle {
				stops = append(stops, ours.traffic(1, 1, c.ours))
			}
			if c.other != idle {
				pool := uint64(100_000)
				if c.same {
					pool = 1
				}
				stops = append(stops, other.traffic(pool, 2, c.other))
			}
			within := foreignWithin
			if c.ours == c.other && c.ours != idle {
				within = alikeWithin
			}
			p.disowned(ours.id(), within, ours, at)
			time.Sleep(500 * time.Millisecond) // it stays so
			if m := p.member(ours.id()); m.GetCacheState().GetTrust() != api.Trust_TRUST_UNKNOWN || m.GetHeldGpuBlocks() != 0 {
				t.Errorf("believed again: %v", m)
			}
			// Mended: the engine gets the address at which its events are looked for.
			for _, stop := range stops {
				stop()
			}
			other.stop()
			ours.cfg.EventsPort, ours.cfg.ReplayPort = other.cfg.EventsPort, other.cfg.ReplayPort
			ours.stop()
			ours.start()
			p.untilMember(ours.id(), "be known anew", func(m *api.MemberState) bool {
				return m.GetCacheState().GetTrust() == api.Trust_TRUST_EXACT || c.noReplay && m.GetCacheState().GetTrust() == api.Trust_TRUST_APPROXIMATE
			})
			ours.complete(several(3, 5)...)
			ours.wait(soon, "be believed", several(3, 5), func(got, want int, _ *api.CacheState) bool { return got == want })
		})
	}
}

// TestSwappedRanksAreNotBelieved is an engine whose ranks are each looked for at
// the other's address.
func TestSwappedRanksAreNotBelieved(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{Ranks: 2})
	front := newFront(t, e, "/kv_event_sources")
	front.say(func([]byte) []byte {
		source := func(rank int) map[string]string {
			return map[string]string{"endpoint": e.Events(rank).Endpoint(), "replay_endpoint": e.Events(rank).ReplayEndpoint()}
		}
		page, _ := json.Marshal(map[string]any{"0": source(1), "1": source(0)})
		return page
	})
	e.watchedBy(stage.AgentOptions{Pod: "pod", Engine: front.URL})
	for i := range 10 {
		q := random(uint64(i), 400+50*i)
		q.rank = i % 2
		e.complete(q, q.branch(100, uint64(i)+50, 300*(1-i%2)+20))
	}
	for rank, id := range e.agent.Members {
		p.untilMember(id, "be disowned", func(m *api.MemberState) bool {
			return m.GetCacheState().GetTrust() == api.Trust_TRUST_UNKNOWN && strings.Contains(m.GetCacheState().GetExplanation(), e.Events(1-rank).Endpoint())
		})
	}
}

// TestStaleAddressIsNotBelieved is an engine that restarts with its events
// elsewhere, while another engine takes the address that it had.
func TestStaleAddressIsNotBelieved(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{NoSources: true})
	at := e.Events(0).Endpoint()
	e.watchedBy(stage.AgentOptions{Pod: "pod", Events: at, Replay: e.Events(0).ReplayEndpoint()})
	e.complete(several(1, 5)...)
	e.truth(soon, several(1, 5)...)
	e.stop()
	e.cfg.EventsPort, e.cfg.ReplayPort = eventsPort+1, replayPort+1
	other := p.engine(fakevllm.Config{Host: e.cfg.Host, Port: httpPort + 1})
	e.start()
	e.complete(several(2, 5)...)
	other.complete(several(3, 5)...)
	e.traffic(1, 1, 50*time.Millisecond)
	p.disowned(e.id(), foreignWithin, e, at)
}

// TestEngineSaysBetterWhereItsEventsAre is a flag that names the neighbour's
// socket, on an engine that tells its own.
func TestEngineSaysBetterWhereItsEventsAre(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	ours := p.engine(fakevllm.Config{})
	// Another port: the same one under another host may be the same socket.
	other := p.engine(fakevllm.Config{EventsPort: eventsPort + 1, ReplayPort: replayPort + 1})
	other.complete(several(2, 5)...)
	ours.complete(several(1, 5)...)
	var err error
	if ours.agent, err = p.Agent(stage.AgentOptions{Engine: ours.URL(), Pod: "pod", Events: other.Events(0).Endpoint(), Replay: other.Events(0).ReplayEndpoint()}); err != nil {
		t.Fatal(err)
	}
	p.untilMember(ours.id(), "be exact", stage.Exact)
	ours.truth(soon, append(several(1, 5), several(2, 5)...)...)
}

// TestEndpointsOutOfReachEndNothing are engines that say what no agent can use:
// they stay members, placed by load.
func TestEndpointsOutOfReachEndNothing(t *testing.T) {
	for name, said := range map[string]string{
		"inproc":    `{"0":{"endpoint":"inproc://kv"}}`,
		"epgm":      `{"0":{"endpoint":"epgm://eth0;239.1.1.1:5557"}}`,
		"malformed": `{"0":{"endpoint":"tcp://[::1"}}`,
		"no JSON":   `endpoint`,
		"a number":  `{"0":{"endpoint":5557}}`,
		"too many":  `{"70000":{"endpoint":"tcp://*:5557"}}`,
		"port":      `{"0":{"endpoint":"tcp://*:0"}}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t, stage.Options{})
			e := p.engine(fakevllm.Config{})
			front := newFront(t, e, "/kv_event_sources")
			front.say(func([]byte) []byte { return []byte(said) })
			e.watchedBy(stage.AgentOptions{Pod: "pod", Engine: front.URL})
			e.complete(random(1, 500))
			p.untilMember(e.id(), "be unknown, with its load", func(m *api.MemberState) bool {
				return m.GetCacheState().GetTrust() == api.Trust_TRUST_UNKNOWN && m.GetCacheState().GetExplanation() != "" && m.RunningRequests != nil && m.GetLoadAgeMs() < 1000
			})
			t.Log(p.member(e.id()).GetCacheState().GetExplanation())
		})
	}
}
