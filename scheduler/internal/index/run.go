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
	tip    bool   // the last key is in the table although its offset is odd

	pages [inlinePages]uint32
}

const (
	inlinePages = 6
	maxRun      = 4096 // keys; so groups and directories fit into a cell
	batch       = 64   // keys whose home lines are fetched at once
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
	r.start, r.length, r.wrote, r.mark, r.loose, r.tip = start, 0, 0, 0, 0, false
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
	x.open(n)
	x.untip(r)
	keys = keys[:min(len(keys), int(maxRun-r.length))]
	from := r.length
	var page *[pageKeys]uint64
	var p uint32
	for i, k := range keys {
		if i%batch == 0 {
			x.lookEven(keys[i:min(i+batch, len(keys))], r.length&1)
		}
		offset := r.length
		if i > 0 {
			if _, begins := x.heads.find(uint64(k)); begins {
				break
			}
		}
		if page == nil || offset%pageKeys == 0 {
			if offset%pageKeys == 0 {
				p = x.newPage(n, r, offset>>pageBits)
			} else {
				p = x.page(r, offset>>pageBits)
			}
			page = &x.pages.chunk(p).keys[p&(1<<pagesBits-1)]
		}
		page[offset%pageKeys] = uint64(k)
		c := p<<pageBits | offset%pageKeys
		switch {
		case offset == 0:
			at, _ := x.heads.look(uint64(k))
			x.heads.insert(uint64(k), at, c)
		case offset&1 == 0:
			x.inner.insert(uint64(k), x.spots[i%batch], c)
		}
		r.length++
	}
	r.wrote = r.length
	x.content += int64(r.length - from)
	return int(r.length - from)
}

// lookEven finds the spots of every other of keys, beginning with the first
// or the second.
func (x *Index) lookEven(keys []blockkey.Key, first uint32) {
	touched := uint64(0)
	for i := int(first); i < len(keys); i += 2 {
		at, tags := x.inner.look(uint64(keys[i]))
		x.spots[i] = at
		touched ^= tags
	}
	x.touched = touched
}

// cellOf is the cell of a key of a run.
func (x *Index) cellOf(r *run, offset uint32) uint32 {
	return x.page(r, offset>>pageBits)<<pageBits | offset%pageKeys
}

// open makes n the run that changes now. Its last key may be missing from the
// tables until another one changes; find looks at it.
func (x *Index) open(n uint32) {
	if x.changing == n {
		return
	}
	if x.changing != 0 {
		if r := x.run(x.changing); r.length > 0 && r.length&1 == 0 && !r.tip {
			k := x.key(r, r.length-1)
			at, _ := x.inner.look(k)
			x.inner.insert(k, at, x.cellOf(r, r.length-1))
			r.tip = true
		}
	}
	x.changing = n
}

// untip takes the last key of a run out of the table, if it is there only for
// being the last.
func (x *Index) untip(r *run) {
	if r.tip {
		k := x.key(r, r.length-1)
		at, _ := x.inner.look(k)
		x.inner.remove(k, at, x.cellOf(r, r.length-1))
		r.tip = false
	}
}

// find is the place of a key that begins a run, stands at an even offset, or
// ends a run.
func (x *Index) find(key blockkey.Key) (n, offset uint32, ok bool) {
	c, ok := x.heads.find(uint64(key))
	if !ok {
		c, ok = x.inner.find(uint64(key))
	}
	if ok {
		n, offset = x.locate(c)
		return n, offset, true
	}
	if n = x.changing; n != 0 {
		if r := x.run(n); r.length > 0 && x.key(r, r.length-1) == uint64(key) {
			return n, r.length - 1, true
		}
	}
	return 0, 0, false
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
	if g := x.groups(r); len(g) > 0 {
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
	x.open(n)
	x.untip(r)
	for at := r.length; at > max(length, 1); {
		count := min(batch, at-max(length, 1))
		at -= count
		touched := uint64(0)
		for i := at & 1; i < count; i += 2 {
			offset := at + i
			p := x.page(r, offset>>pageBits)
			k := x.pages.chunk(p).keys[p&(1<<pagesBits-1)][offset%pageKeys]
			spot, tags := x.inner.look(k)
			x.spots[i], x.keys[i], x.cells[i] = spot, k, p<<pageBits|offset%pageKeys
			touched ^= tags
		}
		x.touched = touched
		for i := at & 1; i < count; i += 2 {
			x.inner.remove(x.keys[i], x.spots[i], x.cells[i])
		}
	}
	if length == 0 {
		k := x.key(r, 0)
		at, _ := x.heads.look(k)
		x.heads.remove(k, at, x.cellOf(r, 0))
		x.changing = 0
	}
	for k := (length + pageKeys - 1) >> pageBits; k < (r.length+pageKeys-1)>>pageBits; k++ {
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
