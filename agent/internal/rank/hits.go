package rank

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
)

// HitRule is how the engine's hits end, as far as its events don't say it.
type HitRule struct {
	mirror.Rule
	// toTheEnd: with several kinds of KV-cache groups a dropped block may be the
	// prompt's last one.
	toTheEnd bool
	// guess says what of it is not known; then the rule is the one that promises
	// least. Empty: all is known.
	guess string
	// Who told what is dropped, and the chunk.
	dropSource, chunkSource string
}

// Methods of speculative decoding by what they do to hits: those that draft
// from the model's own hidden states drop the last block, so that the draft
// model can compute its part of it. The multi-token prediction layers of a model
// share a group with its last attention layers, the others have layers in all.
var (
	dropping = []string{"eagle", "eagle3", "dflash", "dspark"}
	keeping  = []string{"", "none", "ngram", "ngram_gpu", "medusa", "mlp_speculator", "draft_model", "suffix"}
)

// dropOf is what a method does to hits; ok is false for one that is not known.
func dropOf(method string) (drop mirror.Drop, ok bool) {
	switch {
	case slices.Contains(keeping, method):
		return mirror.DropNone, true
	case slices.Contains(dropping, method):
		return mirror.DropAttention, true
	case method == "mtp" || strings.HasSuffix(method, "_mtp"):
		return mirror.DropLast, true
	}
	return mirror.DropAttention, false
}

// KnowsMethod says whether it is known what a method of speculative decoding
// does to hits.
func KnowsMethod(method string) bool {
	_, known := dropOf(method)
	return known
}

// HitSettings are what the operator says of hits; a zero value says nothing.
type HitSettings struct {
	Speculative    string // method of speculative decoding, or "none"
	AttentionChunk int    // of chunked-local attention, in tokens
	HashSeed       string // PYTHONHASHSEED of the engine
	Groups         mirror.Groups
}

// groupKinds are the kinds of KV-cache groups by their names.
var groupKinds = map[string]mirror.GroupKind{"full": mirror.Full, "sliding": mirror.Sliding, "states": mirror.State, "chunked": mirror.Chunked}

// ParseGroups reads kinds of KV-cache groups in the engine's order, such as
// "sliding:128,full,states,chunked". Empty: nothing is said.
func ParseGroups(text string) (groups mirror.Groups, err error) {
	if text == "" {
		return groups, nil
	}
	for i, part := range strings.Split(text, ",") {
		if i == len(groups) {
			return groups, fmt.Errorf("more than %d groups", len(groups))
		}
		kind, window, sized := strings.Cut(part, ":")
		g := &groups[i]
		g.Kind = groupKinds[kind]
		if sized {
			g.Window, err = strconv.Atoi(window)
		}
		if g.Kind == mirror.Unspecified || sized != (g.Kind == mirror.Sliding) || err != nil || sized && (g.Window < 1 || g.Window > maxWindow) {
			return groups, fmt.Errorf("%q is none of full, sliding:WINDOW, states, chunked", part)
		}
	}
	return groups, nil
}

// formatGroups is the text that ParseGroups reads.
func formatGroups(groups mirror.Groups) string {
	var parts []string
	for _, g := range groups {
		for name, kind := range groupKinds {
			switch {
			case g.Kind != kind:
			case kind == mirror.Sliding:
				parts = append(parts, fmt.Sprintf("%s:%d", name, g.Window))
			default:
				parts = append(parts, name)
			}
		}
	}
	return strings.Join(parts, ",")
}

// maxWindow of sliding attention, in tokens.
const maxWindow = 1 << 30

// HitRuleOf weighs what is known: what the engine tells counts before what the
// operator says, and that before what can only be seen from outside. longest is
// the longest prompt of the model; 0: not known.
func HitRuleOf(told vllm.Config, said HitSettings, speculates bool, cache vllm.Cache, longest int, version string) HitRule {
	rule := HitRule{toTheEnd: newer(version, 0, 32)}
	rule.Unit, rule.Algorithm, rule.Seed = cache.HashUnit, cache.Algorithm, said.HashSeed
	rule.Tagged = newer(version, 0, 31)
	rule.Groups, rule.Several = said.Groups, cache.Shared(longest)
	method, known := said.Speculative, said.Speculative != ""
	rule.dropSource = "-speculative"
	if told.Told {
		method, known = told.Speculative, true
		rule.dropSource = "/server_info"
	}
	switch {
	case told.Chunk > 0:
		rule.Chunk, rule.chunkSource = told.Chunk, "/server_info"
	case said.AttentionChunk > 0:
		rule.Chunk, rule.chunkSource = said.AttentionChunk, "-attention-chunk"
	}
	switch {
	case told.KeepsLastBlock:
	case known:
		if rule.Drop, known = dropOf(method); !known {
			rule.guess = fmt.Sprintf("what the speculative method %q does to hits is not known", method)
		}
	case speculates:
		rule.Drop, rule.dropSource = mirror.DropAttention, "metrics"
		rule.guess = "the engine speculates and does not tell by which method: start it with VLLM_SERVER_DEV_MODE=1, or set -speculative"
	default:
		rule.dropSource = "metrics"
	}
	return rule
}

// newer says whether a version like 0.32.1.dev5 is at least so new.
func newer(version string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(version, "%d.%d", &a, &b); n != 2 {
		return false
	}
	return a > major || a == major && b >= minor
}

// follow takes over the rule.
func (r *Rank) follow(rule HitRule) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rule == r.hits {
		return
	}
	r.hits = rule
	r.mirror.SetRule(rule.Rule)
	if reason := r.mirror.Outgrown(); reason != "" {
		r.againLocked(reason)
	}
	r.wake()
}

// againLocked forgets all and has it told again.
func (r *Rank) againLocked(reason string) {
	r.log.Info("forgetting the cache state to hear it again from the beginning", "reason", reason)
	r.beginLocked()
	r.incarnation.missing = reason
	r.trust, r.reason = vllm.Syncing, reason
	if r.tail != nil {
		r.tail.Restart(reason)
	}
}
