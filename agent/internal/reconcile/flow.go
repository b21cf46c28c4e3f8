package reconcile

// maxGroups bounds the KV-cache groups of an engine that are told apart.
const maxGroups = 32

// Flow is what one life of a stream has announced of blocks in GPU memory.
type Flow struct {
	groups [maxGroups]struct {
		size   int // tokens in a block
		tokens uint64
		fresh  uint64
	}
}

// Store takes one event. tokens are all that the event is about, also where a
// group keeps only some of their blocks. computed is false for an event that may
// repeat what was announced before.
func (f *Flow) Store(group, blockSize, tokens int, computed bool) {
	if group < 0 || group >= maxGroups || blockSize <= 0 {
		return
	}
	g := &f.groups[group]
	if blockSize < g.size {
		return // a part of a block, which is announced whole later
	}
	g.size = blockSize
	g.tokens += uint64(tokens)
	if computed {
		g.fresh += uint64(tokens)
	}
}

// Totals of a Flow, in tokens.
type Totals struct {
	Most      float64 // announced: of the group that announced most
	Fresh     float64 // announced by every group, and surely not before
	BlockSize int     // of the group that announced most
}

// Totals sums up. repeated are blocks that were announced and were there already.
// blockSize is the engine's own, for streams that have not shown theirs.
func (f *Flow) Totals(repeated uint64, blockSize int) Totals {
	const defaultBlockSize = 16
	t := Totals{BlockSize: blockSize}
	if blockSize <= 0 {
		t.BlockSize = defaultBlockSize
	}
	least, any := uint64(0), false
	for i := range f.groups {
		g := &f.groups[i]
		if g.size == 0 {
			continue
		}
		if float64(g.tokens) > t.Most {
			t.Most, t.BlockSize = float64(g.tokens), g.size
		}
		if !any || g.fresh < least {
			least, any = g.fresh, true
		}
	}
	t.Fresh = max(0, float64(least)-float64(repeated)*float64(t.BlockSize))
	return t
}
