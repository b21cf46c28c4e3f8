// Command thirdparty says what of others is in the programs that are released:
// their notices as a text, and the modules as an SPDX document.
//
//	thirdparty notices > THIRD-PARTY.txt
//	thirdparty sbom    > sbom.spdx.json
//
// It reads what Go's tools know: the packages that the programs import on
// Linux, go.sum, and the files of the modules' own folders. A module without a
// licence, or with one that it does not know, is an error.
package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// programs are what is released.
var programs = []string{"github.com/kvscout/kvscout/agent/cmd/kvscout-agent", "github.com/kvscout/kvscout/scheduler/cmd/kvscout-scheduler", "github.com/kvscout/kvscout/scheduler/cmd/kvscout"}

// module is one that packages of the programs come from.
type module struct {
	Path, Version, Dir string
	sum                string // of its content, as in go.sum
	licences           []string
	files              []file
}

type file struct{ name, text string }

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "thirdparty: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	if len(args) != 1 || args[0] != "notices" && args[0] != "sbom" {
		return errors.New("what to write: notices or sbom")
	}
	modules, err := list()
	if err != nil {
		return err
	}
	if args[0] == "notices" {
		return notices(out, modules)
	}
	version, commit := "unknown", time.Unix(0, 0)
	if text, err := exec.Command("git", "describe", "--tags", "--always", "--dirty").Output(); err == nil {
		version = strings.TrimSpace(string(text))
	}
	if text, err := exec.Command("git", "log", "-1", "--format=%cI").Output(); err == nil {
		if commit, err = time.Parse(time.RFC3339, strings.TrimSpace(string(text))); err != nil {
			return err
		}
	}
	return sbom(out, modules, version, commit)
}

// list finds the modules, by path.
func list() ([]module, error) {
	cmd := exec.Command("go", append([]string{"list", "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}}\t{{.Version}}\t{{.Dir}}{{end}}{{end}}"}, programs...)...)
	cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED=0")
	cmd.Stderr = os.Stderr
	text, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	sums, err := checksums()
	if err != nil {
		return nil, err
	}
	seen := make(map[string]bool)
	var modules []module
	for line := range strings.Lines(string(text)) {
		fields := strings.Split(strings.TrimSpace(line), "\t")
		if len(fields) != 3 || seen[fields[0]] {
			continue
		}
		m := module{Path: fields[0], Version: fields[1], Dir: fields[2]}
		seen[m.Path] = true
		m.sum = sums[m.Path+" "+m.Version]
		if m.sum == "" {
			return nil, fmt.Errorf("%s %s: not in go.sum", m.Path, m.Version)
		}
		if err := m.read(); err != nil {
			return nil, fmt.Errorf("%s %s: %w", m.Path, m.Version, err)
		}
		modules = append(modules, m)
	}
	slices.SortFunc(modules, func(a, b module) int { return strings.Compare(a.Path, b.Path) })
	return modules, nil
}

// checksums are those of go.sum, by path and version.
func checksums() (map[string]string, error) {
	path, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return nil, fmt.Errorf("go env: %w", err)
	}
	f, err := os.Open(filepath.Join(filepath.Dir(strings.TrimSpace(string(path))), "go.sum"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	sums := make(map[string]string)
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) != 3 {
			continue
		}
		sums[fields[0]+" "+fields[1]] = fields[2]
	}
	return sums, lines.Err()
}

var noticeFile = regexp.MustCompile(`(?i)^(licen[sc]e|copying|notice|patents)`)

// read takes the files of the module that its licence wants repeated.
func (m *module) read() error {
	entries, err := os.ReadDir(m.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() || !noticeFile.MatchString(e.Name()) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(m.Dir, e.Name()))
		if err != nil {
			return err
		}
		m.files = append(m.files, file{e.Name(), strings.ReplaceAll(string(text), "\r\n", "\n")})
		for _, id := range licencesOf(string(text)) {
			if !slices.Contains(m.licences, id) {
				m.licences = append(m.licences, id)
			}
		}
	}
	if len(m.licences) == 0 {
		return fmt.Errorf("no licence that is known in %s", m.Dir)
	}
	slices.Sort(m.licences)
	return nil
}

// sentences are by what a licence is known; the SPDX names of those that may be
// in the programs.
var sentences = []struct{ id, has string }{
	{"Apache-2.0", "apache license version 2.0"},
	{"MIT", "permission is hereby granted, free of charge, to any person obtaining a copy"},
	{"BSD-3-Clause", "redistributions in binary form must reproduce"},
	{"ISC", "permission to use, copy, modify, and/or distribute this software for any purpose with or without fee"},
	{"MPL-2.0", "mozilla public license version 2.0"},
}

func licencesOf(text string) (ids []string) {
	words := strings.Join(strings.Fields(strings.ToLower(text)), " ")
	words = strings.ReplaceAll(words, "license, version", "license version")
	for _, s := range sentences {
		if !strings.Contains(words, s.has) {
			continue
		}
		id := s.id
		if id == "BSD-3-Clause" && !strings.Contains(words, "endorse or promote products") {
			id = "BSD-2-Clause"
		}
		ids = append(ids, id)
	}
	return ids
}

func notices(out io.Writer, modules []module) error {
	w := bufio.NewWriter(out)
	fmt.Fprint(w, "What of others is in kvscout-agent and kvscout-scheduler, beside Go's standard library,\nand under which licences. Made by make notices; do not edit.\n\n")
	for _, m := range modules {
		fmt.Fprintf(w, "%s %s: %s\n", m.Path, m.Version, strings.Join(m.licences, ", "))
	}
	// Many have the same text, word for word.
	var texts []string
	holders := make(map[string][]string)
	for _, m := range modules {
		for _, f := range m.files {
			text := strings.TrimSpace(f.text)
			if holders[text] == nil {
				texts = append(texts, text)
			}
			holders[text] = append(holders[text], m.Path+" "+m.Version+", "+f.name)
		}
	}
	line := strings.Repeat("=", 80)
	for _, text := range texts {
		fmt.Fprintf(w, "\n%s\n%s\n%s\n\n%s\n", line, strings.Join(holders[text], "\n"), line, text)
	}
	return w.Flush()
}

// SPDX 2.3, as far as it is used.
type (
	document struct {
		Version       string         `json:"spdxVersion"`
		License       string         `json:"dataLicense"`
		ID            string         `json:"SPDXID"`
		Name          string         `json:"name"`
		Namespace     string         `json:"documentNamespace"`
		Creation      creation       `json:"creationInfo"`
		Packages      []pkg          `json:"packages"`
		Relationships []relationship `json:"relationships"`
	}
	creation struct {
		Created  string   `json:"created"`
		Creators []string `json:"creators"`
	}
	pkg struct {
		ID        string `json:"SPDXID"`
		Name      string `json:"name"`
		Version   string `json:"versionInfo"`
		Download  string `json:"downloadLocation"`
		Analyzed  bool   `json:"filesAnalyzed"`
		Concluded string `json:"licenseConcluded"`
		Declared  string `json:"licenseDeclared"`
		Copyright string `json:"copyrightText"`
		Source    string `json:"sourceInfo,omitempty"`
		Refs      []ref  `json:"externalRefs,omitempty"`
	}
	ref struct {
		Category string `json:"referenceCategory"`
		Type     string `json:"referenceType"`
		Locator  string `json:"referenceLocator"`
	}
	relationship struct {
		From string `json:"spdxElementId"`
		Type string `json:"relationshipType"`
		To   string `json:"relatedSpdxElement"`
	}
)

const none = "NOASSERTION"

// sbom writes the same bytes for the same commit.
func sbom(out io.Writer, modules []module, version string, commit time.Time) error {
	const self = "SPDXRef-kvscout"
	d := document{
		Version: "SPDX-2.3", License: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: "kvscout-" + version,
		Creation: creation{Created: commit.UTC().Format(time.RFC3339), Creators: []string{"Tool: kvscout-thirdparty"}},
		Packages: []pkg{{
			ID: self, Name: "github.com/kvscout/kvscout", Version: version, Download: none, Concluded: "Apache-2.0", Declared: "Apache-2.0", Copyright: none,
			Refs: []ref{{"PACKAGE-MANAGER", "purl", "pkg:golang/github.com/kvscout/kvscout@" + version}},
		}},
		Relationships: []relationship{{"SPDXRef-DOCUMENT", "DESCRIBES", self}},
	}
	unsafe := regexp.MustCompile(`[^A-Za-z0-9.-]`)
	for _, m := range modules {
		id := "SPDXRef-" + unsafe.ReplaceAllString(m.Path+"-"+m.Version, "-")
		licence := strings.Join(m.licences, " AND ")
		d.Packages = append(d.Packages, pkg{
			ID: id, Name: m.Path, Version: m.Version, Download: none,
			Concluded: licence, Declared: licence, Copyright: none,
			Source: "go.sum: " + m.sum,
			Refs:   []ref{{"PACKAGE-MANAGER", "purl", "pkg:golang/" + strings.ToLower(m.Path) + "@" + m.Version}},
		})
		d.Relationships = append(d.Relationships, relationship{self, "DEPENDS_ON", id})
	}
	content, err := json.Marshal(d.Packages)
	if err != nil {
		return err
	}
	d.Namespace = fmt.Sprintf("https://github.com/kvscout/kvscout/sbom/%s-%x", version, sha256.Sum256(content))
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(d)
}
