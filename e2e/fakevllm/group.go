package fakevllm

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Kind is how the layers of a group attend, and so which of its blocks a hit
// needs.
type Kind int

const (
	// Full attention needs all blocks before the hit's end.
	Full Kind = iota
	// Sliding windows need those that the next token still sees.
	Sliding
	// Chunked attention needs those of the chunk that the hit ends in.
	Chunked
	// StateSpace layers need the one state at the hit's end.
	StateSpace
)

// Group is a KV cache group: layers that share blocks. All groups of an engine
// take theirs from one pool, and all have blocks of one size.
type Group struct {
	Kind Kind
	// Span is the window of Sliding, or the chunk of Chunked, in tokens.
	Span int
}

// blocksOfLongest is how many blocks all groups take of a prompt of the model's
// full length, at the most at a time.
func (c *Config) blocksOfLongest() (blocks int) {
	whole := (c.MaxModelLen + c.BlockSize - 1) / c.BlockSize
	for _, g := range c.Groups {
		switch g.Kind {
		case Sliding, Chunked:
			blocks += min(whole, (g.Span+c.MaxBatchedTokens+c.BlockSize-1)/c.BlockSize+1)
		case StateSpace:
			blocks += 2 // one that is read, one that is written
		default:
			blocks += whole
		}
	}
	return blocks
}

// ParseGroups reads "sliding:128,chunked:256,states,full"; empty: none.
func ParseGroups(text string) ([]Group, error) {
	var list []Group
	for part := range strings.SplitSeq(text, ",") {
		if part == "" {
			continue
		}
		kind, span, spans := strings.Cut(part, ":")
		at := slices.Index([]string{"full", "sliding", "chunked", "states"}, kind)
		g := Group{Kind: Kind(at)}
		if at < 0 || spans != (g.Kind == Sliding || g.Kind == Chunked) {
			return nil, fmt.Errorf("group %q is none of full, sliding:WINDOW, chunked:TOKENS, states", part)
		}
		if spans {
			var err error
			if g.Span, err = strconv.Atoi(span); err != nil {
				return nil, fmt.Errorf("group %q: %w", part, err)
			}
		}
		list = append(list, g)
	}
	return list, nil
}

// spec is the kind's name on the wire.
func (g Group) spec() string {
	return [...]string{"full_attention", "sliding_window", "chunked_local_attention", "mamba"}[g.Kind]
}

// passed is how many leading blocks the group does not need any more once so
// many tokens are computed.
func (g Group) passed(computed, size int) int {
	switch g.Kind {
	case Sliding:
		return max(0, computed-g.Span+1) / size
	case Chunked:
		return computed / g.Span * g.Span / size
	case StateSpace:
		return max(0, computed-1) / size
	default:
		return 0
	}
}

// window is how many blocks in a row a Sliding hit needs.
func (g Group) window(size int) int { return (g.Span - 1 + size - 1) / size }

// needs gives the blocks from first to last, without last, that must be there
// for a hit of end blocks. drops: the engine drops the last block that it finds
// (EAGLE), so that one more must be there. States are never dropped.
func (g Group) needs(end, size int, drops bool) (first, last int) {
	first, last = 0, end
	switch g.Kind {
	case Sliding:
		first = max(0, end-g.window(size))
	case Chunked:
		first = end * size / g.Span * g.Span / size
	case StateSpace:
		return end - 1, end
	}
	if drops {
		last++
	}
	return first, last
}

// keeps says whether the i-th block of a sequence gets a hash. Where retention
// is not dense, windows and states are kept only where one of the boundaries
// (in blocks) can be resumed at.
func (g Group) keeps(i, size int, boundaries []int, drops bool) bool {
	switch g.Kind {
	case Sliding:
		need, shift := g.window(size), 0
		if drops {
			need, shift = need+1, 1
		}
		return slices.ContainsFunc(boundaries, func(b int) bool { return i >= b+shift-need && i < b+shift })
	case StateSpace:
		return slices.ContainsFunc(boundaries, func(b int) bool { return i == b-1 })
	default:
		return true
	}
}

// hit finds the largest number of leading blocks at which every group accepts a
// hit for so many tokens, and how far the first group would have gone alone:
// vLLM looks full attention up first.
func (c Config) hit(p *pool, hashes []uint64, tokens int) (end, alone int) {
	limit := min(len(hashes), (tokens-1)/c.BlockSize)
	// What is dropped must lie in the prompt; beside other groups it may end it.
	most := len(hashes)
	if c.Drops && len(c.Groups) == 1 {
		most = limit
	}
	accepts := func(group, end int) bool {
		first, last := c.Groups[group].needs(end, c.BlockSize, c.Drops)
		if last > most {
			return false
		}
		for _, h := range hashes[first:last] {
			if _, ok := p.byHash[name{h, group}]; !ok {
				return false
			}
		}
		return true
	}
	lead := max(0, slices.IndexFunc(c.Groups, func(g Group) bool { return g.Kind == Full }))
	if c.Groups[lead].Kind == Full {
		limit = min(limit, c.depth(p, lead, hashes[:most]))
	}
	for alone = limit; alone > 0 && c.Groups[lead].Kind != Full && !accepts(lead, alone); alone-- {
	}
	for end = alone; end > 0; end-- {
		all := true
		for g := range c.Groups {
			all = all && (g == lead && c.Groups[g].Kind == Full || accepts(g, end))
		}
		if all {
			break
		}
	}
	return end, alone
}

// depth is how far a Full group's hit goes.
func (c Config) depth(p *pool, group int, hashes []uint64) int {
	n := p.match(hashes, group)
	if c.Drops && n > 0 {
		n--
	}
	return n
}

// resumable are the boundaries, in blocks, that a later request with this
// prompt can resume at: it itself, and longer ones.
func (c Config) resumable(prompt int) []int {
	if !c.Drops {
		return []int{(prompt - 1) / c.BlockSize}
	}
	return []int{max(0, (prompt-1)/c.BlockSize-1), max(0, prompt/c.BlockSize-1)}
}

// stop is where a step that would go from one token to another must end so that
// the states of StateSpace groups are kept: they are written when a step ends.
func (c Config) stop(s *sequence, from, to int) int {
	done := max(s.prompt, len(s.tokens)-1)
	if from >= done || !slices.ContainsFunc(c.Groups, func(g Group) bool { return g.Kind == StateSpace }) {
		return to
	}
	size := c.BlockSize
	if to < done {
		if aligned := to / size * size; aligned > from || size <= c.MaxBatchedTokens {
			to = aligned
		}
	}
	last := (len(s.tokens) - 1) / size * size
	if c.Drops {
		last -= size
	}
	stops := []int{last, s.junction * size}
	if from%size != 0 {
		stops = append(stops, (from/size+1)*size)
	}
	for _, at := range stops {
		if from < at && at < to {
			to = at
		}
	}
	return max(from, to)
}
