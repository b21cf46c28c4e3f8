package e2e

import (
	"bytes"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"sync"
	"testing"
)

// front stands before an engine's HTTP server, on its host, and says what it
// wants for a page.
type front struct {
	*httptest.Server
	path string

	mu   sync.Mutex // guards what follows
	page func(page []byte) []byte
}

func newFront(t *testing.T, e *engine, path string) *front {
	t.Helper()
	target, err := url.Parse(e.URL())
	if err != nil {
		t.Fatal(err)
	}
	f := &front{path: path}
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
			change := f.page
			f.mu.Unlock()
			if change == nil || r.Request.URL.Path != f.path {
				return nil
			}
			page, err := io.ReadAll(r.Body)
			if err != nil {
				return err
			}
			page = change(page)
			r.StatusCode = http.StatusOK
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(page)), int64(len(page))
			r.Header.Set("Content-Length", strconv.Itoa(len(page)))
			return nil
		},
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(e.cfg.Host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	f.Server = &httptest.Server{Listener: listener, Config: &http.Server{Handler: proxy}}
	f.Start()
	t.Cleanup(func() {
		f.Close()
		transport.CloseIdleConnections()
	})
	return f
}

// say replaces the page from here on; nil: the engine's own.
func (f *front) say(page func(page []byte) []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.page = page
}
