// Package members plays members of the fleet that have no engine: what the protocol
// asks of an agent, for a cache state that does not change. It makes fleets of many
// members cheap.
package members

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
)

// chunkKeys keeps a chunk of a snapshot below the largest message.
const chunkKeys = 24 * 1024

// Member is an idle engine's: its heartbeat, and the chunks of its snapshot, encoded
// once.
type Member struct {
	ID        string
	every     time.Duration
	heartbeat []byte
	chunks    [][]byte
}

// New returns the only member of a pod. It beats every so often and holds these
// chains on the GPU, no key twice.
func New(pod, model string, blockSize int, every time.Duration, chains [][]uint64) (*Member, error) {
	return Of(&pb.MemberInfo{
		Namespace: "default", Pod: pod, PodUid: pod, Address: pod + ":8000", Engine: "vllm", EngineVersion: "0.32.0",
		Models: []string{model}, BlockSize: uint32(blockSize),
	}, every, chains)
}

// Of returns the member that says this of itself, likewise.
func Of(info *pb.MemberInfo, every time.Duration, chains [][]uint64) (*Member, error) {
	id, err := protocol.Member{Namespace: info.GetNamespace(), PodUID: info.GetPodUid(), Rank: info.GetRank()}.Name()
	if err != nil {
		return nil, err
	}
	m := &Member{ID: id, every: every}
	header := &pb.Header{Version: protocol.Version, Member: m.ID, Epoch: 1, Sequence: 1}
	count, digest := uint64(0), uint64(0)
	chunks := []*pb.SnapshotChunk{{Header: header}}
	size := 0
	for _, chain := range chains {
		if size > 0 && size+len(chain) > chunkKeys {
			chunks = append(chunks, &pb.SnapshotChunk{Header: header, Index: uint32(len(chunks))})
			size = 0
		}
		last := chunks[len(chunks)-1]
		last.Stored = append(last.Stored, &pb.Stored{Lane: pb.Lane_LANE_GPU, Through: pb.Lane_LANE_DISK, Keys: chain})
		size += len(chain)
		count += uint64(len(chain))
		for _, key := range chain {
			digest ^= blockkey.Digest(blockkey.Key(key))
		}
	}
	var lanes []*pb.LaneState
	for lane := pb.Lane_LANE_GPU; lane <= pb.Lane_LANE_DISK; lane++ {
		lanes = append(lanes, &pb.LaneState{Lane: lane, Count: count, Digest: digest})
	}
	last := chunks[len(chunks)-1]
	last.Last, last.Lanes, last.Trust = true, lanes, pb.Trust_TRUST_EXACT
	for _, c := range chunks {
		data, err := proto.Marshal(c)
		if err == nil && len(data) > protocol.MaxMessage {
			err = fmt.Errorf("%s: a chunk of %d bytes", m.ID, len(data))
		}
		if err != nil {
			return nil, err
		}
		m.chunks = append(m.chunks, data)
	}
	info.Blocks = max(count, 100_000)
	m.heartbeat, err = proto.Marshal(&pb.Heartbeat{
		Header: header, Trust: pb.Trust_TRUST_EXACT, Lanes: lanes, IntervalMs: uint32(every.Milliseconds()),
		Info: info,
		Load: &pb.Load{Running: proto.Uint32(0), Waiting: proto.Uint32(0), KvUsage: proto.Float64(0)},
	})
	return m, err
}

// Run speaks for the member until the context ends.
func (m *Member) Run(ctx context.Context, conn *nats.Conn, subjects protocol.Subjects) error {
	sub, err := conn.Subscribe(subjects.Snapshot(m.ID), func(asked *nats.Msg) {
		for _, c := range m.chunks {
			if asked.Respond(c) != nil {
				return
			}
		}
	})
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	// Agents begin somewhere in the interval.
	timer := time.NewTimer(rand.N(m.every))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
			_ = conn.Publish(subjects.Load(m.ID), m.heartbeat)
			timer.Reset(m.every)
		}
	}
}
