package watch

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/publish"
	"github.com/kvscout/kvscout/agent/internal/rank"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.DiscardHandler)

func engineAt(t *testing.T, url string) *vllm.Engine {
	t.Helper()
	e, err := vllm.NewEngine(vllm.EngineConfig{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// opener makes ranks that nobody runs.
func opener(t *testing.T) func(rank.Config) (*rank.Rank, error) {
	t.Helper()
	closed := make(chan struct{})
	conn, err := nats.Connect(broker.New(t, nil).URL(), nats.ReconnectBufSize(-1), nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); <-closed })
	return func(cfg rank.Config) (*rank.Rank, error) {
		cfg.Member, cfg.Log = fmt.Sprintf("default_x_%d", cfg.Number), quiet
		cfg.Publish = publish.Config{Conn: conn, Pool: "blue"}
		return rank.New(cfg)
	}
}

// chain stores n blocks of 2 tokens from the root.
func chain(n int) vllm.Batch {
	s := mirror.Store{BlockSize: 2, Kind: mirror.Full, Physical: true}
	for i := range n {
		s.Hashes = append(s.Hashes, uint64(i+1))
		s.Tokens = append(s.Tokens, uint32(2*i), uint32(2*i+1))
	}
	return vllm.Batch{Events: []vllm.Event{{Kind: vllm.Stored, Store: s}}}
}

// TestRanksShareTheMirrorsBound: the more there are, the less each remembers.
func TestRanksShareTheMirrorsBound(t *testing.T) {
	w := New(Config{Engine: engineAt(t, "http://h:9000"), Member: &pb.MemberInfo{}, Log: quiet})
	w.open, w.follow = opener(t), func(*rank.Rank) func() { return func() {} }
	w.models.Names = []string{"m"}
	var page vllm.Page
	for n := range vllm.MaxRanks {
		page.Ranks = append(page.Ranks, vllm.RankMetrics{Rank: n})
	}
	const blocks = 70_000 // more than one of so many ranks may remember
	for _, c := range []struct{ ranks, nodes int }{{1, blocks}, {vllm.MaxRanks, 1 << 22 / vllm.MaxRanks}} {
		if err := w.settle(vllm.Page{Ranks: page.Ranks[:c.ranks]}, nil, w.since); err != nil {
			t.Fatal(err)
		}
		r := w.Ranks()[c.ranks-1]
		r.Apply(vllm.Mark{}, chain(blocks))
		if got := r.Mirror().Nodes; got != c.nodes || len(w.Ranks()) != c.ranks {
			t.Errorf("%d ranks: one remembers %d blocks, want %d", len(w.Ranks()), got, c.nodes)
		}
	}
}

// TestAPollFollowsASuspicion is a stream that is lost and comes back: what the
// engine is by then is known a moment later, however seldom it is polled.
func TestAPollFollowsASuspicion(t *testing.T) {
	var w *Watch
	r, err := opener(t)(rank.Config{Identity: rank.Identity{Model: "m", Reported: 16}, Info: &pb.MemberInfo{}, Poll: func() { w.pollSoon() }})
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		w = New(Config{})
		w.ranks[0] = followed{Rank: r}
		rested := func() time.Duration {
			began := time.Now()
			w.rest(t.Context(), time.Minute)
			return time.Since(began)
		}
		for _, trust := range []vllm.Trust{vllm.Exact, vllm.Syncing, vllm.Exact} {
			r.State(trust, "")
			if d := rested(); d > 2*probeFast {
				t.Errorf("polled %v after the change to %v", d, trust)
			}
			r.State(trust, "another reason")
			if d := rested(); d < time.Minute {
				t.Errorf("polled after %v without a change", d)
			}
		}
	})
}

func TestHeartbeatHasRoomForItsNames(t *testing.T) {
	w := New(Config{Member: &pb.MemberInfo{}, Log: quiet})
	w.models = vllm.Models{Names: []string{"m", "alias"}, Root: "/models/m"}
	for n := range 4000 {
		w.models.Adapters = append(w.models.Adapters, vllm.Adapter{Name: fmt.Sprint("adapter-", n), Root: strings.Repeat("/r", 500)})
	}
	info := w.info(0)
	if n := proto.Size(info); n > protocol.MaxInfo || len(info.Models) != 2 || len(info.Adapters) < 30 || w.unnamed != 4000-len(info.Adapters) {
		t.Errorf("%d bytes, %d models, %d adapters, %d left out", n, len(info.Models), len(info.Adapters), w.unnamed)
	}
}

func TestSourceOfARank(t *testing.T) {
	learned := map[int]vllm.Source{0: {Endpoint: "tcp://h:40000", Replay: "tcp://h:40100"}, 1: {Endpoint: "tcp://h:40007"}, 2: {Unusable: "a riddle"}}
	for _, c := range []struct {
		name           string
		cfg            Config
		rank           int
		said           bool
		unread         string
		events, replay string
		unusable       bool
		warned         bool
	}{
		{name: "defaults", events: "tcp://h:5557", replay: "tcp://h:5657"},
		{name: "defaults of a later rank", rank: 2, events: "tcp://h:5559", replay: "tcp://h:5659"},
		{name: "as the engine reports", rank: 1, said: true, events: "tcp://h:40007"},
		{name: "as configured", cfg: Config{Events: "tcp://x:7000", Replay: "tcp://x:8000"}, rank: 1, events: "tcp://x:7001", replay: "tcp://x:8001"},
		{name: "the engine knows better", cfg: Config{Events: "tcp://x:7000", Replay: "tcp://x:8000"}, rank: 0, said: true, events: "tcp://h:40000", replay: "tcp://h:40100", warned: true},
		{name: "the engine has no such replay", cfg: Config{Events: "tcp://x:40006", Replay: "tcp://x:8000"}, rank: 1, said: true, events: "tcp://x:40007", warned: true},
		{name: "the same socket under another name", cfg: Config{Events: "tcp://x:40000", Replay: "tcp://x:40100"}, rank: 0, said: true, events: "tcp://x:40000", replay: "tcp://x:40100"},
		{name: "without replay", cfg: Config{Events: "tcp://x:7000", Replay: NoReplay}, events: "tcp://x:7000"},
		{name: "without replay, as the engine reports", cfg: Config{Replay: NoReplay}, said: true, events: "tcp://h:40000"},
		{name: "listening", cfg: Config{Events: "tcp://*:7000", EventsBind: true}, rank: 1, said: true, events: "tcp://*:7001", replay: "tcp://h:7101"},
		{name: "nothing that could be used", rank: 2, said: true, unusable: true},
		{name: "nothing that could be used, whatever is configured", cfg: Config{Events: "tcp://x:7000"}, rank: 2, said: true, unusable: true, warned: true},
		{name: "a rank without events", rank: 3, said: true, unusable: true},
		{name: "a riddle", said: true, unread: "not JSON", unusable: true},
		{name: "a riddle, and configured", cfg: Config{Events: "tcp://x:7000"}, said: true, unread: "not JSON", events: "tcp://x:7000", replay: "tcp://h:7100"},
		{name: "a socket file has no ranks", cfg: Config{Events: "ipc:///x"}, rank: 1, unusable: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log bytes.Buffer
			c.cfg.Engine, c.cfg.Log = engineAt(t, "http://h:9000"), slog.New(slog.NewTextHandler(&log, nil))
			w := New(c.cfg)
			w.said, w.unread = c.said, c.unread
			if c.said && c.unread == "" {
				w.sources = learned
			}
			s := w.source(c.rank)
			if s.Endpoint != c.events || s.Replay != c.replay || (s.Unusable != "") != c.unusable {
				t.Errorf("%+v", s)
			}
			again := w.source(c.rank)
			if n := strings.Count(log.String(), "level=WARN"); again != s || n != map[bool]int{true: 1}[c.warned] {
				t.Errorf("warned %d times; %+v\n%s", n, again, log.String())
			}
		})
	}
}
