package e2e

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestPromisedTestsExist: docs/PEER-BUGS.md names all 26 mistakes, each with
// tests that there are, in the packages where it says.
func TestPromisedTestsExist(t *testing.T) {
	page, err := os.ReadFile("../docs/PEER-BUGS.md")
	if err != nil {
		t.Fatal(err)
	}
	declared := make(map[string]bool) // folder and name
	function := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	err = filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		folder, err := filepath.Abs(filepath.Dir(path))
		for _, m := range function.FindAllStringSubmatch(string(text), -1) {
			declared[filepath.Base(folder)+" "+m[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	numbers := 0
	named := regexp.MustCompile("`((?:Test|Fuzz)\\w+)`")
	for row := range strings.Lines(string(page)) {
		cells := strings.Split(row, "|")
		if len(cells) < 4 || strings.HasPrefix(cells[1], "---") {
			continue
		}
		held := cells[len(cells)-2]
		if regexp.MustCompile(`^ \d+ $`).MatchString(cells[1]) {
			numbers++
		}
		if strings.HasPrefix(held, " later: ") || strings.HasPrefix(held, " held by") {
			continue
		}
		if !named.MatchString(held) {
			t.Errorf("no test in: %s", row)
		}
		for part := range strings.SplitSeq(held, ";") {
			room, _, _ := strings.Cut(strings.TrimSpace(part), " ")
			for _, m := range named.FindAllStringSubmatch(part, -1) {
				if !declared[room+" "+m[1]] {
					t.Errorf("there is no %s in %s", m[1], room)
				}
			}
		}
	}
	if numbers != 26 {
		t.Errorf("%d mistakes have a number, 26 are known", numbers)
	}
}
