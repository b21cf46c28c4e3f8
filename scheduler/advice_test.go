package scheduler

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the page's advice.json anew")

// adviceFile is what the page knows of reasons.
const adviceFile = "internal/page/static/page/advice.json"

// advice is what to do about a reason. Is, anchored at its beginning, fits the
// reason's text, or the name of what tokens were lost to.
type advice struct {
	Is string `json:"is"`
	Do string `json:"do"`
}

// What the page advises is what the operator's tables say: advice.json is made of
// them.
func TestAdviceIsThatOfTheDocs(t *testing.T) {
	docs, err := os.ReadFile("../docs/OPERATIONS.md")
	if err != nil {
		t.Fatal(err)
	}
	var list []advice
	for _, title := range []string{"### Reasons that an agent gives", "### Reasons that a scheduler adds", "### What an answer says", "## Lost tokens"} {
		_, section, found := strings.Cut(string(docs), "\n"+title+"\n")
		if !found {
			t.Fatalf("no section %q", title)
		}
		section, _, _ = strings.Cut(section, "\n#")
		n := len(list)
		for line := range strings.Lines(section) {
			cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
			if !strings.HasPrefix(line, "| ") || len(cells) < 2 || strings.HasPrefix(cells[0], " reason") || strings.HasPrefix(cells[0], " fallback") || strings.HasPrefix(cells[0], " cause") {
				continue
			}
			do := links.ReplaceAllString(strings.TrimSpace(cells[len(cells)-1]), "$1")
			for reason := range strings.SplitSeq(strings.TrimSpace(cells[0]), "; ") {
				if reason == "..." { // and whatever else: says nothing
					continue
				}
				is := pattern(reason)
				if cause, found := strings.CutPrefix(reason, "`"); found {
					is = "LOSS_" + strings.ToUpper(strings.Trim(cause, "`"))
				}
				if _, err := regexp.Compile(is); err != nil {
					t.Errorf("%q: %v", reason, err)
				}
				list = append(list, advice{Is: is, Do: do})
			}
		}
		if len(list)-n < 8 {
			t.Errorf("%q: only %d reasons", title, len(list)-n)
		}
	}
	var want bytes.Buffer
	encoder := json.NewEncoder(&want)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", " ")
	if err := encoder.Encode(list); err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(adviceFile, want.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if have, err := os.ReadFile(adviceFile); !*update && (err != nil || !bytes.Equal(have, want.Bytes())) {
		t.Errorf("%s is not what docs/OPERATIONS.md says (%v): go test ./scheduler -run TestAdviceIsThatOfTheDocs -update", adviceFile, err)
	}
}

var (
	links = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	// What stands for something else in the tables: numbers, names, whatever.
	stands = regexp.MustCompile(`\\\.\\\.\\\.|\b(NAME|VERSION|N|M)\b`)
)

// pattern of a reason as the tables have it.
func pattern(reason string) string {
	return stands.ReplaceAllStringFunc(regexp.QuoteMeta(reason), func(s string) string {
		switch s {
		case "N", "M":
			return `\d+`
		case "NAME", "VERSION":
			return `\S+`
		}
		return ".*"
	})
}

// Reasons that were seen are found, and each by its own advice.
func TestReasonsFindTheAdviceOfTheDocs(t *testing.T) {
	text, err := os.ReadFile(adviceFile)
	if err != nil {
		t.Fatal(err)
	}
	var list []advice
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	for reason, part := range map[string]string{
		"the engine publishes no KV events":               "kv-events-config",
		"prefix caching is off in the engine":             "no-enable-prefix-caching",
		"3 blocks withheld: their content is not certain": "adapters without a name",
		"just announced":                                  "a snapshot is being fetched",
		"the index is full":                               "index-memory",
		"no tokens in the request: load only":             "send tokens",
		"LOSS_GONE":                                       "fewer restarts",
		"sequence fell from 812 to 3":                     "incarnation",
		"4 of the last 32 requests found less in the engine's cache than was promised: the promise is less by 16 tokens": "cached_tokens",
	} {
		found := ""
		for _, a := range list {
			if regexp.MustCompile("^(?:" + a.Is + ")").MatchString(reason) {
				found = a.Do
				break
			}
		}
		if !strings.Contains(found, part) {
			t.Errorf("%q: advice %q lacks %q", reason, found, part)
		}
	}
}
