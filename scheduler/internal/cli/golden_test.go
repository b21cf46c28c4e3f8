package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

var update = flag.Bool("update", false, "write the golden tables anew")

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*conn).closeWriteAndWait"))
}

// shown is what a command left behind.
type shown struct {
	out, err string
	code     int
}

// invoke runs a command as main does. A width makes Out a terminal.
func invoke(ctx context.Context, width int, env map[string]string, stdin string, args ...string) shown {
	var out, errs bytes.Buffer
	o := IO{In: strings.NewReader(stdin), Out: &out, Err: &errs}
	if width > 0 {
		o.Size = func() (int, int) { return width, 24 }
	}
	code := Run(ctx, args, func(name string) string { return env[name] }, o)
	return shown{out.String(), errs.String(), code}
}

// golden compares a text with a file.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".txt")
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (go test -update writes it anew): %s", name, diff)
	}
}

// still is a scheduler that always answers the same.
type still struct {
	api.UnimplementedSchedulerServer
	api.UnimplementedAdminServer
	fleet    *api.ListMembersResponse
	ranking  *api.Ranking
	shadow   *api.Counterfactual
	books    *api.GetBooksResponse
	prefixes *api.ListPrefixesResponse
	asks     *api.ListPrefixesRequest
	refuses  error // of every call of Admin
	explains *api.ExplainRequest
	scores   *api.ScoreRequest
}

func (s *still) ListMembers(context.Context, *api.ListMembersRequest) (*api.ListMembersResponse, error) {
	return s.fleet, s.refuses
}

func (s *still) ListPrefixes(_ context.Context, r *api.ListPrefixesRequest) (*api.ListPrefixesResponse, error) {
	s.asks = r
	return s.prefixes, s.refuses
}

func (s *still) GetBooks(context.Context, *api.GetBooksRequest) (*api.GetBooksResponse, error) {
	return s.books, s.refuses
}

func (s *still) Explain(_ context.Context, r *api.ExplainRequest) (*api.ExplainResponse, error) {
	s.explains = r
	return &api.ExplainResponse{Ranking: s.ranking, Counterfactual: s.shadow}, s.refuses
}

func (s *still) FindDecision(context.Context, *api.FindDecisionRequest) (*api.FindDecisionResponse, error) {
	return &api.FindDecisionResponse{AgeMs: 61_000, Decision: &api.PickResponse{DecisionId: "d-1", Ranking: s.ranking}}, s.refuses
}

func (s *still) Score(_ context.Context, r *api.ScoreRequest) (*api.ScoreResponse, error) {
	s.scores = r
	return &api.ScoreResponse{Ranking: s.ranking}, nil
}

// serve gives the environment in which kvscout asks it.
func (s *still) serve(t *testing.T) map[string]string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	api.RegisterSchedulerServer(server, s)
	api.RegisterAdminServer(server, s)
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(l) }()
	t.Cleanup(func() { server.Stop(); <-done })
	return map[string]string{"KVSCOUT_SCHEDULER": l.Addr().String()}
}

// fleet has a member of every kind.
func fleet() *api.ListMembersResponse {
	member := func(n int, trust api.Trust, why string) *api.MemberState {
		return &api.MemberState{
			Member: &api.Member{
				Id: fmt.Sprintf("production_6b1d9a52-6cf8-4f0e-9d4c-3f0a1c2b3d%02d_0", n), Namespace: "production",
				Pod: fmt.Sprintf("llama-%d", n), Address: fmt.Sprintf("10.0.0.%d:8000", n),
			},
			CacheState: &api.CacheState{Trust: trust, Explanation: why, AgeMs: 250, Epoch: 1},
			Models:     []string{"meta-llama/Llama-3.1-8B-Instruct"}, EngineVersion: "0.32.0", AgentRelease: "v0.1.0",
			RunningRequests: proto.Uint32(12), WaitingRequests: proto.Uint32(3), KvUsage: proto.Float64(0.42), ReservedTokens: 8192,
		}
	}
	list := []*api.MemberState{
		member(1, api.Trust_TRUST_EXACT, ""),
		member(2, api.Trust_TRUST_APPROXIMATE, "no replay: what the engine sent before the agent came is not known"),
		member(3, api.Trust_TRUST_SYNCING, "just announced"),
		member(4, api.Trust_TRUST_UNKNOWN, "the engine publishes no KV events"),
		member(5, api.Trust_TRUST_EXACT, ""),
		member(6, api.Trust_TRUST_EXACT, ""),
	}
	list[4].Ineligible, list[4].CacheState.AgeMs = api.Ineligible_INELIGIBLE_SILENT, 4000
	list[4].RunningRequests, list[4].WaitingRequests, list[4].KvUsage = nil, nil, nil
	list[5].Ineligible, list[5].FailingForMs, list[5].KvUsage = api.Ineligible_INELIGIBLE_FAILING, 5000, proto.Float64(0.97)
	list[5].EngineVersion = "nightly"
	return &api.ListMembersResponse{
		Members: list, Ready: true, Decisions: 1234,
		Scheduler: &api.SchedulerState{Name: "scheduler-0:50051", Release: "v0.1.0", Pool: "default", Readiness: "ready", NatsConnected: true},
	}
}

func ranking() *api.Ranking {
	r := &api.Ranking{
		Reason: api.Reason_REASON_LOWEST_COST, Explanation: "llama-1 has 4096 of 5000 tokens cached", Policy: "default", PromptTokens: 5000, EligibleMembers: 3,
		Fallbacks: []*api.Fallback{{Explanation: "cache state of the first is APPROXIMATE: older events are lost"}},
	}
	for i, m := range fleet().GetMembers()[:3] {
		cached := []uint32{4096, 1024, 0}[i]
		r.Candidates = append(r.Candidates, &api.Candidate{
			Member: m.GetMember(), CacheState: m.GetCacheState(), CachedTokens: &api.CachedTokens{Gpu: cached, Predicted: 16, Host: uint32(32 * i)},
			UncachedTokens: 5000 - cached, RunningRequests: 12, WaitingRequests: 3,
			Cost: &api.Cost{TotalMs: 100 * float64(i+1), WaitMs: 12.5, LoadMs: 0, PrefillMs: 60.25, MissMs: 3, DecodeMs: 1, EvictMs: 0.25},
		})
	}
	r.Candidates[1].Pull = &api.Pull{From: r.Candidates[0].GetMember(), Tokens: 3072, TransferMs: 10, PrefillMs: 90}
	return r
}

// books of a fleet that lost tokens to everything.
func books() *api.GetBooksResponse {
	evicted := func(pools uint32, tokens uint64) *api.EvictedTokens {
		return &api.EvictedTokens{UsedWithinMs: proto.Float64(60_000), KeptByPools: &pools, Tokens: tokens}
	}
	b := &api.GetBooksResponse{
		Picked:         &api.HitTokens{PromptTokens: 1_000_000, IdealTokens: 500_000, FeasibleTokens: 450_000, RoutedTokens: 300_000, LeastLoadTokens: 100_000},
		BookedRequests: 400, BookedPromptTokens: 1_000_000, UsedTokens: 290_000, DivertedRequests: 40, DivertedMs: 8000,
		Evicted: []*api.EvictedTokens{evicted(1, 10_000), evicted(2, 60_000), evicted(4, 20_000), {Tokens: 10_000}, {PoolUnknown: true, Tokens: 1000}},
	}
	for cause := range api.Loss_name {
		if cause > 0 {
			b.Lost = append(b.Lost, &api.LostTokens{Cause: api.Loss(cause), Tokens: 59_160 + uint64(cause), Explanation: "as it was with " + strings.ToLower(api.Loss(cause).String())})
		}
	}
	slices.SortFunc(b.Lost, func(a, b *api.LostTokens) int { return int(b.GetTokens()) - int(a.GetTokens()) })
	return b
}

// shared prefixes, on no member, on two, and on more than are named.
func shared() *api.ListPrefixesResponse {
	holder := func(n int, host, disk uint32) *api.PrefixHolder {
		return &api.PrefixHolder{Member: &api.Member{Pod: fmt.Sprintf("llama-%d", n), Rank: uint32(n % 2)}, CachedTokens: &api.CachedTokens{Gpu: 1024, Host: host, Disk: disk}}
	}
	list := []*api.Prefix{
		{Key: 0x9af1_0000_0000_0001, Tokens: 2048, Hits: 90_000, Parted: 41_000, UsedAgeMs: 400, HolderCount: 300, Holders: []*api.PrefixHolder{holder(0, 0, 0), holder(1, 0, 0), holder(2, 0, 0)}},
		{Key: 2, Tokens: 4096, Hits: 1200, Parted: 3, UsedAgeMs: 61_000, HolderCount: 2, Holders: []*api.PrefixHolder{holder(2, 1024, 0), holder(3, 1024, 2048)}},
		{Key: 3, Tokens: 64, Hits: 2, Parted: 2, UsedAgeMs: 9_000_000},
	}
	for _, p := range list {
		p.Model = "meta-llama/Llama-3.1-8B-Instruct"
	}
	return &api.ListPrefixesResponse{Prefixes: list}
}

func TestPrefixes(t *testing.T) {
	s := &still{prefixes: shared()}
	env := s.serve(t)
	if got := invoke(t.Context(), 0, env, "", "prefixes", "-model", "m", "-max", "7"); got.code != 0 || s.asks.GetModel() != "m" || s.asks.GetMaxPrefixes() != 7 {
		t.Errorf("%+v, asked %v", got, s.asks)
	}
	s.prefixes = &api.ListPrefixesResponse{}
	if got := invoke(t.Context(), 0, env, "", "prefixes"); got.code != 0 || got.out != "" || !strings.HasPrefix(got.err, "no shared prefixes") {
		t.Errorf("%+v", got)
	}
}

// Doctor recommends the smallest cache that would have kept most of what was
// evicted.
func TestDoctorSaysHowMuchMemoryWouldHaveKeptIt(t *testing.T) {
	class := func(pools, tokens int) *api.EvictedTokens {
		e := &api.EvictedTokens{Tokens: uint64(tokens), PoolUnknown: pools < 0}
		if pools > 0 {
			e.KeptByPools = proto.Uint32(uint32(pools))
		}
		return e
	}
	for name, c := range map[string]struct {
		evicted []*api.EvictedTokens
		want    string
	}{
		"as large":  {[]*api.EvictedTokens{class(1, 80), class(4, 20)}, "80% would have been kept by caches of their present size"},
		"as much":   {[]*api.EvictedTokens{class(1, 10), class(2, 75), class(4, 15)}, "host memory for 1 times what the GPUs hold would have kept 85%"},
		"much more": {[]*api.EvictedTokens{class(1, 10), class(16, 75), class(0, 15)}, "host memory for 15 times what the GPUs hold would have kept 85%"},
		"too much":  {[]*api.EvictedTokens{class(1, 10), class(0, 90)}, "much more"},
		"unknown":   {[]*api.EvictedTokens{class(-1, 90)}, ""},
	} {
		if got := memory(&api.GetBooksResponse{Evicted: c.evicted}); !strings.Contains(got, c.want) || c.want == "" && got != "" {
			t.Errorf("%s: %q", name, got)
		}
	}
}

func TestTables(t *testing.T) {
	s := &still{fleet: fleet(), ranking: ranking(), books: books(), prefixes: shared(), shadow: &api.Counterfactual{Policy: "session", Member: fleet().GetMembers()[1].GetMember(), FirstTokenMs: 12, TotalMs: -3, CachedTokens: -3072}}
	env := s.serve(t)
	s.fleet.Scheduler.TimeMs = 0 // no clock: it would differ from run to run
	for name, args := range map[string][]string{
		"members":  {"members"},
		"explain":  {"explain", "-model", "m"},
		"found":    {"explain", "-request-id", "one"},
		"score":    {"score", "-model", "m"},
		"prefixes": {"prefixes", "-max", "7"},
		"doctor":   {"doctor", "-agents", "127.0.0.1:1"},
	} {
		for _, width := range []int{0, 80, 160} {
			got := invoke(t.Context(), width, map[string]string{"KVSCOUT_SCHEDULER": env["KVSCOUT_SCHEDULER"], "NO_COLOR": "1"}, "a prompt", args...)
			if want := map[bool]int{true: 1}[name == "doctor"]; got.code != want || got.err != "" {
				t.Errorf("%v: status %d, %s", args, got.code, got.err)
			}
			for _, line := range strings.Split(got.out, "\n") {
				if n := utf8.RuneCountInString(line); width > 0 && n > width && strings.Contains(line, " ") && name != "doctor" {
					t.Errorf("%v: a line of %d on %d columns: %s", args, n, width, line)
				}
			}
			if strings.Contains(got.out, "\x1b") {
				t.Errorf("%v: colours with NO_COLOR: %q", args, got.out)
			}
			golden(t, fmt.Sprintf("%s-%d", name, width), got.out)
		}
		// On a terminal there are colours, and nowhere else.
		if got := invoke(t.Context(), 120, env, "a prompt", args...); !strings.Contains(got.out, "\x1b[") {
			t.Errorf("%v: no colours on a terminal", args)
		}
		if got := invoke(t.Context(), 0, env, "a prompt", args...); strings.Contains(got.out, "\x1b") {
			t.Errorf("%v: colours where there is no terminal", args)
		}
		got := invoke(t.Context(), 0, env, "a prompt", append(args, "-o", "json")...)
		var whole map[string]any
		if err := json.Unmarshal([]byte(got.out), &whole); err != nil || len(whole) < 1 {
			t.Errorf("%v -o json: %v\n%s", args, err, got.out)
		}
	}
}

func TestTop(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	p := page{fleet: fleet(), at: now.Add(-500 * time.Millisecond), rate: 12.34}
	for name, size := range map[string][2]int{"top-80": {80, 24}, "top-160": {160, 24}, "top-small": {60, 8}} {
		text := string(p.draw(now, size[0], size[1], false))
		lines := strings.Split(strings.NewReplacer(home, "", endLine, "", endPage, "").Replace(text), "\r\n")
		if len(lines) > size[1] {
			t.Errorf("%s: %d lines", name, len(lines))
		}
		golden(t, name, strings.Join(lines, "\n")+"\n")
	}
	p.lost = "connection refused"
	if text := string(p.draw(now.Add(time.Minute), 200, 24, true)); !strings.Contains(text, "no answer for 60s: connection refused") || !strings.Contains(text, "61s") {
		t.Errorf("%q", text)
	}
}

// TestTopLeavesTheTerminalAsItWas, whether it is ended or the scheduler goes.
func TestTopLeavesTheTerminalAsItWas(t *testing.T) {
	s := &still{fleet: fleet()}
	env := s.serve(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	got := invoke(ctx, 100, env, "", "top", "-interval", "100ms")
	if got.code != 0 || !strings.HasPrefix(got.out, enter) || !strings.HasSuffix(got.out, leave) || strings.Count(got.out, home) < 2 {
		t.Errorf("status %d, %s: %q", got.code, got.err, got.out)
	}
	if got := invoke(t.Context(), 0, env, "", "top"); got.code != 2 || strings.Contains(got.out, "\x1b") {
		t.Errorf("without a terminal: %+v", got)
	}
}

func TestChanges(t *testing.T) {
	first, second := fleet(), fleet()
	second.Members = append(second.Members[1:], &api.MemberState{Member: &api.Member{Id: "new"}, CacheState: &api.CacheState{Trust: api.Trust_TRUST_SYNCING, Explanation: "just announced"}})
	m := second.GetMembers()[0]
	m.CacheState.Trust, m.CacheState.Explanation = api.Trust_TRUST_EXACT, ""
	m.GetMember().Address, m.EngineVersion, m.Warning = "10.0.0.9:8000", "0.33.0", "another member has this address"
	second.GetMembers()[1].CacheState.Explanation = "gap"
	second.GetMembers()[3].Ineligible = api.Ineligible_INELIGIBLE_UNSPECIFIED
	second.Scheduler.Readiness = "ready, but NATS is not connected"
	var lines []string
	for _, list := range [][]change{changes(nil, first), changes(first, second), changes(second, second)} {
		for _, c := range list {
			lines = append(lines, c.line(false))
		}
		lines = append(lines, "")
	}
	golden(t, "changes", strings.Join(lines, "\n"))
	second.GetMembers()[0].CacheState.Epoch = 2e18
	if list := changes(nil, second); len(list) != 7 {
		t.Errorf("%v", list)
	}
	again := proto.CloneOf(second)
	again.GetMembers()[0].CacheState.Epoch = 3e18
	if list := changes(second, again); len(list) != 1 || list[0].What != "incarnation" {
		t.Errorf("%v", list)
	}
}

// What members and engines say of themselves can do nothing to a terminal.
func TestHostileNamesAreHarmless(t *testing.T) {
	hostile := "\x1b]0;owned\x07\r\n\x1b[2J\u202eevil\xff"
	s := &still{fleet: fleet(), ranking: ranking()}
	for _, m := range s.fleet.GetMembers() {
		m.GetMember().Id, m.GetMember().Address, m.Models, m.Warning, m.EngineVersion = "a"+clean1(hostile), clean1(hostile), []string{clean1(hostile)}, clean1(hostile), clean1(hostile)
		m.CacheState.Explanation = clean1(hostile)
	}
	s.prefixes = shared()
	s.prefixes.GetPrefixes()[0].Model = clean1(hostile)
	s.prefixes.GetPrefixes()[0].GetHolders()[0].GetMember().Pod = clean1(hostile)
	s.ranking.Explanation, s.ranking.Policy = clean1(hostile), clean1(hostile)
	s.ranking.GetCandidates()[0].GetMember().Id = clean1(hostile)
	s.refuses = nil
	env := s.serve(t)
	check := func(got shown) {
		t.Helper()
		for _, r := range got.out + got.err {
			if r == '\x1b' || r == '\r' || r == '\a' || r == '\u202e' || r == utf8.RuneError {
				t.Fatalf("%q", got.out+got.err)
			}
		}
	}
	for _, args := range [][]string{{"members"}, {"explain", "-model", "m"}, {"score", "-model", "m"}, {"prefixes"}, {"doctor"}} {
		check(invoke(t.Context(), 0, env, "a prompt", args...))
	}
	for _, c := range changes(nil, s.fleet) {
		check(shown{out: c.line(false)})
	}
	st, err := status.New(codes.Internal, clean1(hostile)).WithDetails(&errdetails.ErrorInfo{Reason: "INTERNAL"})
	if err != nil {
		t.Fatal(err)
	}
	s.refuses = st.Err()
	got := invoke(t.Context(), 0, env, "", "members")
	check(got)
	if got.code != 1 || strings.Count(got.err, "\n") != 1 {
		t.Errorf("%+v", got)
	}
}

// clean1 leaves what a message can carry: valid UTF-8.
func clean1(text string) string { return strings.ToValidUTF8(text, "") }

func TestPromptForms(t *testing.T) {
	s := &still{ranking: ranking()}
	env := s.serve(t)
	file := filepath.Join(t.TempDir(), "prompt")
	for name, c := range map[string]struct {
		prompt string
		args   []string
		want   *api.Request
		wrong  string
	}{
		"a body":             {`{"model":"x","prompt":"p"}`, nil, &api.Request{Prompt: body([]byte(`{"model":"x","prompt":"p"}`))}, ""},
		"text":               {"hello\n", []string{"-model", "m"}, &api.Request{Model: "m", Prompt: body([]byte(`{"model":"m","prompt":"hello"}`))}, ""},
		"braces in a text":   {"{curly", []string{"-model", "m"}, &api.Request{Model: "m", Prompt: body([]byte(`{"model":"m","prompt":"{curly"}`))}, ""},
		"tokens":             {" [1, 2,3]\n", []string{"-model", "m"}, &api.Request{Model: "m", Prompt: &api.Prompt{Form: &api.Prompt_Tokens{Tokens: &api.Tokens{Ids: []uint32{1, 2, 3}}}}}, ""},
		"a list of words":    {`["a"]`, []string{"-model", "m"}, &api.Request{Model: "m", Prompt: body([]byte(`{"model":"m","prompt":"[\"a\"]"}`))}, ""},
		"a list as text":     {`[1]`, []string{"-model", "m", "-as", "text"}, &api.Request{Model: "m", Prompt: body([]byte(`{"model":"m","prompt":"[1]"}`))}, ""},
		"all of the flags":   {`{}`, []string{"-model", "m", "-adapter", "a", "-session", "s", "-tenant", "t", "-policy", "p"}, &api.Request{Model: "m", Adapter: "a", SessionId: "s", Tenant: "t", Policy: "p", Prompt: body([]byte("{}"))}, ""},
		"text without model": {"hello", nil, nil, "-model: a text names no model"},
		"no number":          {`[1, -2]`, []string{"-model", "m", "-as", "tokens"}, nil, "want a JSON list like"},
		"nothing":            {" \n", []string{"-model", "m"}, nil, "the prompt is empty"},
		"another form":       {"x", []string{"-as", "poem"}, nil, `-as: "poem" is none of`},
		"too much":           {strings.Repeat("x", maxPrompt+1), []string{"-model", "m"}, nil, "more than 16 MiB"},
	} {
		if err := os.WriteFile(file, []byte(c.prompt), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, how := range []string{"stdin", "-", "file"} {
			args := append([]string{"explain"}, c.args...)
			switch how {
			case "-":
				args = append(args, "-")
			case "file":
				args = append(args, file)
			}
			s.explains = nil
			got := invoke(t.Context(), 0, env, c.prompt, args...)
			if c.wrong != "" {
				if got.code == 0 || !strings.Contains(got.err, c.wrong) || strings.Count(got.err, "\n") != 1 || s.explains != nil {
					t.Errorf("%s by %s: %+v", name, how, got)
				}
				continue
			}
			if got.code != 0 || !proto.Equal(s.explains.GetRequest(), c.want) {
				t.Errorf("%s by %s: %s\nwant %v\ngot  %v", name, how, got.err, c.want, s.explains.GetRequest())
			}
		}
	}
	if got := invoke(t.Context(), 0, env, `{}`, "score", "-max", "7"); got.code != 0 || s.scores.GetRequest().GetMaxCandidates() != 7 {
		t.Errorf("%+v %v", got, s.scores)
	}
	o := IO{In: strings.NewReader("never read"), Out: &bytes.Buffer{}, Err: new(bytes.Buffer), Asks: true}
	if code := Run(t.Context(), []string{"score"}, func(n string) string { return env[n] }, o); code != 2 {
		t.Errorf("waits for a person to type: %d", code)
	}
}

func TestUsage(t *testing.T) {
	env := map[string]string{"KVSCOUT_MODEL": "from the environment", "KVSCOUT_SORT": "nonsense"}
	for args, want := range map[string]string{
		"nope":                               `there is no command "nope"`,
		"-o json":                            "flags stand behind the command",
		"members -nope":                      "there is no flag -nope",
		"members -mode x":                    "did you mean -model?",
		"members extra":                      `there is no argument "extra"`,
		"explain a b":                        `there is no argument "b"`,
		"members -o xml":                     `-o: "xml" is neither table nor json; for example table`,
		"members -sort age":                  `-sort: "age" is none of`,
		"members -timeout x":                 "-timeout: the value cannot be read",
		"members -timeout 0":                 "-timeout: 0 means nothing here",
		"members -scheduler here":            `-scheduler: "here" is not like host:port`,
		"members -tls-cert x":                "one without the other",
		"top":                                "needs a terminal",
		"doctor -members -1":                 "-members: must not be negative",
		"prefixes -max 65":                   "-max: 65: want 1 to 64",
		"completion csh":                     "bash, zsh or fish",
		"explain -request-id x -model m one": "one of them",
	} {
		got := invoke(t.Context(), 0, env, "", strings.Fields(args)...)
		if got.code != 2 || got.out != "" || !strings.Contains(got.err, want) || strings.Count(got.err, "\n") != 1 {
			t.Errorf("kvscout %s: status %d, %q, want %q", args, got.code, got.err, want)
		}
	}
	if got := invoke(t.Context(), 0, map[string]string{"KVSCOUT_SCHEDULER": "nowhere"}, "", "members"); got.code != 2 || !strings.Contains(got.err, "nowhere") {
		t.Errorf("the environment is not read: %+v", got)
	}
	if got := invoke(t.Context(), 0, map[string]string{"KVSCOUT_SCHEDULER": "127.0.0.1:1", "KVSCOUT_NATS_URL": "nats://user:secret@127.0.0.1:1"}, "", "doctor"); got.code != 1 ||
		!strings.Contains(got.out, "NATS: nats://127.0.0.1:1") || strings.Contains(got.out+got.err, "secret") {
		t.Errorf("NATS by the environment: %+v", got)
	}
	for _, ask := range []string{"", "-help", "help"} {
		got := invoke(t.Context(), 0, nil, "", strings.Fields(ask)...)
		for _, c := range commands() {
			if got.code != 0 || !strings.Contains(got.out, "\n  "+c.name+" ") {
				t.Errorf("%q does not list %s: %+v", ask, c.name, got)
			}
		}
	}
	for _, c := range commands() {
		got := invoke(t.Context(), 0, nil, "", c.name, "-help")
		if got.code != 0 || !strings.Contains(got.out, c.does) {
			t.Errorf("%s -help: %+v", c.name, got)
		}
	}
	if got := invoke(t.Context(), 0, nil, "", "-version"); got.code != 0 || !strings.HasPrefix(got.out, "kvscout ") {
		t.Errorf("%+v", got)
	}
}

// TestDocsListEveryFlag of every command; -update writes the tables.
func TestDocsListEveryFlag(t *testing.T) {
	const page = "../../../docs/CLI.md"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	row := func(f *flag.Flag) string {
		takes, usage := flag.UnquoteUsage(f)
		if f.DefValue != "" && f.DefValue != "false" && f.DefValue != "0" {
			usage += " (default " + f.DefValue + ")"
		}
		return fmt.Sprintf(" `-%s` | %s | %s |\n", f.Name, takes, strings.ReplaceAll(usage, "|", `\|`))
	}
	common, own := "| flag | takes | meaning |\n|---|---|---|\n", "| of | flag | takes | meaning |\n|---|---|---|---|\n"
	shared := flag.NewFlagSet("", flag.ContinueOnError)
	new(options).bind(shared)
	shared.VisitAll(func(f *flag.Flag) { common += "|" + row(f) })
	for _, c := range commands() {
		for _, f := range c.listed() {
			if shared.Lookup(f.Name) == nil {
				own += "| `" + c.name + "` |" + row(f)
			}
		}
	}
	want := string(text)
	for mark, table := range map[string]string{"<!-- flags -->\n": common, "<!-- own flags -->\n": own} {
		before, rest, ok := strings.Cut(want, mark)
		_, after, closed := strings.Cut(rest, "<!-- end -->\n")
		if !ok || !closed {
			t.Fatalf("%s has no table behind %s", page, mark)
		}
		want = before + mark + table + "<!-- end -->\n" + after
	}
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("%s (go test -update writes it anew): %s", page, diff)
	}
	for _, c := range commands() {
		if !strings.Contains(want, "`kvscout "+c.name) {
			t.Errorf("%s does not speak of %s", page, c.name)
		}
	}
}
