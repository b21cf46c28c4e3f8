package index

import (
	"sync/atomic"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// run is a piece of content: consecutive keys of one chain, from start on,
// shared by all who hold any of them. Runs never split and are not linked:
// the blocks after a run, or a branch inside it, are found by their own key.
// A run is one cache line.
//
// Readers see of its keys only those below a cutoff that they read in groups.
// A key is written before any cutoff reaches it and stays as long as a reader
// may know such a cutoff: after a cut the run is not extended again until
// those readers have left.
type run struct {
	groups    atomic.Uint64
	directory atomic.Uint32 // block with the pages' numbers; 0: they are in pages

	// The writers' half, guarded by Index.mu.
	start  uint32
	mark   uint32 // of the last cut
	stamp  uint32 // of the last store
	length uint32
	wrote  uint32 // keys up to here were seen by readers since the last grace
	loose  uint32 // spans in Index.loose

	pages [inlinePages]uint32
}

const (
	inlinePages = 6
	maxRun      = 4096 // keys; so groups and directories fit into a cell
)

func (x *Index) run(n uint32) *run {
	return &x.runs.chunk(n)[n&(1<<runsBits-1)]
}

// page is the number of a run's page k. Readers may call it.
func (x *Index) page(r *run, k uint32) uint32 {
	if d := r.directory.Load(); d != 0 {
		return cell(x.blocks, d)[k]
	}
	return r.pages[k]
}

// key at an offset of a run. Readers may call it below a cutoff.
func (x *Index) key(r *run, offset uint32) uint64 {
	p := x.page(r, offset>>pageBits)
	return x.pages.chunk(p).keys[p&(1<<pagesBits-1)][offset&(pageKeys-1)]
}

// locate is the run of a cell and its offset there.
func (x *Index) locate(c uint32) (n, offset uint32) {
	p := c >> pageBits
	o := x.pages.chunk(p).owner[p&(1<<pagesBits-1)]
	return uint32(o >> 32), uint32(o)<<pageBits + c&(pageKeys-1)
}

func (x *Index) newRun(start uint32) uint32 {
	n := x.runs.alloc(0, 1)
	r := x.run(n)
	r.groups.Store(0)
	r.directory.Store(0)
	r.start, r.length, r.wrote, r.mark, r.loose = start, 0, 0, 0, 0
	return n
}

// extend appends keys, of which the first is not in the index, up to the
// first that begins another run. No other can be there: it would follow its
// parent.
func (x *Index) extend(n uint32, r *run, keys []blockkey.Key) int {
	if r.wrote > r.length {
		if !x.grace.passed(r.mark) {
			return 0
		}
		r.wrote = r.length
	}
	keys = keys[:min(len(keys), int(maxRun-r.length))]
	x.lookFirsts(keys, r.length)
	from := r.length
	var page *[pageKeys]uint64
	for i, k := range keys {
		if i > 0 {
			if _, begins := x.heads.find(uint64(k)); begins {
				break
			}
		}
		offset := r.length
		switch {
		case offset%pageKeys == 0:
			p := x.newPage(n, r, offset>>pageBits)
			page = &x.pages.chunk(p).keys[p&(1<<pagesBits-1)]
			page[0] = uint64(k)
			if offset == 0 {
				at, _ := x.heads.look(uint64(k))
				x.heads.insert(uint64(k), at, p<<pageBits)
			} else {
				x.inner.insert(uint64(k), x.spots[offset>>pageBits], p<<pageBits)
			}
		case page == nil:
			p := x.page(r, offset>>pageBits)
			page = &x.pages.chunk(p).keys[p&(1<<pagesBits-1)]
			fallthrough
		default:
			page[offset%pageKeys] = uint64(k)
		}
		r.length++
	}
	r.wrote = r.length
	x.content += int64(r.length - from)
	return int(r.length - from)
}

// lookFirsts finds the spots of those of keys that will be the first of a page
// when keys are appended at an offset.
func (x *Index) lookFirsts(keys []blockkey.Key, offset uint32) {
	touched := uint64(0)
	for i := -offset % pageKeys; int(i) < len(keys); i += pageKeys {
		at, tags := x.inner.look(uint64(keys[i]))
		x.spots[(offset+i)>>pageBits] = at
		touched ^= tags
	}
	x.touched = touched
}

// find is the place of a key that is the first of a page.
func (x *Index) find(key blockkey.Key) (n, offset uint32, ok bool) {
	c, ok := x.heads.find(uint64(key))
	if !ok {
		if c, ok = x.inner.find(uint64(key)); !ok {
			return 0, 0, false
		}
	}
	n, offset = x.locate(c)
	return n, offset, true
}

// newPage gives a run its page k.
func (x *Index) newPage(n uint32, r *run, k uint32) uint32 {
	p := x.pages.alloc(0, 1)
	x.pages.chunk(p).owner[p&(1<<pagesBits-1)] = uint64(n)<<32 | uint64(k)
	d := r.directory.Load()
	switch {
	case d == 0 && k < inlinePages:
		r.pages[k] = p
		return p
	case d == 0:
		c := class(int(k) + 1)
		larger := x.blocks.alloc(c, sizes[c])
		copy(cell(x.blocks, larger), r.pages[:])
		cell(x.blocks, larger)[k] = p
		r.directory.Store(larger)
	default:
		if size := x.blocks.size(d); k >= size {
			c := class(int(k) + 1)
			larger := x.blocks.alloc(c, sizes[c])
			copy(cell(x.blocks, larger), cell(x.blocks, d)[:size])
			cell(x.blocks, larger)[k] = p
			r.directory.Store(larger)
			x.grace.retire(retiredBlock, d)
		} else {
			cell(x.blocks, d)[k] = p
		}
	}
	return p
}

// common counts how many of keys a run has from offset on.
func (x *Index) common(r *run, offset uint32, keys []blockkey.Key) int {
	keys = keys[:min(len(keys), int(r.length-offset))]
	for i := 0; i < len(keys); {
		p := x.page(r, offset>>pageBits)
		page := &x.pages.chunk(p).keys[p&(1<<pagesBits-1)]
		for j := offset % pageKeys; j < pageKeys && i < len(keys); j++ {
			if page[j] != uint64(keys[i]) {
				return i
			}
			i++
			offset++
		}
	}
	return len(keys)
}

// cut drops the keys of a run that nobody holds any more, and the run with
// the last of them. Their cutoffs are gone from readers' sight.
func (x *Index) cut(n uint32, r *run) {
	length := uint32(0)
	if g := x.groups(&r.groups); len(g) > 0 {
		length = cutoff(g[0])
	}
	if r.loose > 0 {
		for _, s := range x.loose[n] {
			length = max(length, s.to)
		}
	}
	if length >= r.length {
		return
	}
	first, end := (length+pageKeys-1)>>pageBits, (r.length+pageKeys-1)>>pageBits // pages that go
	touched := uint64(0)
	for k := max(first, 1); k < end; k++ {
		at, tags := x.inner.look(x.key(r, k<<pageBits))
		x.spots[k] = at
		touched ^= tags
	}
	x.touched = touched
	for k := max(first, 1); k < end; k++ {
		x.inner.remove(x.key(r, k<<pageBits), x.spots[k], x.page(r, k)<<pageBits)
	}
	if length == 0 {
		k := x.key(r, 0)
		at, _ := x.heads.look(k)
		x.heads.remove(k, at, x.page(r, 0)<<pageBits)
	}
	for k := first; k < end; k++ {
		x.grace.retire(retiredPage, x.page(r, k))
	}
	x.content -= int64(r.length - length)
	r.length = length
	r.mark = x.grace.since()
	if length == 0 {
		if d := r.directory.Load(); d != 0 {
			x.grace.retire(retiredBlock, d)
		}
		x.grace.retire(retiredRun, n)
	}
}
