package kubernetes

import (
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
)

// routes is a proxy of HTTP CONNECT between the API server and Services.
type routes struct {
	address string

	mu   sync.Mutex
	to   map[string]string // NAME.NAMESPACE.svc:PORT -> address
	open map[net.Conn]bool // nil: closed
}

func newRoutes(t testing.TB, address string) *routes {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	r := &routes{address: address, to: make(map[string]string), open: make(map[net.Conn]bool)}
	server := &http.Server{Handler: r}
	var running sync.WaitGroup
	running.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() {
		_ = server.Close()
		r.mu.Lock()
		for conn := range r.open {
			conn.Close()
		}
		r.open = nil
		r.mu.Unlock()
		running.Wait()
	})
	return r
}

func (r *routes) set(service, address string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.to[service] = address
	// Connections that are kept would go the old way.
	for conn := range r.open {
		conn.Close()
	}
}

// keep a connection until it is dropped; false: the proxy is closed.
func (r *routes) keep(conn net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open == nil {
		conn.Close()
		return false
	}
	r.open[conn] = true
	return true
}

func (r *routes) drop(conn net.Conn) {
	conn.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.open, conn)
}

func (r *routes) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	r.mu.Lock()
	address := r.to[request.Host]
	r.mu.Unlock()
	if request.Method != http.MethodConnect || address == "" {
		http.Error(w, "there is no way to "+request.Host, http.StatusBadGateway)
		return
	}
	there, err := net.Dial("tcp", address)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer r.drop(there)
	here, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer r.drop(here)
	if !r.keep(there) || !r.keep(here) {
		return
	}
	if _, err := io.WriteString(here, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
		return
	}
	var back sync.WaitGroup
	back.Go(func() {
		_, _ = io.Copy(here, there)
		here.Close()
	})
	_, _ = io.Copy(there, buffered)
	there.Close()
	back.Wait()
}
