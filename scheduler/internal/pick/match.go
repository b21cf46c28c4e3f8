package pick

import (
	"fmt"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
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

// match finds how much of the prompt each candidate has.
func (p *Picker) match(w *work, r *Request, now time.Time) error {
	if err := w.scope(r); err != nil {
		return err
	}
	for i := range w.scopes {
		s := &w.scopes[i]
		if s.blocks > 0 {
			p.search(w, i, r, now)
		}
	}
	w.breakTies(r, p.random(r))
	return nil
}

// scope sorts the candidates by scope. Keys of a size that no candidate has
// are the caller's mistake; if some have it, the others get no credit.
func (w *work) scope(r *Request) error {
	prompt := &r.Prompt
	if len(prompt.Tokens) == 0 && prompt.BlockSize == 0 {
		w.keyless = true
		return nil
	}
	unknown := 0
	var last *candidate
	for i := range w.candidates {
		c := &w.candidates[i]
		size := c.seat.BlockSize
		switch {
		case size <= 0:
			unknown++
		case prompt.BlockSize > 0 && len(prompt.Tokens) == 0:
			if size != prompt.BlockSize {
				w.misfits++
				continue
			}
			if len(w.scopes) == 0 {
				s := w.addScope()
				s.given, s.BlockSize, s.keys, s.blocks = true, size, prompt.Keys, len(prompt.Keys)
			}
			c.scope = 0
		case last != nil && last.seat.BlockSize == size && last.seat.Model == c.seat.Model && last.adapter == c.adapter:
			c.scope = last.scope
		default:
			last = c
			c.scope = w.scopeOf(blockkey.Scope{
				Model: c.seat.Model, Adapter: c.adapter, Salt: r.Salt, BlockSize: size,
			}, prompt.length()/size)
		}
	}
	w.keyless = unknown+w.misfits > 0
	if w.misfits > 0 && w.misfits == len(w.candidates)-unknown && unknown == 0 {
		return fmt.Errorf("keys for blocks of %d tokens, no candidate has such: %w", prompt.BlockSize, ErrPrompt)
	}
	return nil
}

func (w *work) scopeOf(want blockkey.Scope, blocks int) int32 {
	for i := range w.scopes {
		if w.scopes[i].Scope == want {
			return int32(i)
		}
	}
	s := w.addScope()
	s.Scope, s.blocks = want, blocks
	return int32(len(w.scopes) - 1)
}

// addScope takes a scope into use, with the buffer that it had before.
func (w *work) addScope() *scope {
	if len(w.scopes) < cap(w.scopes) {
		w.scopes = w.scopes[:len(w.scopes)+1]
	} else {
		w.scopes = append(w.scopes, scope{})
	}
	s := &w.scopes[len(w.scopes)-1]
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

// search asks the index and the forecast about one scope.
func (p *Picker) search(w *work, at int, r *Request, now time.Time) {
	s := &w.scopes[at]
	sent := &w.sent
	sent.reset()
	for blocks := firstBlocks; ; blocks *= 4 {
		s.hash(r, blocks)
		p.index.Match(s.keys, &w.held)
		deepest := 0
		for _, depth := range w.held.All() {
			deepest = max(deepest, int(depth))
		}
		w.ideal = max(w.ideal, min(deepest, (r.Prompt.length()-1)/s.BlockSize)*s.BlockSize)
		deepest = max(deepest, p.forecast.look(s.keys, sent, now))
		s.known = deepest
		if deepest < len(s.keys) || len(s.keys) == s.blocks {
			break
		}
	}
	if r.SkipsCache {
		return
	}
	length := r.Prompt.length()
	for h, depth := range w.held.All() {
		if c := w.candidate(fleet.ID(h.Member())); c != nil && int(c.scope) == at {
			has := w.shareOf(c)
			for l := range has.depth {
				if h.On(index.Lane(l)) {
					has.depth[l] = int(depth)
				}
			}
		}
	}
	p.findEnds(w, at, length)
	// Who is not found has nothing, and nothing is credited.
	for h := range w.held.All() {
		if c := w.candidate(fleet.ID(h.Member())); c != nil && int(c.scope) == at {
			w.credit(c, length, s.BlockSize, now)
			w.feasible = max(w.feasible, c.cached())
		}
	}
	for _, m := range sent.found {
		if c := w.candidate(m.member); c != nil && int(c.scope) == at && c.member.Picture.Epoch == m.epoch {
			w.foresee(c, m.depth, length, s.BlockSize)
		}
	}
	if p.mirror.Tracks() {
		for h := range w.held.All() {
			if c := w.candidate(fleet.ID(h.Member())); c != nil && int(c.scope) == at {
				p.assume(w, c, length, s.BlockSize, now)
			}
		}
	}
}

// findEnds asks the index where hits end at members whose engines accept only
// some of the blocks that they hold.
func (p *Picker) findEnds(w *work, at, length int) {
	s := &w.scopes[at]
	w.ends = w.ends[:0]
	for h, depth := range w.held.All() {
		if c := w.candidate(fleet.ID(h.Member())); c != nil && int(c.scope) == at && h.On(index.LaneGPU) && c.member.Picture.Rule.Ends {
			limit := min(int(depth), c.member.Picture.Rule.Limit(length, s.BlockSize))
			w.ends = append(w.ends, index.End{Member: h.Member(), Limit: uint32(max(limit, 0))})
		}
	}
	if len(w.ends) == 0 {
		return
	}
	p.index.Ends(s.keys, w.ends)
	for _, e := range w.ends {
		w.candidate(fleet.ID(e.Member)).share.end = int(e.Blocks)
	}
}

func (w *work) candidate(id fleet.ID) *candidate {
	if int(id) >= len(w.at) || w.at[id] == 0 {
		return nil
	}
	return &w.candidates[w.at[id]-1]
}

// breakTies finds what decides between equals: the first key that nobody has.
// Before it lies what others share, so requests that share a system prompt
// spread, while siblings of one new document meet, at every scheduler. Where
// there is no key, the prompt's tokens or the session stand for it, else chance.
func (w *work) breakTies(r *Request, random uint64) {
	w.round.Random, w.tie = random, 0
	keyless := w.keyless
	for i := range w.scopes {
		s := &w.scopes[i]
		if len(s.keys) > 0 {
			s.tie = uint64(s.keys[min(s.known, len(s.keys)-1)])
		} else {
			keyless = true
		}
	}
	if keyless {
		w.tie = withoutKey(r, random)
	}
}

// tieOf is the number of a candidate that is hashed with its name where scores
// are equal.
func (w *work) tieOf(c *candidate) uint64 {
	if c.scope >= 0 && len(w.scopes[c.scope].keys) > 0 {
		return w.scopes[c.scope].tie
	}
	return w.tie
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
