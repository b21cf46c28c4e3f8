package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"github.com/kvscout/kvscout/e2e/authority"
	"github.com/kvscout/kvscout/e2e/kubernetes"
	"github.com/kvscout/kvscout/e2e/stage"
)

const chart = "../deploy/helm/kvscout"

// helm gives what it says, which must not fail.
func helm(t *testing.T, c *kubernetes.Cluster, args ...string) string {
	t.Helper()
	out, err := c.Run("", "helm", args...)
	if err != nil {
		t.Fatalf("helm %q: %v\n%s", args, err, out)
	}
	return out
}

// rendered are the objects of the chart with these values, by kind/name.
func rendered(t *testing.T, c *kubernetes.Cluster, args ...string) map[string]fields {
	t.Helper()
	out := helm(t, c, append([]string{"template", "kvscout", chart, "-n", "kvscout", "--kube-version", "1.36.3"}, args...)...)
	_, out, _ = strings.Cut(out, "---\n") // what helm says of links
	found := make(map[string]fields)
	for _, o := range objects(t, []byte(out)) {
		if o != nil {
			found[o.text("kind")+"/"+o.text("metadata", "name")] = o
		}
	}
	return found
}

// TestKubernetesChartIsTheBase: by default the chart makes the objects of
// deploy/kustomize/base, but for the namespace, which helm makes. Values that are
// wrong are named.
func TestKubernetesChartIsTheBase(t *testing.T) {
	t.Parallel()
	c := kubernetes.Start(t, 0)
	helm(t, c, "lint", "--strict", chart)
	want, got := base(t), rendered(t, c)
	delete(want, "Namespace/kvscout")
	settings := func(all map[string]fields) (lines map[string]any) {
		data := all["ConfigMap/kvscout-webhook"]["data"].(map[string]any)
		if err := yaml.Unmarshal([]byte(data["webhook.yaml"].(string)), &lines); err != nil {
			t.Fatal(err)
		}
		data["webhook.yaml"] = nil
		return lines
	}
	if diff := cmp.Diff(settings(want), settings(got)); diff != "" {
		t.Errorf("settings of agents: chart (+) and base (-) differ:\n%s", diff)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("chart (+) and base (-) differ:\n%s", diff)
	}

	many := rendered(t, c, "--set", "nats.install=false,nats.url=tls://nats.example.com:4222,nats.secret=keys,nats.secretKeys={seed,ca.crt},scheduler.tls.secret=certificates",
		"--set", "scheduler.args={-policy=round-robin},scheduler.replicas=1,injection.by=none,networkPolicy=false,prometheus.enabled=true,prometheus.labels.release=p,image.pullPolicy=Always,image.pullSecrets={registry}")
	for id := range many {
		if strings.Contains(id, "nats") || strings.Contains(id, "webhook") || strings.HasPrefix(id, "NetworkPolicy") || strings.HasPrefix(id, "PodDisruptionBudget") {
			t.Errorf("%s was not asked for", id)
		}
	}
	container := fields(many["Deployment/kvscout-scheduler"].at("spec", "template", "spec", "containers", 0).(map[string]any))
	args := strings.Join(argumentsOf(container.at("args")), " ")
	for _, want := range []string{"-nats-url=tls://nats.example.com:4222 ", "-nats-seed=/etc/kvscout/nats/seed ", "-nats-tls-ca=/etc/kvscout/nats/ca.crt ", "-grpc-tls-ca=/etc/kvscout/tls/ca.crt ", " -policy=round-robin"} {
		if !strings.Contains(args, want) {
			t.Errorf("the scheduler lacks %q: %s", want, args)
		}
	}
	if strings.Contains(args, "-insecure") || container.text("imagePullPolicy") != "Always" {
		t.Errorf("%v", container)
	}
	if groups, _ := many["PrometheusRule/kvscout"].at("spec", "groups").([]any); len(groups) == 0 {
		t.Error("there are no alerts")
	}
	for id, o := range many {
		if strings.HasPrefix(id, "Deployment/") {
			o["metadata"].(map[string]any)["namespace"] = "default"
			if out, err := c.Run(documents(t, o), "kubectl", "apply", "--dry-run=server", "-f", "-"); err != nil {
				t.Errorf("%s: %v\n%s", id, err, out)
			}
		}
	}

	for _, wrong := range []struct{ set, says string }{
		{"nats.install=false", "/nats/url"}, {"nats.url=nats://me:secret@n", "/nats/url"}, {"injection.by=sidecar", "/injection/by"}, {"scheduler.replicas=0", "/scheduler/replicas"},
		{"replicas=3", "'replicas'"}, {"injection.settings.pol=x", "'pol'"}, {"nats.secretKeys={password}", "/nats/secretKeys/0"}, {"scheduler.args={policy}", "/scheduler/args/0"},
	} {
		if out, err := c.Run("", "helm", "template", "kvscout", chart, "--set", wrong.set); err == nil || !strings.Contains(out, wrong.says) {
			t.Errorf("%s: %v\n%s", wrong.set, err, out)
		}
	}
}

// TestKubernetesChart is installed, changed and removed.
func TestKubernetesChart(t *testing.T) {
	t.Parallel()
	c := kubernetes.Start(t, 2)
	c.Kubectl("create", "namespace", "engines")
	c.Kubectl("label", "namespace", "engines", "kvscout.io/inject=enabled")
	command := func(verb string, args ...string) {
		t.Helper()
		helm(t, c, append([]string{verb, "kvscout", chart, "-n", "kvscout", "--wait", "--timeout", "170s"}, args...)...)
	}
	ready := func(name string) string {
		return c.Kubectl("-n", "kvscout", "get", "deployment", name, "-o", "jsonpath={.status.readyReplicas}")
	}
	command("install", "--create-namespace")
	for _, name := range []string{"kvscout-scheduler", "kvscout-webhook"} {
		if got := ready(name); got != "2" {
			t.Errorf("%s: %q replicas are ready", name, got)
		}
	}
	command("upgrade", "--set", "injection.by=policy,injection.settings.pool=blue,scheduler.replicas=3,image.agent=registry.example.com/kvscout-agent")
	if got := ready("kvscout-scheduler"); got != "3" {
		t.Errorf("%q schedulers are ready", got)
	}
	if out := c.Kubectl("get", "mutatingwebhookconfigurations", "-o", "name") + c.Kubectl("-n", "kvscout", "get", "deployments", "-o", "name"); strings.Contains(out, "webhook") {
		t.Errorf("the webhook stays: %s", out)
	}
	// Pods of a Deployment, made and started by the real controllers.
	plain := objects(t, []byte(`{apiVersion: v1, kind: Pod, metadata: {name: plain}, spec: {containers: [{name: vllm, image: vllm/vllm-openai, args: [m]}]}}`))[0]
	c.Until("the policy is in force", func() bool { return len(agentsOf(admitted(c, t, plain))) == 1 })
	for _, o := range manifests(t, fixtures+"deployment.yaml") {
		o["metadata"].(map[string]any)["namespace"] = "engines"
		for _, pod := range podTemplates(o) {
			delete(pod.at("spec", "containers", 0).(map[string]any), "resources") // no node has a GPU
		}
		c.Apply(documents(t, o))
	}
	c.Kubectl("-n", "engines", "rollout", "status", "deployment/llama", "--timeout=170s")
	var pods struct{ Items []fields }
	if status, text := c.Do(http.MethodGet, "/api/v1/namespaces/engines/pods", "", nil, &pods); status != http.StatusOK || len(pods.Items) != 2 {
		t.Fatalf("%d: %s", status, text)
	}
	for _, pod := range pods.Items {
		env, _ := json.Marshal(pod.at("spec", "initContainers", 0, "env"))
		if pod.text("spec", "initContainers", 0, "image") != "registry.example.com/kvscout-agent:v0.1.0" || !strings.Contains(string(env), `"blue"`) ||
			!strings.Contains(string(env), "kvscout.workload=Deployment/llama") || pod.at("status", "initContainerStatuses", 0, "started") != true {
			t.Errorf("%v", pod)
		}
	}
	helm(t, c, "uninstall", "kvscout", "-n", "kvscout", "--wait", "--timeout", "170s")
	left := c.Kubectl("get", "mutatingwebhookconfigurations,mutatingadmissionpolicies,mutatingadmissionpolicybindings,clusterroles,clusterrolebindings", "-o", "name") +
		c.Kubectl("-n", "kvscout", "get", "deployments,services,configmaps,secrets,networkpolicies,poddisruptionbudgets,roles,rolebindings,serviceaccounts", "-o", "name")
	if strings.Contains(left, "kvscout") {
		t.Errorf("it leaves behind:\n%s", left)
	}
}

// TestKubernetesWebhookNeedsEachRight: without any verb of its roles the webhook
// says what was refused, and is not ready.
func TestKubernetesWebhookNeedsEachRight(t *testing.T) {
	t.Parallel()
	c := kubernetes.Start(t, 0)
	bin := programs(t, "./agent/cmd/kvscout-agent")
	c.Kubectl("apply", "-k", "../deploy/kustomize/base")
	account := c.ServiceAccount("kvscout", "kvscout-webhook")
	const local = "127.0.0.1:0"
	for _, role := range []string{"Role/kvscout-webhook", "ClusterRole/kvscout-webhook"} {
		verbs := argumentsOf(base(t)[role].at("rules", 0, "verbs"))
		for i, verb := range verbs {
			t.Run(strings.ReplaceAll(role, "/", "-")+"-"+verb, func(t *testing.T) {
				c.Kubectl("-n", "kvscout", "patch", role, "--type=json", "-p", fmt.Sprintf(`[{"op": "remove", "path": "/rules/0/verbs/%d"}]`, i))
				resource := "secret/kvscout-webhook"
				if strings.HasPrefix(role, "Cluster") {
					resource = "mutatingwebhookconfiguration/kvscout"
				}
				c.Until("the right is gone", func() bool {
					said, _ := c.Run("", "kubectl", "-n", "kvscout", "auth", "can-i", verb, resource, "--as=system:serviceaccount:kvscout:kvscout-webhook")
					return strings.HasSuffix(strings.TrimSpace(said), "no")
				})
				webhook := launch(t, filepath.Join(bin, "kvscout-agent"), append([]string{"webhook", "-kubernetes", c.URL, "-service-account", account,
					"-address", local, "-admin-address", local}, sameFlags()...)...)
				webhook.says(0, "certificates cannot be kept", "cannot "+verb)
				if len(webhook.log.Lines("the certificate is trusted")) > 0 {
					t.Errorf("it does without %s of %s", verb, role)
				}
				// It ends its silence when the right is back.
				c.Kubectl("apply", "-k", "../deploy/kustomize/base")
				webhook.says(0, "the certificate is trusted")
				webhook.kill()
				// The next one begins anew.
				c.Kubectl("-n", "kvscout", "delete", "secret", "kvscout-webhook")
				c.Kubectl("delete", "mutatingwebhookconfiguration", "kvscout")
				c.Kubectl("apply", "-k", "../deploy/kustomize/base")
			})
		}
	}
}

// TestKubernetesTakesEachFolder of deploy/kustomize; the scheduler starts with the
// arguments and certificates of the overlay with TLS.
func TestKubernetesTakesEachFolder(t *testing.T) {
	t.Parallel()
	c := kubernetes.Start(t, 0)
	files, err := filepath.Glob("../deploy/kustomize/*/*/kustomization.yaml")
	if err != nil || len(files) < 3 {
		t.Fatalf("%d overlays, %v", len(files), err)
	}
	c.Kubectl("apply", "-k", "../deploy/kustomize/base")
	for _, file := range append(files, "../deploy/kustomize/policy/kustomization.yaml") {
		folder := filepath.Dir(file)
		c.Kubectl("apply", "--dry-run=server", "-k", folder)
		made := make(map[string]bool)
		for _, o := range objects(t, []byte(c.Kubectl("kustomize", folder))) {
			made[o.text("kind")+"/"+o.text("metadata", "name")] = true
		}
		switch filepath.Base(folder) {
		case "policy":
			if made["Deployment/kvscout-webhook"] || made["MutatingWebhookConfiguration/kvscout"] || !made["MutatingAdmissionPolicy/kvscout"] || !made["ConfigMap/kvscout-policy"] {
				t.Errorf("%s: %v", folder, made)
			}
		case "external-nats":
			if made["Deployment/kvscout-nats"] || made["Service/kvscout-nats"] || !made["Deployment/kvscout-webhook"] {
				t.Errorf("%s: %v", folder, made)
			}
		case "mtls":
			if !made["Deployment/kvscout-nats"] || !made["Deployment/kvscout-webhook"] {
				t.Errorf("%s: %v", folder, made)
			}
		default:
			t.Errorf("%s is not looked at", folder)
		}
	}

	var args []string
	for _, o := range objects(t, []byte(c.Kubectl("kustomize", "../deploy/kustomize/overlays/mtls"))) {
		if o.text("kind") == "Deployment" && o.text("metadata", "name") == "kvscout-scheduler" {
			args = argumentsOf(o.at("spec", "template", "spec", "containers", 0, "args"))
		}
	}
	ca := authority.New(t)
	pair := ca.Issue(t, time.Now().Add(time.Hour))
	certificates := strings.NewReplacer("/etc/kvscout/tls/tls.crt", pair.Cert, "/etc/kvscout/tls/tls.key", pair.Key, "/etc/kvscout/tls/ca.crt", ca.CA)
	for i := range args {
		args[i] = certificates.Replace(args[i])
	}
	const local = "127.0.0.1:0"
	bin := programs(t, "./scheduler/cmd/kvscout-scheduler")
	scheduler := launch(t, filepath.Join(bin, "kvscout-scheduler"), append(args, "-nats-url="+open(t, stage.Options{}).NATS, "-grpc-address="+local, "-http-address="+local, "-admin-address="+local)...)
	scheduler.says(0, "scheduler started")
}

// TestKubernetesPage runs the commands of docs/KUBERNETES.md in their order, where
// the page is read with kustomize and then with helm. Commands that need a kubelet
// are left out.
func TestKubernetesPage(t *testing.T) {
	t.Parallel()
	c := kubernetes.Start(t, 1)
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	parent := t.TempDir()
	folder := filepath.Join(parent, "mine")
	page := read(t, "../docs/KUBERNETES.md")
	write(t, filepath.Join(folder, "kustomization.yaml"), regexp.MustCompile("(?s)```yaml\n(.*?)```").FindStringSubmatch(page)[1])
	write(t, filepath.Join(folder, "deployment.yaml"), read(t, fixtures+"deployment.yaml"))
	write(t, filepath.Join(folder, "agent.seed"), "seed")
	write(t, filepath.Join(folder, "ca.crt"), "certificate")
	for link, to := range map[string]string{filepath.Join(parent, "kvscout"): root, filepath.Join(folder, "deploy"): filepath.Join(root, "deploy")} {
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
	}
	bin := programs(t, "./agent/cmd/kvscout-agent")
	environment := c.Environment()
	for i, v := range environment {
		if path, ok := strings.CutPrefix(v, "PATH="); ok {
			environment[i] = "PATH=" + bin + string(os.PathListSeparator) + path
		}
	}
	c.Kubectl("create", "namespace", "prod")
	c.Kubectl("apply", "-f", filepath.Join(folder, "deployment.yaml"))

	left := regexp.MustCompile(`(?m)^kubectl .* (logs|port-forward) .*\n`)
	blocks := regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(page, -1)
	ran, restarted := 0, time.Time{}
	for _, tool := range []string{"kubectl", "helm"} {
		for _, block := range blocks {
			script := left.ReplaceAllString(block[1], "")
			if strings.Contains(script, "helm ") != (tool == "helm") || script == "" {
				continue
			}
			if strings.Contains(script, " POD ") {
				var pod string
				c.Until("a pod has what was put into its manifest", func() bool {
					pod = strings.TrimPrefix(strings.TrimSpace(c.Kubectl("-n", "prod", "get", "pods", "-l", "kvscout.io/agent=true", "-o", "jsonpath={.items[0].metadata.name}", "--ignore-not-found")), "pod/")
					return pod != ""
				})
				script = strings.ReplaceAll(script, " POD ", " "+pod+" ")
			}
			if strings.Contains(script, "rollout restart") {
				c.Until("kubectl restarts again, which it does once in a second", func() bool { return time.Since(restarted) > 2*time.Second })
			}
			cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", script)
			cmd.Dir, cmd.Env = folder, environment
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s\n%s", err, script, out)
			}
			if strings.Contains(script, "jsonpath") && !strings.HasPrefix(string(out), "agent beside vllm") {
				t.Errorf("%s says %q", script, out)
			}
			restarted = time.Now()
			ran++
		}
	}
	if ran < 9 {
		t.Errorf("%d of %d blocks were run", ran, len(blocks))
	}
}
