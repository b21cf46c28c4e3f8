package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"go.yaml.in/yaml/v3"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/kubeapi"
	"github.com/kvscout/kvscout/e2e/stage"
)

// fields are those of an object of Kubernetes.
type fields map[string]any

// at is what stands at a path of keys and numbers; nil: nothing.
func (f fields) at(path ...any) any {
	var v any = map[string]any(f)
	for _, step := range path {
		switch s := step.(type) {
		case string:
			m, _ := v.(map[string]any)
			v = m[s]
		case int:
			l, _ := v.([]any)
			if s >= len(l) {
				return nil
			}
			v = l[s]
		}
	}
	return v
}

func (f fields) text(path ...any) string {
	s, _ := f.at(path...).(string)
	return s
}

func objects(t *testing.T, text []byte) (list []fields) {
	t.Helper()
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	for {
		var o map[string]any
		if err := decoder.Decode(&o); errors.Is(err, io.EOF) {
			return list
		} else if err != nil {
			t.Fatal(err)
		}
		list = append(list, o)
	}
}

// environment of a container as the kubelet makes it, for a pod with this
// address.
func environment(t *testing.T, container fields, namespace, pod, uid, ip string) []string {
	t.Helper()
	known := map[string]string{"metadata.namespace": namespace, "metadata.name": pod, "metadata.uid": uid, "status.podIP": ip}
	var list []string
	expand := []string{}
	env, _ := container["env"].([]any)
	for i := range env {
		name, value := container.text("env", i, "name"), container.text("env", i, "value")
		if path := container.text("env", i, "valueFrom", "fieldRef", "fieldPath"); path != "" {
			value = known[path]
		}
		value = strings.NewReplacer(expand...).Replace(value)
		list, expand = append(list, name+"="+value), append(expand, "$("+name+")", value)
	}
	return list
}

// freePorts of 127.0.0.1, n in a row.
func freePorts(t *testing.T, n int) int {
	t.Helper()
	for range 100 {
		first, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		open := []net.Listener{first}
		port := first.Addr().(*net.TCPAddr).Port
		for i := 1; i < n; i++ {
			if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port+i)); err == nil {
				open = append(open, l)
			}
		}
		for _, l := range open {
			l.Close()
		}
		if len(open) == n {
			return port
		}
	}
	t.Fatal("no free ports")
	return 0
}

// TestInjectedAgentFollowsItsEngine: the real agent, with the environment that
// was injected into the engine's pod and nothing else, is a member for each rank,
// and what the scheduler promises is what the engine holds.
func TestInjectedAgentFollowsItsEngine(t *testing.T) {
	t.Parallel()
	bin := programs(t, "./agent/cmd/kvscout-agent")
	p := open(t, stage.Options{})
	ports := freePorts(t, 5)
	e := p.engine(fakevllm.Config{Host: "127.0.0.1", Port: ports, EventsPort: ports + 1, ReplayPort: ports + 3, Ranks: 2, NoSources: true})
	pod := fmt.Sprintf(`apiVersion: apps/v1
kind: Deployment
metadata: {name: llama, namespace: prod}
spec:
  template:
    metadata:
      annotations:
        kvscout.io/role: both
        agent.kvscout.io/admin-address: 127.0.0.1:0
        agent.kvscout.io/state-dir: %s
        agent.kvscout.io/probe: 50ms
    spec:
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.30.0
          env: [{name: HTTP, value: "%d"}]
          command: [bash, -c]
          args:
            - |
              exec vllm serve fake --port $HTTP --data-parallel-size 2 \
                --kv-events-config '{"enable_kv_cache_events":true,"endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"}'
`, t.TempDir(), ports, ports+1, ports+3)
	inject := exec.Command(filepath.Join(bin, "kvscout-agent"), "inject", "-image", "kvscout-agent:v1", "-nats-url", p.NATS)
	inject.Stdin = strings.NewReader(pod)
	var said bytes.Buffer
	inject.Stderr = &said
	out, err := inject.Output()
	if err != nil || said.String() != "document 1, Deployment prod/llama: agent beside vllm\n" {
		t.Fatalf("%v: %s", err, said.String())
	}
	sidecar, _ := objects(t, out)[0].at("spec", "template", "spec", "initContainers", 0).(map[string]any)
	a := &process{t: t, name: "kvscout-agent", cmd: exec.Command(filepath.Join(bin, "kvscout-agent"))}
	a.cmd.Env = environment(t, sidecar, "prod", "llama-1", "0f3c6c1e-6c54", "127.0.0.1")
	a.cmd.Stderr = &a.log
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.kill)
	e.agent = &stage.Agent{Members: []string{"prod_0f3c6c1e-6c54_0", "prod_0f3c6c1e-6c54_1"}}
	var list []prompt
	for i, q := range several(1, 6) {
		q.rank = i % 2
		list = append(list, q)
	}
	e.complete(list...)
	for _, id := range e.agent.Members {
		e.untilMember(id, "be exact", stage.Exact)
	}
	t.Log("true after", e.truth(patience, list...))
	state := p.member(e.id())
	m, labels := state.GetMember(), state.GetLabels()
	if m.GetAddress() != "127.0.0.1:"+strconv.Itoa(ports) || m.GetPod() != "llama-1" || labels["kvscout.workload"] != "Deployment/llama" || labels["kvscout.role"] != "both" {
		t.Errorf("%v", state)
	}
	for _, line := range strings.Split(a.log.String(), "\n") {
		if strings.Contains(line, "unknown environment variable") {
			t.Error(line)
		}
	}
}

// base are the objects of deploy/kustomize/base by kind/name.
func base(t *testing.T) map[string]fields {
	t.Helper()
	const folder = "../deploy/kustomize/base/"
	files, err := filepath.Glob(folder + "*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[string]fields)
	listed := objects(t, []byte(read(t, folder+"kustomization.yaml")))[0]["resources"].([]any)
	if len(listed) != len(files)-1 {
		t.Errorf("%d files, of which the kustomization lists %d", len(files)-1, len(listed))
	}
	for _, name := range listed {
		for _, o := range objects(t, []byte(read(t, folder+name.(string)))) {
			id := o.text("kind") + "/" + o.text("metadata", "name")
			if found[id] != nil || o.text("apiVersion") == "" {
				t.Errorf("%s: %s twice, or without a version", name, id)
			}
			found[id] = o
			switch o.text("kind") {
			case "Namespace", "ClusterRole", "ClusterRoleBinding", "MutatingWebhookConfiguration":
			default:
				if o.text("metadata", "namespace") != "kvscout" {
					t.Errorf("%s is in namespace %q", id, o.text("metadata", "namespace"))
				}
			}
		}
	}
	return found
}

// TestKustomizeBaseFitsTogether: names, labels and ports that one object has of
// another.
func TestKustomizeBaseFitsTogether(t *testing.T) {
	all := base(t)
	labels := make(map[string]fields) // name of an app -> its Deployment
	for id, o := range all {
		if o.text("kind") != "Deployment" {
			continue
		}
		name := o.text("metadata", "name")
		labels[name] = o
		if o.text("spec", "selector", "matchLabels", "app.kubernetes.io/name") != name || o.text("spec", "template", "metadata", "labels", "app.kubernetes.io/name") != name {
			t.Errorf("%s selects other pods than it makes", id)
		}
		spec := fields(o.at("spec", "template", "spec").(map[string]any))
		c := fields(spec.at("containers", 0).(map[string]any))
		// What the namespace's "restricted" demands.
		if spec.at("securityContext", "runAsNonRoot") != true || spec.text("securityContext", "seccompProfile", "type") != "RuntimeDefault" ||
			c.at("securityContext", "allowPrivilegeEscalation") != false || c.text("securityContext", "capabilities", "drop", 0) != "ALL" {
			t.Errorf("%s would not be admitted", id)
		}
		ports := map[string]bool{}
		for i := range c.at("ports").([]any) {
			ports[c.text("ports", i, "name")] = true
		}
		for _, probe := range []string{"readinessProbe", "livenessProbe"} {
			if !ports[c.text(probe, "httpGet", "port")] {
				t.Errorf("%s: its %s asks a port that it does not have", id, probe)
			}
		}
		if s := all["Service/"+name]; s == nil || s.text("spec", "selector", "app.kubernetes.io/name") != name {
			t.Errorf("%s has no Service", id)
		} else {
			for i := range s.at("spec", "ports").([]any) {
				if !ports[s.text("spec", "ports", i, "targetPort")] {
					t.Errorf("Service/%s leads to a port that there is not", name)
				}
			}
		}
		if spec.at("enableServiceLinks") != false {
			t.Errorf("%s gets variables like KVSCOUT_NATS_PORT from Services, which look like settings", id)
		}
		if spec.at("automountServiceAccountToken") != false && all["ServiceAccount/"+spec.text("serviceAccountName")] == nil {
			t.Errorf("%s has a token of nobody", id)
		}
	}
	for id, o := range all {
		if o.text("kind") == "PodDisruptionBudget" {
			if d := labels[o.text("spec", "selector", "matchLabels", "app.kubernetes.io/name")]; d == nil || d.at("spec", "replicas").(int) <= o.at("spec", "minAvailable").(int) {
				t.Errorf("%s allows no disruption", id)
			}
		}
	}
	if len(labels) != 3 {
		t.Errorf("%d Deployments", len(labels))
	}
	config := all["MutatingWebhookConfiguration/kvscout"]
	args := argumentsOf(all["Deployment/kvscout-webhook"].at("spec", "template", "spec", "containers", 0, "args"))
	for i, name := range []string{"namespaces.kvscout.io", "pods.kvscout.io"} {
		w := fields(config.at("webhooks", i).(map[string]any))
		s := all["Service/"+w.text("clientConfig", "service", "name")]
		if w.text("name") != name || w.text("failurePolicy") != "Ignore" || w.text("sideEffects") != "None" || s == nil || s.at("spec", "ports", 0, "port") != w.at("clientConfig", "service", "port") ||
			!slices.Contains(args, "-service="+w.text("clientConfig", "service", "name")) {
			t.Errorf("webhook %s: %v", name, w)
		}
	}
	// Rights are to what the flags name.
	for _, r := range []struct{ role, flag string }{{"Role/kvscout-webhook", "-secret="}, {"ClusterRole/kvscout-webhook", "-configuration="}} {
		if !slices.Contains(args, r.flag+all[r.role].text("rules", 0, "resourceNames", 0)) || len(all[r.role].at("rules").([]any)) != 1 {
			t.Errorf("%s does not fit %s", r.role, r.flag)
		}
	}
	if all["Secret/kvscout-webhook"]["data"] != nil {
		t.Error("a Secret with something in it would be put back by every apply")
	}
}

func argumentsOf(list any) (texts []string) {
	for _, w := range list.([]any) {
		texts = append(texts, w.(string))
	}
	return texts
}

// TestKustomizeBaseStarts the programs with the arguments and files that stand
// there, on addresses of the test.
func TestKustomizeBaseStarts(t *testing.T) {
	t.Parallel()
	all := base(t)
	bin := programs(t, "./agent/cmd/kvscout-agent", "./scheduler/cmd/kvscout-scheduler")
	args := func(name string) []string {
		return argumentsOf(all["Deployment/"+name].at("spec", "template", "spec", "containers", 0, "args"))
	}
	// NATS takes its configuration.
	options, err := server.ProcessConfigFile(file(t, "nats.conf", all["ConfigMap/kvscout-nats"].text("data", "nats.conf")))
	if err != nil || options.Port != 4222 || options.HTTPPort != 8222 || options.Host != "0.0.0.0" {
		t.Errorf("%+v, %v", options, err)
	}
	const local = "127.0.0.1:0"
	nats := open(t, stage.Options{}).NATS
	scheduler := launch(t, filepath.Join(bin, "kvscout-scheduler"), append(args("kvscout-scheduler"), "-nats-url="+nats, "-grpc-address="+local, "-http-address="+local, "-admin-address="+local)...)
	scheduler.says(0, "scheduler started")

	api := kubeapi.New(t, "36")
	settings := file(t, "webhook.yaml", all["ConfigMap/kvscout-webhook"].text("data", "webhook.yaml"))
	webhook := launch(t, filepath.Join(bin, "kvscout-agent"), append(args("kvscout-webhook"), "-config="+settings, "-address="+local, "-admin-address="+local, "-kubernetes="+api.URL, "-service-account="+api.Folder)...)
	webhook.says(0, "the certificate is trusted")
	webhook.says(0, all["Deployment/kvscout-webhook"].text("spec", "template", "spec", "containers", 0, "image"))
	service := all["Service/kvscout-nats"]
	address := fmt.Sprintf("nats://%s.%s:%d", service.text("metadata", "name"), service.text("metadata", "namespace"), service.at("spec", "ports", 0, "port"))
	webhook.says(0, address)
	if !slices.Contains(args("kvscout-scheduler"), "-nats-url="+address) {
		t.Errorf("schedulers and agents meet at different servers: %q", args("kvscout-scheduler"))
	}
}

func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
