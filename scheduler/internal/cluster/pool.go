package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// Pool names an InferencePool of the Gateway API, whose pods and ports members must
// be of. Its zero value: there is none.
type Pool struct{ Namespace, Name string }

// ParsePool reads NAMESPACE/NAME; empty: there is none.
func ParsePool(text string) (Pool, error) {
	if text == "" {
		return Pool{}, nil
	}
	namespace, name, both := strings.Cut(text, "/")
	if !both || !isLabel(namespace) || !isName(name) {
		return Pool{}, errors.New("want NAMESPACE/NAME of an InferencePool")
	}
	return Pool{namespace, name}, nil
}

// isName tells whether Kubernetes takes a text for the name of most objects.
func isName(text string) bool {
	return len(text) <= 253 && !slices.ContainsFunc(strings.Split(text, "."), func(part string) bool { return !isLabel(part) })
}

// pools is the name of their source.
const pools = "inference pool"

// poolObject is what is read of an InferencePool.
type poolObject struct {
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
		TargetPorts []struct {
			Number int `json:"number"`
		} `json:"targetPorts"`
	} `json:"spec"`
}

// poolState is what the API server said last; absent: it has no such pool.
type poolState struct {
	known, absent bool
	labels        map[string]string
	ports         []int
}

func (o *poolObject) state() poolState {
	s := poolState{known: true, labels: o.Spec.Selector.MatchLabels}
	for _, p := range o.Spec.TargetPorts {
		s.ports = append(s.ports, p.Number)
	}
	return s
}

func (c *Cluster) replacePool(all []poolObject) {
	s := poolState{known: true, absent: true}
	for i := range all {
		if all[i].Metadata.Name == c.cfg.Pool.Name {
			s = all[i].state()
		}
	}
	c.setPool(s)
}

func (c *Cluster) setPool(s poolState) {
	c.mu.Lock()
	c.pool = s
	c.sources[pools].followed = true
	c.mu.Unlock()
	c.cfg.Changed()
}

// admitToPoolLocked says why a member is not one of the pool; nil: it is, or there is
// no pool. Who is not known to be of the pool is not.
func (c *Cluster) admitToPoolLocked(i *fleet.Info, p *pod) error {
	if c.cfg.Pool == (Pool{}) {
		return nil
	}
	name := c.cfg.Pool.Namespace + "/" + c.cfg.Pool.Name
	switch {
	case !c.pool.known:
		return fmt.Errorf("the scheduler does not know its InferencePool %s yet", name)
	case c.pool.absent:
		return fmt.Errorf("there is no InferencePool %s, which the scheduler serves", name)
	case p == nil:
		return fmt.Errorf("its pod is not known yet, and must be one of the InferencePool %s", name)
	}
	for key, value := range c.pool.labels {
		if is, has := p.labels[key]; !has || is != value {
			return fmt.Errorf("the InferencePool %s selects pods with the label %s=%s, which its pod has not", name, key, value)
		}
	}
	address, err := protocol.ParseAddress(i.Address)
	if err != nil || !slices.Contains(c.pool.ports, int(address.Port)) {
		return fmt.Errorf("address %.100q has none of the target ports %d of the InferencePool %s", i.Address, c.pool.ports, name)
	}
	return nil
}
