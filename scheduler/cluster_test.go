package scheduler

import (
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/journal"
	"github.com/kvscout/kvscout/e2e/kubeapi"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// inCluster starts a scheduler that follows the pods of prod.
func inCluster(t *testing.T, kubernetes *kubeapi.Objects, log *journal.Journal) *Scheduler {
	t.Helper()
	s, _ := start(t, Config{KubernetesNamespaces: "prod", Kubernetes: kubernetes.URL, ServiceAccount: kubernetes.Folder, Log: log.Logger()})
	return s
}

// picked is the member that a request goes to, with what the answer lacks.
func picked(t *testing.T, s *Scheduler, conn api.SchedulerClient) (member, lacks string) {
	t.Helper()
	d, err := conn.Pick(t.Context(), &api.PickRequest{Request: &api.Request{Model: "m"}})
	if err != nil {
		t.Fatal(err)
	}
	return d.GetRanking().GetCandidates()[0].GetMember().GetId(), d.GetRanking().Lacks()
}

// A pod that is about to go is not picked any more while another is there, whatever
// its agent says, and is picked again when it stays after all.
func TestWithdrawnPodsAreNotPicked(t *testing.T) {
	kubernetes := kubeapi.NewObjects(t)
	kubernetes.Put("nodes", kubeapi.Object{"metadata": kubeapi.Object{"name": "n1"}, "spec": kubeapi.Object{}})
	for name, node := range map[string]string{"stays": "n2", "goes": "n1"} {
		kubernetes.Put("pods", kubeapi.Pod("prod", name, name, "127.0.0.1", node))
	}
	var log journal.Journal
	s := inCluster(t, kubernetes, &log)
	announce(t, s.Addrs().NATS, memberInfo("prod", "stays", "127.0.0.1:1", "m"))
	announce(t, s.Addrs().NATS, memberInfo("prod", "goes", "127.0.0.1:2", "m"))
	await.True(t, "both are members", func() bool { return members(t, s) == "prod_goes_0 prod_stays_0" })
	client := api.NewSchedulerClient(dial(t, s))
	admin := api.NewAdminClient(dial(t, s))
	ineligible := func(name string) api.Ineligible {
		list, err := admin.ListMembers(t.Context(), &api.ListMembersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range list.GetMembers() {
			if m.GetMember().GetPod() == name {
				return m.GetIneligible()
			}
		}
		return -1
	}
	status := func(o kubeapi.Object) kubeapi.Object { return o["status"].(kubeapi.Object) }
	condition := func(kind, is string) func(kubeapi.Object) {
		return func(o kubeapi.Object) {
			ready := kubeapi.Object{"type": "Ready", "status": "True"}
			if kind == "Ready" {
				ready["status"] = is
			}
			conditions := []any{ready}
			if kind != "Ready" {
				conditions = append(conditions, kubeapi.Object{"type": kind, "status": is})
			}
			status(o)["conditions"] = conditions
		}
	}
	cordon := func(is bool) func(kubeapi.Object) {
		return func(o kubeapi.Object) { o["spec"].(kubeapi.Object)["unschedulable"] = is }
	}
	for _, c := range []struct {
		label, reason string
		want          api.Ineligible
		resource      string
		away, back    func(kubeapi.Object)
	}{
		{"cordoned", "its node is cordoned", api.Ineligible_INELIGIBLE_CORDONED, "nodes", cordon(true), cordon(false)},
		{"not_ready", "its pod is not ready", api.Ineligible_INELIGIBLE_NOT_READY, "pods", condition("Ready", "False"), condition("Ready", "True")},
		{"evicted", "its pod is being evicted", api.Ineligible_INELIGIBLE_EVICTED, "pods", condition("DisruptionTarget", "True"), condition("DisruptionTarget", "False")},
		{"ended", "its pod has ended", api.Ineligible_INELIGIBLE_ENDED, "pods",
			func(o kubeapi.Object) { status(o)["phase"] = "Failed" }, func(o kubeapi.Object) { status(o)["phase"] = "Running" }},
		{"deleting", "its pod is being deleted", api.Ineligible_INELIGIBLE_DELETING, "pods",
			func(o kubeapi.Object) { o["metadata"].(kubeapi.Object)["deletionTimestamp"] = "2026-01-02T03:04:05Z" }, nil},
	} {
		namespace, name := "prod", "goes"
		if c.resource == "nodes" {
			namespace, name = "", "n1"
		}
		began := time.Now()
		kubernetes.Change(c.resource, namespace, name, c.away)
		await.True(t, c.reason, func() bool { return ineligible("goes") == c.want })
		t.Logf("%s: known after %v", c.reason, time.Since(began))
		for range 8 {
			if got, lacks := picked(t, s, client); got != "prod_stays_0" || strings.Contains(lacks, "pod") {
				t.Errorf("%s: %s is picked, lacking %q", c.reason, got, lacks)
			}
		}
		if ineligible("stays") != api.Ineligible_INELIGIBLE_UNSPECIFIED {
			t.Errorf("%s: the other is ineligible, too", c.reason)
		}
		if lines := log.Lines("member is withdrawn", "member=prod_goes_0", c.reason); len(lines) != 1 {
			t.Errorf("%s: said %d times", c.reason, len(lines))
		}
		if _, page := get(t, s, "/metrics"); !strings.Contains(page, `kvscout_scheduler_members_withdrawn{reason="`+c.label+`"} 1`) {
			t.Errorf("%s is not counted", c.label)
		}
		if c.back == nil {
			continue
		}
		kubernetes.Change(c.resource, namespace, name, c.back)
		await.True(t, "it is back", func() bool { return ineligible("goes") == api.Ineligible_INELIGIBLE_UNSPECIFIED })
	}
	// Where every pod goes, the best of them is better than none, and the answer says so.
	kubernetes.Change("pods", "prod", "stays", condition("Ready", "False"))
	await.True(t, "the answer says that both are withdrawn", func() bool {
		_, lacks := picked(t, s, client)
		return strings.Contains(lacks, "every candidate's pod is about to go")
	})
	// A pod that is gone is no member any more, though its agent still speaks.
	kubernetes.Delete("pods", "prod", "goes")
	await.True(t, "it is no member", func() bool { return members(t, s) == "prod_stays_0" })
}

// Only pods that Kubernetes has are members, by their own names and addresses, and
// who is refused is told why.
func TestStrangersToTheClusterAreRefused(t *testing.T) {
	kubernetes := kubeapi.NewObjects(t)
	for _, name := range []string{"a", "c", "d"} {
		kubernetes.Put("pods", kubeapi.Pod("prod", "pod-"+name, "uid-"+name, "127.0.0.1", "n"))
	}
	kubernetes.Put("pods", kubeapi.Pod("dev", "pod-b", "uid-b", "127.0.0.1", "n"))
	var log journal.Journal
	s := inCluster(t, kubernetes, &log)
	other := memberInfo("prod", "uid-c", "127.0.0.1:1", "m")
	other.Pod = "pod-z"
	elsewhere := memberInfo("prod", "uid-d", "10.1.2.3:1", "m")
	elsewhere.Pod = "pod-d"
	foreign := memberInfo("prod", "uid-b", "127.0.0.1:1", "m")
	foreign.Pod = "pod-b"
	a, stop := announce(t, s.Addrs().NATS, memberInfo("prod", "nobody", "127.0.0.1:1", "m"))
	await.True(t, "no such pod", func() bool { return strings.Contains(a.refused(), `no pod of namespace prod has the uid "nobody"`) })
	stop()
	a, stop = announce(t, s.Addrs().NATS, other)
	await.True(t, "another name", func() bool { return strings.Contains(a.refused(), "is that of pod prod/pod-c and not of prod/pod-z") })
	stop()
	a, stop = announce(t, s.Addrs().NATS, elsewhere)
	await.True(t, "another address", func() bool { return strings.Contains(a.refused(), "is not that of its pod, which is 127.0.0.1") })
	stop()
	a, stop = announce(t, s.Addrs().NATS, foreign)
	await.True(t, "another namespace", func() bool { return strings.Contains(a.refused(), `no pod of namespace prod has the uid "uid-b"`) })
	stop()
	a, stop = announce(t, s.Addrs().NATS, memberInfo("dev", "uid-b", "127.0.0.1:1", "m"))
	await.True(t, "a namespace that is not followed", func() bool {
		return strings.Contains(a.refused(), `namespace "dev" is not in the scheduler's -kubernetes-namespaces`)
	})
	stop()
	if got := members(t, s); got != "" {
		t.Errorf("members: %s", got)
	}
	right := memberInfo("prod", "uid-a", "127.0.0.1:1", "m")
	right.Pod = "pod-a"
	a, _ = announce(t, s.Addrs().NATS, right)
	await.True(t, "the pod itself is a member", func() bool { return members(t, s) == "prod_uid-a_0" && a.refused() == "" })
}

// While the API server is away picks go on by what it said last, new pods are taken
// up, and it is said once; when it is back they are judged.
func TestPicksGoOnWithoutKubernetes(t *testing.T) {
	kubernetes := kubeapi.NewObjects(t)
	kubernetes.Forbid("list nodes", true)
	for _, name := range []string{"a", "b"} {
		kubernetes.Put("pods", kubeapi.Pod("prod", name, name, "127.0.0.1", "n"))
	}
	var log journal.Journal
	s := inCluster(t, kubernetes, &log)
	announce(t, s.Addrs().NATS, memberInfo("prod", "a", "127.0.0.1:1", "m"))
	announce(t, s.Addrs().NATS, memberInfo("prod", "b", "127.0.0.1:2", "m"))
	await.True(t, "both are members", func() bool { return members(t, s) == "prod_a_0 prod_b_0" })
	kubernetes.Change("pods", "prod", "b", func(o kubeapi.Object) {
		o["metadata"].(kubeapi.Object)["deletionTimestamp"] = "2026-01-02T03:04:05Z"
	})
	client := api.NewSchedulerClient(dial(t, s))
	withdrawn := func(n string) bool {
		_, page := get(t, s, "/metrics")
		return strings.Contains(page, `kvscout_scheduler_members_withdrawn{reason="deleting"} `+n)
	}
	await.True(t, "one is withdrawn", func() bool { return withdrawn("1") })
	forbidden := func() int { return len(log.Lines("Kubernetes is not followed", "list=nodes", "list and watch")) }
	await.True(t, "that nodes are forbidden is said", func() bool { return forbidden() > 0 })

	kubernetes.Down(true)
	announce(t, s.Addrs().NATS, memberInfo("prod", "new", "127.0.0.1:3", "m"))
	await.True(t, "who is new is taken up", func() bool { return strings.Contains(members(t, s), "prod_new_0") })
	await.True(t, "it is said", func() bool { return len(log.Lines("Kubernetes is not followed", `list="pods of prod"`)) > 0 })
	if n := forbidden(); n != 1 {
		t.Errorf("that nodes are forbidden is said in %d lines", n)
	}
	if _, page := get(t, s, "/metrics"); !strings.Contains(page, `kvscout_scheduler_kubernetes_lost{kind="pod"} 1`) {
		t.Error("it is not counted")
	}
	for range 8 {
		if got, _ := picked(t, s, client); got == "prod_b_0" {
			t.Error("the one that is withdrawn is picked")
		}
	}
	if !withdrawn("1") {
		t.Error("what was known is forgotten")
	}

	kubernetes.Down(false)
	await.True(t, "it is said that it is back", func() bool { return len(log.Lines("Kubernetes is followed again")) == 1 })
	await.True(t, "who is no pod is refused now", func() bool { return members(t, s) == "prod_a_0 prod_b_0" })
	if n := len(log.Lines("Kubernetes is not followed", `list="pods of prod"`)); n != 1 {
		t.Errorf("said %d times", n)
	}
}

func TestKubernetesSettings(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for want, cfg := range map[string]Config{
		`in the file: "Prod" is no namespace`:     {KubernetesNamespaces: "Prod", Kubernetes: "https://a:1"},
		`"prod": want NAMESPACE/NAME`:             {InferencePool: "prod", Kubernetes: "https://a:1"},
		"two ways to say whose pods":              {InferencePool: "a/b", KubernetesNamespaces: "a", Kubernetes: "https://a:1"},
		"no other belongs beside it":              {KubernetesNamespaces: "prod,*", Kubernetes: "https://a:1"},
		`"kubernetes" in the file: want https://`: {KubernetesNamespaces: "prod"},
	} {
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if err := (Config{KubernetesNamespaces: "prod, dev", Kubernetes: "https://a:1"}).Validate(); err != nil {
		t.Error(err)
	}
}

// The pool says which pods are members, and at which ports, as it is at each moment.
func TestInferencePoolSaysWhoIsAMember(t *testing.T) {
	kubernetes := kubeapi.NewObjects(t)
	pod := func(name, app string) {
		o := kubeapi.Pod("prod", name, name, "127.0.0.1", "n")
		o["metadata"].(kubeapi.Object)["labels"] = kubeapi.Object{"app": app, "other": "label"}
		kubernetes.Put("pods", o)
	}
	pod("a", "llama")
	pod("b", "qwen")
	pod("c", "llama")
	pool := func(name, app string, port int) kubeapi.Object {
		return kubeapi.Object{"metadata": kubeapi.Object{"namespace": "prod", "name": name},
			"spec": kubeapi.Object{"selector": kubeapi.Object{"matchLabels": kubeapi.Object{"app": app}}, "targetPorts": []any{kubeapi.Object{"number": port}, kubeapi.Object{"number": 8001}}}}
	}
	kubernetes.Put("inferencepools", pool("another", "qwen", 8000))
	var log journal.Journal
	s, _ := start(t, Config{InferencePool: "prod/llama", Kubernetes: kubernetes.URL, ServiceAccount: kubernetes.Folder, Log: log.Logger()})
	a, _ := announce(t, s.Addrs().NATS, memberInfo("prod", "a", "127.0.0.1:8000", "m"))
	b, _ := announce(t, s.Addrs().NATS, memberInfo("prod", "b", "127.0.0.1:8000", "m"))
	c, _ := announce(t, s.Addrs().NATS, memberInfo("prod", "c", "127.0.0.1:9000", "m"))
	d, _ := announce(t, s.Addrs().NATS, memberInfo("dev", "d", "127.0.0.1:8000", "m"))
	await.True(t, "without the pool nobody is a member", func() bool { return strings.Contains(a.refused(), "there is no InferencePool prod/llama") })
	kubernetes.Put("inferencepools", pool("llama", "llama", 8000))
	await.True(t, "who is selected is a member", func() bool { return members(t, s) == "prod_a_0" })
	await.True(t, "others are told why", func() bool {
		return strings.Contains(b.refused(), "with the label app=llama, which its pod has not") && strings.Contains(c.refused(), "has none of the target ports [8000 8001]") &&
			strings.Contains(d.refused(), `namespace "dev" is not that of the scheduler's InferencePool prod/llama`)
	})
	kubernetes.Put("inferencepools", pool("llama", "llama", 9000))
	await.True(t, "another port", func() bool { return members(t, s) == "prod_c_0" })
	pod("c", "qwen")
	await.True(t, "another label", func() bool { return members(t, s) == "" })
	kubernetes.Put("inferencepools", pool("llama", "qwen", 8000))
	await.True(t, "another selector", func() bool { return members(t, s) == "prod_b_0" })
	kubernetes.Down(true)
	await.True(t, "the API server is away", func() bool { return s.cluster.Stats().LostPool == 1 && s.cluster.Stats().LostPods == 1 })
	if got := members(t, s); got != "prod_b_0" {
		t.Errorf("what was known is forgotten: %s", got)
	}
	kubernetes.Down(false)
	await.True(t, "it is back", func() bool { return s.cluster.Stats().LostPool == 0 && s.cluster.Stats().LostPods == 0 })
	kubernetes.Delete("inferencepools", "prod", "llama")
	await.True(t, "without the pool nobody is a member again", func() bool { return members(t, s) == "" })
}
