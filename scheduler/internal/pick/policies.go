package pick

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// maxPolicies bounds the policies with parameters that are kept ready.
const maxPolicies = 64

// policies keeps policies by the name that they were asked for.
type policies struct {
	known sync.Map // string -> policy.Policy
	count atomic.Int32
}

func (p *policies) named(name string, keep bool) (policy.Policy, error) {
	if pol, ok := p.known.Load(name); ok {
		return pol.(policy.Policy), nil
	}
	pol, err := policy.Named(name)
	if keep && err == nil && p.count.Add(1) <= maxPolicies {
		p.known.Store(name, pol)
	}
	return pol, err
}

// allows says whether requests may name the policy.
func (p *Policies) allows(name string) error {
	base, _, _ := strings.Cut(name, ":")
	if len(p.Allowed) == 0 || name == "" || slices.Contains(p.Allowed, base) || name == cmp.Or(p.Policy, policy.Default) || name == p.Shadow {
		return nil
	}
	return fmt.Errorf("policy %.80q: %w; allowed are %s and those that the scheduler uses itself", name, ErrNotAllowed, strings.Join(p.Allowed, ", "))
}

// substitute returns the policy that takes the place of one that goes by
// prefixes or owners where nothing can be known of them: the beginning of the
// prompt decides, and where there is no prompt, the load.
func (k *keys) substitute(pol policy.Policy, r *Request) policy.Policy {
	prompt := &r.Prompt
	text := len(prompt.Beginnings) > 0 || len(prompt.Tokens) > 0 || len(prompt.Keys) > 0
	switch {
	case pol.Needs&policy.NeedsText != 0 && text,
		pol.Needs&policy.NeedsPrefix != 0 && len(k.scopes) > 0,
		pol.Needs&policy.NeedsOwner != 0 && (r.Session != "" || len(k.scopes) > 0),
		pol.Needs&(policy.NeedsPrefix|policy.NeedsOwner|policy.NeedsText) == 0:
		return pol
	case text:
		return byBeginning
	}
	return byLoad
}

var byBeginning, byLoad = must("prefix-hash"), must("least-requests")

func must(name string) policy.Policy {
	pol, err := policy.Named(name)
	if err != nil {
		panic(err)
	}
	return pol
}
