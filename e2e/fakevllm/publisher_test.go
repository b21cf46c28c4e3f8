package fakevllm

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// client is a tiny ZMTP client on the peer's own frame code.
type client struct {
	*testing.T
	peer *peer
}

func dial(t *testing.T, endpoint, kind string) *client {
	t.Helper()
	network, address := "tcp", strings.TrimPrefix(endpoint, "tcp://")
	if rest, ok := strings.CutPrefix(endpoint, "ipc://"); ok {
		network, address = "unix", rest
	}
	conn, err := net.Dial(network, address)
	if err != nil {
		t.Fatal(err)
	}
	c := &client{t, newPeer(conn, 1)}
	t.Cleanup(func() { conn.Close() })
	if err := c.peer.handshake(kind); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *client) write(frames ...[]byte) {
	c.Helper()
	var b []byte
	for i, f := range frames {
		flags := byte(flagMore)
		if i == len(frames)-1 {
			flags = 0
		}
		b = appendFrame(b, flags, f)
	}
	if _, err := c.peer.conn.Write(b); err != nil {
		c.Fatal(err)
	}
}

// read returns a message in hex, frame by frame.
func (c *client) read() string {
	c.Helper()
	if err := c.peer.conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		c.Fatal(err)
	}
	_, parts, err := c.peer.receive()
	if err != nil {
		c.Fatal(err)
	}
	var s []string
	for _, p := range parts {
		s = append(s, fmt.Sprintf("%x", p))
	}
	return strings.Join(s, "|")
}

func publisher(t *testing.T, cfg PublisherConfig) *Publisher {
	t.Helper()
	p, err := NewPublisher(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return p
}

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 5000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("waited too long for %s", what)
}

func subscribed(t *testing.T, p *Publisher, n int) {
	t.Helper()
	until(t, "subscribers", func() bool { return p.Stats().Subscribers == n })
}

func TestPublishedFrames(t *testing.T) {
	for _, endpoint := range []string{"tcp://127.0.0.1:0", "ipc://" + t.TempDir() + "/events"} {
		p := publisher(t, PublisherConfig{Endpoint: endpoint, Topic: "kv"})
		all := dial(t, p.Endpoint(), "SUB")
		all.write([]byte("\x01"))
		other := dial(t, p.Endpoint(), "SUB")
		if _, err := other.peer.conn.Write(appendFrame(nil, flagCommand, []byte("\x09SUBSCRIBEx"))); err != nil {
			t.Fatal(err)
		}
		subscribed(t, p, 2)
		if got := p.Publish([]byte("first")); got != 0 {
			t.Errorf("first sequence %d", got)
		}
		p.PublishFrames([]byte("xy"), 41, []byte("second"))
		p.Publish(bytes.Repeat([]byte("z"), 300))
		if got, want := all.read(), "6b76|0000000000000000|6669727374"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		if got, want := all.read(), "7879|0000000000000029|7365636f6e64"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		if got, want := all.read(), "6b76|000000000000002a|"+strings.Repeat("7a", 300); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		if got, want := other.read(), "7879|0000000000000029|7365636f6e64"; got != want {
			t.Errorf("other topic: got %s, want %s", got, want)
		}
	}
}

func TestReplayForms(t *testing.T) {
	request := binary.BigEndian.AppendUint64(nil, 2)
	for _, c := range []struct {
		name  string
		three bool
		want  []string
	}{
		{"topic", false, []string{"|6b76|0000000000000002|63", "|6b76|0000000000000003|64", "||ffffffffffffffff|"}},
		{"three frames", true, []string{"|0000000000000002|63", "|0000000000000003|64", "|ffffffffffffffff|"}},
	} {
		p := publisher(t, PublisherConfig{ReplayEndpoint: "tcp://127.0.0.1:0", Topic: "kv", BufferSteps: 3, ThreeFrameReplay: c.three})
		for _, s := range []string{"a", "b", "c", "d"} {
			p.Publish([]byte(s))
		}
		d := dial(t, p.ReplayEndpoint(), "DEALER")
		d.write(request)              // no delimiter: no answer
		d.write(nil, []byte("short")) // not a sequence: no answer
		d.write(nil, request)
		var got []string
		for range c.want {
			got = append(got, d.read())
		}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("%s: %s", c.name, d)
		}
		d.write(nil, make([]byte, 8))
		if got := d.read(); !strings.HasSuffix(got, "0000000000000001|62") {
			t.Errorf("%s: the ring begins with %s", c.name, got)
		}
		if n := p.Stats().Malformed; n != 2 {
			t.Errorf("%d malformed requests", n)
		}
	}
}

func TestPingIsAnswered(t *testing.T) {
	p := publisher(t, PublisherConfig{})
	c := dial(t, p.Endpoint(), "SUB")
	if _, err := c.peer.conn.Write(appendFrame(nil, flagCommand, []byte("\x04PING\x00\x0actx"))); err != nil {
		t.Fatal(err)
	}
	name, data, err := c.peer.receive()
	if err != nil || name != "PONG" || string(data[0]) != "ctx" {
		t.Errorf("got %q %q %v", name, data, err)
	}
}

func TestSlowSubscriberLosesMessagesSilently(t *testing.T) {
	p := publisher(t, PublisherConfig{HWM: 10})
	c := dial(t, p.Endpoint(), "SUB")
	c.write([]byte("\x01"))
	subscribed(t, p, 1)
	payload := make([]byte, maxIncoming)
	for range 2000 { // far more than the buffers of the connection
		p.Publish(payload)
	}
	if n := p.Stats().Dropped; n == 0 {
		t.Fatal("nothing was dropped")
	}
	// What was queued arrives; then the stream goes on behind a gap.
	until(t, "an empty outbox", func() bool {
		c.read()
		return p.Stats().Pending == 0
	})
	sequence := p.Publish([]byte("later"))
	until(t, "the newest message", func() bool {
		return strings.Split(c.read(), "|")[1] == fmt.Sprintf("%016x", sequence)
	})
}

func TestReplayDropsAtItsMark(t *testing.T) {
	p := publisher(t, PublisherConfig{ReplayEndpoint: "tcp://127.0.0.1:0", ReplayHWM: 5})
	payload := make([]byte, 1<<20)
	for range 40 {
		p.Publish(payload)
	}
	d := dial(t, p.ReplayEndpoint(), "DEALER")
	d.write(nil, make([]byte, 8))
	until(t, "drops", func() bool { return p.Stats().Dropped > 0 })
}

func TestRestartDropsConnectionsAndForgets(t *testing.T) {
	p := publisher(t, PublisherConfig{ReplayEndpoint: "tcp://127.0.0.1:0"})
	c := dial(t, p.Endpoint(), "SUB")
	c.write([]byte("\x01"))
	subscribed(t, p, 1)
	p.Publish([]byte("old life"))
	c.read()
	p.Restart()
	if _, _, err := c.peer.receive(); err == nil {
		t.Error("the connection survived")
	}
	c = dial(t, p.Endpoint(), "SUB")
	c.write([]byte("\x01"))
	subscribed(t, p, 1)
	p.Publish([]byte("new"))
	if got := c.read(); got != "|0000000000000000|6e6577" {
		t.Errorf("got %s", got)
	}
	d := dial(t, p.ReplayEndpoint(), "DEALER")
	d.write(nil, make([]byte, 8))
	if got := d.read(); got != "||0000000000000000|6e6577" {
		t.Errorf("replay begins with %s", got)
	}
}

func TestGarbageEndsTheConnection(t *testing.T) {
	p := publisher(t, PublisherConfig{})
	for _, garbage := range []string{
		strings.Repeat("GET / HTTP/1.1\r\n", 8),
		string(greeting) + "\x00\x05abcde",
		string(greeting) + string(appendFrame(nil, flagCommand, []byte("\x05READY"))) + "\x02\xff\xff\xff\xff\xff\xff\xff\xff",
		string(greeting) + string(appendFrame(nil, flagCommand, []byte("\x05READY"))) + "\xf8\x00",
	} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(p.Endpoint(), "tcp://"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write([]byte(garbage)); err != nil {
			t.Fatal(err)
		}
		if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		var buf bytes.Buffer
		if _, err := buf.ReadFrom(conn); err != nil && strings.Contains(err.Error(), "timeout") {
			t.Errorf("%.20q: the connection stays", garbage)
		}
		conn.Close()
	}
	until(t, "counts", func() bool { return p.Stats().Malformed == 4 })
}

// libzmqClient reads 200 messages and a replay with the real library.
const libzmqClient = `
import sys, zmq
ctx = zmq.Context()
sub = ctx.socket(zmq.SUB)
sub.setsockopt(zmq.SUBSCRIBE, b"kv")
sub.setsockopt(zmq.HEARTBEAT_IVL, 20)
sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 500)
sub.setsockopt(zmq.RCVTIMEO, 10000)
sub.connect(sys.argv[1])
for i in range(200):
    topic, seq, payload = sub.recv_multipart()
    assert topic == b"kv" and int.from_bytes(seq, "big") == i, (topic, seq)
    assert payload == bytes([i % 256]) * (i * 10), i
print("live", flush=True)
dealer = ctx.socket(zmq.DEALER)
dealer.setsockopt(zmq.RCVTIMEO, 10000)
dealer.connect(sys.argv[2])
dealer.send_multipart([b"", (150).to_bytes(8, "big")])
got = []
while True:
    empty, topic, seq, payload = dealer.recv_multipart()
    assert empty == b""
    if seq == b"\xff" * 8:
        assert topic == b"" and payload == b""
        break
    assert topic == b"kv"
    got.append(int.from_bytes(seq, "big"))
assert got == list(range(150, 200)), got
req = ctx.socket(zmq.REQ)
req.setsockopt(zmq.RCVTIMEO, 10000)
req.connect(sys.argv[2])
req.send((199).to_bytes(8, "big"))
assert req.recv_multipart()[1] == (199).to_bytes(8, "big")
print("replay")
ctx.destroy(linger=0)
`

func TestLibzmqClients(t *testing.T) {
	if out, err := exec.Command("python3", "-c", "import zmq").CombinedOutput(); err != nil {
		if os.Getenv("KVSCOUT_REQUIRE_LIBZMQ") != "" {
			t.Fatalf("no pyzmq: %v %s", err, out)
		}
		t.Skipf("no pyzmq: %v %s", err, out)
	}
	p := publisher(t, PublisherConfig{ReplayEndpoint: "tcp://127.0.0.1:0", Topic: "kv"})
	cmd := exec.Command("python3", "-c", libzmqClient, p.Endpoint(), p.ReplayEndpoint())
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	subscribed(t, p, 1)
	for i := range 200 {
		p.Publish(bytes.Repeat([]byte{byte(i)}, i*10))
	}
	if err := cmd.Wait(); err != nil || out.String() != "live\nreplay\n" {
		t.Fatalf("%v: %s", err, out.String())
	}
}
