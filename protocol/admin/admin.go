// Package admin is the HTTP server of probes, collectors and people that both
// programs have: bounded in connections, time and bytes, so that nobody who can
// reach it keeps the kubelet out. What is served it leaves to its owner.
package admin

import (
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// MaxConnections bounds those that are open at a time.
const MaxConnections = 64

// Server serves h. At the bound the connection on which nothing has begun or
// ended for longest is hung up on, and counted: a newcomer is never turned away,
// because it may be the one that counts. The ConnState hook is taken.
func Server(h http.Handler, hungUp *atomic.Uint64) *http.Server {
	c := &connections{of: make(map[net.Conn]uint64), hungUp: hungUp}
	return &http.Server{
		Handler:           h,
		ConnState:         c.changed,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
	}
}

// connections are those that are open.
type connections struct {
	hungUp *atomic.Uint64

	mu    sync.Mutex          // guards what follows
	of    map[net.Conn]uint64 // the change at which something last began or ended there
	count uint64              // of changes
}

func (c *connections) changed(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if state == http.StateClosed || state == http.StateHijacked {
		delete(c.of, conn)
		return
	}
	if _, open := c.of[conn]; !open && state != http.StateNew {
		return // hung up on
	}
	c.count++
	c.of[conn] = c.count
	if len(c.of) <= MaxConnections {
		return
	}
	oldest := conn
	for other, at := range c.of {
		if at < c.of[oldest] {
			oldest = other
		}
	}
	delete(c.of, oldest)
	oldest.Close()
	c.hungUp.Add(1)
}
