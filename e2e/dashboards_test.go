package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// dashboardQueries are the queries of all panels, by file and title, for ranges that
// Grafana would choose.
func dashboardQueries(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("../deploy/grafana/*.json")
	if err != nil || len(files) < 2 {
		t.Fatalf("%v: %v", files, err)
	}
	queries := make(map[string]string)
	for _, file := range files {
		var page struct {
			Panels []struct {
				Title   string
				Targets []struct{ RefID, Expr string }
			}
		}
		if err := json.Unmarshal([]byte(read(t, file)), &page); err != nil {
			t.Fatal(err)
		}
		for _, p := range page.Panels {
			for _, q := range p.Targets {
				queries[filepath.Base(file)+": "+p.Title+" "+q.RefID] = strings.NewReplacer("$__rate_interval", "15s", "$scheduler", ".*").Replace(q.Expr)
			}
		}
	}
	for _, m := range regexp.MustCompile(`(?m)record: (\S+)$`).FindAllStringSubmatch(read(t, "../deploy/recordings.yaml"), -1) {
		queries["recording "+m[1]] = m[1]
	}
	if len(queries) < 50 {
		t.Fatalf("%d queries", len(queries))
	}
	return queries
}

// prometheus scrapes the pages every second, with the rules of deploy, and gives
// the address of its API.
func (p *play) prometheus(program string, pages map[string][]string) string {
	p.t.Helper()
	folder := p.t.TempDir()
	config := "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files:\n"
	for _, file := range []string{"alerts.yaml", "recordings.yaml"} {
		path, err := filepath.Abs(filepath.Join("../deploy", file))
		if err != nil {
			p.t.Fatal(err)
		}
		config += "- " + path + "\n"
	}
	config += "scrape_configs:\n"
	for job, addresses := range pages {
		config += fmt.Sprintf("- {job_name: %s, static_configs: [{targets: [%s]}]}\n", job, strings.Join(addresses, ", "))
	}
	file := filepath.Join(folder, "prometheus.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		p.t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(folder, "log"))
	if err != nil {
		p.t.Fatal(err)
	}
	address := net.JoinHostPort(loopback.Host(p.t), "29090")
	ctx, cancel := context.WithCancel(context.Background())
	command := exec.CommandContext(ctx, program, "--config.file", file, "--storage.tsdb.path", filepath.Join(folder, "data"), "--web.listen-address", address)
	command.Stdout, command.Stderr = log, log
	if err := command.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() {
		cancel()
		_ = command.Wait() // it was killed
		_ = log.Close()
		if p.t.Failed() {
			p.t.Logf("prometheus: %s", read(p.t, log.Name()))
		}
	})
	p.until("Prometheus is ready", func() bool {
		answer, err := p.http.Get("http://" + address + "/-/ready")
		if err != nil {
			return false
		}
		_ = answer.Body.Close()
		return answer.StatusCode == 200
	})
	return address
}

// values are the numbers that a query gives now.
func (p *play) values(address, query string) (numbers []string) {
	p.t.Helper()
	_, text := p.get(address, "/api/v1/query?query="+url.QueryEscape(query))
	var answer struct {
		Status, Error string
		Data          struct{ Result []struct{ Value [2]any } }
	}
	if err := json.Unmarshal([]byte(text), &answer); err != nil || answer.Status != "success" {
		p.t.Fatalf("%s: %v: %.500s", query, err, text)
	}
	for _, r := range answer.Data.Result {
		if value := fmt.Sprint(r.Value[1]); value != "NaN" {
			numbers = append(numbers, value)
		}
	}
	return numbers
}

// TestPrometheusDashboardsHaveData runs every panel's query, and every recording
// rule, in a real Prometheus that scrapes a fleet under load, of which an engine
// is restarted and a member fails.
func TestPrometheusDashboardsHaveData(t *testing.T) {
	t.Parallel()
	program := prometheusProgram(t, "PROMETHEUS_BIN", "prometheus")
	p := open(t, stage.Options{})
	engines := []*engine{p.engine(fakevllm.Config{}).watched("one"), p.engine(fakevllm.Config{}).watched("two")}
	by := make(map[string]*engine)
	var agents []string
	for _, e := range engines {
		by[e.id()] = e
		agents = append(agents, e.agent.Admin())
	}
	address := p.prometheus(program, map[string][]string{"scheduler": {p.Admin}, "agent": agents})
	missing := dashboardQueries(t)
	shared := random(1, 640)
	for round := uint64(0); len(missing) > 0 || round < 100; round++ {
		if round == 40 {
			engines[0].restart()
		}
		q := shared.branch(320, round%7+2, 320)
		request := question(q)
		if round%10 == 9 {
			request = &api.Request{} // without a prompt: a fallback
		}
		answer := p.pick(request)
		report := &api.Report{DecisionId: answer.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FINISHED}
		if e := by[answer.GetRanking().GetCandidates()[0].GetMember().GetId()]; round%25 == 24 {
			report.Outcome = api.Outcome_OUTCOME_FAILED
		} else {
			report.PromptTokens, report.CachedTokens = proto.Uint32(uint32(len(q.tokens))), proto.Uint32(uint32(e.complete(q)))
		}
		if _, err := p.Client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{report}}); err != nil {
			t.Fatal(err)
		}
		if round%20 == 0 {
			for name, query := range missing {
				if len(p.values(address, query)) > 0 {
					delete(missing, name)
				}
			}
		}
		if round > uint64(patience/(50*time.Millisecond)) {
			for name, query := range missing {
				t.Errorf("%s has no data: %s", name, query)
			}
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	// What the page says is what was done: every booked token is used or lost.
	booked, err := p.Operator.GetBooks(t.Context(), &api.GetBooksRequest{})
	if err != nil {
		t.Fatal(err)
	}
	sum := booked.GetUsedTokens()
	for _, l := range booked.GetLost() {
		sum += l.GetTokens()
	}
	if sum != booked.GetBookedPromptTokens() || booked.GetUsedTokens() == 0 || booked.GetBookedRequests() < 20 {
		t.Errorf("the books do not balance: %v", booked)
	}
	t.Logf("%v", booked)
}
