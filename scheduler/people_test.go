package scheduler

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/authority"
)

// post is get by POST.
func post(t testing.TB, s *Scheduler, path, body string) (int, string) {
	t.Helper()
	return atAdmin(t, s, http.MethodPost, path, body)
}

const question = `{"request":{"model":"nobody's","prompt":{"tokens":{"ids":[1,2,3]}}}}`

// The admin address answers what the page asks, and nothing that changes anything.
func TestPeopleAreShownThePageAndWhatItAsks(t *testing.T) {
	s, _ := start(t, Config{})
	if code, text := get(t, s, "/"); code != http.StatusOK || !strings.Contains(text, "page/app.js") {
		t.Errorf("the page: %d %.100s", code, text)
	}
	if code, text := get(t, s, "/v1/decision?request_id=none"); code != http.StatusNotFound || !strings.Contains(text, "UNKNOWN_REQUEST") {
		t.Errorf("a decision that nobody made: %d %s", code, text)
	}
	if code, text := post(t, s, "/v1/explain", question); code == http.StatusOK || !strings.Contains(text, `"reason":"`) {
		t.Errorf("a question about nobody: %d %s", code, text)
	}
	for _, path := range []string{"/v1/pick", "/v1/report", "/v1/score", "/v1/members"} {
		if code, _ := post(t, s, path, "{}"); code != http.StatusNotFound && code != http.StatusMethodNotAllowed {
			t.Errorf("POST %s: %d", path, code)
		}
	}
	for _, path := range []string{"/healthz", "/metrics", "/config", "/v1/members", "/v1/decisions", "/v1/changes?max_changes=3", "/v1/history"} {
		if code, _ := get(t, s, path); code != http.StatusOK {
			t.Errorf("%s: %d", path, code)
		}
	}
}

// A watch outlives the time in which other answers must be written, and ends with
// the scheduler.
func TestPeopleWatchMembers(t *testing.T) {
	s, stop := start(t, Config{})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + s.Addrs().Admin + "/v1/members:watch?interval_ms=100")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	line, err := lines.ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	var first struct {
		Result struct{ Fleet struct{ Members []any } }
	}
	if err := json.Unmarshal(line, &first); err != nil || first.Result.Fleet.Members == nil {
		t.Fatalf("%v: %s", err, line)
	}
	begin := time.Now()
	if err := stop(); err != nil {
		t.Error(err)
	}
	if _, err := io.Copy(io.Discard, lines); err != nil {
		t.Errorf("the watch is cut off: %v", err)
	}
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("the stop took %v", took)
	}
}

// At the admin address nobody shows a certificate: where the API asks for one, or
// is not open to who can reach that address, only members are shown there.
func TestPeopleAreToldNoMoreThanCallers(t *testing.T) {
	ca := authority.New(t)
	pair := ca.Issue(t, time.Now().Add(time.Hour))
	for _, operators := range []string{"", "somebody"} {
		s, _ := start(t, Config{GRPCTLS: TLS{Cert: pair.Cert, Key: pair.Key, CA: ca.CA}, Operators: operators})
		for _, path := range []string{"/", "/v1/members", "/v1/changes", "/v1/history", "/v1/books"} {
			if code, text := get(t, s, path); code != http.StatusOK {
				t.Errorf("operators %q, %s: %d %s", operators, path, code, text)
			}
		}
		if code, text := get(t, s, "/v1/decision?request_id=none"); code != http.StatusForbidden || !strings.Contains(text, "NOT_AN_OPERATOR") {
			t.Errorf("operators %q, decision: %d %s", operators, code, text)
		}
		if code, text := get(t, s, "/v1/decisions"); code != http.StatusForbidden || !strings.Contains(text, "NOT_AN_OPERATOR") {
			t.Errorf("operators %q, decisions: %d %s", operators, code, text)
		}
		if code, text := post(t, s, "/v1/explain", question); code != http.StatusForbidden || !strings.Contains(text, "NOT_AN_OPERATOR") {
			t.Errorf("operators %q, explain: %d %s", operators, code, text)
		}
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Get("http://" + s.Addrs().Admin + "/v1/members:watch")
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatal(err, resp)
		}
		resp.Body.Close()
	}
	for _, c := range []struct {
		grpc, http, admin, ca string
		want                  bool
	}{
		{grpc: "127.0.0.1:1", admin: "127.0.0.1:2", want: true},
		{grpc: "127.0.0.1:1", admin: "127.0.0.1:2", ca: "ca.pem"},
		{grpc: "127.0.0.1:1", admin: "0.0.0.0:2"},
		{grpc: "0.0.0.0:1", admin: "0.0.0.0:2", want: true},
		{grpc: "127.0.0.1:1", http: "0.0.0.0:3", admin: ":2", want: true},
		{grpc: "0.0.0.0:1", admin: "0.0.0.0:2", ca: "ca.pem"},
	} {
		cfg := Config{GRPCAddress: c.grpc, HTTPAddress: c.http, AdminAddress: c.admin, GRPCTLS: TLS{CA: c.ca}}
		if got := cfg.openToPeople(); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
