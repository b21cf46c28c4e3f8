package vllm

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/loopback"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testEngine is the ZeroMQ side of an engine: a PUB and a ROUTER, each incarnation of
// it a new set of sockets on the same addresses.
type testEngine struct {
	t       *testing.T
	pubAddr string
	repAddr string // empty: no replay socket
	topic   string
	// repliesWithTopic is the reply form since 0.26.
	repliesWithTopic bool
	// answers is ZMTP 3.1, with PING; mute (guarded by mu) leaves them unanswered.
	answers, mute bool
	// keep bounds the ring; 0: no bound.
	keep int

	mu          sync.Mutex // guards all below
	incarnation int
	next        uint64
	ring        []testBatch
	subs        []net.Conn
	conns       []net.Conn
	sockets     []net.Listener
	asked       int
	dials       int // connections that dialOut keeps up
	// swallow says whether message i of n of the given request is dropped;
	// message n is the end marker.
	swallow func(request, i, n int) bool
	wg      sync.WaitGroup
}

type testBatch struct {
	sequence uint64
	payload  []byte
}

func newTestEngine(t *testing.T, replay bool) *testEngine {
	t.Helper()
	host := loopback.Host(t)
	e := &testEngine{t: t, pubAddr: net.JoinHostPort(host, "5557"), topic: "kv", repliesWithTopic: true}
	if replay {
		e.repAddr = net.JoinHostPort(host, "5657")
	}
	t.Cleanup(e.kill)
	return e
}

func (e *testEngine) start() { e.startWith(0) }

// startWith begins an incarnation that has sent some batches before anybody connects:
// hashes 101, 102 and so on.
func (e *testEngine) startWith(batches int) {
	e.t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.incarnation++
	e.next, e.ring = 0, nil
	for i := range batches {
		e.record([]any{stored(uint64(101 + i))})
	}
	e.listen(e.pubAddr, "PUB", e.subscriber)
	if e.repAddr != "" {
		e.listen(e.repAddr, "ROUTER", e.router)
	}
}

func (e *testEngine) listen(addr, kind string, serve func(net.Conn, *bufio.Reader)) {
	e.t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		e.t.Fatal(err)
	}
	e.sockets = append(e.sockets, l)
	e.wg.Add(1)
	go func() {
		defer e.wg.Done()
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			e.mu.Lock()
			e.conns = append(e.conns, c)
			e.mu.Unlock()
			e.wg.Add(1)
			go func() {
				defer e.wg.Done()
				defer c.Close()
				if r := e.greet(c, kind); r != nil {
					serve(c, r)
				}
			}()
		}
	}()
}

// dialOut connects the PUB to a subscriber that listens, and again whenever the
// connection ends, as libzmq does.
func (e *testEngine) dialOut() {
	e.t.Helper()
	e.mu.Lock()
	e.dials++
	want := e.dials
	e.mu.Unlock()
	e.wg.Add(1)
	go func() {
		defer e.wg.Done()
		for e.dialOnce() {
			time.Sleep(20 * time.Millisecond)
		}
	}()
	await.True(e.t, "subscription", func() bool { return e.subscribers() == want })
}

// dialOnce is one connection of dialOut; it is false once the engine is killed.
func (e *testEngine) dialOnce() bool {
	c, err := net.Dial("tcp", e.pubAddr)
	e.mu.Lock()
	if e.dials == 0 || err != nil {
		defer e.mu.Unlock()
		if err == nil {
			c.Close()
		}
		return e.dials > 0
	}
	e.conns = append(e.conns, c)
	e.mu.Unlock()
	defer c.Close()
	if r := e.greet(c, "PUB"); r != nil {
		e.subscriber(c, r)
	}
	return true
}

// kill ends the present incarnation without a word.
func (e *testEngine) kill() {
	e.mu.Lock()
	for _, l := range e.sockets {
		l.Close()
	}
	for _, c := range e.conns {
		c.Close()
	}
	e.sockets, e.conns, e.subs, e.dials = nil, nil, nil, 0
	e.mu.Unlock()
	e.wg.Wait()
}

// cut ends the connections of the subscribers; the engine lives on.
func (e *testEngine) cut() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.subs {
		c.Close()
	}
	e.subs = nil
}

// publish sends events as one batch.
func (e *testEngine) publish(events ...any) {
	e.t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	b := e.record(events)
	for _, c := range e.subs {
		write(c, []byte(e.topic), be(b.sequence), b.payload)
	}
}

// hide puts a batch into the ring that no subscriber gets to see.
func (e *testEngine) hide(events ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.record(events)
}

// skip consumes a sequence number for nothing.
func (e *testEngine) skip() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.next++
}

// rewind makes the next batch carry an old number, as a new incarnation behind the
// same connection would.
func (e *testEngine) rewind() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.incarnation++
	e.next, e.ring = 0, nil
}

func (e *testEngine) record(events []any) testBatch {
	// The time tells incarnations apart, as in a real engine.
	b := testBatch{e.next, pack(e.t, list{float64(e.incarnation*1000) + float64(e.next), events, 0})}
	e.next++
	e.ring = append(e.ring, b)
	if e.keep > 0 && len(e.ring) > e.keep {
		e.ring = e.ring[len(e.ring)-e.keep:]
	}
	return b
}

func (e *testEngine) subscriber(c net.Conn, r *bufio.Reader) {
	if _, _, err := readFrame(r); err != nil {
		return
	}
	e.mu.Lock()
	e.subs = append(e.subs, c)
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.subs = slices.DeleteFunc(e.subs, func(other net.Conn) bool { return other == c })
	}()
	for {
		flags, body, err := readFrame(r)
		if err != nil {
			return
		}
		e.mu.Lock()
		if flags&4 != 0 && bytes.HasPrefix(body, []byte("\x04PING")) && !e.mute {
			_, _ = c.Write([]byte("\x04\x05\x04PONG"))
		}
		e.mu.Unlock()
	}
}

func (e *testEngine) subscribers() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.subs)
}

func (e *testEngine) router(c net.Conn, r *bufio.Reader) {
	for {
		var frames [][]byte
		for more := true; more; {
			flags, body, err := readFrame(r)
			if err != nil {
				return
			}
			frames = append(frames, body)
			more = flags&1 != 0
		}
		if len(frames) != 2 || len(frames[0]) != 0 || len(frames[1]) != 8 {
			e.t.Errorf("replay request %q", frames)
			return
		}
		from := binary.BigEndian.Uint64(frames[1])
		e.mu.Lock()
		request := e.asked
		e.asked++
		var out []testBatch
		for _, b := range e.ring {
			if b.sequence >= from {
				out = append(out, b)
			}
		}
		swallow := e.swallow
		e.mu.Unlock()
		out = append(out, testBatch{sequence: endMarker})
		for i, b := range out {
			if swallow != nil && swallow(request, i, len(out)-1) {
				continue
			}
			parts := [][]byte{nil, be(b.sequence), b.payload}
			if e.repliesWithTopic {
				topic := []byte(e.topic)
				if b.sequence == endMarker {
					topic = nil
				}
				parts = slices.Insert(parts, 1, topic)
			}
			write(c, parts...)
		}
	}
}

func be(v uint64) []byte { return binary.BigEndian.AppendUint64(nil, v) }

// greet does the server's half of a ZMTP 3.0 handshake.
func (e *testEngine) greet(c net.Conn, kind string) *bufio.Reader {
	hello := make([]byte, 64)
	hello[0], hello[9], hello[10] = 0xff, 0x7f, 3
	if e.answers {
		hello[11] = 1
	}
	copy(hello[12:], "NULL")
	ready := append([]byte("\x05READY\x0bSocket-Type\x00\x00\x00"), byte(len(kind)))
	ready = append(ready, kind...)
	hello = append(hello, 4, byte(len(ready)))
	if _, err := c.Write(append(hello, ready...)); err != nil {
		return nil
	}
	r := bufio.NewReader(c)
	if _, err := io.ReadFull(r, make([]byte, 64)); err != nil {
		return nil
	}
	if _, _, err := readFrame(r); err != nil {
		return nil
	}
	return r
}

func readFrame(r *bufio.Reader) (flags byte, body []byte, err error) {
	if flags, err = r.ReadByte(); err != nil {
		return 0, nil, err
	}
	size := make([]byte, 8)
	part := size[7:]
	if flags&2 != 0 {
		part = size
	}
	if _, err = io.ReadFull(r, part); err != nil {
		return 0, nil, err
	}
	body = make([]byte, binary.BigEndian.Uint64(size))
	_, err = io.ReadFull(r, body)
	return flags, body, err
}

func write(c net.Conn, frames ...[]byte) {
	var out []byte
	for i, f := range frames {
		flags := byte(2)
		if i < len(frames)-1 {
			flags |= 1
		}
		out = append(out, flags)
		out = append(out, be(uint64(len(f)))...)
		out = append(out, f...)
	}
	_, _ = c.Write(out) // a dead peer is the test's business
}

// follow starts a Tail on the engine; it ends with the test.
func follow(t *testing.T, e *testEngine) (*state, *Tail) {
	t.Helper()
	p := &state{}
	cfg := TailConfig{Endpoint: "tcp://" + e.pubAddr, Sink: p, Log: testLog(t)}
	if e.repAddr != "" {
		cfg.Replay = "tcp://" + e.repAddr
	}
	return p, runTail(t, cfg)
}

func runTail(t *testing.T, cfg TailConfig) *Tail {
	t.Helper()
	tail, err := NewTail(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); tail.Run(t.Context()) }()
	t.Cleanup(func() { <-ended })
	return tail
}

func testLog(t *testing.T) *slog.Logger {
	level := slog.LevelError + 1
	if testing.Verbose() {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})).With("test", t.Name())
}
