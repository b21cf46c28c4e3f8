package index

// holder is what one member holds on one lane: of each run the leading
// blocks, as far as its cutoff. Guarded by Index.mu.
type holder struct {
	member Member
	lane   uint32 // one bit
	id     uint32
	held   int64
	runs   cutoffs
	loose  map[uint32]int // run -> spans in Index.loose
	ends   int64          // marks; only on the GPU lane
	last   uint32         // the run of the last change: a hint
}

// span is a piece of a run that a holder has although it lacks a block before
// it. No Match counts it. It waits for the blocks before.
type span struct {
	holder   uint32
	from, to uint32
}

// cover says that h holds the blocks [from, to) of a run.
func (x *Index) cover(h *holder, n uint32, r *run, from, to uint32) {
	at := h.runs.find(n)
	cut := h.runs.cutoff(at)
	if from > cut {
		x.loosen(h, n, r, from, to)
		return
	}
	to = max(to, cut)
	absorbed := uint32(0)
	if r.loose > 0 && h.loose[n] > 0 {
		for grown := true; grown; {
			grown = false
			for i, s := range x.loose[n] {
				if s.holder == h.id && s.from <= to {
					absorbed += s.to - s.from
					to = max(to, s.to)
					x.dropSpan(h, n, r, i)
					grown = true
					break
				}
			}
		}
	}
	if to == cut {
		return
	}
	x.move(&r.groups, h.member, h.lane, cut, to)
	x.cutoffs -= h.runs.bytes()
	h.runs.set(at, n, to)
	x.cutoffs += h.runs.bytes()
	x.hold(h, int64(to-cut)-int64(absorbed))
}

func (x *Index) hold(h *holder, n int64) {
	h.held += n
	x.memberships += n
}

// uncover says that h no longer holds the blocks [from, to) of a run.
func (x *Index) uncover(h *holder, n uint32, r *run, from, to uint32) {
	if r.loose > 0 && h.loose[n] > 0 {
		x.tighten(h, n, r, from, to)
	}
	at := h.runs.find(n)
	cut := h.runs.cutoff(at)
	if from < cut {
		if to < cut {
			x.loosen(h, n, r, to, cut)
			x.hold(h, -int64(cut-to))
		}
		if h.ends > 0 {
			x.mark(h, r, from, cut, false)
		}
		x.move(&r.groups, h.member, h.lane, cut, from)
		if from == 0 {
			x.cutoffs -= h.runs.bytes()
			h.runs.remove(at)
			x.cutoffs += h.runs.bytes()
		} else {
			h.runs.set(at, n, from)
		}
		x.hold(h, -int64(min(to, cut)-from))
	}
	x.cut(n, r)
}

// loosen adds a span beyond h's cutoff, joined with those that it meets.
func (x *Index) loosen(h *holder, n uint32, r *run, from, to uint32) {
	for joined := true; joined; {
		joined = false
		for i, s := range x.loose[n] {
			if s.holder == h.id && s.from <= to && from <= s.to {
				from, to = min(from, s.from), max(to, s.to)
				x.dropSpan(h, n, r, i)
				x.hold(h, -int64(s.to-s.from))
				joined = true
				break
			}
		}
	}
	x.addSpan(h, n, r, from, to)
	x.hold(h, int64(to-from))
}

// tighten takes [from, to) out of h's spans.
func (x *Index) tighten(h *holder, n uint32, r *run, from, to uint32) {
	for hit := true; hit; {
		hit = false
		for i, s := range x.loose[n] {
			if s.holder != h.id || s.to <= from || s.from >= to {
				continue
			}
			x.dropSpan(h, n, r, i)
			x.hold(h, -int64(s.to-s.from))
			if s.from < from {
				x.addSpan(h, n, r, s.from, from)
				x.hold(h, int64(from-s.from))
			}
			if s.to > to {
				x.addSpan(h, n, r, to, s.to)
				x.hold(h, int64(s.to-to))
			}
			hit = true
			break
		}
	}
}

func (x *Index) addSpan(h *holder, n uint32, r *run, from, to uint32) {
	if x.loose == nil {
		x.loose = make(map[uint32][]span)
	}
	if h.loose == nil {
		h.loose = make(map[uint32]int)
	}
	x.loose[n] = append(x.loose[n], span{h.id, from, to})
	h.loose[n]++
	r.loose++
	x.spans++
}

func (x *Index) dropSpan(h *holder, n uint32, r *run, i int) {
	s := x.loose[n]
	s[i] = s[len(s)-1]
	if s = s[:len(s)-1]; len(s) == 0 {
		delete(x.loose, n)
	} else {
		x.loose[n] = s
	}
	if h.loose[n]--; h.loose[n] == 0 {
		delete(h.loose, n)
	}
	r.loose--
	x.spans--
}

// cutoffs maps runs to cutoffs: open addressing with linear probing, entries
// run<<32 | cutoff, 0 free.
type cutoffs struct {
	entries []uint64
	used    int
}

func (c *cutoffs) bytes() int64 { return int64(len(c.entries)) * 8 }

func (c *cutoffs) home(n uint32) int {
	return int(uint64(n*0x9E3779B1) * uint64(len(c.entries)) >> 32)
}

// find is the place of a run's entry, or -1.
func (c *cutoffs) find(n uint32) int {
	if c.used == 0 {
		return -1
	}
	for i := c.home(n); c.entries[i] != 0; {
		if uint32(c.entries[i]>>32) == n {
			return i
		}
		if i++; i == len(c.entries) {
			i = 0
		}
	}
	return -1
}

func (c *cutoffs) cutoff(at int) uint32 {
	if at < 0 {
		return 0
	}
	return uint32(c.entries[at])
}

// set writes the entry of a run at the place that find returned.
func (c *cutoffs) set(at int, n, cutoff uint32) {
	e := uint64(n)<<32 | uint64(cutoff)
	if at >= 0 {
		c.entries[at] = e
		return
	}
	if c.used+1 > len(c.entries)*3/4 {
		c.resize(max(4, len(c.entries)*3/2))
	}
	c.put(e)
	c.used++
}

func (c *cutoffs) put(e uint64) {
	i := c.home(uint32(e >> 32))
	for c.entries[i] != 0 {
		if i++; i == len(c.entries) {
			i = 0
		}
	}
	c.entries[i] = e
}

func (c *cutoffs) resize(n int) {
	old := c.entries
	c.entries = make([]uint64, n)
	for _, e := range old {
		if e != 0 {
			c.put(e)
		}
	}
}

// remove takes the entry at a place out and closes the gap.
func (c *cutoffs) remove(at int) {
	for i := at; ; {
		if i++; i == len(c.entries) {
			i = 0
		}
		e := c.entries[i]
		if e == 0 {
			break
		}
		home := c.home(uint32(e >> 32))
		// e may fill the gap unless its home lies after it.
		if (i-home+len(c.entries))%len(c.entries) >= (i-at+len(c.entries))%len(c.entries) {
			c.entries[at] = e
			at = i
		}
	}
	c.entries[at] = 0
	if c.used--; len(c.entries) > 64 && c.used < len(c.entries)/4 {
		c.resize(len(c.entries) / 2)
	}
}
