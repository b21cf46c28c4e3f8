package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/kvscout/kvscout/e2e/authority"
	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler"
)

// play is a real scheduler, with fake engines behind real agents.
type play struct {
	*stage.Stage
	t *testing.T
}

func open(t *testing.T, opt stage.Options) *play {
	t.Helper()
	s, err := stage.New(context.Background(), opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return &play{s, t}
}

// engine runs one.
func (p *play) engine(cfg fakevllm.Config) *fakevllm.Engine {
	p.t.Helper()
	cfg.Host, cfg.Speedup = loopback.Host(p.t), 10_000
	e, err := fakevllm.New(cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	p.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			p.t.Error(err)
		}
	})
	return e
}

// watched puts an agent beside an engine, and waits until its member is as far
// as it will come.
func (p *play) watched(e *fakevllm.Engine, pod string) *stage.Agent {
	p.t.Helper()
	a, err := p.Agent(stage.AgentOptions{Engine: e.URL(), Pod: pod})
	if err != nil {
		p.t.Fatal(err)
	}
	if err := p.Until(p.t.Context(), await.Patience, a.Members[0], "settle", func(m *api.MemberState) bool {
		return len(m.GetModels()) > 0 && stage.Settled(m)
	}); err != nil {
		p.t.Fatal(err)
	}
	return a
}

func (p *play) run(args ...string) shown {
	p.t.Helper()
	return invoke(p.t.Context(), 0, map[string]string{"KVSCOUT_SCHEDULER": p.GRPC}, "", args...)
}

// serveOne has an engine serve a prompt.
func serveOne(t *testing.T, e *fakevllm.Engine, prompt string) {
	t.Helper()
	text, _ := json.Marshal(map[string]any{"model": "fake", "prompt": prompt, "max_tokens": 1})
	answer, err := http.Post(e.URL()+"/v1/completions", "application/json", bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if _, err := io.Copy(io.Discard, answer.Body); err != nil || answer.StatusCode != http.StatusOK {
		t.Fatal(answer.Status, err)
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestCommandsAskARealScheduler(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{Change: func(c *scheduler.Config) { c.Version = "v0.9.0" }})
	holder := p.engine(fakevllm.Config{})
	p.watched(holder, "holder")
	p.watched(p.engine(fakevllm.Config{}), "other")

	got := p.run("members")
	lines := strings.Split(strings.TrimSpace(got.out), "\n")
	if got.code != 0 || len(lines) != 3 || !strings.Contains(lines[1], "default_holder_0") || !strings.Contains(lines[1], "EXACT") || !strings.Contains(lines[2], "default_other_0") {
		t.Errorf("%+v", got)
	}
	var list api.ListMembersResponse
	got = p.run("members", "-o", "json")
	if err := protojson.Unmarshal([]byte(got.out), &list); err != nil || len(list.GetMembers()) != 2 ||
		list.GetScheduler().GetRelease() != "v0.9.0" || list.GetScheduler().GetPool() != "default" || !list.GetScheduler().GetNatsConnected() {
		t.Errorf("%v: %s", err, got.out)
	}
	if got := p.run("members", "-model", "nobody's"); got.code != 0 || got.out != "" || !strings.Contains(got.err, `no members of model "nobody's"`) {
		t.Errorf("%+v", got)
	}

	// What one engine holds is explained, by the cost of the others.
	prompt := strings.Repeat("the quick brown fox ", 40)
	serveOne(t, holder, prompt)
	file := filepath.Join(t.TempDir(), "body.json")
	body, _ := json.Marshal(map[string]any{"model": "fake", "prompt": prompt})
	if err := os.WriteFile(file, body, 0o600); err != nil {
		t.Fatal(err)
	}
	var e api.ExplainResponse
	await.True(t, "the holder is explained", func() bool {
		got = p.run("explain", "-o", "json", "-compare", "least-requests", file)
		if got.code != 0 {
			t.Fatalf("%+v", got)
		}
		if err := protojson.Unmarshal([]byte(got.out), &e); err != nil {
			t.Fatal(err)
		}
		return e.GetRanking().GetCandidates()[0].GetCachedTokens().GetGpu() > 0
	})
	best := e.GetRanking().GetCandidates()[0]
	if best.GetMember().GetPod() != "holder" || e.GetCounterfactual().GetPolicy() != "least-requests" || len(e.GetRanking().GetCandidates()) != 2 {
		t.Errorf("%v", &e)
	}
	got = p.run("explain", file)
	row := strings.Fields(strings.Split(got.out, "\n")[1])
	if got.code != 0 || row[1] != "default_holder_0" || row[3] != fmt.Sprint(best.GetCachedTokens().GetGpu()) {
		t.Errorf("%+v", got)
	}
	got = p.run("score", "-max", "1", file)
	if lines := strings.Split(got.out, "\n"); got.code != 0 || !strings.Contains(lines[1], "default_holder_0") || strings.Contains(got.out, "default_other_0  ") {
		t.Errorf("%+v", got)
	}

	// A decision is found by the request's name.
	pick, err := p.Client.Pick(t.Context(), &api.PickRequest{Request: &api.Request{RequestId: "one", Prompt: &api.Prompt{Form: &api.Prompt_OpenaiBody{OpenaiBody: body}}}})
	if err != nil {
		t.Fatal(err)
	}
	if got := p.run("explain", "-request-id", "one"); got.code != 0 || !strings.Contains(got.out, "decision "+pick.GetDecisionId()) || !strings.Contains(got.out, "default_holder_0") {
		t.Errorf("%+v", got)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"explain", "-request-id", "two"}, "remembered for ten minutes"},
		{[]string{"explain", "-model", "gpt", file}, `served are "fake"`},
		{[]string{"score", "-policy", "gut", file}, "docs/POLICIES.md"},
	} {
		if got := p.run(c.args...); got.code != 1 || got.out != "" || !strings.Contains(got.err, c.want) || strings.Count(got.err, "\n") != 1 {
			t.Errorf("%v: %+v", c.args, got)
		}
	}
}

// TestWatchTellsWhatChanges runs until the test ends it.
func TestWatchTellsWhatChanges(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{Change: func(c *scheduler.Config) { c.Grace = time.Second }})
	p.watched(p.engine(fakevllm.Config{}), "first")
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	ended := make(chan int, 1)
	go func() {
		code := Run(ctx, []string{"watch", "-o", "json"}, func(name string) string { return map[string]string{"KVSCOUT_SCHEDULER": p.GRPC}[name] },
			IO{In: strings.NewReader(""), Out: w, Err: w})
		_ = w.Close()
		ended <- code
	}()
	var mu sync.Mutex
	var seen []change
	read := make(chan struct{})
	go func() {
		defer close(read)
		for lines := bufio.NewScanner(r); lines.Scan(); {
			var c change
			if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
				t.Errorf("%s: %v", lines.Text(), err)
			}
			mu.Lock()
			seen = append(seen, c)
			mu.Unlock()
		}
	}()
	tells := func(member, what, to string) {
		t.Helper()
		await.True(t, fmt.Sprint("watch tells ", member, what, to), func() bool {
			mu.Lock()
			defer mu.Unlock()
			return slices.ContainsFunc(seen, func(c change) bool { return c.Member == member && c.What == what && (to == "" || c.To == to) })
		})
	}
	tells("default_first_0", "there", "EXACT")
	second := p.watched(p.engine(fakevllm.Config{}), "second")
	tells("default_second_0", "joined", "")
	second.Stop()
	tells("default_second_0", "left", "")
	p.StopScheduler()
	tells("", "scheduler", "away")
	if err := p.StartScheduler(); err != nil {
		t.Fatal(err)
	}
	tells("", "scheduler", "there")
	cancel()
	if code := <-ended; code != 0 {
		t.Errorf("status %d", code)
	}
	<-read
}

func TestTransportAndRights(t *testing.T) {
	t.Parallel()
	ours, theirs := authority.New(t), authority.New(t)
	server, caller, stranger := ours.Issue(t, time.Now().Add(time.Hour)), ours.Issue(t, time.Now().Add(time.Hour)), theirs.Issue(t, time.Now().Add(time.Hour))
	start := func(change func(*scheduler.Config)) string {
		t.Helper()
		cfg := scheduler.Config{GRPCAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", NATSAddress: "127.0.0.1:0", ReadyWait: time.Millisecond}
		change(&cfg)
		s, err := scheduler.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		return s.Addrs().GRPC
	}
	plain := start(func(*scheduler.Config) {})
	open := start(func(c *scheduler.Config) { c.GRPCTLS = scheduler.TLS{Cert: server.Cert, Key: server.Key} })
	mutual := start(func(c *scheduler.Config) { c.GRPCTLS = scheduler.TLS{Cert: server.Cert, Key: server.Key, CA: ours.CA} })
	closed := start(func(c *scheduler.Config) {
		c.GRPCTLS, c.Operators = scheduler.TLS{Cert: server.Cert, Key: server.Key, CA: ours.CA}, "operator"
	})
	trust, shows := []string{"-tls-ca", ours.CA}, []string{"-tls-cert", caller.Cert, "-tls-key", caller.Key}
	and := slices.Concat[[]string]
	for name, c := range map[string]struct {
		address string
		flags   []string
		wrong   string // empty: it is answered
	}{
		"plain":                         {plain, nil, ""},
		"TLS":                           {open, trust, ""},
		"TLS by another name":           {strings.Replace(open, "127.0.0.1", loopback.Host(t), 1), trust, "nobody listens"},
		"both sides have certificates":  {mutual, and(trust, shows), ""},
		"TLS where there is none":       {plain, trust, "does not speak TLS"},
		"none where there is TLS":       {open, nil, "speaks TLS: say by -tls-ca"},
		"none where certificates count": {mutual, nil, "speaks TLS: say by -tls-ca"},
		"the system's CAs":              {open, []string{"-tls"}, "signed by no CA of the system"},
		"another CA":                    {open, []string{"-tls-ca", theirs.CA}, "is not signed by a CA in " + theirs.CA},
		"another name":                  {open, and(trust, []string{"-tls-name", "example.com"}), "is for another name"},
		"no certificate of ours":        {mutual, trust, "wants a certificate of callers"},
		"a certificate of a stranger":   {mutual, and(trust, []string{"-tls-cert", stranger.Cert, "-tls-key", stranger.Key}), "does not take the certificate " + stranger.Cert},
		"no operator":                   {closed, and(trust, shows), "must name one of localhost, which " + caller.Cert},
		"no CA in the file":             {open, []string{"-tls-ca", caller.Key}, "there is no certificate in it"},
		"no file":                       {open, []string{"-tls-ca", "/nope"}, "/nope"},
	} {
		t.Run(name, func(t *testing.T) {
			got := invoke(t.Context(), 0, nil, "", append([]string{"members", "-scheduler", c.address}, c.flags...)...)
			if c.wrong == "" {
				if got.code != 0 || !strings.Contains(got.err, "no members") { // a busy one may not be ready yet, and says so
					t.Errorf("%+v", got)
				}
				return
			}
			if got.code != 1 || got.out != "" || !strings.Contains(got.err, c.wrong) || strings.Count(got.err, "\n") != 1 {
				t.Errorf("want %q: %+v", c.wrong, got)
			}
			// Doctor finds the same, and goes on to its end.
			if got := invoke(t.Context(), 0, nil, "", append([]string{"doctor", "-scheduler", c.address}, c.flags...)...); got.code != 1 || !strings.Contains(got.out+got.err, c.wrong) {
				t.Errorf("doctor: want %q: %+v", c.wrong, got)
			}
		})
	}
	// Who is no operator may score.
	got := invoke(t.Context(), 0, nil, "[1]", and([]string{"score", "-scheduler", closed, "-model", "m"}, trust, shows)...)
	if got.code != 1 || !strings.Contains(got.err, "kvscout doctor") {
		t.Errorf("%+v", got)
	}
}

// diagnosis is what doctor says with -o json.
type diagnosis struct {
	OK       bool
	Findings []struct{ Level, About, Finding, Do string }
}

func (p *play) doctor(args ...string) (d diagnosis, code int) {
	p.t.Helper()
	got := p.run(append([]string{"doctor", "-o", "json"}, args...)...)
	if err := json.Unmarshal([]byte(got.out), &d); err != nil || got.err != "" {
		p.t.Fatalf("%v: %+v", err, got)
	}
	return d, got.code
}

// says tells whether there is such a finding.
func (d *diagnosis) says(level, about, finding, do string) bool {
	return slices.ContainsFunc(d.Findings, func(f struct{ Level, About, Finding, Do string }) bool {
		return f.Level == level && strings.HasPrefix(f.About, about) && strings.Contains(f.Finding, finding) && strings.Contains(f.Do, do)
	})
}

func TestDoctorFindsEachFault(t *testing.T) {
	t.Parallel()
	nats := broker.New(t, nil)
	p := open(t, stage.Options{NATS: nats.URL()})
	if d, code := p.doctor(); code != 1 || !d.says("mend", "members", "there are none", "start an agent") {
		t.Errorf("an empty fleet: %d %+v", code, d)
	}
	good := p.watched(p.engine(fakevllm.Config{}), "good")
	pages := []string{good.Admin()}
	seen := func() string { return strings.Join(pages, ",") }
	await.True(t, "all are believed", func() bool {
		d, code := p.doctor("-agents", seen())
		return code == 0 && d.OK
	})
	if d, code := p.doctor("-agents", seen(), "-nats-url", nats.URL(), "-probe", "-members", "1"); code != 0 || !d.OK ||
		!d.says("ok", "NATS", "answers", "") || !d.says("ok", "scheduler", "ready", "") || !d.says("ok", "members", "1 of 1", "") || !d.says("ok", "agents", "1 say", "") ||
		!d.says("ok", "engines", "names cached tokens", "") {
		t.Errorf("nothing is wrong: %d %+v", code, d)
	}
	fault := func(name string, want func(d *diagnosis) bool, args ...string) {
		t.Helper()
		if d, code := p.doctor(args...); code != 1 || d.OK || !want(&d) {
			t.Errorf("%s: status %d, %+v", name, code, d)
		}
	}
	fault("one is missing", func(d *diagnosis) bool { return d.says("mend", "members", "there are 1 of 2", "") }, "-members", "2")

	// Clocks, and what is no agent at all.
	late := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Date", time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat))
		fmt.Fprint(w, `{"believed":true,"ranks":[{"member":"default_elsewhere_0"}]}`)
	}))
	defer late.Close()
	wrong := strings.TrimPrefix(late.URL, "http://")
	fault("a clock", func(d *diagnosis) bool { return d.says("mend", "clock", wrong+" is at least 60m behind", "NTP") }, "-agents", wrong)
	fault("another pool", func(d *diagnosis) bool {
		return d.says("mend", "agent "+wrong, "default_elsewhere_0 is not known to this scheduler", "-pool")
	}, "-agents", wrong)
	fault("no agent's page", func(d *diagnosis) bool { return d.says("mend", "agent "+p.Admin, "cannot be read", "") }, "-agents", p.Admin)

	// Engines.
	mute := p.watched(p.engine(fakevllm.Config{NoEvents: true, Version: "nightly"}), "mute")
	pages = append(pages, mute.Admin())
	fault("no events", func(d *diagnosis) bool {
		return d.says("mend", "member default_mute_0", "publishes no KV events", "--kv-events-config") && d.says("look", "member default_mute_0", `"nightly" is none`, "")
	})
	p.watched(p.engine(fakevllm.Config{NoPromptDetails: true, Version: "0.99.0"}), "silent-usage")
	fault("no cached tokens in usage", func(d *diagnosis) bool {
		return d.says("mend", "engine ", "does not name cached tokens", "--enable-prompt-tokens-details") && d.says("look", "member default_silent-usage_0", "newer than any", "")
	}, "-probe")
	p.watched(p.engine(fakevllm.Config{NoReplay: true, Version: "0.8.1"}), "forgetful")
	fault("no replay", func(d *diagnosis) bool {
		return d.says("look", "member default_forgetful_0", "no replay", "replay_endpoint") && d.says("look", "member default_forgetful_0", "older than any", "")
	})

	// NATS goes, and an agent after it.
	nats.Stop()
	await.True(t, "the scheduler has lost NATS", func() bool {
		m, err := p.Operator.ListMembers(t.Context(), &api.ListMembersRequest{})
		return err == nil && !m.GetScheduler().GetNatsConnected()
	})
	fault("no NATS", func(d *diagnosis) bool {
		return d.says("mend", "NATS", "connection refused", "start the server") && d.says("mend", "scheduler", "NATS is not connected", "-nats-url") &&
			d.says("mend", "agent "+good.Admin(), "NATS", "-nats-url") // not connected, or why not
	}, "-nats-url", nats.URL(), "-agents", seen())
	nats.Start()
	await.True(t, "the scheduler is back", func() bool {
		d, _ := p.doctor("-agents", seen())
		return d.says("ok", "members", "", "") && d.says("ok", "scheduler", "", "") && !d.says("mend", "agent", "", "")
	})
	good.Stop()
	p.StopScheduler()
	fault("no scheduler", func(d *diagnosis) bool { return d.says("mend", "scheduler", "nobody listens", "") })
}

// TestDoctorFindsAnAgentThatDied: it could not say goodbye.
func TestDoctorFindsAnAgentThatDied(t *testing.T) {
	t.Parallel()
	s := &still{fleet: fleet()}
	env := s.serve(t)
	s.fleet.Scheduler.TimeMs = float64(time.Now().Add(time.Hour).UnixMilli())
	s.fleet.GetMembers()[0].AgentRelease = "v0.0.9"
	s.fleet.GetMembers()[0].ReportedRequests, s.fleet.GetMembers()[0].PredictedCachedTokens, s.fleet.GetMembers()[0].ReportedCachedTokens = 1000, 5000, 4000
	s.fleet.GetMembers()[1].Warning = "another member has this address"
	got := invoke(t.Context(), 0, env, "", "doctor", "-o", "json", "-agents", "127.0.0.1:1")
	var d diagnosis
	if err := json.Unmarshal([]byte(got.out), &d); err != nil || got.code != 1 {
		t.Fatalf("%+v", got)
	}
	for _, want := range [][4]string{
		{"mend", "member " + s.fleet.GetMembers()[4].GetMember().GetId(), "sent nothing for 4.0s", "see whether the agent runs"},
		{"mend", "member " + s.fleet.GetMembers()[5].GetMember().GetId(), "callers reported failures", "log"},
		{"mend", "member " + s.fleet.GetMembers()[1].GetMember().GetId(), "another member has this address", "-address"},
		{"mend", "clock", "that of scheduler is at least 60m ahead of", "NTP"},
		{"mend", "agent 127.0.0.1:1", "connection refused", "-admin-address"},
		{"look", "versions", "release v0.1.0, agents are not: 1 of v0.0.9", "docs/VERSIONS.md"},
		{"look", "reports", "1000 requests found 4000 tokens in caches, 5000 were promised", ""},
	} {
		if !d.says(want[0], want[1], want[2], want[3]) {
			t.Errorf("it does not say %q: %+v", want, d.Findings)
		}
	}
	s.fleet.Ready, s.fleet.Scheduler.Readiness = false, "waiting for members to become exact"
	if got := invoke(t.Context(), 0, env, "", "doctor"); !strings.Contains(got.out, "is not ready: waiting for members") {
		t.Errorf("%+v", got)
	}
	s.fleet.Scheduler = nil
	if got := invoke(t.Context(), 0, env, "", "doctor"); !strings.Contains(got.out, "older release") {
		t.Errorf("%+v", got)
	}
}

// What doctor says of reasons must stand in the page about them.
func TestCuresAreOfReasonsThatExist(t *testing.T) {
	page, err := os.ReadFile("../../../docs/OPERATIONS.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cures {
		if !bytes.Contains(page, []byte(c.has)) {
			t.Errorf("docs/OPERATIONS.md knows no reason with %q", c.has)
		}
	}
}

func TestJudgedReleasesAreThoseOfThePage(t *testing.T) {
	files, err := filepath.Glob("../../../docs/compatibility/*.json")
	if err != nil || len(files) < 5 {
		t.Fatal(files, err)
	}
	var low, high []int
	for _, f := range files {
		v, ok := numbers(strings.TrimSuffix(filepath.Base(f), ".json"))
		if !ok {
			t.Fatal(f)
		}
		if low == nil || slices.Compare(v, low) < 0 {
			low = v
		}
		if slices.Compare(v, high) > 0 {
			high = v
		}
	}
	if oldest, _ := numbers(oldestJudged); !slices.Equal(low, oldest) {
		t.Errorf("the oldest judged is %v", low)
	}
	if newest, _ := numbers(newestJudged); !slices.Equal(high, newest) {
		t.Errorf("the newest judged is %v", high)
	}
	for version, want := range map[string]standing{
		"0.10.2": fine, "0.32.0": fine, "0.32.9": fine, "0.23.1rc1.dev5+gabc": fine, "v0.20.2": fine,
		"0.10.1": older, "0.9.2": older, "0.33.0": newer, "1.0.0": newer, "": unjudged, "dev": unjudged, "0.x.1": unjudged, "0.32": unjudged,
	} {
		if got := judged(version); got != want {
			t.Errorf("%q: %d, want %d", version, got, want)
		}
	}
}
