package scenario

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvscout/kvscout/e2e/wire"
)

// events are counts of what an engine published.
type events struct{ batches, stored, removed, cleared int }

func (e events) since(b events) events {
	return events{e.batches - b.batches, e.stored - b.stored, e.removed - b.removed, e.cleared - b.cleared}
}

// listener counts an engine's events.
type listener struct {
	conn net.Conn
	done chan struct{}

	mu     sync.Mutex // guards what follows
	counts events
	err    error
}

// listen subscribes at host:port.
func listen(address string) (*listener, error) {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	split, in := wire.ZMTP(), bufio.NewReader(conn)
	// libzmq hangs up on a peer that says two things before it was answered.
	for _, said := range []string{string(greeting), "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"} {
		_, err := io.WriteString(conn, said)
		if err == nil {
			_, _, err = split(in)
		}
		if err != nil {
			conn.Close()
			return nil, fmt.Errorf("events: %w", err)
		}
	}
	if _, err := io.WriteString(conn, "\x00\x01\x01"); err != nil { // subscribes to everything
		conn.Close()
		return nil, err
	}
	l := &listener{conn: conn, done: make(chan struct{})}
	go l.run(split, in)
	return l, nil
}

func (l *listener) run(split wire.Split, in *bufio.Reader) {
	defer close(l.done)
	for {
		message, free, err := split(in)
		if err != nil {
			return // closed, by us or with the engine
		}
		if !free {
			continue
		}
		n, err := count(message)
		l.mu.Lock()
		l.counts.batches++
		l.counts.stored += n.stored
		l.counts.removed += n.removed
		l.counts.cleared += n.cleared
		if err != nil {
			l.err = err
		}
		l.mu.Unlock()
	}
}

func (l *listener) read() (events, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.counts, l.err
}

func (l *listener) close() {
	l.conn.Close()
	<-l.done
}

// count reads the last frame of a message.
func count(message []byte) (events, error) {
	var payload []byte
	for len(message) > 0 {
		size, head := int(message[1]), 2
		if message[0]&2 != 0 {
			size, head = 0, 9
			for _, b := range message[1:9] {
				size = size<<8 | int(b)
			}
		}
		payload, message = message[head:head+size], message[head+size:]
	}
	var batch []msgpack.RawMessage
	if err := msgpack.Unmarshal(payload, &batch); err != nil || len(batch) < 2 {
		return events{}, fmt.Errorf("events: a batch of %d bytes: %w", len(payload), err)
	}
	var list []struct {
		Type   string   `msgpack:"type"`
		Hashes []uint64 `msgpack:"block_hashes"`
	}
	if err := msgpack.Unmarshal(batch[1], &list); err != nil {
		return events{}, fmt.Errorf("events: %w", err)
	}
	var n events
	for _, e := range list {
		switch e.Type {
		case "BlockStored":
			n.stored += len(e.Hashes)
		case "BlockRemoved":
			n.removed += len(e.Hashes)
		case "AllBlocksCleared":
			n.cleared++
		}
	}
	return n, nil
}
