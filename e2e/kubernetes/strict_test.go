// Package kubernetes holds manifests against Kubernetes' own types. It is a
// module of its own, so that those types are nobody else's dependency.
package kubernetes

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"go.yaml.in/yaml/v3"
	admission "k8s.io/api/admissionregistration/v1"
	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	network "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	rbac "k8s.io/api/rbac/v1"
	strict "sigs.k8s.io/json"
)

// known are the types of apiVersion/kind.
var known = map[string]func() any{
	"v1/Namespace":                                    func() any { return new(core.Namespace) },
	"v1/ConfigMap":                                    func() any { return new(core.ConfigMap) },
	"v1/Secret":                                       func() any { return new(core.Secret) },
	"v1/Service":                                      func() any { return new(core.Service) },
	"v1/ServiceAccount":                               func() any { return new(core.ServiceAccount) },
	"v1/Pod":                                          func() any { return new(core.Pod) },
	"apps/v1/Deployment":                              func() any { return new(apps.Deployment) },
	"apps/v1/StatefulSet":                             func() any { return new(apps.StatefulSet) },
	"batch/v1/Job":                                    func() any { return new(batch.Job) },
	"policy/v1/PodDisruptionBudget":                   func() any { return new(policy.PodDisruptionBudget) },
	"networking.k8s.io/v1/NetworkPolicy":              func() any { return new(network.NetworkPolicy) },
	"rbac.authorization.k8s.io/v1/Role":               func() any { return new(rbac.Role) },
	"rbac.authorization.k8s.io/v1/RoleBinding":        func() any { return new(rbac.RoleBinding) },
	"rbac.authorization.k8s.io/v1/ClusterRole":        func() any { return new(rbac.ClusterRole) },
	"rbac.authorization.k8s.io/v1/ClusterRoleBinding": func() any { return new(rbac.ClusterRoleBinding) },
	"admissionregistration.k8s.io/v1/MutatingWebhookConfiguration": func() any { return new(admission.MutatingWebhookConfiguration) },
}

// decode refuses fields that the type does not have, and those given twice.
func decode(value, into any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	unknown, err := strict.UnmarshalStrict(text, into)
	return errors.Join(append(unknown, err)...)
}

// templates are the pod templates in an object of a type that is not known here.
func templates(value any) (found []any) {
	switch v := value.(type) {
	case map[string]any:
		if spec, ok := v["spec"].(map[string]any); ok && spec["containers"] != nil {
			return []any{v}
		}
		for _, inner := range v {
			found = append(found, templates(inner)...)
		}
	case []any:
		for _, inner := range v {
			found = append(found, templates(inner)...)
		}
	}
	return found
}

func check(t *testing.T, file string, object map[string]any) (checked int) {
	t.Helper()
	version, _ := object["apiVersion"].(string)
	kind, _ := object["kind"].(string)
	if kind == "List" {
		for _, item := range object["items"].([]any) {
			checked += check(t, file, item.(map[string]any))
		}
		return checked
	}
	if fresh := known[version+"/"+kind]; fresh != nil {
		if err := decode(object, fresh()); err != nil {
			t.Errorf("%s: %s: %v", file, kind, err)
		}
		return 1
	}
	for _, template := range templates(object) {
		if err := decode(template, new(core.PodTemplateSpec)); err != nil {
			t.Errorf("%s: a template in %s: %v", file, kind, err)
		}
		checked++
	}
	if checked == 0 {
		t.Errorf("%s: %s/%s is not known here", file, version, kind)
	}
	return checked
}

// TestManifestsAreOfKubernetesTypes: the base, and what is written into pods of
// every shape.
func TestManifestsAreOfKubernetesTypes(t *testing.T) {
	checked := 0
	for _, pattern := range []string{"../../deploy/kustomize/base/*.yaml", "../../agent/cmd/kvscout-agent/testdata/inject/golden/*.yaml", "../../agent/cmd/kvscout-agent/testdata/inject/golden/*.json"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(files), err)
		}
		for _, file := range files {
			if filepath.Base(file) == "kustomization.yaml" {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			decoder := yaml.NewDecoder(bytes.NewReader(text))
			for {
				var object map[string]any
				if err := decoder.Decode(&object); errors.Is(err, io.EOF) {
					break
				} else if err != nil {
					t.Fatalf("%s: %v", file, err)
				}
				checked += check(t, file, object)
			}
		}
	}
	if checked < 40 {
		t.Errorf("only %d objects were checked", checked)
	}
	if decode(map[string]any{"spec": map[string]any{"initContainers": []any{map[string]any{"restartPolice": "Always"}}}}, new(core.Pod)) == nil {
		t.Error("a field that does not exist is taken")
	}
}
