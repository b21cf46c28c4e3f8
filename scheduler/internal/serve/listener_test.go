package serve

import (
	"net"
	"sync/atomic"
	"testing"
)

func TestConnectionsAreBounded(t *testing.T) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var refused atomic.Uint64
	l := &listener{Listener: tcp, limit: 2, refused: &refused}
	defer l.Close()
	accepted := make(chan net.Conn, 8)
	go func() {
		defer close(accepted)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	dial := func() net.Conn {
		c, err := net.Dial("tcp", tcp.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	dial()
	dial()
	first := <-accepted
	<-accepted
	if _, err := dial().Read(make([]byte, 1)); err == nil || refused.Load() != 1 {
		t.Errorf("third: %v, %d refused", err, refused.Load())
	}
	first.Close()
	first.Close()
	dial()
	<-accepted
	if _, err := dial().Read(make([]byte, 1)); err == nil || refused.Load() != 2 {
		t.Errorf("fifth: %v, %d refused", err, refused.Load())
	}
}
