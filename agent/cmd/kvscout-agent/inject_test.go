package main

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

var update = flag.Bool("update", false, "write the golden files of testdata anew")

// injected are the arguments of the golden files.
var injected = []string{"-image", "registry.example.com/kvscout-agent:v0.1.0", "-nats-url", "tls://kvscout-nats.kvscout:4222",
	"-nats-secret", "kvscout-nats", "-nats-secret-keys", "seed,ca.crt", "-pool", "blue"}

func none(string) string { return "" }

// inject runs the command on a manifest.
func injectText(t *testing.T, text string, args ...string) (out, said string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	if code := runInject(append(append([]string(nil), injected...), args...), none, strings.NewReader(text), &stdout, &stderr); code != 0 {
		t.Fatalf("status %d: %s", code, stderr.String())
	}
	return stdout.String(), stderr.String()
}

func fixtures(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/inject/*.[yj]*")
	if err != nil || len(files) < 8 {
		t.Fatalf("%d fixtures, %v", len(files), err)
	}
	return files
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

// TestInjectWritesGoldenFiles: pods as the projects write them that run vLLM on
// Kubernetes, and what is left alone.
func TestInjectWritesGoldenFiles(t *testing.T) {
	for _, file := range fixtures(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			out, said := injectText(t, string(text))
			base := filepath.Join("testdata/inject/golden", filepath.Base(file))
			golden(t, base, out)
			golden(t, base+".said", said)
			// Once more it finds its agents, and changes nothing.
			again, _ := injectText(t, out)
			if again != out {
				t.Errorf("a second time:\n%s", cmp.Diff(out, again))
			}
		})
	}
}

// containers of agents in an object, as plain values.
func agents(value any) (found []map[string]any) {
	switch v := value.(type) {
	case map[string]any:
		if name, _ := v["name"].(string); strings.HasPrefix(name, "kvscout-agent") && v["restartPolicy"] == "Always" && v["env"] != nil {
			return []map[string]any{v}
		}
		for _, inner := range v {
			found = append(found, agents(inner)...)
		}
	case []any:
		for _, inner := range v {
			found = append(found, agents(inner)...)
		}
	}
	return found
}

// TestInjectedSettingsAreTheAgents starts the agent's own reading of settings on
// what is injected: a variable of ours that is none of its flags is an error.
func TestInjectedSettingsAreTheAgents(t *testing.T) {
	seen := 0
	for _, file := range fixtures(t) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		out, _ := injectText(t, string(text))
		decoder := yaml.NewDecoder(strings.NewReader(out))
		for {
			var object any
			if err := decoder.Decode(&object); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			for _, a := range agents(object) {
				seen++
				given := make(map[string]string)
				for _, e := range a["env"].([]any) {
					v := e.(map[string]any)
					name, ours := strings.CutPrefix(v["name"].(string), "KVSCOUT_")
					if !ours {
						continue
					}
					value, literal := v["value"].(string)
					if !literal {
						value = "10.0.0.7" // as good as a name, an address or a key
					}
					value = strings.NewReplacer("$(POD_UID)", "uid", "$(KVSCOUT_POD_IP)", "10.0.0.7").Replace(value)
					given[strings.ToLower(strings.ReplaceAll(name, "_", "-"))] = value
				}
				if err := accepts(given); err != nil {
					t.Errorf("%s: %v", file, err)
				}
				for _, setting := range []string{"namespace", "pod", "pod-uid", "pod-ip", "nats-url", "engine", "state-dir", "admin-address", "nats-seed"} {
					if given[setting] == "" {
						t.Errorf("%s: an agent lacks %s", file, setting)
					}
				}
			}
		}
	}
	if seen < 12 {
		t.Errorf("only %d agents were injected", seen)
	}
}

func TestInjectWrongUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		env  map[string]string
		says string
	}{
		{[]string{"-nats-url", "nats://n"}, nil, "-image"},
		{[]string{"-image", "i"}, nil, "nats-url"},
		{[]string{"-image", "i", "-nats-url", "localhost"}, nil, "nats-url"},
		{[]string{"-image", "i", "-nats-url", "nats://me:s3cret@n"}, nil, "-nats-secret"},
		{[]string{"-image", "i", "-nats-url", "nats://n", "-nats-secret", "Upper"}, nil, "nats-secret"},
		{[]string{"-image", "i", "-nats-url", "nats://n", "-nats-secret", "s", "-nats-secret-keys", "password"}, nil, "nats-secret-keys"},
		{[]string{"-image", "i", "-nats-url", "nats://n", "-nats-secret", "s", "-nats-secret-keys", "tls.crt"}, nil, "nats-tls-key"},
		{[]string{"-image", "i", "-nats-url", "nats://n", "-image-pull-policy", "Sometimes"}, nil, "image-pull-policy"},
		{[]string{"-image", "i", "-nats-url", "nats://n", "-cpu", "much"}, nil, "-cpu"},
		{[]string{"-image", "i", "-nats-url", "nats://n", "-run-as-user", "-1"}, nil, "run-as-user"},
		{[]string{"-image", "i", "-nats-url", "nats://n", "-pool", "a.b"}, nil, "pool"},
		{[]string{"-image", "i", "-nats-url", "nats://n", "manifest.yaml"}, nil, "manifest.yaml"},
		{nil, map[string]string{"KVSCOUT_IMAGE": "i", "KVSCOUT_NATS_URL": "nats://n", "KVSCOUT_MEMORY": "lots"}, "-memory"},
	} {
		var out, said bytes.Buffer
		code := run(t.Context(), append([]string{"inject"}, c.args...), func(k string) string { return c.env[k] }, &out, &said)
		if code != 2 || !strings.Contains(said.String(), c.says) || out.Len() > 0 || strings.Contains(said.String(), "s3cret") {
			t.Errorf("%q: status %d, %s", c.args, code, said.String())
		}
	}
	var out, said bytes.Buffer
	if code := runInject([]string{"-help"}, none, nil, &out, &said); code != 0 || !strings.Contains(out.String(), "-nats-secret-keys") {
		t.Errorf("help: status %d\n%s", code, out.String())
	}
	if code := runInject(append(injected, "-f", "testdata/none.yaml"), none, nil, &out, &said); code != 1 || !strings.Contains(said.String(), "none.yaml") {
		t.Errorf("a file that is not there: status %d, %s", code, said.String())
	}
}

// TestPodsCannotNameFiles: a file of settings would be one of the machine on which
// it is decided, whose content an error could tell.
func TestPodsCannotNameFiles(t *testing.T) {
	out, said := injectText(t, `kind: Pod
metadata: {name: curious, annotations: {agent.kvscout.io/config: testdata/inject/several.yaml}}
spec: {containers: [{name: vllm, command: [vllm, serve, m]}]}
`)
	if strings.Contains(out, "initContainers") || !strings.Contains(said, `there is no setting "config"`) || strings.Contains(said, "apiVersion") {
		t.Errorf("%s\n%s", said, out)
	}
}
