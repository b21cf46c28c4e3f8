package scheduler

import (
	"context"
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/buffers"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

const (
	benchTokens  = 8192
	benchMembers = 64
)

// BenchmarkPickRPC is a decision over loopback gRPC: 8,192 tokens, 64 members
// that hold more and more of them. Its measures are an empty answer to the
// same bytes: BenchmarkEmptyRPC from the same server without a picker, and
// BenchmarkBareRPC from a server as gRPC makes it, without anything of ours.
func BenchmarkPickRPC(b *testing.B) {
	s, _ := start(b, Config{})
	fill(b, s)
	last := callAll(b, s.Addrs().GRPC)
	if last.GetRanking().Lacks() != "" {
		b.Fatal(last.GetRanking().Lacks())
	}
}

// BenchmarkPick is the same without the wire.
func BenchmarkPick(b *testing.B) {
	s, _ := start(b, Config{})
	fill(b, s)
	requests(b, func(b *testing.B, r *api.Request) {
		req := &api.PickRequest{Request: r}
		b.ReportAllocs()
		for b.Loop() {
			if _, err := s.rpc.Pick(context.Background(), req); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkEmptyRPC(b *testing.B) {
	s, err := New(Config{NATSURL: "nats://127.0.0.1:1"})
	if err != nil {
		b.Fatal(err)
	}
	callAll(b, serveEmpty(b, grpc.NewServer(s.serving.Options()...)))
}

func BenchmarkBareRPC(b *testing.B) {
	callAll(b, serveEmpty(b, grpc.NewServer(grpc.MaxRecvMsgSize(16<<20))))
}

// serveEmpty runs a server that answers nothing and returns its address.
func serveEmpty(b *testing.B, server *grpc.Server) string {
	api.RegisterSchedulerServer(server, empty{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); server.Serve(l) }()
	b.Cleanup(func() { server.Stop(); <-done })
	return l.Addr().String()
}

// callAll runs the benchmarks of a server: one caller, and several at a time.
// It returns the last answer to the one.
func callAll(b *testing.B, address string) *api.PickResponse {
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	client := api.NewSchedulerClient(conn)
	var last *api.PickResponse
	requests(b, func(b *testing.B, r *api.Request) {
		req := &api.PickRequest{Request: r}
		b.ReportAllocs()
		used := cpuTime()
		for b.Loop() {
			if last, err = client.Pick(context.Background(), req); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(cpuTime()-used)/float64(b.N), "cpu-ns/op")
	})
	b.Run("parallel", func(b *testing.B) {
		requests(b, func(b *testing.B, r *api.Request) {
			req := &api.PickRequest{Request: r}
			b.SetParallelism(4)
			used := cpuTime()
			b.RunParallel(func(p *testing.PB) {
				for p.Next() {
					if _, err := client.Pick(context.Background(), req); err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
			b.ReportMetric(float64(cpuTime()-used)/float64(b.N), "cpu-ns/op")
		})
	})
	return last
}

// cpuTime is what this process, callers and server together, has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

type empty struct {
	api.UnimplementedSchedulerServer
}

func (empty) Pick(context.Context, *api.PickRequest) (*api.PickResponse, error) {
	return &api.PickResponse{}, nil
}

// requests runs a benchmark for each form of prompt and length of answer.
func requests(b *testing.B, run func(*testing.B, *api.Request)) {
	ids := make([]uint32, benchTokens)
	for i := range ids {
		ids[i] = uint32(i*7919) % 150_000
	}
	var keys []uint64
	for _, k := range blockkey.AppendTokens(nil, blockkey.Scope{Model: "m", BlockSize: blockSize}.Root(), ids, blockSize, nil) {
		keys = append(keys, uint64(k))
	}
	for _, top := range []uint32{1, 3, benchMembers} {
		b.Run(fmt.Sprintf("keys/top=%d", top), func(b *testing.B) {
			run(b, &api.Request{Model: "m", MaxCandidates: top, Prompt: api.Keys(keys, blockSize)})
		})
		b.Run(fmt.Sprintf("ids/top=%d", top), func(b *testing.B) {
			run(b, &api.Request{Model: "m", MaxCandidates: top, Prompt: api.TokenIDs(ids)})
		})
	}
}

// fill puts members into fleet and index, as ingest would.
func fill(b *testing.B, s *Scheduler) {
	ids := make([]uint32, benchTokens)
	for i := range ids {
		ids[i] = uint32(i*7919) % 150_000
	}
	root := blockkey.Scope{Model: "m", BlockSize: blockSize}.Root()
	keys := blockkey.AppendTokens(nil, root, ids, blockSize, nil)
	now := time.Now().Add(time.Hour) // nobody falls silent meanwhile
	for n := range benchMembers {
		name := fmt.Sprintf("ns_uid-%02d_0", n)
		id, err := s.fleet.Join(name, now)
		if err != nil {
			b.Fatal(err)
		}
		s.fleet.Receive(id, fleet.Info{
			Namespace: "ns", Pod: fmt.Sprintf("engine-%02d", n), PodUID: fmt.Sprintf("uid-%02d", n),
			Address: fmt.Sprintf("10.0.0.%d:8000", n), Models: []string{"m"}, BlockSize: blockSize,
		}, &fleet.Load{At: now, Running: n % 5, Waiting: 0, Totals: fleet.NoTotals()}, now)
		s.fleet.SetCacheState(id, fleet.CacheState{Trust: fleet.Exact, Epoch: 1, Sequence: 1})
		for lane := index.LaneGPU; lane <= index.LaneDisk; lane++ {
			s.index.Store(index.Member(id), lane, nil, 0, keys[:8*(n%benchMembers)])
		}
	}
}

// BenchmarkPickStream is many picks on one stream: rate is what is left when
// nobody waits for an answer before the next call.
func BenchmarkPickStream(b *testing.B) {
	s, _ := start(b, Config{})
	fill(b, s)
	requests(b, func(b *testing.B, r *api.Request) {
		stream, err := api.NewSchedulerClient(dial(b, s, buffers.Client()...)).PickStream(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		call := &api.PickStreamRequest{Call: &api.PickStreamRequest_Pick{Pick: &api.PickRequest{Request: r}}}
		b.ReportAllocs()
		window := make(chan struct{}, 256)
		failed := make(chan error, 1)
		begin, used := time.Now(), cpuTime()
		go func() {
			for range b.N {
				window <- struct{}{}
				call.Id++
				if err := stream.Send(call); err != nil {
					failed <- err
					return
				}
			}
			failed <- stream.CloseSend()
		}()
		for range b.N {
			answer, err := stream.Recv()
			if err != nil {
				b.Fatal(err)
			}
			if e := answer.GetError(); e != nil {
				b.Fatal(e)
			}
			<-window
		}
		b.ReportMetric(float64(b.N)/time.Since(begin).Seconds(), "picks/s")
		b.ReportMetric(float64(cpuTime()-used)/float64(b.N), "cpu-ns/op")
		if err := <-failed; err != nil {
			b.Fatal(err)
		}
	})
}
