package index

import (
	"math"
	"math/bits"
	"sync/atomic"
)

// table finds the cell of a key: its page and its place in it. It is cut into
// segments that grow and shrink one by one, by replacement, so that readers
// are never stopped and no writer waits for more than one segment.
//
// A segment is an array of cache lines of 12 cells of 5 bytes. A key lives in
// its home line, or, when that was full, in one of the lines after it; a line
// counts the keys that went past it, so that a search ends at the first line
// that none went past. Keys never move within a segment.
type table struct {
	pages    *slab[pages] // where the keys are
	shared   bool         // readers look into it
	segments [segments]atomic.Pointer[segment]

	// The writers' half, guarded by Index.mu.
	used  int64
	cells int64
	bytes int64
}

const (
	segmentBits = 8
	segments    = 1 << segmentBits
	lineCells   = 12
	lineBytes   = 64
	// A segment grows by growthFactor when more than maxLoad of its cells
	// are used, and is cut when less than minLoad are.
	maxLoad      = 0.9
	minLoad      = 0.35
	growthFactor = 1.2
	// resizeBatch is how many keys are fetched at a time.
	resizeBatch = 16 * lineCells
)

type segment struct {
	lines []line
	used  int // guarded by Index.mu, like limit and floor
	limit int
	floor int
}

// line is one cache line. tags holds a byte for each cell, 0 if it is free;
// the upper half of tags[1] counts the keys that went past the line. A cell is
// written before its tag, so that who sees the tag sees the cell or a later
// one, and whoever uses a cell compares the key.
type line struct {
	tags  [2]uint64
	cells [lineCells]uint32
}

const (
	lows      = 0x0101010101010101
	highs     = 0x8080808080808080
	highs4    = 0x80808080
	pastShift = 32
)

func newTable(p *slab[pages], shared bool) *table {
	t := &table{pages: p, shared: shared}
	for i := range t.segments {
		t.segments[i].Store(t.newSegment(1))
	}
	return t
}

func (t *table) newSegment(lines int) *segment {
	// What the allocator rounds up to is used.
	s := &segment{lines: append([]line(nil), make([]line, lines)...)}
	s.lines = s.lines[:cap(s.lines)]
	lines = len(s.lines)
	s.limit = int(maxLoad * lineCells * float64(lines))
	if lines > 1 {
		s.floor = int(minLoad * lineCells * float64(lines))
	}
	t.cells += int64(lines * lineCells)
	t.bytes += int64(lines * lineBytes)
	return s
}

// keyAt is the key in a cell.
func (t *table) keyAt(cell uint32) uint64 {
	page := cell >> pageBits
	return t.pages.chunk(page).keys[page&(1<<pagesBits-1)][cell&(pageKeys-1)]
}

// hash says where a key belongs: its segment, its home line and its tag, never
// 0. All of a key's bits decide on each.
func hash(key uint64) (number uint32, home, tag uint64) {
	h := key * 0x9E3779B97F4A7C15
	h ^= h >> 32
	tag = h & 0xff
	if tag == 0 {
		tag = 1
	}
	return uint32(h >> (64 - segmentBits)), h >> (32 - segmentBits) & 0xffffffff, tag
}

// lineOf scales home to a number of lines.
func (s *segment) lineOf(home uint64) uint64 {
	return home * uint64(len(s.lines)) >> 32
}

// zeros marks the bytes of w that are 0, and no others: a free cell may lead
// nowhere.
func zeros(w uint64) uint64 {
	return ^((w&^highs + ^uint64(highs)) | w | ^uint64(highs))
}

// find is the cell of key. Readers may call it.
func (t *table) find(key uint64) (cell uint32, ok bool) {
	number, home, tag := hash(key)
	s := t.segments[number].Load()
	first := s.lineOf(home)
	for n := first; ; {
		l := &s.lines[n]
		for m := zeros(atomic.LoadUint64(&l.tags[0]) ^ tag*lows); m != 0; m &= m - 1 {
			if c := atomic.LoadUint32(&l.cells[bits.TrailingZeros64(m)>>3]); t.keyAt(c) == key {
				return c, true
			}
		}
		t1 := atomic.LoadUint64(&l.tags[1])
		for m := zeros(t1^tag*lows) & highs4; m != 0; m &= m - 1 {
			if c := atomic.LoadUint32(&l.cells[8+bits.TrailingZeros64(m)>>3]); t.keyAt(c) == key {
				return c, true
			}
		}
		if n++; n == uint64(len(s.lines)) {
			n = 0
		}
		if t1>>pastShift == 0 || n == first {
			return 0, false
		}
	}
}

// spot is where a key belongs in a segment of so many lines.
type spot struct {
	line, lines uint32
	number      uint16
	tag         uint8
}

// look finds a key's spot and brings its home line into the cache.
func (t *table) look(key uint64) (spot, uint64) {
	number, home, tag := hash(key)
	s := t.segments[number].Load()
	n := s.lineOf(home)
	return spot{uint32(n), uint32(len(s.lines)), uint16(number), uint8(tag)}, s.lines[n].tags[0]
}

// segment is that of a spot, and the spot, should the segment have another
// size since it was looked up.
func (t *table) segment(key uint64, at spot) (*segment, spot) {
	s := t.segments[at.number].Load()
	if len(s.lines) != int(at.lines) {
		at, _ = t.look(key)
	}
	return s, at
}

// insert puts a key, which is not there, at its spot, and notes its cell.
func (t *table) insert(key uint64, at spot, cell uint32) {
	s, at := t.segment(key, at)
	if s.used >= s.limit {
		t.resize(uint32(at.number), s, s.used+1)
		s, at = t.segment(key, at)
	}
	for n := uint64(at.line); ; {
		l := &s.lines[n]
		i := l.free()
		if i >= 0 {
			t.setCell(&l.cells[i], cell)
			w := &l.tags[i>>3]
			t.set(w, *w|uint64(at.tag)<<(i&7*8))
			break
		}
		t.set(&l.tags[1], l.tags[1]+1<<pastShift)
		if n++; n == uint64(len(s.lines)) {
			n = 0
		}
	}
	s.used++
	t.used++
}

// set writes a word that readers may look at.
func (t *table) set(w *uint64, v uint64) {
	if t.shared {
		atomic.StoreUint64(w, v)
	} else {
		*w = v
	}
}

func (t *table) setCell(c *uint32, v uint32) {
	if t.shared {
		atomic.StoreUint32(c, v)
	} else {
		*c = v
	}
}

// free is a free place in the line, or -1.
func (l *line) free() int {
	if m := zeros(l.tags[0]); m != 0 {
		return bits.TrailingZeros64(m) >> 3
	}
	if m := zeros(l.tags[1]) & highs4; m != 0 {
		return 8 + bits.TrailingZeros64(m)>>3
	}
	return -1
}

// remove takes key from its spot, out of cell.
func (t *table) remove(key uint64, at spot, cell uint32) {
	s, at := t.segment(key, at)
	tag := uint64(at.tag)
	first := uint64(at.line)
	for n := first; ; {
		l := &s.lines[n]
		if i := l.find(tag, cell); i >= 0 {
			w := &l.tags[i>>3]
			t.set(w, *w&^(0xff<<(i&7*8)))
			for p := first; p != n; {
				past := &s.lines[p].tags[1]
				t.set(past, *past-1<<pastShift)
				if p++; p == uint64(len(s.lines)) {
					p = 0
				}
			}
			break
		}
		if n++; n == uint64(len(s.lines)) {
			n = 0
		}
		if n == first {
			panic("index: key without its cell")
		}
	}
	s.used--
	t.used--
	if s.used < s.floor {
		t.resize(uint32(at.number), s, s.used)
	}
}

// find is the place of a cell in the line, or -1.
func (l *line) find(tag uint64, cell uint32) int {
	for m := zeros(l.tags[0] ^ tag*lows); m != 0; m &= m - 1 {
		if i := bits.TrailingZeros64(m) >> 3; l.cells[i] == cell {
			return i
		}
	}
	for m := zeros(l.tags[1]^tag*lows) & highs4; m != 0; m &= m - 1 {
		if i := 8 + bits.TrailingZeros64(m)>>3; l.cells[i] == cell {
			return i
		}
	}
	return -1
}

// resize replaces a segment by one for want keys.
func (t *table) resize(number uint32, old *segment, want int) {
	s := t.newSegment(linesFor(number, want))
	t.cells -= int64(len(old.lines) * lineCells)
	t.bytes -= int64(len(old.lines) * lineBytes)
	// Keys lie far apart: they are fetched many at a time, then placed.
	var keys [resizeBatch]uint64
	var cells [resizeBatch]uint32
	n := 0
	for i := range old.lines {
		l := &old.lines[i]
		for c := range lineCells {
			if l.tags[c>>3]>>(c&7*8)&0xff != 0 {
				cells[n] = l.cells[c]
				n++
			}
		}
		if n > resizeBatch-lineCells || i == len(old.lines)-1 {
			for c, cell := range cells[:n] {
				keys[c] = t.keyAt(cell)
			}
			for c, key := range keys[:n] {
				s.put(key, cells[c])
			}
			n = 0
		}
	}
	s.used = old.used
	t.segments[number].Store(s)
}

// put places a key in a segment that no reader has seen.
func (s *segment) put(key uint64, cell uint32) {
	_, home, tag := hash(key)
	for n := s.lineOf(home); ; {
		l := &s.lines[n]
		if i := l.free(); i >= 0 {
			l.cells[i] = cell
			l.tags[i>>3] |= tag << (i & 7 * 8)
			return
		}
		l.tags[1] += 1 << pastShift
		if n++; n == uint64(len(s.lines)) {
			n = 0
		}
	}
}

// linesFor is the number of lines of a segment for so many keys. The sizes
// form a ladder that is shifted from segment to segment, so that they do not
// all grow at once and the table as a whole is always filled alike.
func linesFor(number uint32, keys int) int {
	shift := float64(number) / segments
	need := float64(keys) / (maxLoad * lineCells)
	step := math.Ceil(math.Log(math.Max(need, 1))/math.Log(growthFactor) - shift)
	n := int(math.Ceil(math.Pow(growthFactor, step+shift)))
	for int(maxLoad*lineCells*float64(n)) <= keys {
		n++
	}
	return n
}
