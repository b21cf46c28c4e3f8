package policy

import (
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
	// Pushes: it never waits. Otherwise see Room.
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
	// NeedsFit: Round.Fits and Round.Slack.
	NeedsFit
)

// Names of all policies, without parameters.
func Names() []string {
	return []string{
		Default, "random", "round-robin", "least-requests", "least-tokens", "p2c", "longest-prefix",
		"session", "prefix-hash", "approx", "weighted", "sticky", "e2", "dynamo-cost", "conductor",
		"slo", "slo-pack-load", "slo-least-load", "slo-least-load-pulling",
	}
}

// Named returns the policy with that name; the empty name is Default. A name
// may carry parameters: name:key=value,key=value.
func Named(full string) (Policy, error) {
	name, rest, _ := strings.Cut(full, ":")
	p := Policy{Name: name}
	var parameters []parameter
	switch name {
	case "", Default:
		p.Name, p.Score, p.Times, p.Needs = Default, cost, true, NeedsPrefix
	case "random":
		p.Score = random
	case "round-robin":
		p.Score = roundRobin
	case "least-requests":
		p.Score = leastRequests
	case "least-tokens":
		p.Score = leastTokens
	case "p2c":
		p.Score = twoChoices
	case "longest-prefix":
		p.Score, p.Needs = longestPrefix, NeedsPrefix
	case "session":
		s := newSession()
		p.Score, p.Needs, parameters = s.score, NeedsOwner, s.parameters()
	case "prefix-hash":
		h := newPrefixHash()
		p.Score, p.Needs, parameters = h.score, NeedsText, h.parameters()
	case "approx":
		w := newWeights()
		p.Score, p.Needs, parameters = w.approximate, NeedsPrefix|NeedsSent, w.parameters()
	case "weighted":
		w := newWeights()
		p.Score, p.Needs, parameters = w.exact, NeedsPrefix, w.parameters()
	case "sticky":
		s := newSticky()
		p.Score, p.Needs, parameters = s.score, NeedsPrefix, s.parameters()
	case "e2":
		e := newE2()
		p.Score, p.Needs, parameters = e.score, NeedsPrefix|NeedsHistory, e.parameters()
	case "dynamo-cost":
		d := newDynamo()
		p.Score, p.Needs, parameters = d.score, NeedsPrefix, d.parameters()
	case "conductor":
		c := newConductor()
		p.Score, p.Needs, parameters = c.score, NeedsPrefix, c.parameters()
	case "slo", "slo-least-load-pulling":
		p.Score, p.Needs, p.Pulls = slo, NeedsFit, true
	case "slo-pack-load":
		p.Score, p.Needs, p.Pulls = sloPackLoad, NeedsFit, true
	case "slo-least-load":
		p.Score, p.Needs, p.Pushes = sloLeastLoad, NeedsFit, true
	default:
		return Policy{}, fmt.Errorf("policy %.80q: %w; there are %s", name, ErrUnknown, strings.Join(Names(), ", "))
	}
	if err := set(parameters, rest); err != nil {
		return Policy{}, fmt.Errorf("policy %q: %w", p.Name, err)
	}
	return p, nil
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
