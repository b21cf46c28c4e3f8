package pick

import (
	"fmt"

	"github.com/cespare/xxhash/v2"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// firstBlocks are hashed before the index is asked the first time; then four
// times as many, as long as somebody holds all of them.
const firstBlocks = 128

// scope is the prompt as keys for those candidates whose blocks have the same
// size and lie under the same root.
type scope struct {
	blockkey.Scope
	given  bool // keys are the caller's
	keys   []blockkey.Key
	buffer []blockkey.Key
	blocks int // whole blocks of the prompt
	known  int // leading blocks that anybody holds or was just sent
	tie    uint64
}

func (s *scope) release() {
	if !s.given {
		s.buffer = s.keys[:0]
	}
	*s = scope{buffer: s.buffer}
}

// keys are the prompt as the candidates' caches know it: its blocks in each
// scope.
type keys struct {
	scopes  []scope
	misfits int    // candidates with blocks of another size than the keys'
	partial bool   // some candidate's blocks have no keys here
	tie     uint64 // decides between equal candidates without keys
}

func (k *keys) release() {
	for i := range k.scopes {
		k.scopes[i].release()
	}
	*k = keys{scopes: k.scopes[:0]}
}

// cut sorts the candidates by scope. Keys of a size that no candidate has
// are the caller's mistake; if some have it, the others get no credit.
func (k *keys) cut(r *Request, list []candidate) error {
	prompt := &r.Prompt
	if len(prompt.Tokens) == 0 && prompt.BlockSize == 0 {
		k.partial = true
		return nil
	}
	unknown := 0
	var last *candidate
	extras := r.Salt != "" || len(r.Items) > 0
	for i := range list {
		c := &list[i]
		c.hidden = extras && c.member.Info.HidesExtras
		size := c.row.BlockSize
		switch {
		case size <= 0:
			unknown++
		case prompt.BlockSize > 0 && len(prompt.Tokens) == 0:
			if size != prompt.BlockSize {
				k.misfits++
				continue
			}
			if len(k.scopes) == 0 {
				s := k.addScope()
				s.given, s.BlockSize, s.keys, s.blocks = true, size, prompt.Keys, len(prompt.Keys)
			}
			c.scope = 0
		case last != nil && last.row.BlockSize == size && last.row.Model == c.row.Model && last.adapter == c.adapter:
			c.scope = last.scope
		default:
			last = c
			c.scope = k.scopeOf(blockkey.Scope{
				Model: c.row.Model, Adapter: c.adapter, Salt: r.Salt, BlockSize: size,
			}, prompt.length()/size)
		}
	}
	k.partial = unknown+k.misfits > 0
	if k.misfits > 0 && k.misfits == len(list)-unknown && unknown == 0 {
		return fmt.Errorf("keys for blocks of %d tokens, no candidate has such: %w", prompt.BlockSize, ErrPrompt)
	}
	return nil
}

func (k *keys) scopeOf(want blockkey.Scope, blocks int) int32 {
	for i := range k.scopes {
		if k.scopes[i].Scope == want {
			return int32(i)
		}
	}
	s := k.addScope()
	s.Scope, s.blocks = want, blocks
	return int32(len(k.scopes) - 1)
}

// addScope takes a scope into use, with the buffer that it had before.
func (k *keys) addScope() *scope {
	if len(k.scopes) < cap(k.scopes) {
		k.scopes = k.scopes[:len(k.scopes)+1]
	} else {
		k.scopes = append(k.scopes, scope{})
	}
	s := &k.scopes[len(k.scopes)-1]
	s.keys = s.buffer[:0]
	return s
}

// hash extends the keys to so many blocks.
func (s *scope) hash(r *Request, blocks int) {
	blocks = min(blocks, s.blocks)
	if s.given || blocks <= len(s.keys) {
		return
	}
	if len(r.Items) > 0 {
		// Items lie in the prompt's coordinates: no piece can be hashed alone.
		s.keys, _ = blockkey.AppendBytes(s.keys[:0], s.Root(), r.Prompt.Tokens, s.BlockSize, r.Items)
		return
	}
	var parent blockkey.Key
	if n := len(s.keys); n > 0 {
		parent = s.keys[n-1]
	} else {
		parent = s.Root()
	}
	width := 4 * s.BlockSize
	piece := r.Prompt.Tokens[len(s.keys)*width : blocks*width]
	s.keys, _ = blockkey.AppendBytes(s.keys, parent, piece, s.BlockSize, nil) // whole blocks are never ragged
}

// breakTies finds what decides between equals: the first key that nobody has.
// Before it lies what others share, so requests that share a system prompt
// spread, while siblings of one new document meet, at every scheduler. Where
// there is no key, the prompt's tokens or the session stand for it, else chance.
func (k *keys) breakTies(r *Request, random uint64) {
	k.tie = 0
	partial := k.partial
	for i := range k.scopes {
		s := &k.scopes[i]
		if len(s.keys) > 0 {
			s.tie = uint64(s.keys[min(s.known, len(s.keys)-1)])
		} else {
			partial = true
		}
	}
	if partial {
		k.tie = withoutKey(r, random)
	}
}

// tieOf is the number of a candidate that is hashed with its name where scores
// are equal.
func (k *keys) tieOf(c *candidate) uint64 {
	if c.scope >= 0 && len(k.scopes[c.scope].keys) > 0 {
		return k.scopes[c.scope].tie
	}
	return k.tie
}

func withoutKey(r *Request, random uint64) uint64 {
	switch {
	case len(r.Prompt.Tokens) > 0:
		return xxhash.Sum64(r.Prompt.Tokens)
	case r.Session != "":
		return xxhash.Sum64String(r.Session)
	}
	return random
}

// random returns the number of this decision. Who only looks sees that of the
// next; the second member of a pair has another than the first.
func (p *Picker) random(r *Request) uint64 {
	turn := p.turn.Load() + 1
	if r.Reserve {
		turn = p.turn.Add(1)
	}
	n := mix(p.seed + turn*0x9e3779b97f4a7c15)
	if r.decode != nil {
		n = mix(n)
	}
	return n
}

// mix is SplitMix64's finisher.
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
