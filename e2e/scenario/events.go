package scenario

import (
	"fmt"
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
	subscriber *wire.Subscriber

	mu     sync.Mutex // guards what follows
	counts events
	err    error
}

// listen subscribes at host:port.
func listen(address string) (*listener, error) {
	l := &listener{}
	var err error
	if l.subscriber, err = wire.Subscribe(address, l.heard); err != nil {
		return nil, fmt.Errorf("events: %w", err)
	}
	return l, nil
}

func (l *listener) heard(payload []byte) {
	n, err := count(payload)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts.batches++
	l.counts.stored += n.stored
	l.counts.removed += n.removed
	l.counts.cleared += n.cleared
	if err != nil {
		l.err = err
	}
}

func (l *listener) read() (events, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.counts, l.err
}

func (l *listener) close() { l.subscriber.Close() }

// count reads a batch.
func count(payload []byte) (events, error) {
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
