package e2e

import (
	"bytes"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/e2e/wire"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
)

// between puts a proxy before the stage's NATS server, for agents that start
// from here on.
func (p *play) between() *wire.Proxy {
	p.t.Helper()
	proxy := proxy(p.t, p.NATS, wire.NATS, nil)
	p.NATS = "nats://" + proxy.Addr()
	return proxy
}

// outage lets the engine work while something is broken, and then demands the
// truth about what was before and what came meanwhile.
func (e *engine) outage(begin, end func()) *witness {
	e.t.Helper()
	old := several(1, 20)
	e.complete(old...)
	e.truth(soon, old...)
	w := e.witness(old...)
	begin()
	more := several(2, 30)
	e.complete(more...)
	end()
	w.says(e.t, e.truth(soon, append(old, more...)...), flight)
	return w
}

// doubtful is an outage that the state must have admitted.
func (e *engine) doubtful(begin, end func()) {
	e.t.Helper()
	if e.outage(begin, end).doubt == "" {
		e.t.Error("no doubt was admitted")
	}
}

// small is an engine whose pool 30 prompts overflow.
var small = fakevllm.Config{Blocks: 100}

func TestNATSEmbeddedRestarts(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(small).watched("pod")
	old, more := several(1, 20), several(2, 30)
	e.complete(old...)
	e.truth(soon, old...)
	if err := p.RestartScheduler(); err != nil { // the server is in it
		t.Fatal(err)
	}
	e.complete(more...)
	start := time.Now()
	e.untilMember(e.id(), "be exact", stage.Exact)
	e.truth(soon, append(old, more...)...)
	t.Log("true after", time.Since(start))
}

func TestNATSRestarts(t *testing.T) {
	t.Parallel()
	s := broker.New(t, nil)
	p := open(t, stage.Options{NATS: s.URL()})
	e := p.engine(small).watched("pod")
	e.doubtful(s.Stop, s.Start)
}

func TestNATSClusterLosesNodes(t *testing.T) {
	t.Parallel()
	var nodes []*broker.Broker
	var urls []string
	var routes []*url.URL
	for range 3 {
		s := broker.New(t, &server.Options{Cluster: server.ClusterOpts{Name: "c", Host: "127.0.0.1", Port: server.RANDOM_PORT}, Routes: routes})
		nodes, urls = append(nodes, s), append(urls, s.URL())
		routes = append(routes, &url.URL{Scheme: "nats", Host: s.ClusterAddr().String()})
	}
	p := open(t, stage.Options{NATS: strings.Join(urls, ",")})
	p.until("the cluster is whole", func() bool {
		for _, s := range nodes {
			if s.NumRoutes() == 0 || s.NumRemotes() != 2 {
				return false
			}
		}
		return true
	})
	e := p.engine(small).watched("pod")
	e.outage(nodes[0].Stop, func() {})
	e.outage(nodes[1].Stop, func() {})
	p.until("both clients are on the last node", func() bool { return nodes[2].NumClients() == 2 })
}

func TestNATSPartitionOfTheAgent(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	proxy := p.between()
	e := p.engine(small).watched("pod")
	old, more := several(1, 20), several(2, 30)
	e.complete(old...)
	e.truth(soon, old...)
	proxy.Stall(true)
	e.complete(more...)
	watch := newStopwatch()
	e.untilMember(e.id(), "admit that nobody hears it", func(m *api.MemberState) bool { return !stage.Exact(m) })
	if watch.over(silence + flight) {
		t.Errorf("doubt came after %v", watch.ours())
	}
	proxy.Stall(false)
	t.Log("true after", e.truth(soon, append(old, more...)...))
}

func TestNATSPartitionOfTheScheduler(t *testing.T) {
	t.Parallel()
	s := broker.New(t, nil)
	proxy := proxy(t, s.URL(), wire.NATS, nil)
	p := open(t, stage.Options{NATS: "nats://" + proxy.Addr()})
	p.NATS = s.URL()
	e := p.engine(small).watched("pod")
	e.doubtful(func() {
		proxy.Refuse(true)
		e.untilMember(e.id(), "be in doubt", func(m *api.MemberState) bool { return !stage.Exact(m) })
	}, func() { proxy.Refuse(false) })
}

// A consumer that does not read is cut off by the server; what it missed it
// asks for.
func TestNATSSlowConsumer(t *testing.T) {
	t.Parallel()
	s := broker.New(t, &server.Options{MaxPending: 128 << 10, MaxPayload: 64 << 10, WriteDeadline: 200 * time.Millisecond})
	proxy := proxy(t, s.URL(), wire.NATS, nil)
	p := open(t, stage.Options{NATS: "nats://" + proxy.Addr()})
	p.NATS = s.URL()
	e := p.engine(small).watched("pod")
	conn := p.bus()
	junk := make([]byte, 64<<10)
	list := several(1, 20)
	e.complete(list...)
	e.truth(soon, list...)
	proxy.Stall(true)
	p.until("the server has cut the slow consumer", func() bool {
		_ = conn.Publish(subjects(t).Load("default_nobody_0"), junk) // fills its pipe
		_ = conn.Flush()
		return s.NumSlowConsumers() > 0
	})
	more := several(2, 30)
	e.complete(more...)
	proxy.Stall(false)
	t.Log("true after", e.truth(soon, append(list, more...)...))
}

func TestNATSMessagesAreMistreated(t *testing.T) {
	for name, tamper := range map[string]func() wire.Tamper{
		"lost": func() wire.Tamper {
			return func([]byte) [][]byte { return nil }
		},
		"deltas lost": func() wire.Tamper {
			return func(m []byte) [][]byte {
				if bytes.Contains(m[:bytes.IndexByte(m, '\n')], []byte(".blocks.")) {
					return nil
				}
				return [][]byte{m}
			}
		},
		"doubled": func() wire.Tamper {
			return func(m []byte) [][]byte { return [][]byte{m, m} }
		},
		"reordered": func() wire.Tamper {
			var late []byte
			return func(m []byte) [][]byte {
				if late == nil {
					late = m
					return nil
				}
				pair := [][]byte{m, late}
				late = nil
				return pair
			}
		},
		"cut": func() wire.Tamper {
			n := 0
			return func(m []byte) [][]byte {
				payload := wire.Payload(m)
				n++
				return [][]byte{wire.WithPayload(m, payload[:len(payload)*(n%5)/5])}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t, stage.Options{})
			proxy := p.between()
			e := p.engine(small).watched("pod")
			e.outage(func() { proxy.Tamper(tamper()) }, func() { proxy.Tamper(nil) })
		})
	}
}

// Messages of a life that is over change nothing for longer than it takes to
// ask the agent.
func TestNATSMessagesFromAnOldEpoch(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	conn := p.bus()
	e := p.engine(small)
	// What the agent says in its first life is kept.
	heard := make(chan *nats.Msg, 1024)
	for _, subject := range []string{subjects(t).Blocks("default_pod_0"), subjects(t).Load("default_pod_0")} {
		if _, err := conn.ChanSubscribe(subject, heard); err != nil {
			t.Fatal(err)
		}
	}
	if err := conn.Flush(); err != nil {
		t.Fatal(err)
	}
	e.watched("pod")
	old := several(1, 20)
	e.complete(old...)
	e.truth(soon, old...)
	var kept []*nats.Msg
	p.until("the first life is recorded", func() bool {
		select {
		case m := <-heard:
			kept = append(kept, m)
		default:
		}
		return len(kept) >= 12
	})
	life := p.member(e.id()).GetCacheState().GetEpoch()
	e.restart()
	more := several(2, 10)
	e.complete(more...)
	e.truth(soon, append(old, more...)...)
	w := e.witness(old...)
	for _, m := range kept {
		if err := conn.PublishMsg(&nats.Msg{Subject: m.Subject, Data: m.Data}); err != nil {
			t.Fatal(err)
		}
	}
	// One more of the first life, which fits nothing.
	forged, err := proto.Marshal(&pb.Delta{Header: &pb.Header{Version: 1, Member: e.id(), Epoch: life, Sequence: 1 << 40}})
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Publish(subjects(t).Blocks(e.id()), forged); err != nil {
		t.Fatal(err)
	}
	if err := conn.Flush(); err != nil {
		t.Fatal(err)
	}
	w.says(t, e.truth(soon, append(old, more...)...), flight)
	if now := p.member(e.id()).GetCacheState().GetEpoch(); now <= life {
		t.Errorf("epoch %d after %d", now, life)
	}
}
