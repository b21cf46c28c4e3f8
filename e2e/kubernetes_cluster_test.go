package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/e2e/kubernetes"
)

const (
	fixtures = "../agent/cmd/kvscout-agent/testdata/inject/"
	golden   = fixtures + "golden/"
)

// manifests are the objects of files, those of Lists one by one.
func manifests(t *testing.T, patterns ...string) (found []fields) {
	t.Helper()
	for _, pattern := range patterns {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(files), err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, o := range objects(t, text) {
				if items, ok := o["items"].([]any); ok && o.text("kind") == "List" {
					for _, item := range items {
						found = append(found, item.(map[string]any))
					}
					continue
				}
				found = append(found, o)
			}
		}
	}
	return found
}

// podTemplates are the templates of pods in an object of whatever kind; of a
// Pod, itself.
func podTemplates(value any) (found []fields) {
	switch v := value.(type) {
	case fields:
		return podTemplates(map[string]any(v))
	case map[string]any:
		if spec, ok := v["spec"].(map[string]any); ok && spec["containers"] != nil {
			return []fields{v}
		}
		for _, key := range slices.Sorted(maps.Keys(v)) {
			found = append(found, podTemplates(v[key])...)
		}
	case []any:
		for _, inner := range v {
			found = append(found, podTemplates(inner)...)
		}
	}
	return found
}

// documents of objects, as kubectl takes them.
func documents(t *testing.T, list ...fields) string {
	t.Helper()
	var all strings.Builder
	for _, o := range list {
		text, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&all, "%s\n---\n", text)
	}
	return all.String()
}

// built are the groups whose kinds every API server knows.
var built = []string{"v1", "apps/v1", "batch/v1"}

// TestKubernetesTakesWhatIsInjected: each object that the agent's command writes,
// with unknown fields refused. Of kinds that the server does not know, what they
// hold of a pod.
func TestKubernetesTakesWhatIsInjected(t *testing.T) {
	t.Parallel()
	c := kubernetes.Start(t, 0)
	var list []fields
	namespaces := map[string]bool{"default": true}
	for _, o := range manifests(t, golden+"*.yaml", golden+"*.json") {
		namespace := o.text("metadata", "namespace")
		if namespace != "" && !namespaces[namespace] {
			namespaces[namespace] = true
			c.Kubectl("create", "namespace", namespace)
		}
		if slices.Contains(built, o.text("apiVersion")) {
			list = append(list, o)
			continue
		}
		for i, template := range podTemplates(o) {
			list = append(list, fields{"apiVersion": "v1", "kind": "PodTemplate", "metadata": map[string]any{"name": fmt.Sprintf("t%d", i)}, "template": template})
		}
	}
	if len(list) < 20 {
		t.Fatalf("%d objects", len(list))
	}
	if out, err := c.Run(documents(t, list...), "kubectl", "apply", "--dry-run=server", "-f", "-"); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	wrong := fields{"apiVersion": "v1", "kind": "PodTemplate", "metadata": map[string]any{"name": "wrong"}, "template": map[string]any{
		"spec": map[string]any{"containers": []any{map[string]any{"name": "a", "image": "i", "restartPolice": "Always"}}},
	}}
	if out, err := c.Run(documents(t, wrong), "kubectl", "apply", "--dry-run=server", "-f", "-"); err == nil || !strings.Contains(out, "restartPolice") {
		t.Errorf("a field that does not exist is taken: %v\n%s", err, out)
	}
}

// TestKubernetesRunsPods: the harness itself, once with all its parts.
func TestKubernetesRunsPods(t *testing.T) {
	t.Parallel()
	c := kubernetes.Start(t, 2)
	c.Apply(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: web, image: web}]}
`)
	c.Kubectl("rollout", "status", "deployment/web", "--timeout=150s")
	if addresses := strings.Fields(c.Kubectl("get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].status.podIP}")); len(addresses) != 3 {
		t.Errorf("addresses of pods: %q", addresses)
	}
	// What it knows outlives the API server.
	c.StopServer()
	if out, err := c.Run("", "kubectl", "get", "pods"); err == nil {
		t.Errorf("a server that is stopped answers: %s", out)
	}
	c.StartServer()
	c.Kubectl("delete", "deployment", "web", "--timeout=150s")
	c.Until("the pods are gone", func() bool { return !strings.Contains(c.Kubectl("get", "pods", "-l", "app=web", "-o", "name"), "pod/") })
}
