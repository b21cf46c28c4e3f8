package vllm

import (
	"context"

	"github.com/kvscout/kvscout/agent/internal/zmtp"
	"golang.org/x/sync/semaphore"
)

const (
	// feedMessages and feedBytes bound what a feed reads ahead. At the bound it
	// stops reading: the peer then drops, which shows as a gap and is replayed.
	feedMessages = 16384
	feedBytes    = 64 << 20
	// maxMessage bounds one message.
	maxMessage = 16 << 20
	// keptMessages are kept for reuse, unless they are larger than keptBytes.
	keptMessages = 16
	keptBytes    = 1 << 20
)

// feed reads a connection ahead of its consumer, so that neither a replay nor
// a slow batch keeps messages waiting in the engine, and so that the end of
// the connection is noticed when it comes.
type feed struct {
	messages chan *zmtp.Message // closed at the end of the connection
	lost     chan struct{}      // closed at the same time
	err      error              // why; to be read once messages or lost is closed

	spoke bool // it was chosen for its first message, a batch; see peers
	conn  *zmtp.Conn
	hear  func(context.Context, *zmtp.Message) error // see newFeed; nil once called
	end   context.CancelFunc
	bytes *semaphore.Weighted
	free  chan *zmtp.Message
}

// newFeed starts to read conn, which it owns from here on. The first message
// goes through hear, unless that is nil: nothing more is read before it returns,
// and its error ends the feed. The reader ends with the connection or with ctx;
// close ends it and waits for that.
func newFeed(ctx context.Context, conn *zmtp.Conn, hear func(context.Context, *zmtp.Message) error) *feed {
	ctx, cancel := context.WithCancel(ctx)
	f := &feed{
		messages: make(chan *zmtp.Message, feedMessages),
		lost:     make(chan struct{}),
		conn:     conn,
		hear:     hear,
		end:      cancel,
		bytes:    semaphore.NewWeighted(feedBytes),
		free:     make(chan *zmtp.Message, keptMessages),
	}
	go f.read(ctx)
	return f
}

func (f *feed) close() {
	f.end()
	<-f.lost
}

func (f *feed) read(ctx context.Context) {
	defer f.end()
	defer close(f.lost)
	defer close(f.messages)
	defer f.conn.Close()
	stop := context.AfterFunc(ctx, func() { f.conn.Close() })
	defer stop()
	for {
		m := f.message()
		if f.err = f.conn.Recv(m); f.err != nil {
			return
		}
		if hear := f.hear; hear != nil {
			f.hear = nil
			if f.err = hear(ctx, m); f.err != nil {
				return
			}
		}
		if f.err = f.bytes.Acquire(ctx, weight(m)); f.err != nil {
			return
		}
		select {
		case f.messages <- m:
		case <-ctx.Done():
			f.err = ctx.Err()
			return
		}
	}
}

func weight(m *zmtp.Message) int64 {
	n := int64(64)
	for _, frame := range m.Frames {
		n += int64(len(frame))
	}
	return n
}

func (f *feed) message() *zmtp.Message {
	select {
	case m := <-f.free:
		return m
	default:
		return new(zmtp.Message)
	}
}

// done gives a message back; its frames are not valid any more.
func (f *feed) done(m *zmtp.Message) {
	n := weight(m)
	f.bytes.Release(n)
	if n > keptBytes {
		return
	}
	select {
	case f.free <- m:
	default:
	}
}
