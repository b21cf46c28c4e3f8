package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/e2e/kubernetes"
)

// same are the settings of agents by each way.
var same = map[string]string{
	"image": "registry.example.com/kvscout-agent:v0.1.0", "nats-url": "tls://kvscout-nats.kvscout:4222", "nats-secret": "kvscout-nats", "nats-secret-keys": "seed,ca.crt", "pool": "blue",
}

func sameFlags() (args []string) {
	for name, value := range same {
		args = append(args, "-"+name+"="+value)
	}
	return args
}

// leftOut are the pods of the fixtures that the policy leaves alone and the
// webhook does not, and why: docs/KUBERNETES.md says each.
var leftOut = map[string]string{
	"qwen-1p1d-0": byShell, "qwen-1p1d-1": byShell, "in-a-branch": byShell, "ms-pd-decode-0": byShell, "ms-pd-prefill-0": byShell, "big-0": byShell,
	"by-image-and-port": "engines that are guessed by image and port",
	"wide-0":            "`--kv-events-config` key by key",
	"pair-0":            "pods with several engines",
	"heartbeat":         "other annotations `agent.kvscout.io/...`",
	"network":           "pods on their node's network",
	"port-taken":        "pods that declare port 9478",
	"port-variable":     "`--port` or `--host` from a variable",
}

// forms in which engines are written, beyond the fixtures.
const forms = `
{kind: Pod, metadata: {name: key-literal}, spec: {containers: [{name: vllm, image: vllm/vllm-openai, args: [m, --api-key=a=b==, --port=8001, --port, "8002"]}]}}
---
{kind: Pod, metadata: {name: key-reference}, spec: {containers: [{name: vllm, image: r/vllm@sha256:0000000000000000000000000000000000000000000000000000000000000000,
  args: [m, --api_key, $(KEY)], env: [{name: KEY, valueFrom: {secretKeyRef: {name: s, key: k}}}], ports: [{containerPort: 8000}]}]}}
---
{kind: Pod, metadata: {name: key-variable}, spec: {containers: [{name: vllm, image: other, command: [vllm, serve], args: [m],
  env: [{name: VLLM_API_KEY, valueFrom: {secretKeyRef: {name: s, key: k}}}, {name: PYTHONHASHSEED, value: "7"}]}]}}
---
{kind: Pod, metadata: {name: guaranteed}, spec: {containers: [{name: vllm, image: vllm, args: [m], resources: {limits: {cpu: 2, memory: 1Gi}}}]}}
---
{kind: Pod, metadata: {name: drafts, labels: {role-name: decode}}, spec: {containers: [{name: vllm, image: vllm, args: [m, --speculative-config, '{"method": "eagle3"}']}]}}
---
{kind: Pod, metadata: {name: drafts-unheard}, spec: {containers: [{name: vllm, image: vllm, args: [m, --speculative-config, '{"method": "unheard"}']}]}}
---
{kind: Pod, metadata: {name: consumer}, spec: {containers: [{name: vllm, image: vllm, args: [m, --kv-transfer-config, '{"kv_role": "kv_consumer"}']}]}}
---
{kind: Pod, metadata: {name: host, labels: {kvscout.io/role: prefill-decode}}, spec: {containers: [{name: vllm, image: vllm, args: [m, --host, 10.0.0.5]}]}}
---
{kind: Pod, metadata: {name: host-any}, spec: {containers: [{name: vllm, image: vllm, args: [m, --host, "::"]}]}}
---
{kind: Pod, metadata: {name: host-six}, spec: {containers: [{name: vllm, image: vllm, args: [m, --host, "fd00::1"]}]}}
---
{kind: Pod, metadata: {name: tls, annotations: {agent.kvscout.io/log-level: debug}}, spec: {containers: [{name: vllm, image: vllm, args: [m, --ssl-certfile, c, --ssl-keyfile=k]}]}}
---
{kind: Pod, metadata: {name: wrapped}, spec: {containers: [{name: web, image: nginx}, {name: engine, image: ours, command: [numactl, -N, "0", python, -m, vllm.entrypoints.cli.main, serve, m, --port=9000]}]}}
---
{kind: Pod, metadata: {name: elsewhere}, spec: {containers: [{name: vllm, image: vllm, args: [m, '--kv-events-config={"enable_kv_cache_events": true, "endpoint": "tcp://epp:5557"}']}]}}
---
{kind: Pod, metadata: {name: chosen-port}, spec: {containers: [{name: vllm, image: vllm, args: [m, '--kv-events-config={"enable_kv_cache_events": true, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}']}]}}
---
{kind: Pod, metadata: {name: switched-off}, spec: {containers: [{name: vllm, image: vllm, args: [m, '--kv-events-config={"enable_kv_cache_events": false}']}]}}
---
{kind: Pod, metadata: {name: file}, spec: {containers: [{name: vllm, image: vllm, args: [m, --config, f.yaml], ports: [{containerPort: 8080}]}]}}
---
{kind: Pod, metadata: {name: router}, spec: {containers: [{name: r, image: r/vllm-router, args: [m, --port, "8000"]}]}}
---
{kind: Pod, metadata: {name: port-high}, spec: {containers: [{name: vllm, image: vllm, args: [m, --port, "99999"]}]}}
---
{kind: Pod, metadata: {name: refused, labels: {kvscout.io/inject: disabled}}, spec: {containers: [{name: vllm, image: vllm, args: [m]}]}}
---
{kind: Pod, metadata: {name: heartbeat, annotations: {agent.kvscout.io/heartbeat: 1s}}, spec: {containers: [{name: vllm, image: vllm, args: [m]}]}}
---
{kind: Pod, metadata: {name: network}, spec: {hostNetwork: true, containers: [{name: vllm, image: vllm, args: [m]}]}}
---
{kind: Pod, metadata: {name: port-taken}, spec: {containers: [{name: vllm, image: vllm, args: [m], ports: [{containerPort: 9478}]}]}}
---
{kind: Pod, metadata: {name: port-variable}, spec: {containers: [{name: vllm, image: vllm, args: [m, --port, $(PORT)], env: [{name: PORT, value: "9000"}], ports: [{containerPort: 8000}]}]}}
`

const byShell = "commands in scripts of a shell"

// createdPods are the pods of a file as controllers create them, by name.
func createdPods(t *testing.T, text []byte) (names []string, pods map[string]fields) {
	t.Helper()
	pods = make(map[string]fields)
	list := objects(t, text)
	for len(list) > 0 {
		o := list[0]
		list = list[1:]
		if items, ok := o["items"].([]any); ok {
			for _, item := range items {
				list = append(list, item.(map[string]any))
			}
			continue
		}
		kind, owner := o.text("kind"), o.text("metadata", "name")
		for i, pod := range podTemplates(o) {
			name := owner
			if kind != "Pod" {
				name = fmt.Sprintf("%s-%d", owner, i)
			}
			meta, _ := pod["metadata"].(map[string]any)
			if meta == nil {
				meta = make(map[string]any)
			}
			labels, _ := meta["labels"].(map[string]any)
			if labels == nil {
				labels = make(map[string]any)
			}
			reference := map[string]any{"apiVersion": o.text("apiVersion"), "kind": kind, "name": owner, "controller": true, "uid": "1"}
			switch kind {
			case "Deployment":
				reference["kind"], reference["name"], labels["pod-template-hash"] = "ReplicaSet", owner+"-5d4f8", "5d4f8"
			case "LeaderWorkerSet":
				reference["apiVersion"], reference["kind"], labels["leaderworkerset.sigs.k8s.io/name"] = "apps/v1", "StatefulSet", owner
			case "StormService":
				reference["kind"], labels["storm-service-name"] = "RoleSet", owner
			}
			if kind != "Pod" {
				meta["ownerReferences"], meta["labels"] = []any{reference}, labels
			}
			delete(meta, "namespace")
			meta["name"] = name
			pod["apiVersion"], pod["kind"], pod["metadata"] = "v1", "Pod", meta
			names = append(names, name)
			pods[name] = pod
		}
	}
	return names, pods
}

// admitted is what the API server makes of a new pod, without what it gives to
// each. It keeps nothing.
func admitted(c *kubernetes.Cluster, t *testing.T, pod fields) fields {
	t.Helper()
	body, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	var out map[string]any
	status, text := c.Do(http.MethodPost, "/api/v1/namespaces/engines/pods?dryRun=All&fieldValidation=Strict", "application/json", body, &out)
	if status != http.StatusCreated {
		t.Fatalf("%s: %d, %s", pod.text("metadata", "name"), status, text)
	}
	for _, key := range []string{"uid", "creationTimestamp", "managedFields", "generation"} {
		delete(out["metadata"].(map[string]any), key)
	}
	delete(out, "status")
	return out
}

// agentsOf are the names of the agents in a pod.
func agentsOf(pod fields) (names []string) {
	list, _ := pod.at("spec", "initContainers").([]any)
	for i := range list {
		if name := pod.text("spec", "initContainers", i, "name"); strings.HasPrefix(name, "kvscout-agent") {
			names = append(names, name)
		}
	}
	return names
}

// byName sorts the variables of agents, whose order is each way's own.
func byName(pod fields) fields {
	list, _ := pod.at("spec", "initContainers").([]any)
	for i := range list {
		if env, ok := pod.at("spec", "initContainers", i, "env").([]any); ok && strings.HasPrefix(pod.text("spec", "initContainers", i, "name"), "kvscout-agent") {
			slices.SortFunc(env, func(a, b any) int {
				return strings.Compare(a.(map[string]any)["name"].(string), b.(map[string]any)["name"].(string))
			})
		}
	}
	return pod
}

// webhookService is where API servers call it.
const webhookService = "kvscout-webhook.kvscout.svc:443"

// startWebhook installs the base and starts its webhook on this machine, with the
// rights that its service account has.
func startWebhook(t *testing.T, c *kubernetes.Cluster) (address string) {
	t.Helper()
	c.Kubectl("apply", "-k", "../deploy/kustomize/base")
	bin := programs(t, "./agent/cmd/kvscout-agent")
	const local = "127.0.0.1:0"
	p := launch(t, filepath.Join(bin, "kvscout-agent"), append([]string{"webhook", "-kubernetes", c.URL, "-service-account", c.ServiceAccount("kvscout", "kvscout-webhook"),
		"-address", local, "-admin-address", local}, sameFlags()...)...)
	p.says(0, "the certificate is trusted")
	address = regexp.MustCompile(`msg="serving reviews" address=(\S+)`).FindStringSubmatch(p.log.String())[1]
	c.Route(webhookService, address)
	return address
}

// TestKubernetesInjectionByThreeWays: each pod of the fixtures goes through the
// API server with agents by the command, by the webhook and by the policy.
func TestKubernetesInjectionByThreeWays(t *testing.T) {
	t.Parallel()
	c := kubernetes.Start(t, 0)
	c.Kubectl("create", "namespace", "engines")
	var names []string
	original, untouched, byCommand := make(map[string]fields), make(map[string]fields), make(map[string]fields)
	bin := programs(t, "./agent/cmd/kvscout-agent")
	var files []string
	for _, pattern := range []string{"*.yaml", "*.json"} {
		list, err := filepath.Glob(fixtures + pattern)
		if err != nil || len(list) == 0 {
			t.Fatalf("%d fixtures, %v", len(list), err)
		}
		files = append(files, list...)
	}
	for _, file := range append(files, file(t, "forms.yaml", strings.ReplaceAll(forms, "{kind:", "{apiVersion: v1, kind:"))) {
		out, err := exec.Command(filepath.Join(bin, "kvscout-agent"), append([]string{"inject", "-f", file}, sameFlags()...)...).Output()
		if err != nil {
			t.Fatal(err)
		}
		list, pods := createdPods(t, []byte(read(t, file)))
		_, injected := createdPods(t, out)
		for _, name := range list {
			if original[name] != nil || injected[name] == nil {
				t.Fatalf("%s: %s is there twice, or was lost", file, name)
			}
			original[name], untouched[name], byCommand[name] = pods[name], admitted(c, t, pods[name]), admitted(c, t, injected[name])
		}
		names = append(names, list...)
	}
	plain := objects(t, []byte(`{apiVersion: v1, kind: Pod, metadata: {name: plain}, spec: {containers: [{name: vllm, image: vllm/vllm-openai, args: [m]}]}}`))[0]
	served := func() bool { return len(agentsOf(admitted(c, t, plain))) == 1 }

	address := startWebhook(t, c)
	if served() {
		t.Error("an agent is in a pod for which nobody asked")
	}
	c.Kubectl("label", "namespace", "engines", "kvscout.io/inject=enabled")
	c.Until("the webhook is in force", served)
	byWebhook := make(map[string]fields)
	agents := 0
	for _, name := range names {
		byWebhook[name] = admitted(c, t, original[name])
		agents += len(agentsOf(byWebhook[name]))
		if diff := cmp.Diff(byCommand[name], byWebhook[name]); diff != "" {
			t.Errorf("%s: webhook (+) and command (-) differ:\n%s", name, diff)
		}
	}
	if agents < 17 {
		t.Errorf("only %d agents", agents)
	}

	// The webhook is away: pods start, without.
	c.Route(webhookService, "")
	if served() {
		t.Error("who put an agent there?")
	}

	c.Kubectl("apply", "-f", "../deploy/kustomize/policy/policy.yaml")
	settings, err := json.Marshal(map[string]any{"data": same})
	if err != nil {
		t.Fatal(err)
	}
	c.Kubectl("-n", "kvscout", "patch", "configmap", "kvscout-policy", "--type=merge", "-p", string(settings))
	c.Until("the policy is in force, with its settings", func() bool {
		pod := admitted(c, t, plain)
		return served() && pod.text("spec", "initContainers", 0, "image") == same["image"]
	})
	page := read(t, "../docs/KUBERNETES.md")
	equal := 0
	for _, name := range names {
		got := admitted(c, t, original[name])
		if why := leftOut[name]; why != "" {
			if diff := cmp.Diff(untouched[name], got); diff != "" {
				t.Errorf("%s is to be left alone by the policy, for %q:\n%s", name, why, diff)
			}
			if !strings.Contains(page, why) {
				t.Errorf("docs/KUBERNETES.md does not say that the policy leaves alone %q", why)
			}
			continue
		}
		want := byWebhook[name]
		// What it says of shortcomings may be less.
		said, more := got.text("metadata", "annotations", "kvscout.io/status"), want.text("metadata", "annotations", "kvscout.io/status")
		for _, sentence := range strings.Split(said, "; ") {
			if !strings.Contains(more, sentence) {
				t.Errorf("%s: only the policy says %q", name, sentence)
			}
		}
		if said != "" && more != "" {
			want["metadata"].(map[string]any)["annotations"].(map[string]any)["kvscout.io/status"] = said
		}
		if diff := cmp.Diff(byName(want), byName(got)); diff != "" {
			t.Errorf("%s: policy (+) and webhook (-) differ:\n%s", name, diff)
		}
		if len(agentsOf(got)) > 0 {
			equal++
		}
	}
	if equal < 6 {
		t.Errorf("the policy gave only %d pods an agent", equal)
	}

	// Both: injected once, and what the policy leaves alone by the webhook.
	c.Route(webhookService, address)
	for _, name := range names {
		c.Until(name+" has its agents with policy and webhook together", func() bool {
			return slices.Equal(agentsOf(admitted(c, t, original[name])), agentsOf(byCommand[name]))
		})
	}
	t.Logf("%d pods, %d agents by command and webhook, %d pods with the same agent by the policy", len(names), agents, equal)
}
