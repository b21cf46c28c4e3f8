package index

import (
	"sync/atomic"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// slab is storage in chunks of type C, cut into cells that are addressed by
// number. Chunks hold no pointers, so the garbage collector looks at none of
// them, and never move, so readers go on while a slab grows.
//
// The directory of chunks is replaced when it grows. A reader that loads it
// after it loaded an address finds that address in it; a writer publishes an
// address only after its chunk.
type slab[C any] struct {
	dir atomic.Pointer[[]*C]

	// The writers' half, guarded by Index.mu.
	bits  uint  // an address is chunk<<bits + offset of the cell
	bytes int64 // of one chunk
	meta  []chunk
	gone  []uint32          // numbers of chunks given back
	open  [classes][]uint32 // chunks of a class with free cells, latest on top
	cells int64             // cells in use
	units int64             // their units
	room  int64             // cells of all chunks
	total int64             // bytes of all chunks
}

// classes is the most kinds of cells that one slab cuts chunks into.
const classes = 24

type chunk struct {
	class  int8
	open   bool
	size   uint16 // units of one cell
	cells  uint16 // cells of the chunk
	used   uint16
	virgin uint16   // cells from here on were never handed out
	free   []uint16 // numbers of cells handed back
}

func newSlab[C any](bits uint, bytes int64) *slab[C] {
	s := &slab[C]{bits: bits, bytes: bytes, meta: make([]chunk, 1)}
	dir := make([]*C, 8) // chunk 0 does not exist: no cell has address 0
	s.dir.Store(&dir)
	return s
}

// chunk is the chunk of an address that was published.
func (s *slab[C]) chunk(addr uint32) *C {
	return (*s.dir.Load())[addr>>s.bits]
}

// spare is the number of cells that can be handed out without a new chunk.
func (s *slab[C]) spare() int64 { return s.room - s.cells }

func (s *slab[C]) alloc(class int, size uint32) uint32 {
	for {
		open := s.open[class]
		if len(open) == 0 {
			s.grow(class, size)
			continue
		}
		n := open[len(open)-1]
		m := &s.meta[n]
		if m.used == m.cells {
			m.open = false
			s.open[class] = open[:len(open)-1]
			continue
		}
		m.used++
		s.cells++
		s.units += int64(m.size)
		var cell uint16
		if k := len(m.free); k > 0 {
			cell = m.free[k-1]
			m.free = m.free[:k-1]
		} else {
			cell = m.virgin
			m.virgin++
		}
		return n<<s.bits + uint32(cell)*uint32(m.size)
	}
}

func (s *slab[C]) grow(class int, size uint32) {
	var n uint32
	if k := len(s.gone); k > 0 {
		n = s.gone[k-1]
		s.gone = s.gone[:k-1]
	} else {
		n = uint32(len(s.meta))
		s.meta = append(s.meta, chunk{})
	}
	dir := *s.dir.Load()
	if int(n) >= len(dir) {
		larger := make([]*C, 2*len(dir))
		copy(larger, dir)
		dir = larger
		s.dir.Store(&larger)
	}
	dir[n] = new(C)
	s.meta[n] = chunk{class: int8(class), size: uint16(size), cells: uint16((uint32(1) << s.bits) / size), open: true}
	s.open[class] = append(s.open[class], n)
	s.total += s.bytes
	s.room += int64(s.meta[n].cells)
}

// free takes a cell back that no reader can reach.
func (s *slab[C]) free(addr uint32) {
	n := addr >> s.bits
	m := &s.meta[n]
	m.free = append(m.free, uint16((addr&(1<<s.bits-1))/uint32(m.size)))
	m.used--
	s.cells--
	s.units -= int64(m.size)
	if !m.open {
		m.open = true
		s.open[m.class] = append(s.open[m.class], n)
	}
	if m.used == 0 && len(s.open[m.class]) > 1 {
		s.drop(n)
	}
}

// drop gives a chunk without cells in use back to the collector.
func (s *slab[C]) drop(n uint32) {
	m := &s.meta[n]
	open := s.open[m.class]
	for i, o := range open {
		if o == n {
			s.open[m.class] = append(open[:i], open[i+1:]...)
			break
		}
	}
	s.room -= int64(m.cells)
	(*s.dir.Load())[n] = nil
	*m = chunk{class: -1}
	s.gone = append(s.gone, n)
	s.total -= s.bytes
}

const (
	pageBits  = 4 // keys of a page
	pageKeys  = blockkey.Lead
	pagesBits = 10
	runsBits  = 9
	listsBits = 12
	blockBits = 13
)

// pages is a chunk of key pages: each holds up to 16 consecutive keys of a
// run. owner names the run and the page's number within it.
type pages struct {
	owner [1 << pagesBits]uint64 // run<<32 | number
	keys  [1 << pagesBits][pageKeys]uint64
}

type (
	runs   [1 << runsBits]run
	lists  [1 << listsBits]uint64 // group lists
	blocks [1 << blockBits]uint32 // holder sets and page directories
)

// sizes of the cells of lists and blocks, in units, by class.
var sizes = [...]uint32{2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 682, 1024, 1365, 2048, 4096, 8192}

func class(n int) int {
	for c, size := range sizes {
		if n <= int(size) {
			return c
		}
	}
	panic("index: cell too large")
}

// size of the cell at addr, in units.
func (s *slab[C]) size(addr uint32) uint32 {
	return uint32(s.meta[addr>>s.bits].size)
}
