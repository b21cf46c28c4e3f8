package main

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestNoticesAreInStep with go.mod: what is in the repository is what make
// notices would write.
func TestNoticesAreInStep(t *testing.T) {
	var out bytes.Buffer
	if err := run([]string{"notices"}, &out); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("../../../THIRD-PARTY.txt")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, out.Bytes()) {
		t.Error("THIRD-PARTY.txt differs: run make notices")
	}
	if text := out.String(); !strings.Contains(text, "github.com/nats-io/nats.go ") || strings.Contains(text, "gonum.org") || strings.Contains(text, os.TempDir()) {
		t.Error("not the modules of the two programs")
	}
}

func TestSBOMNamesEveryModuleOnce(t *testing.T) {
	modules, err := list()
	if err != nil {
		t.Fatal(err)
	}
	var out, again bytes.Buffer
	commit := time.Unix(1, 0)
	for _, b := range []*bytes.Buffer{&out, &again} {
		if err := sbom(b, modules, "v1.2.3", commit); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(out.Bytes(), again.Bytes()) {
		t.Error("the same twice differs")
	}
	var d document
	if err := json.Unmarshal(out.Bytes(), &d); err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, p := range d.Packages {
		ids = append(ids, p.ID)
		if p.Declared == "" || len(p.Refs) != 1 {
			t.Errorf("%+v", p)
		}
	}
	slices.Sort(ids)
	if n := len(slices.Compact(ids)); n != len(modules)+1 || len(d.Relationships) != n || n < 30 {
		t.Errorf("%d packages of %d modules, %d relationships", n, len(modules), len(d.Relationships))
	}
}

func TestLicencesAreToldApart(t *testing.T) {
	const bsd = "Redistributions in binary form must\n   reproduce the above copyright notice"
	for text, want := range map[string]string{
		"Apache License\n   Version 2.0, January 2004": "Apache-2.0",
		bsd: "BSD-2-Clause",
		bsd + " ... may be used to endorse or promote products":                         "BSD-3-Clause",
		"Permission is hereby granted, free of charge, to any person\nobtaining a copy": "MIT",
		"GNU AFFERO GENERAL PUBLIC LICENSE":                                             "",
	} {
		if got := strings.Join(licencesOf(text), " "); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}
