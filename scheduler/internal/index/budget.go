package index

// At the bound of its bytes the index keeps less, never something wrong: it
// sheds the deepest blocks first, for they are worth the least: a prefix
// serves every prompt that goes on from it, and whoever held the shed blocks
// still matches all before them. Of a sample of runs, taken in turn over all,
// the one that ends deepest loses its second half, or all of it if it is
// short; among equals the one that was stored to longest ago. What finds no
// room even so is not taken. All of it is counted in Stats.Shed.
//
// Room is reckoned in live bytes, since freed cells stay in their chunks:
// ceiling is what the live bytes were, less a little, when the memory taken
// came to the bound.

const (
	shedSample = 16
	shedWhole  = 64 // keys of a run that is shed in one piece
	minBytes   = 4 << 20
	chunkBytes = 256 << 10 // one more chunk of every slab
	entryBytes = 6         // of a key in a table
)

// bytes of memory taken.
func (x *Index) bytes() int64 {
	return x.heads.bytes + x.inner.bytes +
		x.pages.total + x.runs.total + x.lists.total + x.blocks.total +
		x.cutoffs + int64(len(x.sets.byHash))*32 + x.spans*64 + x.ends.bytes +
		int64(cap(x.grace.fresh)+cap(x.grace.waiting))*8
}

// live is the part of bytes that is in use.
func (x *Index) live() int64 {
	return (x.heads.used+x.inner.used)*entryBytes +
		x.pages.cells*(pageKeys+1)*8 + x.runs.cells*lineBytes + x.lists.units*8 + x.blocks.units*4 +
		x.cutoffs + int64(len(x.sets.byHash))*32 + x.spans*64 + x.ends.bytes
}

// room makes room for a store of so many keys, and reports whether there is.
func (x *Index) room(keys int) bool {
	bound := x.cfg.MaxBytes
	if bound == 0 {
		return true
	}
	// New keys take their page, their entry, and a share of a segment that
	// grows for them.
	growth := int64(keys)*20 + chunkBytes + bound/64
	bytes := x.bytes()
	if bytes+growth <= bound && (x.ceiling == 0 || bytes < bound/8*7) {
		x.ceiling = 0
		return true
	}
	live := x.live()
	if x.ceiling == 0 || bytes+chunkBytes+bound/128 > bound {
		x.ceiling = min(live, bound) / 64 * 63
	}
	for need := int64(keys)*16 + 512; live+need > x.ceiling; live = x.live() {
		if !x.shedOne() {
			return false
		}
		x.grace.flush()
	}
	return x.bytes()+chunkBytes <= bound && (x.pages.spare()*pageKeys > int64(keys)+2*pageKeys || x.bytes()+growth <= bound)
}

// shedOne sheds blocks of the next victim; false if there is none.
func (x *Index) shedOne() bool {
	victim, depth, stamp := uint32(0), uint32(0), uint32(0)
	seen := 0
	total := uint32(len(x.runs.meta)) << runsBits
	for range total {
		x.hand++
		if x.hand >= total {
			x.hand = 1 << runsBits
		}
		if x.runs.chunk(x.hand) == nil {
			x.hand |= 1<<runsBits - 1
			continue
		}
		r := x.run(x.hand)
		if r.length == 0 {
			continue
		}
		age := x.stamp - r.stamp
		if end := r.start + r.length; victim == 0 || end > depth || end == depth && age > stamp {
			victim, depth, stamp = x.hand, end, age
		}
		if seen++; seen == shedSample {
			break
		}
	}
	if victim == 0 {
		return false
	}
	r := x.run(victim)
	keep := uint32(0)
	if r.length > shedWhole {
		keep = r.length / 2
	}
	before := x.memberships
	for r.length > keep {
		h := x.longest(victim, r)
		x.uncover(h, victim, r, keep, r.length)
	}
	x.shed += before - x.memberships
	return true
}

// longest is a holder of the last block of a run.
func (x *Index) longest(n uint32, r *run) *holder {
	for _, s := range x.loose[n] {
		if s.to == r.length {
			return x.holders[s.holder]
		}
	}
	e := x.members(holders(x.groups(&r.groups)[0]), new([1]uint32))[0]
	for l := range Lanes {
		if e>>l&1 != 0 {
			return x.holders[int(e>>laneBits)*Lanes+l]
		}
	}
	panic("index: holder without a lane")
}
