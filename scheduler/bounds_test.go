package scheduler

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/journal"
)

func TestInventedMethodsMakeNoMetrics(t *testing.T) {
	s, _ := start(t, Config{})
	conn := dial(t, s)
	for n := range 100 {
		err := conn.Invoke(context.Background(), fmt.Sprintf("/kvscout.v1.Invented/Method%d", n), &emptypb.Empty{}, &emptypb.Empty{})
		if status.Code(err).String() != "Unimplemented" {
			t.Fatal(err)
		}
	}
	resp, err := http.Get("http://" + s.Addrs().Admin + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(page), "Invented"); n > 0 {
		t.Errorf("%d lines of the metrics page name methods that callers made up", n)
	}
}

// TestSlowReadersOfTheEmbeddedNATSAreCut is a client that subscribes to all and
// reads nothing. The server holds so much for it and no more, cuts it off, and
// says so; whoever reads gets everything.
func TestSlowReadersOfTheEmbeddedNATSAreCut(t *testing.T) {
	var log journal.Journal
	s, _ := start(t, Config{Log: log.Logger()})
	slow, err := net.Dial("tcp", s.Addrs().NATS)
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	if _, err := io.WriteString(slow, "CONNECT {\"verbose\":false}\r\nSUB flood 1\r\nPING\r\n"); err != nil {
		t.Fatal(err)
	}
	greeting := make([]byte, 64<<10)
	for text := ""; !strings.Contains(text, "PONG"); {
		n, err := slow.Read(greeting)
		if err != nil {
			t.Fatal(err)
		}
		text += string(greeting[:n])
	}

	const message, held = 256 << 10, 64 << 20
	reader, writer := mustJoin(t, s.Addrs().NATS, ""), mustJoin(t, s.Addrs().NATS, "")
	var got atomic.Int64
	if _, err := reader.Subscribe("flood", func(m *nats.Msg) { got.Add(int64(len(m.Data))) }); err != nil {
		t.Fatal(err)
	}
	if err := reader.Flush(); err != nil {
		t.Fatal(err)
	}
	sent := int64(0)
	for sent < 2*held && !strings.Contains(log.String(), "Slow Consumer") {
		if err := writer.Publish("flood", make([]byte, message)); err != nil {
			t.Fatal(err)
		}
		if err := writer.Flush(); err != nil {
			t.Fatal(err)
		}
		sent += message
	}
	await.True(t, "the server says so", func() bool { return strings.Contains(log.String(), "Slow Consumer") })
	await.True(t, "the reader has everything", func() bool { return got.Load() == sent })
	if err := slow.SetReadDeadline(time.Now().Add(await.Patience)); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, slow); n >= sent {
		t.Errorf("all %d bytes were kept for it, %v", n, err)
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the connection was not cut")
	}
}
