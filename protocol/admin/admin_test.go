package admin

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func serve(t *testing.T) (address string, hungUp *atomic.Uint64) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hungUp = new(atomic.Uint64)
	server := Server(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }), hungUp)
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return l.Addr().String(), hungUp
}

func probe(t *testing.T, address string) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, "GET", "http://"+address+"/healthz", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// TestIdleStrangersDoNotKeepTheKubeletOut holds as many connections as there
// may be, and more, of those who say nothing, half a request, or have had an
// answer.
func TestIdleStrangersDoNotKeepTheKubeletOut(t *testing.T) {
	address, hungUp := serve(t)
	for i := range 3 * MaxConnections {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, []string{"", "GET /healthz HT", "GET / HTTP/1.1\r\nHost: x\r\n\r\n"}[i%3]); err != nil {
			t.Fatal(err)
		}
		if i%MaxConnections == MaxConnections-1 {
			if err := probe(t, address); err != nil {
				t.Fatalf("with %d strangers: %v", i+1, err)
			}
		}
	}
	if n := hungUp.Load(); n < MaxConnections {
		t.Errorf("%d hung up on", n)
	}
}

// TestWhoIsServedStays: connections in use survive idle ones.
func TestWhoIsServedStays(t *testing.T) {
	address, _ := serve(t)
	transport := &http.Transport{MaxIdleConnsPerHost: 1}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	for range 2 * MaxConnections {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		resp, err := client.Get("http://" + address)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
}

func TestTimesAndBytesAreBounded(t *testing.T) {
	s := Server(nil, nil)
	if s.ReadHeaderTimeout <= 0 || s.ReadTimeout <= 0 || s.WriteTimeout <= 0 || s.IdleTimeout <= 0 || s.MaxHeaderBytes <= 0 {
		t.Errorf("%+v", s)
	}
}
