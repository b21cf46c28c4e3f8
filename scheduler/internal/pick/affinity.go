package pick

import (
	"encoding/binary"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/predict"
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

// belonging is where the request belongs, and what its prefix met lately.
type belonging struct {
	texts     []uint64 // keys of the prompt's beginnings
	marks     []uint64 // where a conversation may have ended before
	mark      uint64   // by which this one can be recognised; 0: none
	owners    []index.Member
	histories []policy.History
}

// affinity finds out where the request belongs, as far as the policy wants to
// know that.
func (p *Picker) affinity(m *draft, r *Request, needs policy.Needs, now time.Time) {
	m.round.Owner, m.round.Left, m.belongs.mark = -1, policy.Stayed, 0
	switch {
	case needs&policy.NeedsText != 0:
		m.draw(p.textKey(m, r, now))
	case needs&policy.NeedsOwner != 0 && r.Session != "":
		m.draw(scopeKey(r, blockkey.Key(xxhash.Sum64String(r.Session))))
	case needs&policy.NeedsOwner != 0:
		p.recognise(m, r)
	}
}

// draw lets every candidate draw for a key: rendezvous hashing. All schedulers
// draw alike, and who leaves moves only what was its own.
func (m *draft) draw(key uint64) {
	for i := range m.eligible.list {
		m.round.Candidates[i].Draw = mix(key ^ m.eligible.list[i].row.Hash)
	}
}

// recognise finds the owner of a conversation that has no name: who holds the
// most of it, among those alike who served it last or is the first in line;
// where nobody holds most of it, who served it last.
func (p *Picker) recognise(m *draft, r *Request) {
	// Members of other scopes have other marks: they are recognised by what
	// they hold.
	s := &m.keys.scopes[0]
	s.hash(r, s.blocks)
	m.belongs.marks = m.belongs.marks[:0]
	for b := conversationEnd(s.blocks); b > 0 && recognised*b >= s.blocks && len(m.belongs.marks) < maxRecall; b = conversationEnd(b - 1) {
		m.belongs.marks = append(m.belongs.marks, uint64(s.keys[b-1]))
	}
	if len(m.belongs.marks) > 0 {
		m.belongs.mark = m.belongs.marks[0]
		m.draw(m.belongs.mark)
	} else {
		m.draw(withoutKey(r, m.round.Random))
	}
	deepest, at := 1, -1
	for i := range m.eligible.list {
		c := &m.eligible.list[i]
		switch n := c.cached() + c.has().predicted; {
		case n > deepest,
			n == deepest && at >= 0 && m.round.Candidates[i].Draw > m.round.Candidates[at].Draw:
			deepest, at = n, i
		}
	}
	if recognised*deepest < r.Prompt.length() {
		at = -1
	}
	m.round.Owner = at
	if id, ok := p.fleet.Recall(m.belongs.marks); ok && (at < 0 || m.holds(id, deepest)) {
		m.own(id)
	}
}

// conversationEnd is the last number of blocks, up to b, that a conversation may be
// remembered by: any below the stride, then every stride.
func conversationEnd(b int) int {
	if b < predict.Stride {
		return b
	}
	return b - b%predict.Stride
}

func (m *draft) holds(id fleet.ID, tokens int) bool {
	c := m.eligible.of(id)
	return c != nil && c.cached()+c.has().predicted == tokens
}

// own makes a member the owner; one that is not among the candidates is gone.
func (m *draft) own(id fleet.ID) {
	m.round.Owner = -1
	if int(id) < len(m.eligible.at) && m.eligible.at[id] != 0 {
		m.round.Owner = int(m.eligible.at[id] - 1)
		return
	}
	m.round.Left = policy.Gone
}

// The beginnings of a prompt that have keys: so many characters, or so many
// bytes of token ids, which is a quarter of that in tokens.
var beginnings = [...]int{100, 500, 1000}

// textKey is the key of the longest beginning of the prompt that was seen
// lately, else of the longest: schedulers that have not seen it agree.
func (p *Picker) textKey(m *draft, r *Request, now time.Time) uint64 {
	m.belongs.texts = m.belongs.texts[:0]
	prompt := &r.Prompt
	switch {
	case len(prompt.Beginnings) > 0:
		m.belongs.texts = append(m.belongs.texts, prompt.Beginnings...)
	case len(prompt.Tokens) > 0:
		chain, from := uint64(0), 0
		for _, to := range beginnings {
			to = min(to, len(prompt.Tokens))
			if to == from {
				break
			}
			chain = mix(chain ^ xxhash.Sum64(prompt.Tokens[from:to]))
			m.belongs.texts, from = append(m.belongs.texts, chain), to
		}
	case len(prompt.Keys) > 0:
		for _, n := range beginnings {
			at := min(max(n/4/prompt.BlockSize, 1), len(prompt.Keys)) - 1
			m.belongs.texts = append(m.belongs.texts, uint64(prompt.Keys[at]))
		}
	default:
		return m.round.Random
	}
	for i, k := range m.belongs.texts {
		m.belongs.texts[i] = scopeKey(r, blockkey.Key(k))
	}
	return p.recent.longest(m.belongs.texts, now)
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
