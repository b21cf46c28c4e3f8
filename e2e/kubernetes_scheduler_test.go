package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvscout/kvscout/e2e/journal"
	"github.com/kvscout/kvscout/e2e/kubernetes"
	"github.com/kvscout/kvscout/e2e/members"
	"github.com/kvscout/kvscout/protocol"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler"
)

// clusterPod is what these tests read of a pod.
type clusterPod struct {
	Metadata struct {
		Name, UID         string
		DeletionTimestamp string
	}
	Spec   struct{ NodeName string }
	Status struct{ PodIP string }
}

func podsOf(t *testing.T, c *kubernetes.Cluster, namespace string) (list []clusterPod) {
	t.Helper()
	var all struct{ Items []clusterPod }
	if err := json.Unmarshal([]byte(c.Kubectl("-n", namespace, "get", "pods", "-o", "json")), &all); err != nil {
		t.Fatal(err)
	}
	return all.Items
}

// schedulerIn runs a scheduler with the rights that deploy gives it, until the test ends.
func schedulerIn(t *testing.T, c *kubernetes.Cluster, log *journal.Journal, cfg scheduler.Config) (*scheduler.Scheduler, *grpc.ClientConn) {
	t.Helper()
	c.Kubectl("create", "namespace", "kvscout")
	c.Kubectl("apply", "-f", "../deploy/kustomize/kubernetes/rbac.yaml")
	cfg.Kubernetes, cfg.ServiceAccount = c.URL, c.ServiceAccount("kvscout", "kvscout-scheduler")
	cfg.GRPCAddress, cfg.AdminAddress, cfg.NATSAddress, cfg.Log = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", log.Logger()
	s, err := scheduler.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	conn, err := grpc.NewClient(s.Addrs().GRPC, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return s, conn
}

// asAgent connects to a scheduler's NATS server as a pod's agent. A connection that
// is lost stays so.
func asAgent(t *testing.T, s *scheduler.Scheduler, token string) (*nats.Conn, error) {
	t.Helper()
	conn, err := nats.Connect("nats://"+s.Addrs().NATS, nats.Token(token), nats.NoReconnect(), nats.Timeout(20*time.Second))
	if err == nil {
		t.Cleanup(conn.Close)
	}
	return conn, err
}

// TestKubernetesSchedulerKnowsItsPods: agents come by the tokens that the API server
// gives their pods; pods that go are not picked, and cut off when they are gone.
func TestKubernetesSchedulerKnowsItsPods(t *testing.T) {
	t.Parallel()
	c := kubernetes.Start(t, 2)
	c.Kubectl("create", "namespace", "prod")
	c.Apply(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: llama, namespace: prod}
spec:
  replicas: 2
  selector: {matchLabels: {app: llama}}
  template:
    metadata: {labels: {app: llama}}
    spec:
      topologySpreadConstraints:
        - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: llama}}}
      containers: [{name: vllm, image: vllm}]
`)
	c.Kubectl("-n", "prod", "rollout", "status", "deployment/llama", "--timeout=150s")
	var log journal.Journal
	s, conn := schedulerIn(t, c, &log, scheduler.Config{KubernetesNamespaces: "*", NATSTokenAudience: "kvscout"})
	admin, client := api.NewAdminClient(conn), api.NewSchedulerClient(conn)
	subjects, err := protocol.NewSubjects("default")
	if err != nil {
		t.Fatal(err)
	}
	tokenOf := func(pod clusterPod, audience string) string {
		return strings.TrimSpace(c.Kubectl("-n", "prod", "create", "token", "default", "--audience", audience, "--duration", "10m",
			"--bound-object-kind", "Pod", "--bound-object-name", pod.Metadata.Name, "--bound-object-uid", pod.Metadata.UID))
	}
	running, end := context.WithCancel(context.Background())
	t.Cleanup(end)
	pods := podsOf(t, c, "prod")
	if len(pods) != 2 {
		t.Fatalf("%d pods", len(pods))
	}
	conns := make(map[string]*nats.Conn)
	tokens := make(map[string]string)
	for _, pod := range pods {
		uid := pod.Metadata.UID
		tokens[uid] = tokenOf(pod, "kvscout")
		if conns[uid], err = asAgent(t, s, tokens[uid]); err != nil {
			t.Fatal(err)
		}
		m, err := members.Of(&pb.MemberInfo{Namespace: "prod", Pod: pod.Metadata.Name, PodUid: uid, Address: pod.Status.PodIP + ":8000",
			Engine: "vllm", Models: []string{"llama"}, BlockSize: 16}, 200*time.Millisecond, nil)
		if err != nil {
			t.Fatal(err)
		}
		go func() { _ = m.Run(running, conns[uid], subjects) }()
	}
	list := func() map[string]api.Ineligible {
		answer, err := admin.ListMembers(t.Context(), &api.ListMembersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		found := make(map[string]api.Ineligible)
		for _, m := range answer.GetMembers() {
			found[m.GetMember().GetPod()] = m.GetIneligible()
		}
		return found
	}
	a, b := pods[0], pods[1]
	free := api.Ineligible_INELIGIBLE_UNSPECIFIED
	c.Until("both are members in service", func() bool {
		l := list()
		return len(l) == 2 && l[a.Metadata.Name] == free && l[b.Metadata.Name] == free
	})

	// Another audience, and another pod's subjects.
	if _, err := asAgent(t, s, tokenOf(a, "https://kubernetes.default.svc")); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("a token of another audience: %v", err)
	}
	if text, err := os.ReadFile(filepath.Join(c.ServiceAccount("kvscout", "kvscout-scheduler"), "token")); err != nil {
		t.Fatal(err)
	} else if _, err := asAgent(t, s, string(text)); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("a token that is no pod's: %v", err)
	}
	other, err := asAgent(t, s, tokens[a.Metadata.UID])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.SubscribeSync(subjects.Snapshot("prod_" + b.Metadata.UID + "_0")); err != nil {
		t.Fatal(err)
	}
	if err := other.Flush(); err != nil || !errors.Is(other.LastError(), nats.ErrPermissionViolation) {
		t.Errorf("a pod listens for another: %v, %v", err, other.LastError())
	}

	began := time.Now()
	c.Kubectl("cordon", a.Spec.NodeName)
	c.Until("its node is cordoned", func() bool { return list()[a.Metadata.Name] == api.Ineligible_INELIGIBLE_CORDONED })
	t.Logf("cordoned: not picked %v after kubectl was called", time.Since(began))
	for range 10 {
		d, err := client.Pick(t.Context(), &api.PickRequest{Request: &api.Request{Model: "llama"}})
		if err != nil {
			t.Fatal(err)
		}
		if got := d.GetRanking().GetCandidates()[0].GetMember().GetPod(); got != b.Metadata.Name {
			t.Errorf("%s is picked, whose node is cordoned", got)
		}
	}
	c.Kubectl("uncordon", a.Spec.NodeName)
	c.Until("it is in service again", func() bool { return list()[a.Metadata.Name] == free })

	// Picks go on without the API server, and nobody is cut off.
	c.StopServer()
	for range 10 {
		if _, err := client.Pick(t.Context(), &api.PickRequest{Request: &api.Request{Model: "llama"}}); err != nil {
			t.Error(err)
		}
	}
	c.StartServer()
	if lines := log.Lines("member refused"); len(lines) > 0 {
		t.Errorf("refused: %s", lines)
	}

	began = time.Now()
	c.Kubectl("-n", "prod", "delete", "pod", a.Metadata.Name, "--wait=false")
	c.Until("it is withdrawn", func() bool {
		why, is := list()[a.Metadata.Name]
		return !is || why == api.Ineligible_INELIGIBLE_DELETING
	})
	t.Logf("deleted: not picked %v after kubectl was called, the API server having been away", time.Since(began))
	c.Until("it is no member, and cut off, though its agent still speaks", func() bool {
		_, is := list()[a.Metadata.Name]
		return !is && conns[a.Metadata.UID].IsClosed()
	})
	c.Until("its token is no token any more", func() bool {
		_, err := asAgent(t, s, tokens[a.Metadata.UID])
		return errors.Is(err, nats.ErrAuthorization)
	})
	if conns[b.Metadata.UID].IsClosed() {
		t.Error("the other is cut off, too")
	}
}

// TestKubernetesInferencePoolSaysWhoIsAMember: a custom resource is followed with the
// rights that deploy gives, and no fewer.
func TestKubernetesInferencePoolSaysWhoIsAMember(t *testing.T) {
	t.Parallel()
	c := kubernetes.Start(t, 0)
	c.Apply(`
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: inferencepools.inference.networking.k8s.io
  annotations: {api-approved.kubernetes.io: "unapproved, for a test"}
spec:
  group: inference.networking.k8s.io
  scope: Namespaced
  names: {kind: InferencePool, plural: inferencepools, singular: inferencepool}
  versions:
    - name: v1
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, x-kubernetes-preserve-unknown-fields: true}}}}
`)
	c.Kubectl("create", "namespace", "prod")
	c.Kubectl("wait", "--for=condition=Established", "crd/inferencepools.inference.networking.k8s.io", "--timeout=120s")
	for _, name := range []string{"llama", "qwen"} {
		c.Apply("{apiVersion: v1, kind: Pod, metadata: {name: " + name + ", namespace: prod, labels: {app: " + name + "}}, spec: {containers: [{name: vllm, image: vllm}]}}")
	}
	pool := func(app string) {
		c.Apply("{apiVersion: inference.networking.k8s.io/v1, kind: InferencePool, metadata: {name: pool, namespace: prod}, spec: {selector: {matchLabels: {app: " + app + "}}, targetPorts: [{number: 8000}]}}")
	}
	pool("llama")
	var log journal.Journal
	s, conn := schedulerIn(t, c, &log, scheduler.Config{InferencePool: "prod/pool"})
	subjects, err := protocol.NewSubjects("default")
	if err != nil {
		t.Fatal(err)
	}
	running, end := context.WithCancel(context.Background())
	t.Cleanup(end)
	for _, pod := range podsOf(t, c, "prod") {
		link, err := asAgent(t, s, "")
		if err != nil {
			t.Fatal(err)
		}
		m, err := members.Of(&pb.MemberInfo{Namespace: "prod", Pod: pod.Metadata.Name, PodUid: pod.Metadata.UID, Address: "10.0.0.1:8000",
			Engine: "vllm", Models: []string{"m"}, BlockSize: 16}, 200*time.Millisecond, nil)
		if err != nil {
			t.Fatal(err)
		}
		go func() { _ = m.Run(running, link, subjects) }()
	}
	admin := api.NewAdminClient(conn)
	member := func() string {
		answer, err := admin.ListMembers(t.Context(), &api.ListMembersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, m := range answer.GetMembers() {
			names = append(names, m.GetMember().GetPod())
		}
		return strings.Join(names, " ")
	}
	c.Until("the missing right is said", func() bool { return len(log.Lines("Kubernetes is not followed", "inferencepools")) > 0 })
	if got := member(); got != "" {
		t.Errorf("members without a pool: %s", got)
	}
	c.Kubectl("-n", "prod", "create", "rolebinding", "kvscout-inference-pool", "--clusterrole=kvscout-inference-pool", "--serviceaccount=kvscout:kvscout-scheduler")
	c.Until("who is selected is a member", func() bool { return member() == "llama" })
	pool("qwen")
	c.Until("who is selected then is", func() bool { return member() == "qwen" })
}
