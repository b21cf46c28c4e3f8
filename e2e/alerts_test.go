package e2e

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	prommodel "github.com/prometheus/common/model"
	"go.yaml.in/yaml/v3"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// alert is one rule of deploy/alerts.yaml.
type alert struct {
	Alert, Expr, For string
	Labels           map[string]string
	Annotations      map[string]string
}

func alerts(t *testing.T) []alert {
	t.Helper()
	file, err := os.Open("../deploy/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var rules struct {
		Groups []struct {
			Name  string
			Rules []alert
		}
	}
	decoder := yaml.NewDecoder(file)
	decoder.KnownFields(true)
	if err := decoder.Decode(&rules); err != nil {
		t.Fatal(err)
	}
	var list []alert
	for _, g := range rules.Groups {
		list = append(list, g.Rules...)
	}
	if len(list) < 10 {
		t.Fatalf("%d alerts", len(list))
	}
	return list
}

// TestEveryAlertIsExplained holds the rules against the table of what to do.
func TestEveryAlertIsExplained(t *testing.T) {
	t.Parallel()
	_, table, _ := strings.Cut(read(t, operations), "\n## Alerts\n")
	table, _, _ = strings.Cut(table, "\n## ")
	explained := make(map[string]bool)
	for _, row := range regexp.MustCompile(`(?m)^\| (Kvscout\w+) \| (.+) \|$`).FindAllStringSubmatch(table, -1) {
		explained[row[1]] = true
	}
	ruled := make(map[string]bool)
	for _, a := range alerts(t) {
		if ruled[a.Alert] {
			t.Errorf("two rules are called %s", a.Alert)
		}
		ruled[a.Alert] = true
		if !explained[a.Alert] {
			t.Errorf("%s does not say what to do about %s", operations, a.Alert)
		}
		if a.Labels["severity"] == "" || a.Annotations["summary"] == "" {
			t.Errorf("%s has no severity or no summary", a.Alert)
		}
	}
	for name := range explained {
		if !ruled[name] {
			t.Errorf("%s explains %s, for which there is no rule", operations, name)
		}
	}
}

// selector is a metric in an expression, with what its labels must be.
type selector struct {
	metric string
	labels map[string][]string // any of these
}

var (
	// Words of expressions that are no metrics; with them, the labels that follow
	// in brackets.
	grouping = regexp.MustCompile(`\b(?:by|without|on|ignoring)\s*\([^)]*\)`)
	words    = regexp.MustCompile(`\b([a-z_]\w*)(\{[^}]*\})?(\s*\()?`)
	matcher  = regexp.MustCompile(`(\w+)(=~|=|!=|!~)"([^"]*)"`)
	quoted   = regexp.MustCompile(`\[[^\]]*\]`)
	operator = []string{"and", "or", "unless", "bool", "e6"}
)

// selectors of an expression: all words that are neither called nor operators.
func selectors(t *testing.T, expr string) (list []selector) {
	t.Helper()
	expr = quoted.ReplaceAllString(grouping.ReplaceAllString(expr, ""), "")
	for _, w := range words.FindAllStringSubmatch(expr, -1) {
		if w[3] != "" || slices.Contains(operator, w[1]) {
			continue
		}
		s := selector{metric: w[1], labels: make(map[string][]string)}
		for _, m := range matcher.FindAllStringSubmatch(w[2], -1) {
			if m[2] != "=" && m[2] != "=~" {
				t.Fatalf("%s: the test does not know %s", expr, m[2])
			}
			s.labels[m[1]] = strings.Split(m[3], "|")
		}
		list = append(list, s)
	}
	return list
}

// TestAlertsWatchWhatIsExported holds every expression against the pages of a
// scheduler and an agent: a metric, label or value that they never show would
// make a rule that never fires.
func TestAlertsWatchWhatIsExported(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	q := random(1, 160)
	e.complete(q)
	e.truth(patience, q)
	p.pick(question(q))
	p.pick(&api.Request{}) // without a prompt: a fallback

	exported := make(map[string][]map[string]string) // the labels of each series
	for _, admin := range []string{p.Admin, e.agent.Admin()} {
		parser := expfmt.NewTextParser(prommodel.UTF8Validation)
		families, err := parser.TextToMetricFamilies(strings.NewReader(scraped(t, admin, "text/plain")))
		if err != nil {
			t.Fatal(err)
		}
		for name, family := range families {
			for _, m := range family.GetMetric() {
				labels := make(map[string]string)
				for _, l := range m.GetLabel() {
					labels[l.GetName()] = l.GetValue()
				}
				names := []string{name}
				if m.GetHistogram() != nil {
					names = []string{name + "_bucket", name + "_sum", name + "_count"}
				}
				for _, n := range names {
					exported[n] = append(exported[n], labels)
				}
			}
		}
	}
	for _, a := range alerts(t) {
		list := selectors(t, a.Expr)
		if len(list) == 0 {
			t.Errorf("%s watches nothing: %s", a.Alert, a.Expr)
		}
		for _, s := range list {
			series, ok := exported[s.metric]
			if !ok {
				t.Errorf("%s: nobody exports %s", a.Alert, s.metric)
				continue
			}
			for label, values := range s.labels {
				for _, v := range values {
					if !slices.ContainsFunc(series, func(labels map[string]string) bool { return labels[label] == v }) {
						t.Errorf("%s: no %s has %s %q, but %v", a.Alert, s.metric, label, v, seen(series, label))
					}
				}
			}
		}
	}
}

// seen are the values of a label.
func seen(series []map[string]string, label string) []string {
	values := make(map[string]bool)
	for _, labels := range series {
		values[labels[label]] = true
	}
	return slices.Sorted(maps.Keys(values))
}
