package rpc

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/protocol/blockkey"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/books"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const size = 16

// house is a service on real packages, with three members of model m. Member b
// holds the first 4 blocks of prompt, member a the first one.
type house struct {
	*Service
	fleet  *fleet.Fleet
	client api.SchedulerClient
	admin  api.AdminClient
	conn   *grpc.ClientConn
	engine *httptest.Server
	asked  atomic.Int64
	events []Decided
}

var prompt = func() []uint32 {
	ids := make([]uint32, 100)
	for i := range ids {
		ids[i] = uint32(i + 1)
	}
	return ids
}()

func name(m string) string { return "ns_uid-" + m + "_0" }

func build(t *testing.T, change func(*Config)) *house {
	t.Helper()
	h := &house{fleet: fleet.New(fleet.Config{})}
	x := index.New(index.Config{})
	h.engine = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.asked.Add(1)
		if strings.HasPrefix(r.URL.Path, "/v1/chat") {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		ids := strings.Trim(strings.ReplaceAll(fmt.Sprint(prompt), " ", ","), "[]")
		fmt.Fprintf(w, `{"token_ids":[%s],"tokens":[%s]}`, ids, ids)
	}))
	t.Cleanup(h.engine.Close)
	for i, m := range []string{"a", "b", "c"} {
		id := join(t, h.fleet, fleet.Info{
			Heartbeat: time.Minute,
			Namespace: "ns", Pod: "pod-" + m, PodUID: "uid-" + m, Address: fmt.Sprintf("10.0.0.%d:8000", i+1),
			Models: []string{"m"}, Adapters: []fleet.Adapter{{Name: "lora"}}, BlockSize: size, EngineVersion: "0.32.0", Blocks: 1000,
		})
		keys := blockkey.AppendTokens(nil, blockkey.Scope{Model: "m", BlockSize: size}.Root(), prompt, size, nil)
		n := map[string]int{"a": 1, "b": 4}[m]
		for lane := index.LaneGPU; n > 0 && lane <= index.LaneDisk; lane++ {
			x.Store(index.Member(id), lane, nil, 0, keys[:n])
		}
	}
	kept := books.New()
	picker, err := pick.New(pick.Config{Fleet: h.fleet, Index: x, Books: kept, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	in := intake.New(intake.Config{Engines: func(model string) ([]string, error) {
		if model == "m" {
			return []string{h.engine.URL}, nil
		}
		return nil, nil
	}})
	t.Cleanup(in.Close)
	cfg := Config{
		Intake: in, Picker: picker, Fleet: h.fleet, Books: kept, Ready: func() bool { return true },
		CallTimeout: 5 * time.Second, MaxWatchers: 2,
		MaxCalls: 100, Log: slog.New(slog.DiscardHandler),
		Decided: func(_ context.Context, d Decided) { h.events = append(h.events, d) },
	}
	if change != nil {
		change(&cfg)
	}
	h.Service = New(cfg)

	l := bufconn.Listen(1 << 20)
	server := grpc.NewServer(grpc.MaxRecvMsgSize(16<<20), grpc.UnaryInterceptor(h.Unary), grpc.StreamInterceptor(h.Stream))
	api.RegisterSchedulerServer(server, h.Service)
	api.RegisterAdminServer(server, h.Service)
	done := make(chan struct{})
	go func() { defer close(done); server.Serve(l) }()
	h.conn, err = grpc.NewClient("passthrough:x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	h.client, h.admin = api.NewSchedulerClient(h.conn), api.NewAdminClient(h.conn)
	t.Cleanup(func() {
		h.conn.Close()
		h.Close()
		server.GracefulStop()
		<-done
	})
	return h
}

func join(t *testing.T, f *fleet.Fleet, info fleet.Info) fleet.ID {
	t.Helper()
	info.Name = info.Namespace + "_" + info.PodUID + "_0"
	now := time.Now()
	id, err := f.Join(info.Name, now)
	if err != nil {
		t.Fatal(err)
	}
	f.Receive(id, info, &fleet.Load{At: now, Running: 0, Waiting: 0, Totals: fleet.NoTotals()}, now)
	f.SetCacheState(id, fleet.CacheState{Trust: fleet.Exact, Epoch: 7, Sequence: 9, Held: [3]uint64{4, 4, 4}})
	return id
}

func TestEveryFormFindsThePrefix(t *testing.T) {
	h := build(t, nil)
	keys := blockkey.AppendTokens(nil, blockkey.Scope{Model: "m", BlockSize: size}.Root(), prompt, size, nil)
	var raw []uint64
	for _, k := range keys {
		raw = append(raw, uint64(k))
	}
	ids := strings.ReplaceAll(fmt.Sprint(prompt), " ", ",")
	for _, tc := range []struct {
		name string
		req  *api.Request
	}{
		{"tokens", &api.Request{Model: "m", Prompt: api.TokenIDs(prompt)}},
		{"keys", &api.Request{Model: "m", Prompt: &api.Prompt{Form: &api.Prompt_BlockKeys{BlockKeys: &api.BlockKeys{Keys: raw, BlockSizeTokens: size, PromptTokens: 100}}}}},
		{"chat body", &api.Request{Prompt: api.Body(`{"model":"m","messages":[]}`)}},
		{"text body", &api.Request{Prompt: api.Body(`{"model":"m","prompt":"x"}`)}},
		{"ids body", &api.Request{Prompt: api.Body(`{"model":"m","prompt":` + ids + `}`)}},
		{"several prompts", &api.Request{Prompt: api.Body(`{"model":"m","prompt":[` + ids + `,[1]]}`)}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			resp, err := h.client.Score(t.Context(), &api.ScoreRequest{Request: tc.req})
			if err != nil {
				t.Fatal(err)
			}
			r := resp.GetRanking()
			if r.Lacks() != "" || r.GetPromptTokens() != 100 || len(r.GetCandidates()) != 3 || r.GetPolicy() != "default" {
				t.Fatalf("ranking %v", r)
			}
			first := r.GetCandidates()[0]
			if first.GetMember().GetId() != name("b") || first.GetCachedTokens().GetGpu() != 64 || first.GetUncachedTokens() != 36 {
				t.Errorf("first %v", first)
			}
			if tc.name == "several prompts" && !strings.Contains(r.GetExplanation(), "first of 2 prompts") {
				t.Errorf("reason %q", r.GetExplanation())
			}
		})
	}
}

func TestAnswerCarriesEverything(t *testing.T) {
	h := build(t, nil)
	resp, err := h.client.Pick(t.Context(), &api.PickRequest{Request: &api.Request{
		Model: "m", Prompt: api.TokenIDs(prompt), MaxCandidates: 1,
	}})
	if err != nil {
		t.Fatal(err)
	}
	if resp.GetDecisionId() == "" || len(resp.GetRanking().GetCandidates()) != 1 || resp.GetRanking().GetExplanation() == "" ||
		resp.GetRanking().GetEnginePriority() == 0 {
		t.Fatalf("%v", resp)
	}
	c := resp.GetRanking().GetCandidates()[0]
	want := &api.Member{Id: name("b"), Namespace: "ns", Pod: "pod-b", Address: "10.0.0.2:8000"}
	if !proto.Equal(want, c.GetMember()) {
		t.Errorf("member %v", c.GetMember())
	}
	p := c.GetCacheState()
	if p.GetTrust() != api.Trust_TRUST_EXACT || p.GetEpoch() != 7 || p.GetSequence() != 9 || p.GetAgeMs() > 10_000 {
		t.Errorf("cache state %v", p)
	}
	cost := c.GetCost()
	parts := cost.GetWaitMs() + cost.GetLoadMs() + cost.GetPrefillMs() + cost.GetMissMs() + cost.GetEvictMs() + cost.GetDecodeMs()
	if d := cost.GetTotalMs() - parts; cost.GetTotalMs() <= 0 || d > 1e-9 || d < -1e-9 {
		t.Errorf("cost %v", cost)
	}
	if len(h.events) != 1 || h.events[0].Method != "pick" || h.events[0].Decision.Candidates[0].Cached.Known() != 64 || h.events[0].Decision.ID != resp.GetDecisionId() {
		t.Errorf("observed %+v", h.events)
	}
}

func TestWithoutTokensTheChoiceIsByLoad(t *testing.T) {
	h := build(t, nil)
	h.engine.Close()
	for _, tc := range []struct {
		req           *api.Request
		want, instead string
	}{
		{&api.Request{Model: "m"}, "no prompt", "load only"},
		{&api.Request{Model: "m", Prompt: api.Body(`{"prompt":"secret"}`)}, "no engine could turn", "by the beginning of the prompt"},
		{&api.Request{Model: "lora", Prompt: api.Body(`{"prompt":"secret"}`)}, "no engine of the model", "by the beginning of the prompt"},
		{&api.Request{Model: "m", Prompt: api.Body(`{"input":"x"}`)}, "neither messages nor prompt", "load only"},
	} {
		resp, err := h.client.Pick(t.Context(), &api.PickRequest{Request: tc.req})
		if err != nil {
			t.Fatal(err)
		}
		if f := resp.GetRanking().Lacks(); !strings.Contains(f, tc.want) || !strings.Contains(f, tc.instead) || strings.Contains(f, "secret") {
			t.Errorf("fallback %q, want %q", f, tc.want)
		}
		if len(resp.GetRanking().GetCandidates()) != 3 {
			t.Errorf("%v", resp)
		}
	}
}

func TestCodes(t *testing.T) {
	h := build(t, nil)
	tokens := api.TokenIDs(prompt)
	var all []*api.MemberRef
	for _, m := range []string{"a", "b", "c"} {
		all = append(all, &api.MemberRef{Ref: &api.MemberRef_MemberId{MemberId: name(m)}})
	}
	for _, tc := range []struct {
		name string
		req  *api.Request
		code codes.Code
		want string
	}{
		{"no request", nil, codes.InvalidArgument, "no request"},
		{"no model", &api.Request{Prompt: tokens}, codes.InvalidArgument, "no model"},
		{"unknown model", &api.Request{Model: "x", Prompt: tokens}, codes.NotFound, `"x"`},
		{"unknown adapter", &api.Request{Model: "m", Adapter: "x", Prompt: tokens}, codes.NotFound, `"x"`},
		{"unknown policy", &api.Request{Model: "m", Policy: "x", Prompt: tokens}, codes.InvalidArgument, `"x"`},
		{"long policy", &api.Request{Model: "m", Policy: strings.Repeat("ü", 1<<20), Prompt: tokens}, codes.InvalidArgument, "policy"},
		{"no tokens", &api.Request{Model: "m", Prompt: api.TokenIDs(nil)}, codes.InvalidArgument, "0 tokens"},
		{"too many tokens", &api.Request{Model: "m", Prompt: api.TokenIDs(make([]uint32, 3<<20))}, codes.InvalidArgument, "limit"},
		{"too many bytes", &api.Request{Model: "m", Prompt: api.TokenIDs(make([]uint32, 5<<20))}, codes.ResourceExhausted, "larger than max"},
		{"keys of another size", &api.Request{Model: "m", Prompt: api.Keys([]uint64{1}, 32)}, codes.InvalidArgument, "blocks of 32"},
		{"keys without size", &api.Request{Model: "m", Prompt: api.Keys([]uint64{1}, 0)}, codes.InvalidArgument, "block size is 0"},
		{"no keys", &api.Request{Model: "m", Prompt: api.Keys(nil, 0)}, codes.InvalidArgument, "block size is 0"},
		{"empty text", &api.Request{Model: "m", Prompt: api.Body(`{"prompt":""}`)}, codes.InvalidArgument, "empty"},
		{"broken body", &api.Request{Model: "m", Prompt: api.Body("{")}, codes.InvalidArgument, "JSON"},
		{"bad item", &api.Request{Model: "m", Prompt: &api.Prompt{Form: &api.Prompt_Tokens{Tokens: &api.Tokens{Ids: prompt, MultimodalItems: []*api.MultimodalItem{{Hash: "h", OffsetTokens: 99, LengthTokens: 2}}}}}}, codes.InvalidArgument, "item 0"},
		{"empty reference", &api.Request{Model: "m", Prompt: tokens, Candidates: []*api.MemberRef{{}}}, codes.InvalidArgument, "names nobody"},
		{"too many references", &api.Request{Model: "m", Prompt: tokens, Exclude: make([]*api.MemberRef, maxRefs+1)}, codes.InvalidArgument, "limit"},
		{"all excluded", &api.Request{Model: "m", Prompt: tokens, Exclude: all}, codes.FailedPrecondition, "excluded by the request itself"},
		{"candidate of nobody", &api.Request{Model: "m", Prompt: tokens, Candidates: []*api.MemberRef{{Ref: &api.MemberRef_Address{Address: "x"}}}}, codes.FailedPrecondition, "not among its candidates"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := h.client.Pick(t.Context(), &api.PickRequest{Request: tc.req})
			st := status.Convert(err)
			if st.Code() != tc.code || !strings.Contains(st.Message(), tc.want) {
				t.Errorf("%s: %.200s", st.Code(), st.Message())
			}
			if len(st.Message()) > 2*maxMessage {
				t.Errorf("a message of %d bytes", len(st.Message()))
			}
		})
	}
	t.Run("empty fleet", func(t *testing.T) {
		for _, m := range h.fleet.View().Members {
			h.fleet.Leave(m.ID)
		}
		_, err := h.client.Pick(t.Context(), &api.PickRequest{Request: &api.Request{Model: "m", Prompt: tokens}})
		if status.Code(err) != codes.Unavailable {
			t.Error(err)
		}
	})
}

func TestCandidatesAndExclude(t *testing.T) {
	h := build(t, nil)
	ref := map[string]*api.MemberRef{
		"member":  {Ref: &api.MemberRef_MemberId{MemberId: name("b")}},
		"pod":     {Ref: &api.MemberRef_Pod{Pod: "pod-b"}},
		"address": {Ref: &api.MemberRef_Address{Address: "10.0.0.2:8000"}},
	}
	for kind, r := range ref {
		one, err := h.client.Score(t.Context(), &api.ScoreRequest{Request: &api.Request{Model: "m", Candidates: []*api.MemberRef{r}}})
		if err != nil || len(one.GetRanking().GetCandidates()) != 1 || one.GetRanking().GetCandidates()[0].GetMember().GetId() != name("b") {
			t.Errorf("candidates by %s: %v, %v", kind, err, one)
		}
		two, err := h.client.Score(t.Context(), &api.ScoreRequest{Request: &api.Request{Model: "m", Exclude: []*api.MemberRef{r}}})
		if err != nil || len(two.GetRanking().GetCandidates()) != 2 {
			t.Errorf("exclude by %s: %v, %v", kind, err, two)
		}
	}
}

func TestTwoMillionTokens(t *testing.T) {
	h := build(t, nil)
	ids := make([]uint32, 2_000_000)
	for i := range ids {
		ids[i] = uint32(i % 150_000)
	}
	for form, req := range map[string]*api.Request{
		"ids": {Model: "m", Prompt: api.TokenIDs(ids)},
	} {
		resp, err := h.client.Score(t.Context(), &api.ScoreRequest{Request: req})
		if err != nil || resp.GetRanking().GetPromptTokens() != 2_000_000 {
			t.Errorf("%s: %v", form, err)
		}
	}
}

func TestReport(t *testing.T) {
	h := build(t, nil)
	picked := func() string {
		resp, err := h.client.Pick(t.Context(), &api.PickRequest{Request: &api.Request{Model: "m", Prompt: api.TokenIDs(prompt)}})
		if err != nil {
			t.Fatal(err)
		}
		return resp.GetDecisionId()
	}
	d := picked()
	state := func() *api.MemberState {
		f, err := h.admin.ListMembers(t.Context(), &api.ListMembersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return f.GetMembers()[1]
	}
	if s := state(); s.GetReservedRequests() != 1 || s.GetReservedTokens() != 36 {
		t.Errorf("after the pick: %v", s)
	}
	resp, err := h.client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{DecisionId: d, Outcome: api.Outcome_OUTCOME_FINISHED,
		PromptTokens: proto.Uint32(100), CachedTokens: proto.Uint32(48)}}})
	if err != nil || !recorded(resp) || resp.GetResults()[0].GetExplanation() != "" {
		t.Fatal(err, resp)
	}
	if resp, err := h.client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{DecisionId: picked(), Outcome: api.Outcome_OUTCOME_CANCELLED, MemberId: "ns_nobody_0"}}}); err != nil || resp.GetResults()[0].GetStatus() != api.ReportStatus_REPORT_STATUS_UNKNOWN_MEMBER || !strings.Contains(resp.GetResults()[0].GetExplanation(), `no member "ns_nobody_0"`) {
		t.Error(err, resp)
	}
	if s := state(); s.GetReservedTokens() != 0 || s.GetReportedPromptTokens() != 100 || s.GetReportedCachedTokens() != 48 ||
		s.GetPredictedCachedTokens() != 64 || s.GetReportedRequests() != 1 {
		t.Errorf("after the report: %v", s)
	}
	for _, id := range []string{d, "zz", "ffffffff", strings.Repeat("1", 1<<16)} {
		if resp, err := h.client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{DecisionId: id, Outcome: api.Outcome_OUTCOME_FAILED}}}); err != nil || resp.GetResults()[0].GetStatus() != api.ReportStatus_REPORT_STATUS_UNKNOWN_DECISION {
			t.Errorf("decision %.20q: %v, %v", id, err, resp)
		}
	}
	// Each report of a batch stands for itself.
	bad := []*api.Report{
		{Outcome: api.Outcome_OUTCOME_FINISHED},
		{DecisionId: d},
		{DecisionId: d, Outcome: 77},
		{DecisionId: d, Outcome: api.Outcome_OUTCOME_FINISHED, PromptTokens: proto.Uint32(1), CachedTokens: proto.Uint32(2)},
		{DecisionId: d, Outcome: api.Outcome_OUTCOME_FINISHED, TtftMs: proto.Float64(math.NaN())},
		{DecisionId: d, Outcome: api.Outcome_OUTCOME_FINISHED, TtftMs: proto.Float64(-1)},
		{DecisionId: picked(), Outcome: api.Outcome_OUTCOME_FINISHED},
	}
	resp, err = h.client.Report(t.Context(), &api.ReportRequest{Reports: bad})
	if err != nil || len(resp.GetResults()) != len(bad) {
		t.Fatal(err, resp)
	}
	for i, r := range resp.GetResults() {
		want := api.ReportStatus_REPORT_STATUS_INVALID
		if i == len(bad)-1 {
			want = api.ReportStatus_REPORT_STATUS_RECORDED
		}
		if r.GetStatus() != want || (want == api.ReportStatus_REPORT_STATUS_INVALID) != (r.GetExplanation() != "") {
			t.Errorf("report %d: %v, want %v", i, r, want)
		}
	}
	if resp, err := h.client.Report(t.Context(), &api.ReportRequest{}); err != nil || len(resp.GetResults()) != 0 {
		t.Error(err, resp)
	}
	if _, err := h.client.Report(t.Context(), &api.ReportRequest{Reports: make([]*api.Report, maxReports+1)}); status.Code(err) != codes.InvalidArgument {
		t.Error(err)
	}
}

func recorded(r *api.ReportResponse) bool {
	return r.GetResults()[0].GetStatus() == api.ReportStatus_REPORT_STATUS_RECORDED
}

func TestFleet(t *testing.T) {
	h := build(t, nil)
	id, err := h.fleet.Join("ns_other_0", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	h.fleet.Receive(id, fleet.Info{Namespace: "ns", Pod: "other", Models: []string{"other"}}, nil, time.Now())
	for model, want := range map[string]int{"": 4, "m": 3, "lora": 3, "other": 1, "none": 0} {
		f, err := h.admin.ListMembers(t.Context(), &api.ListMembersRequest{Model: model})
		if err != nil || len(f.GetMembers()) != want || !f.GetReady() {
			t.Errorf("model %q: %v, %v", model, err, f)
		}
	}
	f, _ := h.admin.ListMembers(t.Context(), &api.ListMembersRequest{Model: "m"})
	got := f.GetMembers()[0]
	got.CacheState.AgeMs, got.LoadAgeMs, got.Speed = 0, nil, nil
	want := &api.MemberState{
		Member:     &api.Member{Id: name("a"), Namespace: "ns", Pod: "pod-a", Address: "10.0.0.1:8000"},
		CacheState: &api.CacheState{Trust: api.Trust_TRUST_EXACT, Epoch: 7, Sequence: 9},
		Models:     []string{"m"}, Adapters: []string{"lora"}, EngineVersion: "0.32.0", BlockSizeTokens: size, CapacityBlocks: 1000,
		HeldGpuBlocks: 4, HeldHostBlocks: 4, HeldDiskBlocks: 4, RunningRequests: proto.Uint32(0), WaitingRequests: proto.Uint32(0), KvUsage: proto.Float64(0),
	}
	if !proto.Equal(want, got) {
		t.Errorf("%v\nwant %v", got, want)
	}
	f, _ = h.admin.ListMembers(t.Context(), &api.ListMembersRequest{Model: "other"})
	if s := f.GetMembers()[0]; s.RunningRequests != nil || s.WaitingRequests != nil || s.KvUsage != nil || s.LoadAgeMs != nil ||
		s.GetCacheState().GetTrust() != api.Trust_TRUST_UNKNOWN {
		t.Errorf("what is not known is said: %v", s)
	}
}

func TestWatchSendsChanges(t *testing.T) {
	h := build(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := h.admin.WatchMembers(ctx, &api.WatchMembersRequest{IntervalMs: 1})
	if err != nil {
		t.Fatal(err)
	}
	next := func() *api.ListMembersResponse {
		t.Helper()
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return m.GetFleet()
	}
	if n := len(next().GetMembers()); n != 3 {
		t.Fatalf("%d members", n)
	}
	start := time.Now()
	h.fleet.Leave(h.fleet.View().Members[0].ID)
	if n := len(next().GetMembers()); n != 2 {
		t.Fatalf("%d members", n)
	}
	h.fleet.Leave(h.fleet.View().Members[0].ID)
	if n := len(next().GetMembers()); n != 1 {
		t.Fatalf("%d members", n)
	}
	if took := time.Since(start); took < shortestInterval {
		t.Errorf("two changes after %s", took)
	}
	// The service closes: the stream ends with a clear code.
	h.Close()
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Error(err)
	}
}

func TestWatchersAreBounded(t *testing.T) {
	h := build(t, nil)
	var open []context.CancelFunc
	for range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		open = append(open, cancel)
		stream, err := h.admin.WatchMembers(ctx, &api.WatchMembersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	stream, err := h.admin.WatchMembers(t.Context(), &api.WatchMembersRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
	for _, cancel := range open {
		cancel()
	}
	await.True(t, "no watcher stays", func() bool { return h.Stats().Watchers == 0 })
}

func TestCallsAreBounded(t *testing.T) {
	h := build(t, nil)
	h.calls.Add(100)
	_, err := h.admin.ListMembers(t.Context(), &api.ListMembersRequest{})
	if status.Code(err) != codes.ResourceExhausted || h.Stats().Refused != 1 {
		t.Error(err, h.Stats())
	}
	h.calls.Add(-1)
	if _, err := h.admin.ListMembers(t.Context(), &api.ListMembersRequest{}); err != nil {
		t.Error(err)
	}
}

// TestDeadlines: a hanging engine must cost neither the caller's deadline nor,
// without one, more than the service's.
func TestDeadlines(t *testing.T) {
	hold := make(chan struct{})
	engine := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		select {
		case <-hold:
		case <-r.Context().Done():
		}
	}))
	defer engine.Close()
	defer close(hold)
	in := intake.New(intake.Config{Engines: func(string) ([]string, error) { return []string{engine.URL}, nil }, Timeout: time.Minute})
	defer in.Close()
	h := build(t, func(c *Config) { c.Intake, c.CallTimeout = in, 300*time.Millisecond })
	req := &api.ScoreRequest{Request: &api.Request{Model: "m", Prompt: api.Body(`{"prompt":"x"}`)}}
	resp, err := h.client.Score(t.Context(), req)
	if err != nil || resp.GetRanking().Lacks() == "" {
		t.Errorf("without a deadline: %v, %v", err, resp)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
	defer cancel()
	resp, err = h.client.Score(ctx, req)
	if err != nil || resp.GetRanking().Lacks() == "" {
		t.Errorf("with a deadline: %v, %v", err, resp)
	}
	gone, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	if _, err := h.client.Score(gone, req); status.Code(err) != codes.Canceled {
		t.Errorf("cancelled: %v", err)
	}
}

func TestPanicsBecomeErrors(t *testing.T) {
	ready := true
	h := build(t, func(c *Config) {
		c.Ready = func() bool {
			if !ready {
				panic("no")
			}
			return true
		}
	})
	ready = false
	if _, err := h.admin.ListMembers(t.Context(), &api.ListMembersRequest{}); status.Code(err) != codes.Internal {
		t.Error(err)
	}
	stream, err := h.admin.WatchMembers(t.Context(), &api.WatchMembersRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.Internal || strings.Contains(err.Error(), "no\n") {
		t.Error(err)
	}
	if n := h.Stats().Panics; n != 2 {
		t.Errorf("%d panics", n)
	}
	if n := h.Stats().Watchers; n != 0 {
		t.Errorf("%d watchers", n)
	}
}

func TestReferencesKeepTheirKind(t *testing.T) {
	got, err := refs("candidates", []*api.MemberRef{
		{Ref: &api.MemberRef_Pod{Pod: "a"}}, {Ref: &api.MemberRef_MemberId{MemberId: "b"}}, {Ref: &api.MemberRef_Address{Address: "c"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]pick.Ref{{Pod: "a"}, {Member: "b"}, {Address: "c"}}, got); d != "" {
		t.Error(d)
	}
}

func TestExplainShowsTwoPolicies(t *testing.T) {
	h := build(t, nil)
	resp, err := h.admin.Explain(t.Context(), &api.ExplainRequest{Request: ask("m").GetRequest(), ShadowPolicy: "round-robin"})
	if err != nil {
		t.Fatal(err)
	}
	c := resp.GetCounterfactual()
	if len(resp.GetRanking().GetCandidates()) != 3 || len(resp.GetShadowRanking().GetCandidates()) != 3 ||
		resp.GetRanking().GetPolicy() != "default" || resp.GetShadowRanking().GetPolicy() != "round-robin" || c.GetPolicy() != "round-robin" {
		t.Fatalf("%v", resp)
	}
	was, would := resp.GetRanking().GetCandidates()[0], resp.GetShadowRanking().GetCandidates()[0]
	if c.GetMember().GetId() != would.GetMember().GetId() || c.GetSame() != (was.GetMember().GetId() == would.GetMember().GetId()) ||
		c.GetTotalMs() != would.GetCost().GetTotalMs()-was.GetCost().GetTotalMs() {
		t.Errorf("%v of %v and %v", c, was, would)
	}
	resp, err = h.admin.Explain(t.Context(), &api.ExplainRequest{Request: ask("m").GetRequest()})
	if err != nil || resp.GetShadowRanking() != nil || resp.GetCounterfactual() != nil {
		t.Errorf("without a second policy: %v, %v", resp, err)
	}
	for shadow, want := range map[string]codes.Code{"nonsense": codes.InvalidArgument} {
		if _, err := h.admin.Explain(t.Context(), &api.ExplainRequest{Request: ask("m").GetRequest(), ShadowPolicy: shadow}); status.Code(err) != want {
			t.Errorf("shadow %q: %v", shadow, err)
		}
	}
	if _, err := h.admin.Explain(t.Context(), &api.ExplainRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("without a request: %v", err)
	}
}

func TestFleetSaysSpeedAndFailures(t *testing.T) {
	h := build(t, nil)
	for range 3 {
		d, err := h.client.Pick(t.Context(), &api.PickRequest{Request: ask("m").GetRequest()})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := h.client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{DecisionId: d.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FAILED, MemberId: name("b")}}}); err != nil {
			t.Fatal(err)
		}
	}
	state, err := h.admin.ListMembers(t.Context(), &api.ListMembersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range state.GetMembers() {
		failing := m.GetMember().GetId() == name("b")
		if failing != (m.GetFailingForMs() > 0) || failing != (m.GetIneligible() == api.Ineligible_INELIGIBLE_FAILING) {
			t.Errorf("%s: failing for %v ms, %v", m.GetMember().GetId(), m.GetFailingForMs(), m.GetIneligible())
		}
		if sp := m.GetSpeed(); !(sp.GetTokenMs() > 0) || sp.GetLearned() {
			t.Errorf("%s: %v", m.GetMember().GetId(), sp)
		}
	}
}

// fleetOf is a member that serves one model.
func fleetOf(model string) fleet.Info {
	return fleet.Info{Heartbeat: time.Minute, Namespace: "ns", Pod: "pod-" + model, PodUID: "uid-" + model, Models: []string{model}, BlockSize: size}
}
