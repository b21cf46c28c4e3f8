package e2e

import (
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
)

// bus is a bare connection to the stage's NATS server.
func (p *play) bus() *nats.Conn {
	p.t.Helper()
	closed := make(chan struct{})
	conn, err := nats.Connect(p.NATS, nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() {
		conn.Close()
		<-closed
	})
	return conn
}

func subjects(t testing.TB) protocol.Subjects {
	t.Helper()
	s, err := protocol.NewSubjects("default")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// speaker is a member without an engine: what the protocol asks of an agent,
// by hand. It makes fleets of many members cheap, and members that are odd.
type speaker struct {
	id   string
	quit chan struct{}
	done chan struct{}

	mu     sync.Mutex // guards what follows
	info   *pb.MemberInfo
	load   *pb.Load
	header *pb.Header
	lanes  []*pb.LaneState
	stored []*pb.Stored
}

// speaker joins the fleet, idle, with these prompts' whole blocks on the GPU.
// Prompts must not share their first block.
func (p *play) speaker(conn *nats.Conn, pod string, prompts ...prompt) *speaker {
	p.t.Helper()
	s := &speaker{
		id: "default_" + pod + "_0", quit: make(chan struct{}), done: make(chan struct{}),
		info: &pb.MemberInfo{
			Namespace: "default", Pod: pod, PodUid: pod, Address: pod + ":8000", Engine: "vllm", EngineVersion: "0.32.0",
			Models: []string{model}, BlockSize: size, Blocks: 100_000,
		},
		load: idle(),
	}
	s.header = &pb.Header{Version: protocol.Version, Member: s.id, Epoch: 1, Sequence: 1}
	root := blockkey.Scope{Model: model, BlockSize: size}.Root()
	count, digest := uint64(0), uint64(0)
	for _, q := range prompts {
		run := &pb.Stored{Lane: pb.Lane_LANE_GPU, Through: pb.Lane_LANE_DISK}
		for _, k := range blockkey.AppendTokens(nil, root, q.tokens, size, nil) {
			run.Keys = append(run.Keys, uint64(k))
			digest ^= blockkey.Digest(k)
			count++
		}
		if len(run.Keys) > 0 {
			s.stored = append(s.stored, run)
		}
	}
	for lane := pb.Lane_LANE_GPU; lane <= pb.Lane_LANE_DISK; lane++ {
		s.lanes = append(s.lanes, &pb.LaneState{Lane: lane, Count: count, Digest: digest})
	}
	subject := subjects(p.t)
	sub, err := conn.Subscribe(subject.Snapshot(s.id), func(m *nats.Msg) { _ = m.Respond(s.snapshot()) })
	if err != nil {
		p.t.Fatal(err)
	}
	go func() {
		defer close(s.done)
		for {
			_ = conn.Publish(subject.Load(s.id), s.heartbeat())
			select {
			case <-s.quit:
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
	}()
	p.t.Cleanup(func() {
		close(s.quit)
		<-s.done
		_ = sub.Unsubscribe()
	})
	p.untilMember(s.id, "be exact", stage.Exact)
	return s
}

func idle() *pb.Load {
	return &pb.Load{Running: proto.Uint32(0), Waiting: proto.Uint32(0), KvUsage: proto.Float64(0)}
}

// loaded replaces the load sample of every later heartbeat.
func (s *speaker) loaded(load *pb.Load) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.load = load
}

func (s *speaker) snapshot() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	data, _ := proto.Marshal(&pb.SnapshotChunk{
		Header: s.header, Last: true, Stored: s.stored, Lanes: s.lanes, Trust: pb.Trust_TRUST_EXACT,
	})
	return data
}

func (s *speaker) heartbeat() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	data, _ := proto.Marshal(&pb.Heartbeat{
		Header: s.header, Trust: pb.Trust_TRUST_EXACT, Lanes: s.lanes, IntervalMs: 1000, Info: s.info, Load: s.load,
	})
	return data
}
