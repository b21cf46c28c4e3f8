package e2e

import (
	"bytes"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"sync"
	"testing"
)

// front stands before an engine's HTTP server and says what it wants for its
// metrics.
type front struct {
	*httptest.Server

	mu      sync.Mutex // guards metrics
	metrics func(page []byte) []byte
}

func newFront(t *testing.T, e *engine) *front {
	t.Helper()
	target, err := url.Parse(e.URL())
	if err != nil {
		t.Fatal(err)
	}
	f := &front{}
	transport := &http.Transport{}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Header.Del("Accept-Encoding") // pages are to be plain
		},
		Transport: transport,
		ErrorLog:  log.New(io.Discard, "", 0), // calls end with the test
		ModifyResponse: func(r *http.Response) error {
			f.mu.Lock()
			change := f.metrics
			f.mu.Unlock()
			if change == nil || r.Request.URL.Path != "/metrics" {
				return nil
			}
			page, err := io.ReadAll(r.Body)
			if err != nil {
				return err
			}
			page = change(page)
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(page)), int64(len(page))
			r.Header.Set("Content-Length", strconv.Itoa(len(page)))
			return nil
		},
	}
	f.Server = httptest.NewServer(proxy)
	t.Cleanup(func() {
		f.Close()
		transport.CloseIdleConnections()
	})
	return f
}

// say replaces the metrics from here on; nil: the engine's own.
func (f *front) say(metrics func(page []byte) []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.metrics = metrics
}
