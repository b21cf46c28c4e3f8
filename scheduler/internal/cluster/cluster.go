// Package cluster knows the pods that members run in, as Kubernetes has them: who
// may say that it is one of them, and which are about to go. It follows lists of the
// API server and answers from memory; while the server is away, what it said last
// stands. What becomes of members, others decide.
package cluster

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/kube"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

const (
	// Every stands for all namespaces.
	Every = "*"
	// awayAfter is how long a list may not be followed before that is said: servers
	// restart, and watches end.
	awayAfter = 5 * time.Second
	checkEach = time.Second
	// maxAddresses of one pod are remembered.
	maxAddresses = 8
)

// Config of a Cluster. Every field but Pool is required.
type Config struct {
	Client *kube.Client
	// Namespaces whose pods are followed; Every alone: all.
	Namespaces []string
	// Pool that members must be of; zero: none.
	Pool Pool
	// Changed is called when Admit or Withdrawn may answer otherwise than before.
	Changed func()
	Log     *slog.Logger
}

// Cluster follows pods and nodes.
type Cluster struct {
	cfg            Config
	events, losses atomic.Uint64

	mu       sync.RWMutex // guards what follows
	pods     map[string]*pod
	cordoned map[string]bool // nodes by name
	sources  map[string]*source
	pool     poolState
}

// source is one list, by what it is of.
type source struct {
	followed bool // at present
	lost     time.Time
	why      error
	said     bool // that it is lost
}

// nodes is the name of their source.
const nodes = "nodes"

func sourceOf(namespace string) string {
	if namespace == Every {
		return "pods"
	}
	return "pods of " + namespace
}

// pod is what is remembered of one.
type pod struct {
	namespace, name, node string
	addresses             []netip.Addr
	labels                map[string]string // nil where there is no pool
	withdrawal            fleet.Withdrawal  // but for its node
}

func (p *pod) equal(o *pod) bool {
	return p != nil && o != nil && p.namespace == o.namespace && p.name == o.name && p.node == o.node &&
		p.withdrawal == o.withdrawal && slices.Equal(p.addresses, o.addresses) && maps.Equal(p.labels, o.labels)
}

// podObject is what is read of a pod.
type podObject struct {
	Metadata struct {
		Name              string            `json:"name"`
		Namespace         string            `json:"namespace"`
		UID               string            `json:"uid"`
		DeletionTimestamp string            `json:"deletionTimestamp"`
		Labels            map[string]string `json:"labels"`
	} `json:"metadata"`
	Spec struct {
		NodeName string `json:"nodeName"`
	} `json:"spec"`
	Status struct {
		Phase  string `json:"phase"`
		PodIPs []struct {
			IP string `json:"ip"`
		} `json:"podIPs"`
		Conditions []struct {
			Type   string `json:"type"`
			Status string `json:"status"`
		} `json:"conditions"`
	} `json:"status"`
}

func (o *podObject) pod() *pod {
	p := &pod{namespace: o.Metadata.Namespace, name: o.Metadata.Name, node: o.Spec.NodeName, withdrawal: o.withdrawal()}
	for _, each := range o.Status.PodIPs[:min(len(o.Status.PodIPs), maxAddresses)] {
		if ip, err := netip.ParseAddr(each.IP); err == nil {
			p.addresses = append(p.addresses, ip.Unmap())
		}
	}
	return p
}

func (o *podObject) withdrawal() fleet.Withdrawal {
	is := func(condition string) bool {
		for _, c := range o.Status.Conditions {
			if c.Type == condition {
				return c.Status == "True"
			}
		}
		return false
	}
	switch {
	case o.Status.Phase == "Failed" || o.Status.Phase == "Succeeded":
		return fleet.Ended
	case o.Metadata.DeletionTimestamp != "":
		return fleet.Deleting
	case is("DisruptionTarget"):
		return fleet.Evicted
	case !is("Ready"):
		return fleet.NotReady
	}
	return fleet.InService
}

// nodeObject is what is read of a node. Only cordoned ones are listed.
type nodeObject struct {
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
}

// ParseNamespaces reads a list separated by commas.
func ParseNamespaces(list string) ([]string, error) {
	var names []string
	for part := range strings.SplitSeq(list, ",") {
		part = strings.TrimSpace(part)
		if part != Every && !isLabel(part) {
			return nil, fmt.Errorf("%.80q is no namespace: want names separated by commas, or %s for all", part, Every)
		}
		names = append(names, part)
	}
	if len(names) > 1 && slices.Contains(names, Every) {
		return nil, fmt.Errorf("%s stands for all namespaces: no other belongs beside it", Every)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// isLabel tells whether Kubernetes takes a text for the name of a namespace.
func isLabel(text string) bool {
	fits := func(r rune) bool { return 'a' <= r && r <= 'z' || '0' <= r && r <= '9' || r == '-' }
	return text != "" && len(text) <= 63 && !strings.HasPrefix(text, "-") && !strings.HasSuffix(text, "-") &&
		strings.IndexFunc(text, func(r rune) bool { return !fits(r) }) < 0
}

// New returns a Cluster that knows nothing yet.
func New(cfg Config) *Cluster {
	c := &Cluster{cfg: cfg, pods: make(map[string]*pod), cordoned: make(map[string]bool), sources: map[string]*source{nodes: {}}}
	for _, namespace := range cfg.Namespaces {
		c.sources[sourceOf(namespace)] = &source{}
	}
	if cfg.Pool != (Pool{}) {
		c.sources[pools] = &source{}
	}
	return c
}

// Run follows pods and nodes until ctx is done.
func (c *Cluster) Run(ctx context.Context) {
	var following sync.WaitGroup
	defer following.Wait()
	for _, namespace := range c.cfg.Namespaces {
		path := "/api/v1/pods"
		if namespace != Every {
			path = "/api/v1/namespaces/" + namespace + "/pods"
		}
		what := sourceOf(namespace)
		list := &kube.List[podObject]{Client: c.cfg.Client, Path: path,
			All:  func(all []podObject) { c.replacePods(namespace, all) },
			Put:  func(o podObject) { c.put(&o) },
			Gone: func(o podObject) { c.gone(&o) },
			Lost: func(err error) { c.lost(what, err) }, Followed: func() { c.followed(what) }}
		following.Go(func() { list.Run(ctx) })
	}
	// The server sends cordoned nodes alone: one that is no more leaves the list.
	list := &kube.List[nodeObject]{Client: c.cfg.Client, Path: "/api/v1/nodes", Selector: url.Values{"fieldSelector": {"spec.unschedulable=true"}},
		All:  c.replaceNodes,
		Put:  func(o nodeObject) { c.cordon(o.Metadata.Name, true) },
		Gone: func(o nodeObject) { c.cordon(o.Metadata.Name, false) },
		Lost: func(err error) { c.lost(nodes, err) }, Followed: func() { c.followed(nodes) }}
	following.Go(func() { list.Run(ctx) })
	if c.cfg.Pool != (Pool{}) {
		list := &kube.List[poolObject]{Client: c.cfg.Client, Path: "/apis/inference.networking.k8s.io/v1/namespaces/" + c.cfg.Pool.Namespace + "/inferencepools",
			Selector: url.Values{"fieldSelector": {"metadata.name=" + c.cfg.Pool.Name}},
			All:      c.replacePool,
			Put:      func(o poolObject) { c.setPool(o.state()) },
			Gone:     func(poolObject) { c.setPool(poolState{known: true, absent: true}) },
			Lost:     func(err error) { c.lost(pools, err) }, Followed: func() { c.followed(pools) }}
		following.Go(func() { list.Run(ctx) })
	}
	check := time.NewTicker(checkEach)
	defer check.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-check.C:
			c.check(now)
		}
	}
}

// replacePods takes all pods of a namespace, or of all of them.
func (c *Cluster) replacePods(namespace string, all []podObject) {
	c.mu.Lock()
	is := make(map[string]bool, len(all))
	changed := false
	for i := range all {
		is[all[i].Metadata.UID] = true
		changed = c.putLocked(&all[i]) || changed
	}
	for uid, p := range c.pods {
		if !is[uid] && (namespace == Every || p.namespace == namespace) {
			delete(c.pods, uid)
			changed = true
		}
	}
	// Members that were taken up before anything was known are to be judged now.
	s := c.sources[sourceOf(namespace)]
	changed, s.followed = changed || !s.followed, true
	c.mu.Unlock()
	if changed {
		c.cfg.Changed()
	}
}

func (c *Cluster) putLocked(o *podObject) (changed bool) {
	p := o.pod()
	if c.cfg.Pool != (Pool{}) {
		p.labels = o.Metadata.Labels
	}
	if p.equal(c.pods[o.Metadata.UID]) {
		return false
	}
	c.pods[o.Metadata.UID] = p
	return true
}

func (c *Cluster) put(o *podObject) {
	c.events.Add(1)
	c.mu.Lock()
	changed := c.putLocked(o)
	c.mu.Unlock()
	if changed {
		c.cfg.Changed()
	}
}

func (c *Cluster) gone(o *podObject) {
	c.events.Add(1)
	c.mu.Lock()
	delete(c.pods, o.Metadata.UID)
	c.mu.Unlock()
	c.cfg.Changed()
}

func (c *Cluster) replaceNodes(all []nodeObject) {
	c.mu.Lock()
	c.sources[nodes].followed = true
	clear(c.cordoned)
	for i := range all {
		c.cordoned[all[i].Metadata.Name] = true
	}
	c.mu.Unlock()
	c.cfg.Changed()
}

func (c *Cluster) cordon(node string, is bool) {
	c.events.Add(1)
	c.mu.Lock()
	was := c.cordoned[node]
	if delete(c.cordoned, node); is {
		c.cordoned[node] = true
	}
	c.mu.Unlock()
	if was != is {
		c.cfg.Changed()
	}
}

// lost notes that a list is not followed.
func (c *Cluster) lost(what string, err error) {
	c.losses.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.sources[what]
	if s.why == nil {
		s.lost = time.Now()
	}
	s.followed, s.why = false, err
}

// followed notes that a list is.
func (c *Cluster) followed(what string) {
	c.mu.Lock()
	s := c.sources[what]
	was := *s
	*s = source{followed: true}
	c.mu.Unlock()
	if was.said {
		c.cfg.Log.Info("Kubernetes is followed again", "list", what, "after", time.Since(was.lost).Round(time.Millisecond))
	}
	if !was.followed {
		c.cfg.Changed()
	}
}

// check says which lists have not been followed for a while, once each.
func (c *Cluster) check(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for what, s := range c.sources {
		if s.why == nil || s.said || now.Sub(s.lost) < awayAfter {
			continue
		}
		s.said = true
		do := "see that Kubernetes' API server can be reached from here; members are judged by what it said last meanwhile, and new ones are taken up"
		if kube.IsCode(s.why, 403) {
			do = "give the service account the verbs list and watch for them (docs/KUBERNETES.md)"
			if what == nodes {
				do += "; without, members on cordoned nodes are picked like others"
			}
		}
		c.cfg.Log.Warn("Kubernetes is not followed", "list", what, "error", s.why, "do", do)
	}
}

// Admit says why a member may not be one: there is no such pod, or it has another
// name or address; nil: it may. While the pods are not followed, who is not known
// is admitted.
func (c *Cluster) Admit(i *fleet.Info) error {
	c.mu.RLock()
	defer c.mu.RUnlock()
	s := c.sources[sourceOf(Every)]
	if s == nil {
		s = c.sources[sourceOf(i.Namespace)]
	}
	if s == nil && c.cfg.Pool != (Pool{}) {
		return fmt.Errorf("namespace %q is not that of the scheduler's InferencePool %s/%s", i.Namespace, c.cfg.Pool.Namespace, c.cfg.Pool.Name)
	}
	if s == nil {
		return fmt.Errorf("namespace %q is not in the scheduler's -kubernetes-namespaces", i.Namespace)
	}
	p := c.pods[i.PodUID]
	switch {
	case p == nil && !s.followed:
		return c.admitToPoolLocked(i, nil)
	case p == nil:
		return fmt.Errorf("no pod of namespace %s has the uid %.80q, by Kubernetes; give the agent the pod's own -pod-uid", i.Namespace, i.PodUID)
	case p.namespace != i.Namespace || i.Pod != "" && p.name != i.Pod:
		return fmt.Errorf("uid %s is that of pod %s/%s and not of %s/%.80s, by Kubernetes; give the agent the pod's own -pod and -pod-uid", i.PodUID, p.namespace, p.name, i.Namespace, i.Pod)
	}
	if err := c.admitToPoolLocked(i, p); err != nil {
		return err
	}
	address, err := protocol.ParseAddress(i.Address)
	if err != nil || !address.IP.IsValid() || len(p.addresses) == 0 || slices.Contains(p.addresses, address.IP.Unmap()) {
		return nil
	}
	return fmt.Errorf("address %s is not that of its pod, which is %s by Kubernetes; give the agent the pod's own -pod-ip", i.Address, p.addresses[0])
}

// Withdrawn says whether a member's pod is in service.
func (c *Cluster) Withdrawn(i *fleet.Info) fleet.Withdrawal {
	c.mu.RLock()
	defer c.mu.RUnlock()
	p := c.pods[i.PodUID]
	switch {
	case p == nil || p.namespace != i.Namespace:
		return fleet.InService
	case p.withdrawal != fleet.InService:
		return p.withdrawal
	case c.cordoned[p.node]:
		return fleet.Cordoned
	}
	return fleet.InService
}

// Gone tells whether there is surely no such pod.
func (c *Cluster) Gone(namespace, uid string) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	s := c.sources[sourceOf(Every)]
	if s == nil {
		s = c.sources[sourceOf(namespace)]
	}
	return s != nil && s.followed && c.pods[uid] == nil
}

// Stats of a Cluster.
type Stats struct {
	// LostPods and LostNodes are lists that are not followed at present.
	LostPods, LostNodes, LostPool int
	Pods, Cordoned                int
	// Events of the server, and Losses: times that it could not be asked.
	Events, Losses uint64
}

// Stats as of now.
func (c *Cluster) Stats() Stats {
	c.mu.RLock()
	defer c.mu.RUnlock()
	st := Stats{Pods: len(c.pods), Cordoned: len(c.cordoned), Events: c.events.Load(), Losses: c.losses.Load()}
	for what, s := range c.sources {
		switch {
		case s.followed:
		case what == nodes:
			st.LostNodes++
		case what == pools:
			st.LostPool++
		default:
			st.LostPods++
		}
	}
	return st
}
