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

// Policies that a picker uses. They can be changed while it runs.
type Policies struct {
	// Policy for requests that name none; policy.Default when empty.
	Policy string
	// Allowed names what requests may name besides Policy and Shadow, without
	// parameters, which they may choose; empty: every policy.
	Allowed []string
	// Shadow is asked about the same requests and does not decide; empty: none.
	Shadow string
	// Targets of requests that have none and whose profile has none.
	Targets policy.Targets
	// Disaggregate from so many tokens on that the member that is to decode
	// would have to compute; 0: never.
	Disaggregate int
	// PullMS is the time in ms that a token takes from one member to another;
	// 0: members do not pull.
	PullMS float64
}

// Check says whether there are such policies.
func (p Policies) Check() error {
	if _, err := policy.Named(p.Policy); err != nil {
		return err
	}
	if _, err := policy.Named(p.Shadow); err != nil {
		return fmt.Errorf("shadow: %w", err)
	}
	for _, name := range p.Allowed {
		pol, err := policy.Named(name)
		if err == nil && pol.Name != name {
			err = fmt.Errorf("%.80q: want the name of a policy without parameters", name)
		}
		if err != nil {
			return fmt.Errorf("allowed: %w", err)
		}
	}
	return nil
}

// Use changes the policies for requests that come from now on.
func (p *Picker) Use(policies Policies) error {
	if err := policies.Check(); err != nil {
		return err
	}
	p.usual.Store(&policies)
	return nil
}

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
