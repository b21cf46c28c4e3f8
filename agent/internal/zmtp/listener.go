package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"
)

// Listener waits for peers that connect to us, as a publisher does whose
// endpoint is an address of its subscriber.
type Listener struct {
	ln      deadlineListener
	opt     Options
	open    atomic.Int64
	refused atomic.Uint64
}

type deadlineListener interface {
	net.Listener
	SetDeadline(time.Time) error
}

// Listen opens endpoint for peers. A socket file that nobody listens on any
// more is replaced.
func Listen(ctx context.Context, endpoint string, opt Options) (*Listener, error) {
	e, err := ParseEndpoint(endpoint)
	if err != nil {
		return nil, err
	}
	if opt, err = opt.withDefaults(); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", e, err)
	}
	config := net.ListenConfig{KeepAliveConfig: keepAlive}
	ln, err := config.Listen(ctx, e.Network, e.address())
	if errors.Is(err, syscall.EADDRINUSE) && e.Network == "unix" && removeStale(ctx, e.Path) {
		ln, err = config.Listen(ctx, e.Network, e.address())
	}
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", e, err)
	}
	return &Listener{ln: ln.(deadlineListener), opt: opt}, nil
}

// removeStale removes the socket at path if its owner is gone.
func removeStale(ctx context.Context, path string) bool {
	info, err := os.Lstat(path)
	if err != nil || info.Mode().Type() != os.ModeSocket {
		return false
	}
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err == nil {
		conn.Close()
		return false
	}
	return errors.Is(err, syscall.ECONNREFUSED) && os.Remove(path) == nil
}

// Accept waits for the next peer, until Close or the end of ctx. It returns
// before the handshake, so that a peer that stalls there holds up nobody else;
// see Conn.Handshake. Peers above MaxPeers are hung up on and counted. One
// goroutine at a time calls Accept; its errors concern the Listener.
func (l *Listener) Accept(ctx context.Context) (*Conn, error) {
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(woken)
		_ = l.ln.SetDeadline(time.Unix(1, 0)) // fails only if closed, which ends Accept too
	})
	defer func() {
		if !stop() {
			<-woken
			_ = l.ln.SetDeadline(time.Time{})
		}
	}()
	for {
		conn, err := l.ln.Accept()
		if err != nil {
			if ctx.Err() != nil {
				err = fmt.Errorf("accept on %s: %w", l.ln.Addr(), context.Cause(ctx))
			}
			return nil, err
		}
		if l.open.Add(1) > int64(l.opt.MaxPeers) {
			l.open.Add(-1)
			l.refused.Add(1)
			conn.Close()
			continue
		}
		name := conn.RemoteAddr().String()
		if name == "" || name == "@" {
			name = "a peer of " + l.ln.Addr().String()
		}
		c := newConn(conn, name, l.opt)
		c.onClose = func() { l.open.Add(-1) }
		return c, nil
	}
}

// Refused counts the peers hung up on because too many were connected.
func (l *Listener) Refused() uint64 { return l.refused.Load() }

// Addr is where the Listener listens.
func (l *Listener) Addr() net.Addr { return l.ln.Addr() }

// Close stops listening and ends a waiting Accept. Accepted connections live on.
func (l *Listener) Close() error { return l.ln.Close() }
