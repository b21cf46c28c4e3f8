package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
)

// bus listens to what the agent publishes, counts it, and follows its claims.
type bus struct {
	conn *nats.Conn

	mu       sync.Mutex // guards what follows
	changed  chan struct{}
	trust    pb.Trust
	epoch    uint64
	sequence uint64
	batches  uint64 // of the engine, that the newest delta stands on
	held     protocol.Held
	keys     uint64 // in stores, each once for all lanes
	deltas   uint64
	bytes    uint64
	err      error
	// arrived[n] is when batch n was on the bus; nil: nobody wants to know.
	arrived []time.Time
}

func listen(url string) (*bus, error) {
	subjects, err := protocol.NewSubjects(pool)
	if err != nil {
		return nil, err
	}
	b := &bus{changed: make(chan struct{}, 1)}
	if b.conn, err = nats.Connect(url); err != nil {
		return nil, err
	}
	for subject, take := range map[string]func(*nats.Msg) error{subjects.Blocks(member): b.delta, subjects.Load(member): b.heartbeat} {
		sub, err := b.conn.Subscribe(subject, func(m *nats.Msg) {
			b.mu.Lock()
			b.err = errors.Join(b.err, take(m))
			b.mu.Unlock()
			select {
			case b.changed <- struct{}{}:
			default:
			}
		})
		if err == nil {
			err = sub.SetPendingLimits(-1, -1)
		}
		if err != nil {
			b.conn.Close()
			return nil, err
		}
	}
	if err := b.conn.Flush(); err != nil {
		b.conn.Close()
		return nil, err
	}
	return b, nil
}

func (b *bus) delta(m *nats.Msg) error {
	now := time.Now()
	d, err := protocol.ReadDelta(m.Data, member)
	if err != nil {
		return err
	}
	h := d.GetHeader()
	if h.GetEpoch() != b.epoch {
		if b.sequence > 0 {
			return errors.New("the agent began another epoch")
		}
		b.epoch = h.GetEpoch()
	}
	if h.GetSequence() != b.sequence+1 {
		return fmt.Errorf("delta %d came after %d", h.GetSequence(), b.sequence)
	}
	b.sequence = h.GetSequence()
	for _, c := range d.GetChanges() {
		b.keys += uint64(len(c.GetStored().GetKeys()))
	}
	b.deltas++
	b.bytes += uint64(len(m.Data))
	if len(d.GetLanes()) == 0 {
		return nil // the rest of it follows
	}
	if b.held, err = protocol.ReadHeld(d.GetLanes()); err != nil {
		return err
	}
	b.batches = d.GetEngineBatches()
	for b.arrived != nil && uint64(len(b.arrived)) < b.batches {
		b.arrived = append(b.arrived, now)
	}
	return nil
}

func (b *bus) heartbeat(m *nats.Msg) error {
	h, err := protocol.ReadHeartbeat(m.Data, member)
	if err == nil && !h.GetLeaving() {
		b.trust = h.GetTrust()
	}
	return err
}

// arrival of a batch; zero: not yet.
func (b *bus) arrival(batch uint64) time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	if batch < uint64(len(b.arrived)) {
		return b.arrived[batch]
	}
	return time.Time{}
}

// until waits until a condition holds.
func (b *bus) until(ctx context.Context, patience time.Duration, what string, holds func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		b.mu.Lock()
		ok, err := holds(), b.err
		b.mu.Unlock()
		if err != nil || ok {
			return err
		}
		select {
		case <-b.changed:
		case <-ctx.Done():
			return fmt.Errorf("%s: not within %v", what, patience)
		}
	}
}

// verifies says whether the newest delta claims exactly what the stream amounts to.
func (b *bus) proves(t *stream) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for l, h := range b.held[:protocol.Lanes] {
		if h.Count != t.held || h.Digest != t.digest {
			return fmt.Errorf("lane %d holds %d blocks with digest %x, should hold %d with %x", l, h.Count, h.Digest, t.held, t.digest)
		}
	}
	return nil
}
