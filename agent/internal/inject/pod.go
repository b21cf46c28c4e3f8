package inject

import (
	"cmp"
	"strings"
)

// Pod is what is read of a pod, or of the template of one. Everything else of
// it stays as it is.
type Pod struct {
	Metadata Metadata `json:"metadata"`
	Spec     Spec     `json:"spec"`
}

// Metadata of a pod.
type Metadata struct {
	Name         string            `json:"name"`
	GenerateName string            `json:"generateName"`
	Labels       map[string]string `json:"labels"`
	Annotations  map[string]string `json:"annotations"`
	Owners       []Owner           `json:"ownerReferences"`
}

// Owner is what a pod belongs to.
type Owner struct {
	Kind       string `json:"kind"`
	Name       string `json:"name"`
	Controller bool   `json:"controller"`
}

// Spec of a pod.
type Spec struct {
	InitContainers []Container `json:"initContainers"`
	Containers     []Container `json:"containers"`
	Volumes        []struct {
		Name string `json:"name"`
	} `json:"volumes"`
	HostNetwork bool `json:"hostNetwork"`
	OS          struct {
		Name string `json:"name"`
	} `json:"os"`
}

// Container of a pod.
type Container struct {
	Name    string     `json:"name"`
	Image   string     `json:"image"`
	Command []string   `json:"command"`
	Args    []string   `json:"args"`
	Env     []Variable `json:"env"`
	EnvFrom []any      `json:"envFrom"`
	Ports   []struct {
		Number int `json:"containerPort"`
	} `json:"ports"`
	Resources struct {
		Requests map[string]any `json:"requests"`
		Limits   map[string]any `json:"limits"`
	} `json:"resources"`
}

// Variable of a container's environment: a text, or where it comes from.
type Variable struct {
	Name  string `json:"name"`
	Value string `json:"value,omitempty"`
	From  any    `json:"valueFrom,omitempty"`
}

// guaranteed tells whether Kubernetes gives the pod the quality of service
// "Guaranteed", with processors of its own where nodes have such: each
// container's limits of processor and memory are its requests.
func (s Spec) guaranteed() bool {
	for _, c := range append(append([]Container(nil), s.InitContainers...), s.Containers...) {
		for _, kind := range []string{"cpu", "memory"} {
			limit, limited := c.Resources.Limits[kind]
			request, requested := c.Resources.Requests[kind]
			if !limited || requested && request != limit {
				return false
			}
		}
	}
	return len(s.Containers) > 0
}

// workloadLabels are labels of pods that name what their owner belongs to.
var workloadLabels = []struct{ label, kind string }{{"leaderworkerset.sigs.k8s.io/name", "LeaderWorkerSet"}, {"storm-service-name", "StormService"}}

// workload is kind/name of what the pod belongs to, by its labels or its owner;
// empty: nothing is known. The replica set of a deployment is named after it and
// a hash.
func (m Metadata) workload() string {
	for _, w := range workloadLabels {
		if name := m.Labels[w.label]; name != "" {
			return w.kind + "/" + name
		}
	}
	for _, o := range m.Owners {
		if !o.Controller {
			continue
		}
		if hash := m.Labels["pod-template-hash"]; o.Kind == "ReplicaSet" && hash != "" {
			if name, ok := strings.CutSuffix(o.Name, "-"+hash); ok {
				return "Deployment/" + name
			}
		}
		return o.Kind + "/" + o.Name
	}
	return ""
}

// roleLabels are the labels of pods by which prefill and decode are told apart:
// ours, llm-d's and KServe's, AIBrix's.
var roleLabels = []string{Domain + "role", "llm-d.ai/role", "role-name"}

// role of a pod as the agent announces it; empty: not told.
func (m Metadata) role() string {
	for _, key := range roleLabels {
		switch role := cmp.Or(m.Annotations[key], m.Labels[key]); role {
		case "prefill", "decode", "both":
			return role
		case "prefill-decode":
			return "both"
		}
	}
	return ""
}
