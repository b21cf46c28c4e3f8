package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The files are what the description says.
func TestDashboardsAreCurrent(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("../../..", folder, "*.json"))
	if err != nil || len(files) != len(dashboards) {
		t.Errorf("%d dashboards, %d files: %v", len(dashboards), len(files), err)
	}
	for i := range dashboards {
		d := &dashboards[i]
		got, err := os.ReadFile(filepath.Join("../../..", folder, d.uid+".json"))
		if err != nil || !bytes.Equal(got, d.json()) {
			t.Errorf("%s is out of step: go run ./e2e/cmd/grafana (%v)", d.uid, err)
		}
	}
}

// Each panel says what it shows and in what, and leads to a section that exists.
func TestPanelsAreExplained(t *testing.T) {
	text, err := os.ReadFile("../../../docs/OPERATIONS.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := make(map[string]bool)
	for _, m := range regexp.MustCompile(`(?m)^##+ (.+)$`).FindAllStringSubmatch(string(text), -1) {
		sections[strings.ToLower(strings.ReplaceAll(m[1], " ", "-"))] = true
	}
	seen := make(map[string]bool)
	for _, d := range dashboards {
		for _, r := range d.rows {
			if columns%len(r.panels) != 0 {
				t.Errorf("%s: %d panels do not fill the row %s", d.uid, len(r.panels), r.title)
			}
			for _, p := range r.panels {
				if !strings.HasSuffix(p.about, ".") || p.unit == "" || !sections[p.see] || len(p.queries) == 0 || seen[p.title] {
					t.Errorf("%s: %q: about %q, unit %q, section %q, %d queries", d.uid, p.title, p.about, p.unit, p.see, len(p.queries))
				}
				seen[p.title] = true
				for _, q := range p.queries {
					if q.legend == "" || p.number != (r.panels[0].number) || regexp.MustCompile(`kvscout_scheduler_\w+(\{[^$]|[^{\w])`).MatchString(q.expr) {
						t.Errorf("%s: %q: %s", d.uid, p.title, q.expr)
					}
				}
			}
		}
	}
}
