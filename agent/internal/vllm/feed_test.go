package vllm

import (
	"context"
	"testing"

	"github.com/kvscout/kvscout/agent/internal/zmtp"
	"github.com/kvscout/kvscout/e2e/await"
)

// TestReadAheadIsBounded is a consumer that stands still while the engine
// publishes: at the bound reading stops, and goes on where it stopped.
func TestReadAheadIsBounded(t *testing.T) {
	const size, all = 1 << 20, 2 * feedBytes >> 20
	e := newTestEngine(t, false)
	e.start()
	conn, err := zmtp.Dial(t.Context(), "tcp://"+e.pubAddr, zmtp.Options{Type: zmtp.SUB, MaxMessage: maxMessage})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	f := newFeed(ctx, conn, nil)
	await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
	flooded := make(chan struct{})
	go func() {
		defer close(flooded)
		for n := range uint64(all) {
			write(e.subs[0], []byte(e.topic), be(n), make([]byte, size))
		}
	}()
	defer func() {
		cancel()
		<-f.lost
		<-flooded
	}()
	await.True(t, "the bound", func() bool {
		room := f.bytes.TryAcquire(size)
		if room {
			f.bytes.Release(size)
		}
		return !room
	})
	if n := len(f.messages); n > feedBytes/size {
		t.Errorf("%d messages of 1 MiB read ahead", n)
	}
	for want := range uint64(all) {
		m := <-f.messages
		if got := bigEndian(m.Frames[1]); got != want {
			t.Fatalf("message %d instead of %d", got, want)
		}
		f.done(m)
	}
}

// TestSessionThatIsLeftLeavesItsFeedAlone is a stream that is begun anew while
// the engine sends: the race detector sees who reads what.
func TestSessionThatIsLeftLeavesItsFeedAlone(t *testing.T) {
	e := newTestEngine(t, true)
	e.start()
	p, tail := follow(t, e)
	p.settles(t, Exact)
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for n := uint64(1); ; n++ {
			select {
			case <-stop:
				return
			default:
				e.publish(stored(n))
			}
		}
	}()
	for range 20 {
		lives := tail.Stats().Incarnations
		tail.Restart("a test")
		await.True(t, "a new incarnation", func() bool { return tail.Stats().Incarnations > lives })
	}
	close(stop)
	<-ended
}
