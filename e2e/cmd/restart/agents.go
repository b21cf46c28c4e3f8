package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
)

const (
	model     = "fake"
	blockSize = 16
	// chain is the number of blocks of one prompt.
	chain = 512
	// chunkKeys keeps a chunk of a snapshot below the largest message.
	chunkKeys = 24 * 1024
	// connections that the members share.
	connections = 16
)

// member is what an agent would say of one engine: its heartbeat, and the
// chunks of its snapshot, encoded once.
type member struct {
	id        string
	conn      *nats.Conn
	heartbeat []byte
	chunks    [][]byte
}

// serve runs a NATS server and all members until in is closed, and writes the
// server's URL to out when they are there.
func serve(ctx context.Context, o options, in io.Reader, out io.Writer) error {
	s, err := broker.Open()
	if err != nil {
		return err
	}
	defer s.Close()
	subjects, err := protocol.NewSubjects("default")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()
	var conns []*nats.Conn
	for range connections {
		conn, err := nats.Connect(s.URL(), nats.ReconnectBufSize(-1))
		if err != nil {
			return err
		}
		defer conn.Close()
		conns = append(conns, conn)
	}
	for i := range o.members {
		m, err := newMember(o, i, conns[i%connections])
		if err != nil {
			return err
		}
		if _, err := m.conn.Subscribe(subjects.Snapshot(m.id), m.answer); err != nil {
			return err
		}
		group.Go(func() { m.beat(ctx, subjects.Load(m.id), o.beat) })
	}
	for _, c := range conns {
		if err := c.Flush(); err != nil {
			return err
		}
	}
	fmt.Fprintln(out, s.URL())
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, in)
		close(ended)
	}()
	select {
	case <-ctx.Done():
	case <-ended:
	}
	return nil
}

func newMember(o options, i int, conn *nats.Conn) (*member, error) {
	pod := fmt.Sprintf("pod%d", i)
	m := &member{id: "default_" + pod + "_0", conn: conn}
	header := &pb.Header{Version: protocol.Version, Member: m.id, Epoch: 1, Sequence: 1}
	digest := uint64(0)
	chunk := &pb.SnapshotChunk{Header: header}
	size := 0
	flush := func() error {
		data, err := proto.Marshal(chunk)
		if err == nil && len(data) > protocol.MaxMessage {
			err = fmt.Errorf("chunk of %d bytes", len(data))
		}
		m.chunks = append(m.chunks, data)
		chunk = &pb.SnapshotChunk{Header: header, Index: chunk.Index + 1}
		size = 0
		return err
	}
	for left, c := o.blocks, 0; left > 0; c++ {
		n := min(left, chain)
		left -= n
		owner := uint64(i + 1)
		if float64(c*chain) < o.shared*float64(o.blocks) {
			owner = 0
		}
		r := rand.New(rand.NewPCG(owner, uint64(c)))
		run := &pb.Stored{Lane: pb.Lane_LANE_GPU, Through: pb.Lane_LANE_DISK, Keys: make([]uint64, n)}
		for k := range run.Keys {
			run.Keys[k] = r.Uint64() | 1
			digest ^= blockkey.Digest(blockkey.Key(run.Keys[k]))
		}
		chunk.Stored = append(chunk.Stored, run)
		if size += n; size >= chunkKeys && left > 0 {
			if err := flush(); err != nil {
				return nil, err
			}
		}
	}
	var lanes []*pb.LaneState
	for lane := pb.Lane_LANE_GPU; lane <= pb.Lane_LANE_DISK; lane++ {
		lanes = append(lanes, &pb.LaneState{Lane: lane, Count: uint64(o.blocks), Digest: digest})
	}
	chunk.Last, chunk.Lanes, chunk.Trust = true, lanes, pb.Trust_TRUST_EXACT
	if err := flush(); err != nil {
		return nil, err
	}
	var err error
	m.heartbeat, err = proto.Marshal(&pb.Heartbeat{
		Header: header, Trust: pb.Trust_TRUST_EXACT, Lanes: lanes, IntervalMs: uint32(o.beat.Milliseconds()),
		Info: &pb.MemberInfo{
			Namespace: "default", Pod: pod, PodUid: pod, Address: pod + ":8000", Engine: "vllm", EngineVersion: "0.32.0",
			Models: []string{model}, BlockSize: blockSize, Blocks: uint64(o.blocks),
		},
		Load: &pb.Load{Running: proto.Uint32(0), Waiting: proto.Uint32(0), KvUsage: proto.Float64(0)},
	})
	return m, err
}

func (m *member) answer(request *nats.Msg) {
	for _, c := range m.chunks {
		if err := request.Respond(c); err != nil {
			return
		}
	}
}

// beat begins somewhere in the interval, as agents do.
func (m *member) beat(ctx context.Context, subject string, every time.Duration) {
	timer := time.NewTimer(rand.N(every))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			_ = m.conn.Publish(subject, m.heartbeat)
			timer.Reset(every)
		}
	}
}
