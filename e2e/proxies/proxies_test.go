package proxies

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// installed puts programs where they are looked for that are good enough to be found.
func installed(t *testing.T) {
	t.Helper()
	folder := t.TempDir()
	modules := filepath.Join(folder, "lib/nginx/modules")
	if err := os.MkdirAll(modules, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(modules, "ngx_http_js_module.so"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(folder, "sbin"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, p := range All() {
		path := filepath.Join(folder, "sbin", p.usual)
		if err := os.WriteFile(path, []byte("#!/bin/sh\necho http.handlers.kvscout\n"), 0o700); err != nil { //nolint:gosec // it is run
			t.Fatal(err)
		}
		t.Setenv(p.variable, path)
	}
}

// Nothing of the addresses in deploy/proxies is left, and nothing else has changed
// that a test would not have noticed: every edit finds its place once.
func TestConfigurationStandsElsewhere(t *testing.T) {
	installed(t)
	ours := regexp.MustCompile(`127\.0\.0\.1(:|, port_value: )\d+`)
	for _, p := range All() {
		for _, plain := range []bool{false, true} {
			folder := t.TempDir()
			s := Site{Root: "../..", Host: "127.1.2.3", Engines: []string{"127.1.2.4:1", "127.1.2.5:2", "127.1.2.6:3"},
				GRPC: "127.1.2.7:4", HTTP: "127.1.2.7:4", Pickers: []string{"127.1.2.7:4"}, Plain: plain}
			x, err := p.Prepare(t.Context(), folder, s)
			if err != nil {
				t.Errorf("%s, plain: %t: %v", p.Name, plain, err)
				continue
			}
			all := ""
			files, err := filepath.Glob(filepath.Join(folder, "*"))
			if err != nil || len(files) == 0 {
				t.Fatal(files, err)
			}
			for _, file := range files {
				text, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				all += strings.ReplaceAll(string(text), ", port_value: ", ":")
			}
			if left := ours.FindAllString(all, -1); left != nil {
				t.Errorf("%s, plain: %t: still at %q", p.Name, plain, left)
			}
			wanted := append([]string{x.Address}, s.Engines...)
			if !plain {
				wanted = append(wanted, s.GRPC)
			}
			for _, address := range wanted {
				if !strings.Contains(all, address) {
					t.Errorf("%s, plain: %t: without %s", p.Name, plain, address)
				}
			}
		}
	}
}

func TestEditsMustFindTheirPlace(t *testing.T) {
	installed(t)
	for _, e := range []Edit{{"Caddyfile", "what nobody wrote", ""}, {"Caddyfile", "\n", ""}, {"caddy.json", "{", ""}} {
		if _, err := Caddy.Prepare(t.Context(), t.TempDir(), Site{Root: "../.."}, e); err == nil || !strings.Contains(err.Error(), e.File) {
			t.Errorf("%+v: %v", e, err)
		}
	}
}

func TestMissingProgramSaysHowToGetIt(t *testing.T) {
	installed(t)
	for _, p := range All() {
		if path, err := p.Find(); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		if ByName(strings.ToLower(p.Name)) != p {
			t.Errorf("%s is not found by its name", p.Name)
		}
	}
	without := filepath.Join(t.TempDir(), "caddy")
	if err := os.WriteFile(without, []byte("#!/bin/sh\necho http.handlers.other\n"), 0o700); err != nil { //nolint:gosec // it is run
		t.Fatal(err)
	}
	for _, p := range All() {
		for _, path := range []string{filepath.Join(t.TempDir(), p.usual), without} {
			t.Setenv(p.variable, path)
			_, err := p.Find()
			if path == without && (p == Envoy || p == HAProxy) {
				continue // any program will do
			}
			if err == nil || !strings.Contains(err.Error(), "make "+p.target+" installs it, or "+p.variable+" names it") {
				t.Errorf("%s: %v", p.Name, err)
			}
		}
	}
}
