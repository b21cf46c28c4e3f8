package e2e

import (
	"encoding/binary"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/e2e/wire"
)

// proxy stands before a server at host:port or under a URL, until the test ends.
func proxy(t *testing.T, server string, up, down func() wire.Split) *wire.Proxy {
	t.Helper()
	_, address, _ := strings.Cut(server, "://")
	p, err := wire.New(address, up, down)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// link stands between an agent and a ZeroMQ socket of its engine.
type link struct {
	*wire.Proxy
	lost atomic.Int64
}

func newLink(t *testing.T, endpoint string) *link {
	t.Helper()
	return &link{Proxy: proxy(t, endpoint, nil, wire.ZMTP)}
}

func (l *link) endpoint() string { return "tcp://" + l.Addr() }

// drop loses the next n messages of the engine, and counts them anew.
func (l *link) drop(n int) {
	l.lost.Store(0)
	l.Tamper(func(message []byte) [][]byte {
		if l.lost.Load() >= int64(n) {
			return [][]byte{message}
		}
		l.lost.Add(1)
		return nil
	})
}

// inject sends bytes before the engine's next message.
func (l *link) inject(raw []byte) {
	sent := false
	l.Tamper(func(message []byte) [][]byte {
		if sent {
			return [][]byte{message}
		}
		sent = true
		return [][]byte{raw, message}
	})
}

// behind puts links between the engine and its agent.
func (e *engine) behind(t *testing.T, pod string) (events, replay *link) {
	t.Helper()
	events = newLink(t, e.Events(0).Endpoint())
	opt := stage.AgentOptions{Pod: pod, Events: events.endpoint(), Replay: "none"}
	if at := e.Events(0).ReplayEndpoint(); at != "" {
		replay = newLink(t, at)
		opt.Replay = replay.endpoint()
	}
	e.watchedBy(opt)
	return events, replay
}

// Flags of a ZMTP frame.
const (
	frameMore    = 1
	frameLong    = 2
	frameCommand = 4
)

// message is the bytes of a message with these frames.
func message(frames ...[]byte) []byte {
	var raw []byte
	for i, f := range frames {
		flags := byte(frameLong)
		if i < len(frames)-1 {
			flags |= frameMore
		}
		raw = append(binary.BigEndian.AppendUint64(append(raw, flags), uint64(len(f))), f...)
	}
	return raw
}
