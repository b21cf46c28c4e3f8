package e2e

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

var update = flag.Bool("update", false, "write the tables of docs/OPERATIONS.md anew")

const operations = "../docs/OPERATIONS.md"

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// write makes a file, and the folders that it is in.
func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestDocsListEveryFlag compares the tables of flags with what the commands say
// themselves; -update writes them.
func TestDocsListEveryFlag(t *testing.T) {
	entry := regexp.MustCompile(`(?m)^  -([a-z-]+)(?: ([^\n]+))?(?:\n    )?\t([^\n]+)$`)
	bin := programs(t, "./agent/cmd/kvscout-agent", "./scheduler/cmd/kvscout-scheduler")
	for _, name := range []string{"kvscout-agent", "kvscout-agent inject", "kvscout-agent webhook", "kvscout-scheduler"} {
		words := strings.Fields(name)
		help, err := exec.Command(filepath.Join(bin, words[0]), append(words[1:], "-help")...).CombinedOutput()
		if err != nil {
			t.Fatal(err)
		}
		var table strings.Builder
		table.WriteString("| flag | takes | meaning |\n|---|---|---|\n")
		flags := entry.FindAllStringSubmatch(string(help), -1)
		if len(flags) < 10 {
			t.Fatalf("%d flags in\n%s", len(flags), help)
		}
		for _, f := range flags {
			fmt.Fprintf(&table, "| `-%s` | %s | %s |\n", f[1], f[2], strings.ReplaceAll(f[3], "|", `\|`))
		}
		text := read(t, operations)
		begin, end := "<!-- flags of "+name+" -->\n", "<!-- end -->\n"
		before, rest, ok := strings.Cut(text, begin)
		got, after, closed := strings.Cut(rest, end)
		if !ok || !closed {
			t.Fatalf("%s has no table between %q and %q", operations, begin, end)
		}
		if got == table.String() {
			continue
		}
		if !*update {
			t.Errorf("%s: the flags of %s differ: go test ./e2e -run Docs -update", operations, name)
			continue
		}
		if err := os.WriteFile(operations, []byte(before+begin+table.String()+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDocsAndAlertsNameRealMetrics holds that every metric is explained, and
// that no page or rule speaks of one that does not exist.
func TestDocsAndAlertsNameRealMetrics(t *testing.T) {
	var metrics, attributes, spans []string
	for _, d := range regexp.MustCompile(`(?m)^\s*(Attr|Span)\w+\s*=\s*"(kvscout\.[a-z_.]+)"`).FindAllStringSubmatch(read(t, "../protocol/telemetry/names.go"), -1) {
		if d[1] == "Span" {
			spans = append(spans, d[2])
		} else {
			attributes = append(attributes, strings.ReplaceAll(d[2], ".", "_"))
		}
	}
	made := regexp.MustCompile(`"(kvscout\.(?:agent|scheduler)\.[a-z_.]+)"`)
	for _, pattern := range []string{"../agent/*.go", "../agent/internal/webhook/*.go", "../scheduler/*.go", "../scheduler/internal/observe/*.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			for _, m := range made.FindAllStringSubmatch(read(t, file), -1) {
				metrics = append(metrics, strings.ReplaceAll(m[1], ".", "_"))
			}
		}
	}
	if len(metrics) < 30 || len(attributes) < 5 {
		t.Fatalf("only %d metrics and %d attributes found", len(metrics), len(attributes))
	}
	// What the exporter appends: units, kinds, the series of histograms.
	exported := regexp.MustCompile(`^(_seconds|_milliseconds|_bytes)?(_total|_bucket|_sum|_count)?$`)
	named := make(map[string]bool)
	for _, page := range []string{operations, "../docs/RELIABILITY.md", "../deploy/alerts.yaml", "../deploy/recordings.yaml"} {
		for _, word := range regexp.MustCompile(`kvscout_[a-z_]+`).FindAllString(read(t, page), -1) {
			if slices.Contains(attributes, word) || strings.HasSuffix(word, "_") {
				continue
			}
			known := ""
			for _, m := range metrics {
				if rest, ok := strings.CutPrefix(word, m); ok && exported.MatchString(rest) && len(m) > len(known) {
					known = m
				}
			}
			if known == "" {
				t.Errorf("%s names %s, which nobody exports", page, word)
			}
			if page == operations {
				named[known] = true
			}
		}
	}
	for _, s := range spans {
		if !strings.Contains(read(t, operations), "`"+s+"`") {
			t.Errorf("%s does not explain the span %s", operations, s)
		}
	}
	for _, m := range metrics {
		if !named[m] {
			t.Errorf("%s does not explain %s", operations, m)
		}
	}
}

// TestDocsNameFieldsOfTheFleet holds the section on /v1/members against the message
// that the page shows.
func TestDocsNameFieldsOfTheFleet(t *testing.T) {
	_, section, _ := strings.Cut(read(t, operations), "\n## Reading /v1/members\n")
	section, _, _ = strings.Cut(section, "\n## ")
	known := map[string]bool{"members": true, "n": true, "c": true}
	for _, m := range []proto.Message{&api.MemberState{}, &api.Member{}, &api.CacheState{}, &api.Speed{}} {
		fields := m.ProtoReflect().Descriptor().Fields()
		for i := range fields.Len() {
			known[string(fields.Get(i).Name())] = true
		}
	}
	named := 0
	for _, code := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(section, -1) {
		if strings.Contains(code[1], "<") {
			continue // the form of a name
		}
		for _, word := range regexp.MustCompile(`[a-zA-Z_]+`).FindAllString(code[1], -1) {
			if named++; !known[word] {
				t.Errorf("%s speaks of %s, which /v1/members does not show", operations, word)
			}
		}
	}
	if named < 20 {
		t.Errorf("only %d names in the section", named)
	}
}

// TestDocsNameTestsThatExist holds that what is promised is tested.
func TestDocsNameTestsThatExist(t *testing.T) {
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`)
	tests := make(map[string]bool)
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range declared.FindAllSubmatch(text, -1) {
			tests[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range []string{operations, "../docs/RELIABILITY.md", "../docs/PEER-BUGS.md", "../docs/POLICIES.md", "../docs/VERSIONS.md"} {
		for _, m := range regexp.MustCompile("`((?:Test|Fuzz|Benchmark)\\w+)`").FindAllStringSubmatch(read(t, page), -1) {
			if !tests[m[1]] {
				t.Errorf("%s names %s, which does not exist", page, m[1])
			}
		}
	}
}

// TestEveryWarningIsExplained holds the table of log messages against
// what the programs can log at WARN and ERROR.
func TestEveryWarningIsExplained(t *testing.T) {
	logged := regexp.MustCompile(`(?:\.(?:Warn|Error)\(|logChange\(log, \w+, |(?:report|sayLocked|failedLocked)\(|Log\(ctx, level, )"([^"]+)"`)
	messages := make(map[string]string)
	for _, s := range sources(t) {
		if strings.HasPrefix(s.pkg, "e2e") || strings.Contains(s.pkg, "sim") || strings.HasPrefix(s.pkg, "protocol/pb") {
			continue
		}
		for _, m := range logged.FindAllStringSubmatch(s.text, -1) {
			messages[m[1]] = s.path
		}
	}
	if len(messages) < 40 {
		t.Fatalf("only %d messages found", len(messages))
	}
	_, table, _ := strings.Cut(read(t, operations), "<!-- log -->\n")
	table, _, ok := strings.Cut(table, "<!-- end of log -->")
	if !ok {
		t.Fatalf("%s has no table of log messages", operations)
	}
	explained := make(map[string]bool)
	for _, row := range regexp.MustCompile(`(?m)^\| (.+?) \| (?:WARN|ERROR) \| (?:both|agent|scheduler) \| .+ \|$`).FindAllStringSubmatch(table, -1) {
		explained[row[1]] = true
		if messages[row[1]] == "" {
			t.Errorf("%s explains %q, which nobody logs", operations, row[1])
		}
	}
	for m, path := range messages {
		if !explained[m] {
			t.Errorf("%s does not say what to do about %q of %s", operations, m, path)
		}
	}
}

// pages are all of the repository, by path from its top.
func pages(t *testing.T) map[string]string {
	t.Helper()
	found := make(map[string]string)
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != ".." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "out" || d.Name() == "bin" || d.Name() == "testdata") {
			return filepath.SkipDir
		}
		if strings.HasSuffix(path, ".md") {
			found[filepath.ToSlash(path[len("../"):])] = read(t, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(found) < 15 {
		t.Fatalf("only %d pages found", len(found))
	}
	return found
}

// anchors are the names of a page's headings, as GitHub makes them.
func anchors(page string) map[string]bool {
	names := make(map[string]bool)
	for _, h := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(page, -1) {
		name := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(h[1]), "")
		names[strings.ReplaceAll(name, " ", "-")] = true
	}
	return names
}

// TestDocsLinksLeadSomewhere follows every link to a page, a heading, a file or
// a folder of the repository.
func TestDocsLinksLeadSomewhere(t *testing.T) {
	all, links := pages(t), 0
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	for page, text := range all {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			links++
			path, anchor, _ := strings.Cut(m[1], "#")
			target := page
			if path != "" {
				target = filepath.ToSlash(filepath.Join(filepath.Dir(page), path))
			}
			if _, err := os.Stat(filepath.Join("..", target)); err != nil {
				t.Errorf("%s: the link %s leads nowhere", page, m[1])
			} else if anchor != "" && !anchors(all[target])[anchor] {
				t.Errorf("%s: %s has no heading for #%s", page, target, anchor)
			}
		}
	}
	if links < 50 {
		t.Fatalf("only %d links found", links)
	}
}

// TestDocsSayForWhomTheyAre in their first lines, and docs/README.md leads to all.
func TestDocsSayForWhomTheyAre(t *testing.T) {
	all := pages(t)
	for page, text := range all {
		name, ok := strings.CutPrefix(page, "docs/")
		if !ok || strings.Contains(name, "/") {
			continue
		}
		if lines := strings.SplitN(text, "\n", 4); len(lines) < 4 || !strings.HasPrefix(lines[0], "# ") || !strings.HasPrefix(lines[2], "For ") {
			t.Errorf("%s does not say in its first lines for whom it is", page)
		}
		if name != "README.md" && !strings.Contains(all["docs/README.md"], "("+name) {
			t.Errorf("docs/README.md does not lead to %s", name)
		}
	}
}
