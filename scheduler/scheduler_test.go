package scheduler

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/protocol/settings"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	member    = "ns_uid_0"
	blockSize = 16
)

var tokens = func() []uint32 {
	ids := make([]uint32, 100)
	for i := range ids {
		ids[i] = uint32(i)
	}
	return ids
}()

// start runs a scheduler on free ports. The returned function stops it and
// reports how Run ended.
func start(t testing.TB, cfg Config) (*Scheduler, func() error) {
	t.Helper()
	cfg.GRPCAddress, cfg.HTTPAddress, cfg.AdminAddress = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	if cfg.NATSURL == "" && cfg.NATSAddress == "" {
		cfg.NATSAddress = "127.0.0.1:0"
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s, run(t, s)
}

// run lets a scheduler run until the test ends, or the function that it returns
// is called.
func run(t testing.TB, s *Scheduler) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() { stop() })
	select {
	case <-s.Started():
	case err := <-done:
		done <- err
		t.Fatalf("did not start: %v", err)
	}
	return stop
}

func dial(t testing.TB, s *Scheduler, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(s.Addrs().GRPC, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// agent speaks for one member on the bus: it holds the first blocks of tokens
// and beats until the test ends.
func agent(t testing.TB, url string, blocks int) {
	t.Helper()
	conn, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	subjects, err := protocol.NewSubjects("default")
	if err != nil {
		t.Fatal(err)
	}
	root := blockkey.Scope{Model: "m", BlockSize: blockSize}.Root()
	keys := blockkey.AppendTokens(nil, root, tokens[:blocks*blockSize], blockSize, nil)
	digest := uint64(0)
	raw := make([]uint64, len(keys))
	for i, k := range keys {
		digest ^= blockkey.Digest(k)
		raw[i] = uint64(k)
	}
	var lanes []*pb.LaneState
	var stored []*pb.Stored
	for lane := pb.Lane_LANE_GPU; lane <= pb.Lane_LANE_DISK; lane++ {
		lanes = append(lanes, &pb.LaneState{Lane: lane, Count: uint64(len(keys)), Digest: digest})
		stored = append(stored, &pb.Stored{Lane: lane, Keys: raw})
	}
	header := &pb.Header{Version: protocol.Version, Member: member, Epoch: 1, Sequence: 1}
	sub, err := conn.Subscribe(subjects.Snapshot(member), func(m *nats.Msg) {
		data, _ := proto.Marshal(&pb.SnapshotChunk{Header: header, Last: true, Stored: stored, Lanes: lanes, Trust: pb.Trust_TRUST_EXACT})
		m.Respond(data)
	})
	if err != nil {
		t.Fatal(err)
	}
	beat, err := proto.Marshal(&pb.Heartbeat{
		Header: header, Trust: pb.Trust_TRUST_EXACT, Lanes: lanes, IntervalMs: 1000,
		Info: &pb.MemberInfo{Namespace: "ns", Pod: "pod", PodUid: "uid", Address: "127.0.0.1:1", Engine: "vllm",
			Models: []string{"m"}, BlockSize: blockSize, Blocks: 1000},
		Load: &pb.Load{Running: proto.Uint32(1), Waiting: proto.Uint32(0)},
	})
	if err != nil {
		t.Fatal(err)
	}
	stop := beats(t, conn, subjects.Load(member), beat, 100*time.Millisecond)
	t.Cleanup(func() {
		stop()
		sub.Unsubscribe()
		closed := make(chan struct{})
		conn.SetClosedHandler(func(*nats.Conn) { close(closed) })
		conn.Close()
		<-closed
	})
}

// exact waits until the member's cache state is there, and asks for a ranking.
func exact(t testing.TB, client api.SchedulerClient) *api.Ranking {
	t.Helper()
	var resp *api.ScoreResponse
	await.True(t, "an exact answer", func() bool {
		var err error
		resp, err = client.Score(context.Background(), &api.ScoreRequest{Request: &api.Request{
			Model: "m", Prompt: api.TokenIDs(tokens),
		}})
		return err == nil && resp.GetRanking().Lacks() == ""
	})
	return resp.GetRanking()
}

func get(t testing.TB, s *Scheduler, path string) (int, string) {
	t.Helper()
	return atAdmin(t, s, http.MethodGet, path, "")
}

// atAdmin asks the admin address, on a connection of its own.
func atAdmin(t testing.TB, s *Scheduler, method, path, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(context.Background(), method, "http://"+s.Addrs().Admin+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// TestCompleteSystem: with the embedded server and one agent, everything that
// is seen from outside works.
func TestCompleteSystem(t *testing.T) {
	s, stop := start(t, Config{ShadowPolicy: "least-requests", QueueLength: 8})
	conn := dial(t, s)
	client := api.NewSchedulerClient(conn)
	agent(t, "nats://"+s.Addrs().NATS, 3)

	r := exact(t, client)
	c := r.GetCandidates()[0]
	if c.GetMember().GetId() != member || c.GetCachedTokens().GetGpu() != 48 || c.GetCacheState().GetTrust() != api.Trust_TRUST_EXACT ||
		c.GetCacheState().GetEpoch() != 1 || c.GetCacheState().GetSequence() != 1 {
		t.Errorf("%v", r)
	}

	health := healthpb.NewHealthClient(conn)
	await.True(t, "health", func() bool {
		h, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "kvscout.scheduler.v1.Scheduler"})
		return err == nil && h.GetStatus() == healthpb.HealthCheckResponse_SERVING
	})
	if code, text := get(t, s, "/healthz"); code != 200 || text != "ok\n" {
		t.Error(code, text)
	}
	if code, text := get(t, s, "/readyz"); code != 200 {
		t.Error(code, text)
	}
	if code, text := get(t, s, "/v1/members"); code != 200 || !strings.Contains(text, member) {
		t.Error(code, text)
	}
	if code, text := get(t, s, "/v1/members?model=x"); code != 200 || strings.Contains(text, member) {
		t.Error(code, text)
	}

	pick, err := client.Pick(t.Context(), &api.PickRequest{Request: &api.Request{Model: "m"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{DecisionId: pick.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FINISHED,
		PromptTokens: proto.Uint32(7), CachedTokens: proto.Uint32(3)}}}); err != nil {
		t.Fatal(err)
	}
	_, page := get(t, s, "/metrics")
	for _, want := range []string{
		`kvscout_scheduler_decisions_total{fallback="true",method="pick",policy="least-requests",reason="only"} 1`,
		`kvscout_scheduler_decision_duration_seconds_count{method="pick"} 1`,
		`kvscout_scheduler_members{trust="exact"} 1`, `kvscout_scheduler_members{trust="syncing"} 0`,
		`kvscout_scheduler_index_blocks 3`, `kvscout_scheduler_ready 1`, `kvscout_scheduler_index_memory_bytes `,
		`kvscout_scheduler_ingest_snapshots_total{outcome="complete"} 1`,
		`kvscout_scheduler_intake_prompts_total{source="none"} 1`,
		`kvscout_scheduler_reports_total{outcome="finished"} 1`,
		`kvscout_scheduler_shadow_decisions_total{policy="default",same="true",shadow="least-requests"} `,
		`kvscout_scheduler_delivered_tokens_total{stage="prompt"} 7`, `kvscout_scheduler_delivered_tokens_total{stage="delivered"} 3`,
		`rpc_server_call_duration_seconds_count{rpc_method="kvscout.scheduler.v1.Scheduler/Pick",rpc_response_status_code="OK",rpc_system_name="grpc"} 1`, `kvscout_scheduler_panics_total 0`,
	} {
		if !strings.Contains(page, want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
	if strings.Contains(page, `rpc_method="grpc.health`) {
		t.Error("health checks are among the metrics")
	}

	source, err := os.ReadFile("metrics.go")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(source), "\nvar instruments ")
	names := regexp.MustCompile(`"kvscout\.scheduler\.[a-z_.]+"`).FindAllString(table, -1)
	if len(names) < 50 {
		t.Errorf("only %d instruments found", len(names))
	}
	for _, name := range names {
		if want := "# TYPE " + strings.ReplaceAll(strings.Trim(name, `"`), ".", "_"); !strings.Contains(page, want) {
			t.Errorf("/metrics lacks %s", name)
		}
	}

	stream, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	list, err := stream.Recv()
	if err != nil || !strings.Contains(list.String(), "kvscout.scheduler.v1.Scheduler") {
		t.Error(err, list)
	}
	if err := stream.CloseSend(); err != nil {
		t.Error(err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestExternalNATS(t *testing.T) {
	// The server comes after the scheduler, which must not mind.
	ns := broker.Absent(t, &server.Options{Username: "user", Password: "pass"})
	url := "nats://user:pass@" + ns.Address()
	log := &syncBuffer{}
	s, stop := start(t, Config{NATSURL: url, Log: slog.New(slog.NewTextHandler(log, nil))})
	if a := s.Addrs(); a.NATS != "" {
		t.Errorf("an embedded server at %s", a.NATS)
	}
	if code, _ := get(t, s, "/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("ready without a bus: %d", code)
	}
	health := healthpb.NewHealthClient(dial(t, s))
	if h, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil || h.GetStatus() != healthpb.HealthCheckResponse_NOT_SERVING {
		t.Errorf("health without a bus: %v, %v", err, h)
	}

	ns.Start()
	agent(t, url, 2)
	if got := exact(t, api.NewSchedulerClient(dial(t, s))).GetCandidates()[0].GetCachedTokens().GetGpu(); got != 32 {
		t.Errorf("%d tokens cached", got)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if strings.Contains(log.String(), "pass") {
		t.Errorf("the log tells the password:\n%s", log)
	}
}

func TestPortsInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	taken, free := l.Addr().String(), "127.0.0.1:0"
	for want, cfg := range map[string]Config{
		"gRPC address":  {GRPCAddress: taken, AdminAddress: free, NATSAddress: free},
		"admin address": {GRPCAddress: free, AdminAddress: taken, NATSAddress: free},
		"embedded NATS": {GRPCAddress: free, AdminAddress: free, NATSAddress: taken},
	} {
		s, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "address already in use") {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// TestStopIsGracefulAndBounded: a call under way is finished, a Watch ends with
// Unavailable, and one that never ends does not hold the stop up for ever.
func TestStopIsGracefulAndBounded(t *testing.T) {
	engine, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	s, stop := start(t, Config{StopWait: 300 * time.Millisecond, TokenizeTimeout: time.Minute, CallTimeout: time.Minute, EngineAddresses: "127.0.0.1"})
	s.intakeFor(t, engine.Addr().String())
	conn := dial(t, s)
	client := api.NewSchedulerClient(conn)

	watch, err := api.NewAdminClient(conn).WatchMembers(t.Context(), &api.WatchMembersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	hung := make(chan error, 1)
	go func() {
		_, err := client.Score(context.Background(), &api.ScoreRequest{Request: &api.Request{Model: "m", Prompt: api.Body(`{"prompt":"x"}`)}})
		hung <- err
	}()
	asked, err := engine.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer asked.Close()
	begin := time.Now()
	if err := stop(); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took < 250*time.Millisecond || took > await.Patience {
		t.Errorf("stopped after %s", took)
	}
	if _, err := watch.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("the watcher got %v", err)
	}
	if err := <-hung; status.Code(err) != codes.Unavailable && status.Code(err) != codes.Canceled {
		t.Errorf("the hanging call got %v", err)
	}
}

// intakeFor announces a member whose engine listens at the address.
func (s *Scheduler) intakeFor(t *testing.T, address string) {
	t.Helper()
	id, err := s.fleet.Join(member, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	info := s.fleet.View().Member(id).Info
	with := *info
	with.Models, with.Address, with.BlockSize = []string{"m"}, address, blockSize
	s.fleet.Receive(id, with, nil, time.Now())
}

func TestRunOnce(t *testing.T) {
	s, stop := start(t, Config{})
	if err := s.Run(t.Context()); err == nil {
		t.Error("ran twice")
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestValidateNamesEverything(t *testing.T) {
	if err := (Config{}).Validate(); err != nil {
		t.Errorf("the zero value: %v", err)
	}
	err := Config{
		Pool: "a.b", GRPCAddress: "nowhere", AdminAddress: ":1", NATSAddress: "x:y", NATSURL: "http://u:secret@h", IndexBytes: -1, StopWait: -1,
	}.Validate()
	for _, key := range []string{"pool", "grpc-address", "admin-address", "nats-address", "nats-url", "index-memory", "stop-wait"} {
		if err == nil || !strings.Contains(err.Error(), "-"+key+", "+settings.Variable(key)+" or \""+key+"\" in the file: ") {
			t.Errorf("%s is not named in %v", key, err)
		}
	}
	if strings.Contains(fmt.Sprint(err), "secret") {
		t.Errorf("%v tells a password", err)
	}
	if _, err := New(Config{Policy: "no such"}); err == nil || !strings.Contains(err.Error(), "-policy") {
		t.Error(err)
	}
	if _, err := New(Config{NATSCredentials: "file"}); err == nil || !strings.Contains(err.Error(), "-nats-credentials") {
		t.Error(err)
	}
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// TestSchedulersKnowOfEachOther: what one reserves the other sees, through the
// server that one of them embeds.
func TestSchedulersKnowOfEachOther(t *testing.T) {
	a, stopA := start(t, Config{})
	b, stopB := start(t, Config{NATSURL: "nats://" + a.Addrs().NATS})
	agent(t, "nats://"+a.Addrs().NATS, 3)
	toA, toB := dial(t, a), dial(t, b)
	first, second := api.NewSchedulerClient(toA), api.NewSchedulerClient(toB)
	exact(t, first)
	exact(t, second)
	await.True(t, "the two hear each other", func() bool {
		return a.replica.Load().Stats().Peers == 1 && b.replica.Load().Stats().Peers == 1
	})
	d, err := first.Pick(t.Context(), &api.PickRequest{Request: &api.Request{Model: "m"}})
	if err != nil {
		t.Fatal(err)
	}
	reserved := func(c api.AdminClient, want uint32) func() bool {
		return func() bool {
			f, err := c.ListMembers(t.Context(), &api.ListMembersRequest{})
			return err == nil && len(f.GetMembers()) == 1 && f.GetMembers()[0].GetReservedRequests() == want
		}
	}
	await.True(t, "the other sees the reservation", reserved(api.NewAdminClient(toB), 1))
	if _, err := second.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{DecisionId: d.GetDecisionId(), Outcome: api.Outcome_OUTCOME_CANCELLED}}}); err != nil {
		t.Fatal(err)
	}
	await.True(t, "the end is known", reserved(api.NewAdminClient(toA), 0))
	if err := errors.Join(stopB(), stopA()); err != nil {
		t.Error(err)
	}
}

func TestReadinessSaysWhatNATSRefuses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := l.Addr().String()
	l.Close()
	s, stop := start(t, Config{NATSURL: "nats://u:secret@" + nobody, ReadyWait: time.Hour})
	await.True(t, "readiness names the refusal", func() bool {
		code, text := get(t, s, "/readyz")
		if strings.Contains(text, "secret") {
			t.Fatal(text)
		}
		return code == 503 && strings.Contains(text, "cannot connect to NATS: ")
	})
	if err := stop(); err != nil {
		t.Error(err)
	}
}
