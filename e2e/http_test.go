package e2e

import (
	"bufio"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler"
)

// call is one of the API as HTTP/JSON, as a program without gRPC makes it. An
// error comes as its status and reason.
func (p *play) call(path string, header http.Header, request any, into proto.Message) (code int, reason string) {
	p.t.Helper()
	if header == nil {
		header = http.Header{}
	}
	header.Set("Content-Type", "application/json")
	code, text := p.post("http://"+p.HTTP+path, header, request)
	if code != http.StatusOK {
		var e struct{ Details []struct{ Reason string } }
		if err := json.Unmarshal(text, &e); err != nil || len(e.Details) == 0 {
			p.t.Fatalf("%s: %d %v: %.300s", path, code, err, text)
		}
		return code, e.Details[0].Reason
	}
	if err := protojson.Unmarshal(text, into); err != nil {
		p.t.Fatalf("%s: %v: %.300s", path, err, text)
	}
	return code, ""
}

type object = map[string]any

// What a proxy without gRPC does: it sends the client's body, sends the request to
// the first candidate, and reports. The promise is the engine's own count.
func TestHTTPPickAndReport(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	q := random(1, 160)
	body := object{"model": model, "prompt": q.tokens, "max_tokens": 1}
	text, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{0, 144} { // a prompt's last token is always computed
		e.truth(patience, q)
		var d api.PickResponse
		if code, reason := p.call("/v1/pick", nil, object{"request": object{"prompt": object{"openai_body": base64.StdEncoding.EncodeToString(text)}}}, &d); code != http.StatusOK {
			t.Fatal(code, reason)
		}
		first := d.GetRanking().GetCandidates()[0]
		if first.GetMember().GetId() != e.id() || int(first.GetCachedTokens().GetGpu()) != want {
			t.Errorf("picked %v, want %d tokens of %s", first, want, e.id())
		}
		_, cached := e.serve("/v1/completions", 0, body)
		if cached != want {
			t.Errorf("served %d cached tokens, promised %d", cached, want)
		}
		var r api.ReportResponse
		report := object{"decision_id": d.GetDecisionId(), "outcome": "OUTCOME_FINISHED", "prompt_tokens": 160, "cached_tokens": cached, "output_tokens": 1}
		if code, reason := p.call("/v1/report", nil, object{"reports": []object{report}}, &r); code != http.StatusOK || r.GetResults()[0].GetStatus() != api.ReportStatus_REPORT_STATUS_RECORDED {
			t.Fatal(code, reason, &r)
		}
	}
	if m := p.member(e.id()); m.GetReportedRequests() != 2 || m.GetReportedCachedTokens() != 144 || m.GetReservedRequests() != 0 {
		t.Errorf("%v", m)
	}
	// The same as over gRPC, number for number.
	var ranking api.ScoreResponse
	if code, reason := p.call("/v1/score", nil, object{"request": object{"model": model, "prompt": object{"tokens": object{"ids": q.tokens}}}}, &ranking); code != http.StatusOK {
		t.Fatal(code, reason)
	}
	other := p.score(q.request()).GetCandidates()[0]
	if got := ranking.GetRanking().GetCandidates()[0]; !proto.Equal(got.GetCachedTokens(), other.GetCachedTokens()) || got.GetMember().GetId() != other.GetMember().GetId() {
		t.Errorf("HTTP %v, gRPC %v", got, other)
	}
	var fleet api.ListMembersResponse
	_, page := p.get(p.HTTP, "/v1/members?model="+model)
	if err := protojson.Unmarshal([]byte(page), &fleet); err != nil || len(fleet.GetMembers()) != 1 {
		t.Errorf("%v %v", err, &fleet)
	}
}

func TestHTTPErrorsAreThoseOfTheAPI(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	p.engine(fakevllm.Config{}).watched("pod")
	p.ready()
	ask := func(fields object) (int, string) {
		fields["request_id"] = fmt.Sprint(len(fields), fields["model"], fields["policy"])
		return p.call("/v1/pick", nil, object{"request": fields}, &api.PickResponse{})
	}
	for _, c := range []struct {
		request object
		code    int
		reason  string
	}{
		{object{"model": "nobody's"}, 404, "UNKNOWN_MODEL"},
		{object{"model": model, "policy": "none"}, 400, "UNKNOWN_POLICY"},
		{object{"model": model, "exclude": []object{{"pod": "pod"}}}, 400, "EXCLUDED"},
		{object{}, 400, "INVALID_REQUEST"},
	} {
		if code, reason := ask(c.request); code != c.code || reason != c.reason {
			t.Errorf("%v: %d %s, want %d %s", c.request, code, reason, c.code, c.reason)
		}
	}
	if n := p.counted(p.Admin, "http_server_request_duration_seconds_count", `http_response_status_code="404"`); n != 1 {
		t.Errorf("%v requests counted as 404", n)
	}
	if n := p.counted(p.Admin, "rpc_server_call_duration_seconds_count", `rpc_response_status_code="NOT_FOUND"`); n != 1 {
		t.Errorf("%v calls counted as NOT_FOUND", n)
	}
}

// The page's commands do what it says, with curl as people have it.
func TestHTTPDocsCommands(t *testing.T) {
	t.Parallel()
	if out, err := exec.Command("curl", "--json", "{}", "--version").CombinedOutput(); err != nil {
		t.Skipf("no curl that knows --json: %v %s", err, out)
	}
	_, page, _ := strings.Cut(read(t, "../docs/API.md"), "## Over HTTP/JSON\n")
	_, commands, _ := strings.Cut(page, "```\n")
	commands, _, _ = strings.Cut(commands, "```")
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	var d api.PickResponse
	var r api.ReportResponse
	var fleet api.ListMembersResponse
	lines := strings.SplitAfter(commands, "\n")
	for _, c := range []struct {
		script string
		into   proto.Message
	}{{lines[0] + lines[1], &d}, {lines[2], &r}, {lines[3], &fleet}} {
		script := strings.NewReplacer("127.0.0.1:8080", p.HTTP, "MODEL", model, "DECISION", d.GetDecisionId()).Replace(c.script)
		out, err := exec.CommandContext(t.Context(), "sh", "-c", script).Output()
		if err != nil {
			t.Fatalf("%s: %v", script, err)
		}
		if err := protojson.Unmarshal(out, c.into); err != nil {
			t.Fatalf("%s: %v: %s", script, err, out)
		}
	}
	if got := d.GetRanking().GetCandidates()[0].GetMember().GetId(); got != e.id() || len(fleet.GetMembers()) != 1 ||
		r.GetResults()[0].GetStatus() != api.ReportStatus_REPORT_STATUS_RECORDED {
		t.Errorf("%v\n%v\n%v", &d, &r, &fleet)
	}
}

// raw sends bytes and gives the first line of what comes back; empty: hung up.
func raw(t *testing.T, address string, write func(net.Conn)) string {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	write(conn)
	line, _ := bufio.NewReader(conn).ReadString('\n')
	return strings.TrimSpace(line)
}

// Whatever comes in is answered or hung up on, takes no memory that stays, and
// others are served meanwhile.
func TestHTTPHostileRequests(t *testing.T) {
	p := open(t, stage.Options{})
	p.engine(fakevllm.Config{}).watched("pod")
	const head = "POST /v1/pick HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
	before := heap()
	for name, c := range map[string]struct {
		write func(net.Conn)
		want  string
	}{
		"not HTTP": {func(c net.Conn) { fmt.Fprint(c, "\x16\x03\x01\x00\x05hello\r\n\r\n") }, "HTTP/1.1 400 Bad Request"},
		"100 MB claimed": {func(c net.Conn) {
			fmt.Fprint(c, head+"Content-Length: 104857600\r\n\r\n{")
			c.(*net.TCPConn).CloseWrite()
		}, "HTTP/1.1 400 Bad Request"},
		"100 MB sent": {func(c net.Conn) {
			fmt.Fprint(c, head+"Content-Length: 104857600\r\n\r\n")
			chunk := []byte(strings.Repeat(" ", 1<<20))
			for range 100 {
				if _, err := c.Write(chunk); err != nil {
					return // told already
				}
			}
		}, "HTTP/1.1 413 Request Entity Too Large"},
		"endless chunks": {func(c net.Conn) {
			fmt.Fprint(c, head+"Transfer-Encoding: chunked\r\n\r\n")
			chunk := "100000\r\n" + strings.Repeat(" ", 1<<20) + "\r\n"
			for range 100 {
				if _, err := fmt.Fprint(c, chunk); err != nil {
					return
				}
			}
		}, "HTTP/1.1 413 Request Entity Too Large"},
		"endless headers": {func(c net.Conn) {
			fmt.Fprint(c, "GET /v1/members HTTP/1.1\r\n")
			for range 1000 {
				if _, err := fmt.Fprint(c, "X: "+strings.Repeat("x", 1000)+"\r\n"); err != nil {
					return
				}
			}
		}, "HTTP/1.1 431 Request Header Fields Too Large"},
		"cut off": {func(c net.Conn) {
			fmt.Fprint(c, head+"Content-Length: 1000\r\n\r\n{\"request\"")
			c.(*net.TCPConn).CloseWrite()
		}, "HTTP/1.1 400 Bad Request"},
	} {
		// A connection that is closed with bytes unread may lose its answer.
		if got := raw(t, p.HTTP, c.write); got != c.want && (got != "" || !strings.Contains(c.want, "Large")) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	var many sync.WaitGroup
	for range 50 {
		many.Go(func() {
			conn, err := net.Dial("tcp", p.HTTP)
			if err != nil {
				return
			}
			fmt.Fprint(conn, head+"Content-Length: 16000000\r\n\r\n[[[[")
			conn.Close()
		})
	}
	many.Wait()
	if code, reason := p.call("/v1/pick", nil, object{"request": object{"model": model}}, &api.PickResponse{}); code != http.StatusOK {
		t.Error(code, reason)
	}
	p.until("the memory is free again", func() bool { return heap()-before < 8<<20 })
}

// A stop ends a watch, and answers what is under way.
func TestHTTPStopsInGoodOrder(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{Change: func(c *scheduler.Config) { c.StopWait = patience }})
	p.engine(fakevllm.Config{}).watched("pod")
	answer, err := p.http.Get("http://" + p.HTTP + "/v1/members:watch")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	lines := bufio.NewScanner(answer.Body)
	lines.Buffer(nil, 1<<20)
	if !lines.Scan() || !strings.Contains(lines.Text(), `"result"`) {
		t.Fatalf("%s %v", lines.Text(), lines.Err())
	}
	start := time.Now()
	p.StopScheduler()
	last := ""
	for lines.Scan() {
		last = lines.Text()
	}
	if !strings.Contains(last, `"STOPPING"`) || time.Since(start) > patience/2 {
		t.Errorf("the last line after %v: %s", time.Since(start), last)
	}
	if err := p.StartScheduler(); err != nil {
		t.Fatal(err)
	}
}

// A trace goes on through a call over HTTP as through one over gRPC.
func TestHTTPCallsAreSpans(t *testing.T) {
	r := collector(t)
	p := open(t, stage.Options{})
	p.engine(fakevllm.Config{}).watched("pod")
	header := http.Header{"Traceparent": {"00-" + callerTrace + "-" + callerSpan + "-01"}}
	if code, reason := p.call("/v1/pick", header, object{"request": object{"model": model}}, &api.PickResponse{}); code != http.StatusOK {
		t.Fatal(code, reason)
	}
	mine := func(s *tracepb.Span) bool { return hex.EncodeToString(s.GetTraceId()) == callerTrace }
	p.until("the spans arrive", func() bool {
		return slices.ContainsFunc(r.named("kvscout.scheduler.v1.Scheduler/Pick"), mine) && slices.ContainsFunc(r.named("kvscout.decision"), mine)
	})
}

func TestHTTPManyAtATime(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	p.engine(fakevllm.Config{}).watched("pod")
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 200}, Timeout: patience}
	defer client.CloseIdleConnections()
	var group sync.WaitGroup
	var mu sync.Mutex
	seen := make(map[string]bool)
	for i := range 200 {
		group.Go(func() {
			body := fmt.Sprintf(`{"request":{"model":%q,"request_id":"r%d"}}`, model, i)
			answer, err := client.Post("http://"+p.HTTP+"/v1/pick", "application/json", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			defer answer.Body.Close()
			text, _ := io.ReadAll(answer.Body)
			var d api.PickResponse
			if err := protojson.Unmarshal(text, &d); err != nil {
				t.Errorf("%v: %.200s", err, text)
			}
			mu.Lock()
			defer mu.Unlock()
			seen[d.GetDecisionId()] = true
		})
	}
	group.Wait()
	if len(seen) != 200 {
		t.Errorf("%d decisions", len(seen))
	}
}
