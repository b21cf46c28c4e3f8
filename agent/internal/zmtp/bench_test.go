package zmtp

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"
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

// BenchmarkLibzmq reads as fast as a real publisher sends, which drops what
// exceeds its high-water mark of 100,000 messages.
func BenchmarkLibzmq(b *testing.B) {
	const n, size = 200_000, 600
	var lost int
	var took, cpu time.Duration
	for b.Loop() {
		z := startLibzmq(b, "pub", "bind", "tcp://127.0.0.1:*", fmt.Sprint("count=", n), fmt.Sprint("size=", size))
		c := dialUntil(b, z.endpoint, Options{Type: SUB})
		var m Message
		// One-frame messages come before the first and after the last.
		for first := true; len(m.Frames) <= 1; first = false {
			if err := c.Recv(&m); err != nil {
				b.Fatal(err)
			}
			if first {
				fmt.Fprintln(z.in, "go")
			}
		}
		began, busy := time.Now(), ownCPU(b)
		got := 0
		for ; len(m.Frames) > 1; got++ {
			if err := c.Recv(&m); err != nil {
				b.Fatal(err)
			}
		}
		lost += n - got
		took += time.Since(began)
		cpu += ownCPU(b) - busy
		c.Close()
		z.kill()
	}
	b.ReportMetric(0, "ns/op") // mostly Python's start
	b.ReportMetric(float64(lost), "lost")
	b.ReportMetric(float64(n*b.N-lost)/took.Seconds(), "messages/s")
	b.ReportMetric(cpu.Seconds()/float64(b.N), "cpu-s/op")
}

// ownCPU is the processor time of this process.
func ownCPU(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
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
