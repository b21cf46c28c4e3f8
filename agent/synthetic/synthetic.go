// Package synthetic publishes members that have no engine, so that one process
// can be a thousand of them: the publisher, the messages and their rhythm are
// those of every agent, the cache is computed. What the caches hold it leaves to
// its callers.
package synthetic

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/publish"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/nats-io/nats.go"
)

// Run of consecutive blocks of one chain, in GPU memory.
type Run struct {
	Remove   bool
	Position uint32         // of Keys[0] in its chain
	Before   []blockkey.Key // the blockkey.Lead keys before Keys[0], or all there are
	Keys     []blockkey.Key
}

// Cache says what an engine's cache holds after each of its batches. It is a
// function of the number alone, and its slices are the caller's.
type Cache interface {
	// Batch appends what batch n changes: removes first, children before parents.
	Batch(n uint64, runs []Run) []Run
	// All appends what is held after batch n, parents first.
	All(n uint64, runs []Run) []Run
}

// Config of a Member.
type Config struct {
	// Conn must not buffer while it is disconnected: nats.ReconnectBufSize(-1).
	Conn *nats.Conn
	Pool string
	// Info of the member; its namespace, pod uid and rank are its name.
	Info *pb.MemberInfo
	// Cache, and the batches that its engine has published already.
	Cache Cache
	From  uint64
	// Epoch of the engine: higher than that of a member of this name before.
	Epoch uint64
	// Load of the engine now; nil: it is not known.
	Load func() *pb.Load
	// Heartbeat is the time between two; 0: protocol.HeartbeatEvery.
	Heartbeat time.Duration
}

// Member is one rank of an engine that is not there.
type Member struct {
	publisher *publish.Publisher
	state     *state
}

// state is the cache state as the publisher sees it, a publish.CacheState.
type state struct {
	cfg Config

	mu      sync.Mutex // guards all below
	batches uint64     // of the engine
	drained uint64     // of them published
	begun   bool       // the cache as of drained is published
	at      time.Time  // of the first batch that is not
	held    struct{ Count, Digest uint64 }
	runs    []Run
}

// New checks the configuration.
func New(cfg Config) (*Member, error) {
	m := &Member{state: &state{cfg: cfg, batches: cfg.From}}
	name, err := protocol.Member{Namespace: cfg.Info.GetNamespace(), PodUID: cfg.Info.GetPodUid(), Rank: cfg.Info.GetRank()}.Name()
	if err != nil {
		return nil, fmt.Errorf("synthetic: %w", err)
	}
	m.publisher, err = publish.New(publish.Config{Conn: cfg.Conn, Pool: cfg.Pool, Member: name, CacheState: m.state, HeartbeatEvery: cfg.Heartbeat})
	return m, err
}

// Run publishes until ctx is done, and says goodbye then if the connection is
// there. It may be called once.
func (m *Member) Run(ctx context.Context) error { return m.publisher.Run(ctx) }

// Advance lets the engine publish its batches up to number n, the oldest of them
// at this time. It never waits.
func (m *Member) Advance(n uint64, at time.Time) {
	m.state.advance(n, at)
	m.publisher.Wake()
}

// Stats are the publisher's.
type Stats struct {
	// Deltas and heartbeats sent; Keys stored and removed in deltas; Snapshots
	// answered; Bytes of deltas and heartbeats.
	Deltas, Heartbeats, Keys, Snapshots, Bytes uint64
	// Dropped changes, that no connection took, and its errors.
	Dropped, Errors uint64
}

// Stats returns the counts.
func (m *Member) Stats() Stats {
	s := m.publisher.Stats()
	return Stats{Deltas: s.Deltas, Heartbeats: s.Heartbeats, Keys: s.Keys, Snapshots: s.Snapshots, Bytes: s.Bytes, Dropped: s.Dropped, Errors: s.Errors}
}

func (s *state) advance(n uint64, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n > s.batches && s.at.IsZero() {
		s.at = at
	}
	s.batches = max(s.batches, n)
}

// Drain is what the batches since the last call changed; see publish.CacheState.
func (s *state) Drain(ops []mirror.Op) ([]mirror.Op, publish.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.begun {
		s.begun, s.drained = true, s.batches
		s.runs = s.cfg.Cache.All(s.drained, s.runs[:0])
		ops = s.takeLocked(ops)
		s.runs = nil // as large as it gets again
	}
	for s.drained < s.batches {
		s.drained++
		s.runs = s.cfg.Cache.Batch(s.drained, s.runs[:0])
		ops = s.takeLocked(ops)
	}
	st := s.stateLocked()
	st.EventTime, s.at = s.at, time.Time{}
	return ops, st
}

// takeLocked adds the runs to what is held.
func (s *state) takeLocked(ops []mirror.Op) []mirror.Op {
	for _, r := range s.runs {
		for _, k := range r.Keys {
			s.held.Digest ^= blockkey.Digest(k)
		}
		if r.Remove {
			s.held.Count -= uint64(len(r.Keys))
		} else {
			s.held.Count += uint64(len(r.Keys))
		}
	}
	return appendOps(ops, s.runs)
}

// Snapshot is the whole cache state; see publish.CacheState.
func (s *state) Snapshot() ([]mirror.Op, publish.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return appendOps(nil, s.cfg.Cache.All(s.drained, nil)), s.stateLocked()
}

// Heartbeat describes the member; see publish.CacheState.
func (s *state) Heartbeat() (*pb.MemberInfo, *pb.Load) {
	if s.cfg.Load == nil {
		return s.cfg.Info, nil
	}
	return s.cfg.Info, s.cfg.Load()
}

func (s *state) stateLocked() publish.State {
	st := publish.State{Epoch: s.cfg.Epoch, Trust: pb.Trust_TRUST_EXACT, EngineBatches: s.drained}
	for l := range protocol.Lanes {
		st.Lanes[l] = s.held
	}
	return st
}

// appendOps says of each run that it is on all lanes, as a mirror does: the
// widest one first where blocks come, last where they go.
func appendOps(ops []mirror.Op, runs []Run) []mirror.Op {
	for _, r := range runs {
		for i := range mirror.Lanes {
			lane := mirror.LaneDisk - mirror.Lane(i)
			if r.Remove {
				lane = mirror.Lane(i)
			}
			ops = append(ops, mirror.Op{Remove: r.Remove, Lane: lane, Position: r.Position, Before: r.Before, Keys: r.Keys})
		}
	}
	return ops
}
