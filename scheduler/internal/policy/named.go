package policy

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

var (
	// ErrUnknown says that no policy has the name asked for.
	ErrUnknown = errors.New("unknown policy")
	// ErrParameter says that a policy has no such parameter or that its value
	// is out of range.
	ErrParameter = errors.New("bad parameter")
)

// Default is the policy of requests that name none.
const Default = "default"

// Policy is one way to rank.
type Policy struct {
	// Name without parameters.
	Name string
	// Score writes one number for each candidate; the lowest wins.
	Score func(r *Round, scores []float64)
	// Times tells that scores are predicted ms, where a small difference
	// means nothing. Otherwise only equal scores are ties.
	Times bool
	// Needs of Score.
	Needs Needs
	// Pulls: the request waits while no score is below full, where it may wait.
	// Pushes: it never waits. Otherwise see HasRoom.
	Pulls, Pushes bool
}

// Needs are the facts that a policy wants in its Round beyond load, speed and
// what is cached. Nobody pays for those that are not wanted.
type Needs uint8

const (
	// NeedsPrefix: the policy goes by what is cached. Where nothing can be
	// known of that, another takes its place.
	NeedsPrefix Needs = 1 << iota
	// NeedsOwner: Round.Owner, and Candidate.Draw of the session.
	NeedsOwner
	// NeedsText: Candidate.Draw of the beginning of the prompt.
	NeedsText
	// NeedsSent: Candidate.Sent.
	NeedsSent
	// NeedsHistory: Candidate.History.
	NeedsHistory
	// NeedsSLO: Round.SLOs and Round.Slack.
	NeedsSLO
)

// registry are the policies, each with what makes it anew and the parameters
// of what was made. A new policy is one row here, one file and one test.
var registry = []struct {
	name string
	make func() (Policy, []parameter)
}{
	{Default, plain(Policy{Score: cost, Times: true, Needs: NeedsPrefix})},
	{"random", plain(Policy{Score: random})},
	{"round-robin", plain(Policy{Score: roundRobin})},
	{"least-requests", plain(Policy{Score: leastRequests})},
	{"least-tokens", plain(Policy{Score: leastTokens})},
	{"p2c", plain(Policy{Score: twoChoices})},
	{"longest-prefix", plain(Policy{Score: longestPrefix, Needs: NeedsPrefix})},
	{"session", func() (Policy, []parameter) {
		s := newSession()
		return Policy{Score: s.score, Needs: NeedsOwner}, s.parameters()
	}},
	{"prefix-hash", func() (Policy, []parameter) {
		h := newPrefixHash()
		return Policy{Score: h.score, Needs: NeedsText}, h.parameters()
	}},
	{"approx", func() (Policy, []parameter) {
		w := newWeights()
		return Policy{Score: w.approximate, Needs: NeedsPrefix | NeedsSent}, w.parameters()
	}},
	{"weighted", func() (Policy, []parameter) {
		w := newWeights()
		return Policy{Score: w.exact, Needs: NeedsPrefix}, w.parameters()
	}},
	{"sticky", func() (Policy, []parameter) {
		s := newSticky()
		return Policy{Score: s.score, Needs: NeedsPrefix}, s.parameters()
	}},
	{"e2", func() (Policy, []parameter) {
		e := newE2()
		return Policy{Score: e.score, Needs: NeedsPrefix | NeedsHistory}, e.parameters()
	}},
	{"dynamo-cost", func() (Policy, []parameter) {
		d := newDynamo()
		return Policy{Score: d.score, Needs: NeedsPrefix}, d.parameters()
	}},
	{"conductor", func() (Policy, []parameter) {
		c := newConductor()
		return Policy{Score: c.score, Needs: NeedsPrefix}, c.parameters()
	}},
	{"slo", plain(Policy{Score: slo, Needs: NeedsSLO, Pulls: true})},
	{"slo-pack-load", plain(Policy{Score: sloPackLoad, Needs: NeedsSLO, Pulls: true})},
	{"slo-least-load", plain(Policy{Score: sloLeastLoad, Needs: NeedsSLO, Pushes: true})},
	{"slo-least-load-pulling", plain(Policy{Score: slo, Needs: NeedsSLO, Pulls: true})},
}

// plain makes a policy without parameters.
func plain(p Policy) func() (Policy, []parameter) {
	return func() (Policy, []parameter) { return p, nil }
}

// Names of all policies, without parameters.
func Names() []string {
	names := make([]string, len(registry))
	for i, r := range registry {
		names[i] = r.name
	}
	return names
}

// Named returns the policy with that name; the empty name is Default. A name
// may carry parameters: name:key=value,key=value.
func Named(full string) (Policy, error) {
	name, rest, _ := strings.Cut(full, ":")
	name = cmp.Or(name, Default)
	for _, r := range registry {
		if r.name != name {
			continue
		}
		p, parameters := r.make()
		p.Name = name
		if err := set(parameters, rest); err != nil {
			return Policy{}, fmt.Errorf("policy %q: %w", name, err)
		}
		return p, nil
	}
	return Policy{}, fmt.Errorf("policy %.80q: %w; there are %s", name, ErrUnknown, strings.Join(Names(), ", "))
}

// parameter is a number that a policy's name may set, within limits.
type parameter struct {
	key       string
	value     *float64
	low, high float64
}

// set reads key=value,key=value.
func set(parameters []parameter, text string) error {
	if text == "" {
		return nil
	}
	for pair := range strings.SplitSeq(text, ",") {
		key, value, _ := strings.Cut(pair, "=")
		if err := setOne(parameters, strings.TrimSpace(key), strings.TrimSpace(value)); err != nil {
			return err
		}
	}
	return nil
}

func setOne(parameters []parameter, key, value string) error {
	for _, p := range parameters {
		if p.key != key {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil || !(v >= p.low && v <= p.high) {
			return fmt.Errorf("%s=%.40s: a number from %g to %g is wanted: %w", key, value, p.low, p.high, ErrParameter)
		}
		*p.value = v
		return nil
	}
	keys := make([]string, len(parameters))
	for i, p := range parameters {
		keys[i] = p.key
	}
	if len(keys) == 0 {
		return fmt.Errorf("%.40q: it has no parameters: %w", key, ErrParameter)
	}
	return fmt.Errorf("%.40q: its parameters are %s: %w", key, strings.Join(keys, ", "), ErrParameter)
}
