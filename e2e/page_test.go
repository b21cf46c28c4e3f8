package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// browser is a Chromium, and where the tools are that drive it.
func browser(t *testing.T) (program, modules string) {
	t.Helper()
	program, modules = os.Getenv("CHROMIUM"), os.Getenv("KVSCOUT_PAGE_MODULES")
	if program == "" {
		program = "chromium"
	}
	program, err := exec.LookPath(program)
	if err == nil && modules == "" {
		err = fmt.Errorf("KVSCOUT_PAGE_MODULES is not set")
	}
	if err == nil {
		_, err = exec.LookPath("node")
	}
	if err != nil {
		if os.Getenv("KVSCOUT_REQUIRE_PAGE") != "" {
			t.Fatal(err)
		}
		t.Skipf("no browser: %v: see make test-page", err)
	}
	return program, modules
}

// What a person sees, in a real browser, through a proxy that puts the scheduler
// under a path: two engines of which one has served, and one that tells no events.
func TestPage(t *testing.T) {
	program, modules := browser(t)
	p := open(t, stage.Options{})
	one, two := p.engine(fakevllm.Config{}).watched("pod-1"), p.engine(fakevllm.Config{}).watched("pod-2")
	p.engine(fakevllm.Config{NoEvents: true}).watched("pod-3")
	at := map[string]*engine{one.id(): one, two.id(): two}
	name := ""
	for i := range uint64(24) {
		q := random(1+i%4, 1600)
		if i < 6 { // share a beginning
			q = random(9, 800).branch(800, 20+i, 800)
		}
		name = fmt.Sprint("request-", i)
		r := q.request()
		r.Model, r.RequestId = model, name
		r.Candidates = []*api.MemberRef{{Ref: &api.MemberRef_MemberId{MemberId: one.id()}}, {Ref: &api.MemberRef_MemberId{MemberId: two.id()}}}
		d := p.pick(r)
		e := at[d.GetRanking().GetCandidates()[0].GetMember().GetId()]
		prompt, cached := e.serve("/v1/completions", 0, object{"model": model, "prompt": q.tokens, "max_tokens": 1})
		p.report(d.GetDecisionId(), prompt, cached)
	}
	lately, err := p.Operator.ListDecisions(t.Context(), &api.ListDecisionsRequest{})
	if err != nil || len(lately.GetDecisions()) == 0 {
		t.Fatal(err, lately)
	}
	nobody := open(t, stage.Options{})
	task, err := json.Marshal(map[string]string{
		"url": behind(t, p.Admin) + "/some/path/", "empty": "http://" + nobody.Admin + "/",
		"pictures": pictures(t), "request": name, "member": lately.GetDecisions()[0].GetRanking().GetCandidates()[0].GetMember().GetPod(), "suspect": "pod-3",
	})
	if err != nil {
		t.Fatal(err)
	}
	command := exec.CommandContext(t.Context(), "node", "page/drive.mjs", string(task))
	command.Env = append(os.Environ(), "CHROMIUM="+program, "KVSCOUT_PAGE_MODULES="+modules)
	said, err := command.CombinedOutput()
	t.Logf("%s", said)
	if err != nil {
		t.Fatal(err)
	}
}

func (p *play) report(decision string, prompt, cached int) {
	p.t.Helper()
	n, c, one := uint32(prompt), uint32(cached), uint32(1)
	answer, err := p.Client.Report(p.t.Context(), &api.ReportRequest{Reports: []*api.Report{{
		DecisionId: decision, Outcome: api.Outcome_OUTCOME_FINISHED, PromptTokens: &n, CachedTokens: &c, OutputTokens: &one,
	}}})
	if err != nil || answer.GetResults()[0].GetStatus() != api.ReportStatus_REPORT_STATUS_RECORDED {
		p.t.Fatal(err, answer)
	}
}

// pictures is where those of the page go.
func pictures(t *testing.T) string {
	t.Helper()
	folder, err := filepath.Abs("../out/page/pictures")
	if err != nil {
		t.Fatal(err)
	}
	return folder
}

// behind puts an address under the path /some/path of another one.
func behind(t *testing.T, address string) string {
	t.Helper()
	proxy := &httputil.ReverseProxy{FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(&url.URL{Scheme: "http", Host: address})
	}}
	server := httptest.NewServer(http.StripPrefix("/some/path", proxy))
	t.Cleanup(server.Close)
	return server.URL
}
