package pick

import (
	"encoding/binary"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

const (
	// recognised is how much of a prompt must be a conversation's for the
	// prompt to be its next turn, as one part of so many: what is shared by
	// many, like a system prompt, is less.
	recognised = 2
	// maxRecall bounds the places of a prompt at which a conversation may
	// have ended before.
	maxRecall = 1024
)

// affinity finds out where the request belongs, as far as the policy wants to
// know that.
func (p *Picker) affinity(w *work, r *Request, needs policy.Needs, now time.Time) {
	w.round.Owner, w.round.Left, w.mark = -1, policy.Stayed, 0
	switch {
	case needs&policy.NeedsText != 0:
		w.draw(p.textKey(w, r, now))
	case needs&policy.NeedsOwner != 0 && r.Session != "":
		w.draw(scopeKey(r, blockkey.Key(xxhash.Sum64String(r.Session))))
	case needs&policy.NeedsOwner != 0:
		p.recognise(w, r)
	}
}

// draw lets every candidate draw for a key: rendezvous hashing. All schedulers
// draw alike, and who leaves moves only what was its own.
func (w *work) draw(key uint64) {
	for i := range w.candidates {
		w.round.Candidates[i].Draw = mix(key ^ w.candidates[i].seat.Hash)
	}
}

// recognise finds the owner of a conversation that has no name: who holds the
// most of it, among those alike who served it last or is the first in line;
// where nobody holds most of it, who served it last.
func (p *Picker) recognise(w *work, r *Request) {
	// Members of other scopes have other marks: they are recognised by what
	// they hold.
	s := &w.scopes[0]
	s.hash(r, s.blocks)
	w.marks = w.marks[:0]
	for b := ends(s.blocks); b > 0 && recognised*b >= s.blocks && len(w.marks) < maxRecall; b = ends(b - 1) {
		w.marks = append(w.marks, uint64(s.keys[b-1]))
	}
	if len(w.marks) > 0 {
		w.mark = w.marks[0]
		w.draw(w.mark)
	} else {
		w.draw(withoutKey(r, w.round.Random))
	}
	deepest, at := 1, -1
	for i := range w.candidates {
		c := &w.candidates[i]
		switch n := c.cached() + c.has().predicted; {
		case n > deepest,
			n == deepest && at >= 0 && w.round.Candidates[i].Draw > w.round.Candidates[at].Draw:
			deepest, at = n, i
		}
	}
	if recognised*deepest < r.Prompt.length() {
		at = -1
	}
	w.round.Owner = at
	if id, ok := p.fleet.Recall(w.marks); ok && (at < 0 || w.holds(id, deepest)) {
		w.own(id)
	}
}

// ends is the last number of blocks, up to b, that a conversation may be
// remembered by: any below stride, then every stride.
func ends(b int) int {
	if b < stride {
		return b
	}
	return b - b%stride
}

func (w *work) holds(id fleet.ID, tokens int) bool {
	c := w.candidate(id)
	return c != nil && c.cached()+c.has().predicted == tokens
}

// own makes a member the owner; one that is not among the candidates is gone.
func (w *work) own(id fleet.ID) {
	w.round.Owner = -1
	if int(id) < len(w.at) && w.at[id] != 0 {
		w.round.Owner = int(w.at[id] - 1)
		return
	}
	w.round.Left = policy.Gone
}

// The beginnings of a prompt that have keys: so many characters, or so many
// bytes of token ids, which is a quarter of that in tokens.
var beginnings = [...]int{100, 500, 1000}

// textKey is the key of the longest beginning of the prompt that was seen
// lately, else of the longest: schedulers that have not seen it agree.
func (p *Picker) textKey(w *work, r *Request, now time.Time) uint64 {
	w.texts = w.texts[:0]
	prompt := &r.Prompt
	switch {
	case len(prompt.Beginnings) > 0:
		w.texts = append(w.texts, prompt.Beginnings...)
	case len(prompt.Tokens) > 0:
		chain, from := uint64(0), 0
		for _, to := range beginnings {
			to = min(to, len(prompt.Tokens))
			if to == from {
				break
			}
			chain = mix(chain ^ xxhash.Sum64(prompt.Tokens[from:to]))
			w.texts, from = append(w.texts, chain), to
		}
	case len(prompt.Keys) > 0:
		for _, n := range beginnings {
			at := min(max(n/4/prompt.BlockSize, 1), len(prompt.Keys)) - 1
			w.texts = append(w.texts, uint64(prompt.Keys[at]))
		}
	default:
		return w.round.Random
	}
	for i, k := range w.texts {
		w.texts[i] = scopeKey(r, blockkey.Key(k))
	}
	return p.seen.longest(w.texts, now)
}

// scopeKey roots a key in what the request asks for, so that equal prompts to
// different models are not the same.
func scopeKey(r *Request, key blockkey.Key) uint64 {
	root := blockkey.Scope{Model: r.Model, Adapter: r.Adapter, Salt: r.Salt}.Root()
	return uint64(blockkey.Chain(root, uint64(key)))
}

// Beginnings returns the keys of the beginnings of a prompt that is text: of its
// first 100, 500 and 1,000 characters, as far as it goes. Each one stands for
// all before it.
func Beginnings(dst []uint64, text string) []uint64 {
	chain, from, count := uint64(0), 0, 0
	next := 0
	cut := func(to int) {
		var length [4]byte
		binary.LittleEndian.PutUint32(length[:], uint32(to-from))
		chain = mix(mix(chain^xxhash.Sum64(length[:])) ^ xxhash.Sum64String(text[from:to]))
		dst, from = append(dst, chain), to
		next++
	}
	for i := range text {
		if count == beginnings[next] {
			if cut(i); next == len(beginnings) {
				return dst
			}
		}
		count++
	}
	if from < len(text) {
		cut(len(text))
	}
	return dst
}
