package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/journal"
	"github.com/kvscout/kvscout/e2e/kubeapi"
)

// template is a pod in a file, with the object that it belongs to.
type template struct {
	kind, name string
	pod        map[string]any
}

// podsIn finds the pods and templates of a value, in the order of keys.
func podsIn(value any, kind, name string) (found []template) {
	switch v := value.(type) {
	case map[string]any:
		if k, ok := v["kind"].(string); ok && v["apiVersion"] != nil {
			kind = k
			if m, ok := v["metadata"].(map[string]any); ok {
				name, _ = m["name"].(string)
			}
		}
		if spec, ok := v["spec"].(map[string]any); ok {
			if _, ok := spec["containers"].([]any); ok {
				return []template{{kind, name, v}}
			}
		}
		for _, key := range slices.Sorted(maps.Keys(v)) {
			found = append(found, podsIn(v[key], kind, name)...)
		}
	case []any:
		for _, inner := range v {
			found = append(found, podsIn(inner, kind, name)...)
		}
	}
	return found
}

func pods(t *testing.T, file string) (found []template) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	for {
		var object any
		if err := decoder.Decode(&object); errors.Is(err, io.EOF) {
			return found
		} else if err != nil {
			t.Fatal(err)
		}
		// Through JSON, so that both sides have its types.
		var plain any
		text, err := json.Marshal(object)
		if err == nil {
			err = json.Unmarshal(text, &plain)
		}
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, podsIn(plain, "", "")...)
	}
}

// created is the pod as its controller creates it.
func (p template) created(t *testing.T) map[string]any {
	t.Helper()
	pod := clone(t, p.pod)
	meta, _ := pod["metadata"].(map[string]any)
	if meta == nil {
		meta = make(map[string]any)
		pod["metadata"] = meta
	}
	owner := map[string]any{"apiVersion": "v1", "kind": p.kind, "name": p.name, "controller": true, "uid": "1"}
	label := func(key, value string) {
		labels, _ := meta["labels"].(map[string]any)
		if labels == nil {
			labels = make(map[string]any)
			meta["labels"] = labels
		}
		labels[key] = value
	}
	switch p.kind {
	case "Pod":
		return pod
	case "Deployment":
		owner["kind"], owner["name"] = "ReplicaSet", p.name+"-5d4f8"
		label("pod-template-hash", "5d4f8")
	case "LeaderWorkerSet":
		owner["kind"], owner["name"] = "StatefulSet", p.name+"-0"
		label("leaderworkerset.sigs.k8s.io/name", p.name)
	case "StormService":
		owner["kind"], owner["name"] = "RoleSet", p.name+"-roleset-x"
		label("storm-service-name", p.name)
	}
	meta["ownerReferences"] = []any{owner}
	return pod
}

func clone(t *testing.T, value map[string]any) (copied map[string]any) {
	t.Helper()
	text, err := json.Marshal(value)
	if err == nil {
		err = json.Unmarshal(text, &copied)
	}
	if err != nil {
		t.Fatal(err)
	}
	return copied
}

// patched applies a JSON Patch of adds and replaces, as RFC 6902 has them.
func patched(t *testing.T, value any, patch []byte) any {
	t.Helper()
	var changes []struct {
		Op, Path string
		Value    any
	}
	if len(patch) > 0 {
		if err := json.Unmarshal(patch, &changes); err != nil {
			t.Fatal(err)
		}
	}
	var at func(value any, steps []string, op string, put any) any
	at = func(value any, steps []string, op string, put any) any {
		if len(steps) == 0 {
			return put
		}
		step := strings.NewReplacer("~1", "/", "~0", "~").Replace(steps[0])
		switch v := value.(type) {
		case map[string]any:
			if _, there := v[step]; !there && (len(steps) > 1 || op == "replace") {
				t.Fatalf("%s %q: it is not there", op, step)
			}
			v[step] = at(v[step], steps[1:], op, put)
			return v
		case []any:
			if step == "-" && len(steps) == 1 && op == "add" {
				return append(v, put)
			}
			i, err := strconv.Atoi(step)
			if err != nil || i >= len(v) || op == "add" && len(steps) == 1 {
				t.Fatalf("%s %q in a list", op, step)
			}
			v[i] = at(v[i], steps[1:], op, put)
			return v
		}
		t.Fatalf("%s %q below %v", op, step, value)
		return nil
	}
	for _, c := range changes {
		value = at(value, strings.Split(c.Path, "/")[1:], c.Op, c.Value)
	}
	return value
}

// webhookClient starts the command and gives a function that asks it as the API
// server does.
func webhookClient(t *testing.T, api *kubeapi.Server) func(pod map[string]any) (patch []byte, warnings []string) {
	t.Helper()
	var log journal.Journal
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan int, 1)
	args := append([]string{"webhook", "-address", "127.0.0.1:0", "-admin-address", "127.0.0.1:0", "-kubernetes", api.URL, "-service-account", api.Folder}, injected...)
	go func() { done <- run(ctx, args, none, io.Discard, &log) }()
	t.Cleanup(func() {
		stop()
		if code := <-done; code != 0 {
			t.Errorf("status %d\n%s", code, log.String())
		}
	})
	await.True(t, "the certificate is trusted", func() bool { return strings.Contains(log.String(), "the certificate is trusted") })
	address := regexp.MustCompile(`msg="serving reviews" address=(\S+)`).FindStringSubmatch(log.String())[1]
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(api.Bundle(0))
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "kvscout-webhook.kvscout.svc"}, ForceAttemptHTTP2: true}
	t.Cleanup(transport.CloseIdleConnections)
	return func(pod map[string]any) ([]byte, []string) {
		t.Helper()
		body, err := json.Marshal(map[string]any{
			"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
			"request": map[string]any{"uid": "u", "operation": "CREATE", "kind": map[string]any{"version": "v1", "kind": "Pod"}, "object": pod},
		})
		if err != nil {
			t.Fatal(err)
		}
		resp, err := (&http.Client{Transport: transport}).Post("https://"+address+"/mutate", "application/json", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var out struct {
			Response struct {
				Allowed  bool
				Patch    []byte
				Warnings []string
			}
		}
		if err := json.NewDecoder(resp.Body).Decode(&out); err != nil || !out.Response.Allowed {
			t.Fatalf("%d, %+v, %v", resp.StatusCode, out, err)
		}
		return out.Response.Patch, out.Response.Warnings
	}
}

// TestWebhookDoesWhatInjectDoes: each pod of the golden files, created by its
// controller, becomes what stands in them; and once more it stays so.
func TestWebhookDoesWhatInjectDoes(t *testing.T) {
	ask := webhookClient(t, kubeapi.New(t, "36"))
	changed := 0
	for _, file := range fixtures(t) {
		originals := pods(t, file)
		wanted := pods(t, filepath.Join("testdata/inject/golden", filepath.Base(file)))
		said, err := os.ReadFile(filepath.Join("testdata/inject/golden", filepath.Base(file)+".said"))
		if err != nil {
			t.Fatal(err)
		}
		if len(originals) != len(wanted) || len(wanted) == 0 {
			t.Fatalf("%s: %d and %d pods", file, len(originals), len(wanted))
		}
		for i, p := range originals {
			patch, warnings := ask(p.created(t))
			got, _ := patched(t, p.created(t), patch).(map[string]any)
			want := wanted[i].created(t)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s, %s %s (-file +pod):\n%s", file, p.kind, p.name, diff)
			}
			for _, w := range warnings {
				w = strings.TrimSuffix(strings.TrimPrefix(w, "kvscout: "), "...")
				if !strings.Contains(string(said), w) {
					t.Errorf("%s: only the webhook warns %q", file, w)
				}
			}
			if len(patch) > 0 {
				changed++
				if again, _ := ask(got); len(again) > 0 {
					t.Errorf("%s, %s %s: reinvoked, it changes %s", file, p.kind, p.name, again)
				}
			}
		}
	}
	if changed < 12 {
		t.Errorf("only %d pods were changed", changed)
	}
}

func TestWebhookWrongUsage(t *testing.T) {
	good := append([]string{"webhook", "-kubernetes", "https://127.0.0.1:1", "-service-account", t.TempDir()}, injected...)
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"webhook"}, 2, "-image"},
		{append([]string{"webhook"}, injected...), 2, "KUBERNETES_SERVICE_HOST"},
		{append(slices.Clone(good), "-kubernetes", "http://insecure"), 2, "-kubernetes"},
		{append(slices.Clone(good), "-secret", "a/b"), 2, "-secret"},
		{append(slices.Clone(good), "-address", "9443"), 2, "-address"},
		{good, 1, "-service-account"},
	} {
		var said bytes.Buffer
		if code := run(t.Context(), c.args, none, io.Discard, &said); code != c.code || !strings.Contains(said.String(), c.says) {
			t.Errorf("%q: status %d, %s", c.args, code, said.String())
		}
	}
	var out, said bytes.Buffer
	if code := run(t.Context(), []string{"webhook", "-help"}, none, &out, &said); code != 0 || !strings.Contains(out.String(), "-service-account") {
		t.Errorf("help: status %d\n%s", code, out.String())
	}
}
