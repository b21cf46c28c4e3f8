package serve

import (
	"net"
	"sync"
	"sync/atomic"
)

// listener bounds its open connections: whoever comes beyond is hung up on.
type listener struct {
	net.Listener
	limit   int64
	open    atomic.Int64
	refused *atomic.Uint64
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.open.Add(1) <= l.limit {
			return &connection{Conn: c, left: func() { l.open.Add(-1) }}, nil
		}
		l.open.Add(-1)
		l.refused.Add(1)
		c.Close()
	}
}

type connection struct {
	net.Conn
	once sync.Once
	left func()
}

func (c *connection) Close() error {
	c.once.Do(c.left)
	return c.Conn.Close()
}
