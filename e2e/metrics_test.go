package e2e

import (
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
)

// TestMetricsAreAsPrometheusWants holds both pages, of programs that have work,
// against the linter behind promtool check metrics, and against the table of
// docs/OPERATIONS.md, which has every name as it is printed.
func TestMetricsAreAsPrometheusWants(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	for seed := range uint64(8) {
		q := random(seed, 160)
		e.complete(q)
		e.truth(patience, q)
		p.pick(question(q))
	}
	_, table, _ := strings.Cut(read(t, operations), "\n## Metrics\n")
	table, _, _ = strings.Cut(table, "\n## ")
	for name, admin := range map[string]string{"scheduler": p.Admin, "agent": e.agent.Admin()} {
		page := scraped(t, admin, "text/plain")
		problems, err := promlint.New(strings.NewReader(page)).Lint()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, problem := range problems {
			t.Errorf("%s: %s: %s", name, problem.Metric, problem.Text)
		}
		families := regexp.MustCompile(`(?m)^# TYPE (kvscout_\w+) `).FindAllStringSubmatch(page, -1)
		for _, f := range families {
			if !strings.Contains(table, "`"+f[1]+"`") {
				t.Errorf("%s does not explain %s of the %s by its name", operations, f[1], name)
			}
		}
		if len(families) < 20 {
			t.Errorf("%s: only %d metrics", name, len(families))
		}
		if lag := p.counted(admin, "kvscout_"+name+"_event_lag_seconds_count", ""); lag < 1 {
			t.Errorf("%s: the lag of events was measured %v times", name, lag)
		}
	}
}
