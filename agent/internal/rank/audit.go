package rank

import (
	"slices"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
)

const (
	// auditHeads and auditBlocks bound the prompts that are kept for audits, and
	// how much of each.
	auditHeads  = 8
	auditBlocks = 4
	// auditLeast blocks must be believed held: an engine that speculates (EAGLE,
	// MTP) computes the last one again although it holds it.
	auditLeast = 2
	// auditBlockSize is the most tokens a block may have to be kept.
	auditBlockSize = 1024
)

// head is the beginning of a prompt that the engine computed not long ago.
type head struct {
	hashes []uint64
	tokens []uint32
	size   int
}

// heads are the newest ones, the very newest last. They exist only where audits
// are on: nothing else of the agent remembers tokens.
type heads []head

// note keeps the beginning of a prompt that a plain request could ask for.
func (h *heads) note(s *mirror.Store) {
	if s.Tier != mirror.GPU || s.HasParent || s.Withhold || s.HidesExtras || s.Adapter != "" || s.Salt != "" ||
		s.Kind != mirror.Full && s.Kind != mirror.Unspecified ||
		s.BlockSize <= 0 || s.BlockSize > auditBlockSize || len(s.Tokens) != len(s.Hashes)*s.BlockSize ||
		len(s.Hashes) < auditLeast || slices.ContainsFunc(s.Refs, func(r []blockkey.Ref) bool { return len(r) > 0 }) {
		return
	}
	n := min(len(s.Hashes), auditBlocks)
	*h = slices.DeleteFunc(*h, func(old head) bool { return old.hashes[0] == s.Hashes[0] })
	if len(*h) == auditHeads {
		*h = slices.Delete(*h, 0, 1)
	}
	*h = append(*h, head{hashes: slices.Clone(s.Hashes[:n]), tokens: slices.Clone(s.Tokens[:n*s.BlockSize]), size: s.BlockSize})
}

// question is the newest prompt of which enough is believed held; nil: none.
// One token more makes it end behind a block, because engines compute the last
// token in any case.
func (h heads) question(held func(hash uint64) bool) []uint32 {
	for _, head := range slices.Backward(h) {
		n := 0
		for n < len(head.hashes) && held(head.hashes[n]) {
			n++
		}
		if n >= auditLeast {
			tokens := slices.Clone(head.tokens[:n*head.size])
			return append(tokens, tokens[len(tokens)-1])
		}
	}
	return nil
}

// Question is a prompt that an audit may ask the engine for, nil for none, and
// where the stream stood.
func (r *Rank) Question() ([]uint32, Position) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if trust, _ := r.trustLocked(); r.heads == nil || trust == pb.Trust_TRUST_SYNCING || trust == pb.Trust_TRUST_UNKNOWN {
		return nil, Position{}
	}
	tokens := r.heads.question(func(hash uint64) bool { return r.mirror.Held(hash, mirror.LaneGPU) })
	return tokens, r.positionLocked()
}

// Disprove forgets the GPU's blocks after an audit that found none, unless the
// engine has announced the loss meanwhile: after a reset while it was idle the
// audit's own request makes it do so.
func (r *Rank) Disprove(at Position) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.epoch != at.epoch || r.incarnation.clears != at.clears {
		return
	}
	r.log.Warn("audit: the engine lacks blocks that were believed held, forgetting its GPU blocks")
	r.clearLocked("an audit found blocks missing")
}
