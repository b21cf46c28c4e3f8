package agent

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
)

// hitRule is how the engine's hits end, as far as its events don't say it.
type hitRule struct {
	mirror.Rule
	// toTheEnd: with several kinds of KV-cache groups a dropped block may be the
	// prompt's last one.
	toTheEnd bool
	// guess says what of it is not known; then the rule is the one that promises
	// least. Empty: all is known.
	guess string
	// source says who told it.
	source string
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

// hitRuleOf weighs what is known: what the engine tells counts before what the
// operator says, and that before what can only be seen from outside.
func hitRuleOf(told vllm.Config, cfg *Config, speculates bool, cache vllm.Cache, version string) hitRule {
	rule := hitRule{toTheEnd: newer(version, 0, 32)}
	rule.Unit, rule.Algorithm, rule.Seed = cache.HashUnit, cache.Algorithm, cfg.HashSeed
	rule.Tagged = newer(version, 0, 31)
	method, known := cfg.Speculative, cfg.Speculative != ""
	rule.Chunk, rule.source = cfg.AttentionChunk, "settings"
	if told.Told {
		method, known = told.Speculative, true
		rule.Chunk, rule.source = cmp.Or(told.Chunk, rule.Chunk), "/server_info"
	}
	switch {
	case told.KeepsLastBlock:
	case known:
		if rule.Drop, known = dropOf(method); !known {
			rule.guess = fmt.Sprintf("what the speculative method %q does to hits is not known", method)
		}
	case speculates:
		rule.Drop, rule.source = mirror.DropAttention, "metrics"
		rule.guess = "the engine speculates and does not tell by which method: start it with VLLM_SERVER_DEV_MODE=1, or set -speculative"
	default:
		rule.source = "metrics"
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
func (r *rank) follow(rule hitRule) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rule == r.hits {
		return
	}
	r.hits = rule
	r.mirror.SetRule(rule.Rule)
	r.againLocked()
	if rule.Drop != mirror.DropNone || rule.Chunk > 0 || rule.guess != "" {
		r.log.Info("how hits end", "dropped_blocks", r.mirror.Dropped(), "chunk", rule.Chunk, "source", rule.source, "unknown", rule.guess)
	}
	r.wake()
}

// againLocked forgets all and has it told again, if the mirror has found out
// that it must.
func (r *rank) againLocked() {
	reason := r.mirror.Outgrown()
	if reason == "" {
		return
	}
	r.log.Info("forgetting the cache state to hear it again from the beginning", "reason", reason)
	r.beginLocked()
	r.incarnation.doubt = reason
	r.trust, r.reason = vllm.Syncing, reason
	if r.tail != nil {
		r.tail.Restart(reason)
	}
}
