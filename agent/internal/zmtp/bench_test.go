package zmtp

import (
	"context"
	"testing"
)

// endless says a good handshake and then one stretch of frames for ever.
type endless struct {
	said   []byte
	repeat []byte
}

func (e *endless) Read(p []byte) (int, error) {
	if len(e.said) == 0 {
		e.said = e.repeat
	}
	n := copy(p, e.said)
	e.said = e.said[n:]
	return n, nil
}

func benchmarkRecv(b *testing.B, payload int) {
	var repeat []byte
	for range 100 {
		repeat = appendMessage(repeat, []byte("kv"), make([]byte, 8), make([]byte, payload))
	}
	c, _ := playTape(b, &endless{said: hello("PUB"), repeat: repeat}, Options{Type: SUB})
	if err := c.Handshake(context.Background()); err != nil {
		b.Fatal(err)
	}
	var m Message
	b.SetBytes(int64(len(repeat) / 100))
	b.ReportAllocs()
	for b.Loop() {
		if err := c.Recv(&m); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkRecv(b *testing.B) {
	b.Run("600B", func(b *testing.B) { benchmarkRecv(b, 600) })
	b.Run("64KiB", func(b *testing.B) { benchmarkRecv(b, 64<<10) })
}

func TestRecvAllocatesNothing(t *testing.T) {
	repeat := appendMessage(nil, []byte("kv"), make([]byte, 8), make([]byte, 600))
	repeat = appendCommand(repeat, "PING", 0, 0)
	c, tp := playTape(t, &endless{said: hello("PUB"), repeat: repeat}, Options{Type: SUB})
	var m Message
	recv := func() {
		if err := c.Recv(&m); err != nil {
			t.Fatal(err)
		}
		tp.said.Reset()
	}
	recv()
	recv()
	if n := testing.AllocsPerRun(1000, recv); n > 0 {
		t.Errorf("%v allocations per message", n)
	}
}
