package books

import (
	"math/bits"
	"time"
	"unsafe"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

const (
	// seenEntries are 32 MiB: prompts of 8,192 tokens take 97 each, so the last
	// 10,800 that have nothing in common are remembered, 88 million tokens.
	seenEntries = 1 << 20
	pageEntries = 1 << 10
	ways        = 4

	entryBytes   = unsafe.Sizeof(entry{})
	accountBytes = unsafe.Sizeof(account{}) + 8

	// tick is the resolution of times, grain of tokens written.
	tick  = 100 * time.Millisecond
	grain = 16
	// tagBits of a home are of its epoch, the rest is its member's number.
	tagBits = 12
)

// entry says that a prompt up to a block was seen. An equal key at one place
// means that all before it is equal.
type entry struct {
	key    blockkey.Key // 0: free
	last   uint32       // use, in ticks
	volume uint32       // what was written to its home until then, in grains
	home   uint32       // the member that it was sent to last, and a tag of its epoch
	hits   uint32       // prompts that had it, but for the first
	parted uint32       // of those, by which nothing behind it was known
}

// page is a piece of the table, made when it is needed.
type page [pageEntries]entry

// seen remembers prompts: not each block, but those at the checkpoints of step,
// and the last. So a prompt of n blocks takes 16 log2(n/8) entries, and the depth up to
// which it was seen before is found short by 1/16 of itself at most, and never too
// deep. An entry stands in one of the ways of its bucket; a new one takes the place
// of the longest unused.
type seen struct {
	pages   []*page // a power of two; nil: nothing of it was seen
	taken   int     // pages
	origin  time.Time
	written []uint64 // tokens, by number of the member
	now     uint32   // in ticks
	dropped uint64   // entries
	unused  float64  // mean of ticks for which those had not been used, the last ones most
	touched uint64   // keeps touches of memory alive
}

// step is from one checkpoint to the next: every block up to 32, every second
// up to 64, and so on.
func step(blocks int) int {
	if blocks < 16 {
		return 1
	}
	return 1 << (bits.Len(uint(blocks)) - 5)
}

// visit adds to an account what was seen before beyond its end, and notes that
// it is seen now. It returns the deepest entry that was there, and its blocks.
func (s *seen) visit(p *Placement, home func(uint32) Home, now time.Time, a *account) (deepest *entry, depth int) {
	if s.origin.IsZero() {
		s.origin = now
	}
	if s.pages == nil && len(p.Keys) > 0 {
		s.pages = make([]*page, seenEntries/pageEntries)
	}
	s.now = uint32(max(now.Sub(s.origin), 0) / tick)
	here := s.homeOf(p.Member, p.Epoch)
	volume := s.volume(p.Member)
	var last uint32
	var homed Home
	asked, past := false, 0
	s.touch(p.Keys)
	for n := 0; n < len(p.Keys); {
		n = min(n+step(n), len(p.Keys))
		e, found := s.find(p.Keys[n-1])
		if found {
			to := min(n*p.BlockSize, p.Limit)
			if a.count == 0 || to > int(a.spans[a.count-1].to) {
				if !asked || last != e.home {
					last, asked = e.home, true
					homed = home(e.home >> tagBits)
				}
				next := s.past(e, &homed)
				before := a.count
				if past == maxPast {
					next = a.spans[a.count-1] // no room to tell them apart
				}
				a.extend(to, next)
				past += int(a.count - before)
			}
			e.hits++
			deepest, depth = e, n
		}
		e.last, e.volume, e.home = s.now, volume, here
	}
	s.write(p.Member, p.Writes)
	if deepest == nil || deepest.key != p.Keys[depth-1] {
		return nil, 0 // none, or another has its place by now
	}
	deepest.parted++
	return deepest, depth
}

// touch asks for the memory of all buckets at once, as waiting for one after the
// other takes ten times as long.
func (s *seen) touch(keys []blockkey.Key) {
	for n := 0; n < len(keys); {
		n = min(n+step(n), len(keys))
		bucket := s.bucket(keys[n-1])
		s.touched += uint64(bucket[0].key) + uint64(bucket[ways-1].key)
	}
}

// past is what became of something that was seen.
func (s *seen) past(e *entry, h *Home) span {
	switch {
	case !h.Present || s.homeOf(e.home>>tagBits, h.Epoch) != e.home:
		return span{cause: Gone}
	case !h.Exact:
		return span{cause: Untrusted}
	}
	found := span{cause: Evicted}
	age := time.Duration(s.now-e.last) * tick
	for int(found.age) < len(Ages) && age >= Ages[found.age] {
		found.age++
	}
	if h.Tokens == 0 {
		return found
	}
	written := uint64(s.volume(e.home>>tagBits)-e.volume) * grain
	for found.size = 1; int(found.size) <= len(Sizes) && written > uint64(Sizes[found.size-1])*h.Tokens; {
		found.size++
	}
	return found
}

// bucket is where a key may be.
func (s *seen) bucket(key blockkey.Key) []entry {
	at := uint64(key) * ways
	p := &s.pages[at/pageEntries&uint64(len(s.pages)-1)]
	if *p == nil {
		*p = new(page)
		s.taken++
	}
	return (*p)[at%pageEntries:][:ways]
}

// find is the entry of a key, made in place of the longest unused of its bucket
// where there is none.
func (s *seen) find(key blockkey.Key) (e *entry, found bool) {
	bucket := s.bucket(key)
	for i := range bucket {
		if bucket[i].key == key {
			return &bucket[i], true
		}
	}
	e = &bucket[0]
	for i := range bucket {
		if bucket[i].key == 0 {
			e = &bucket[i]
			break
		}
		if bucket[i].last < e.last {
			e = &bucket[i]
		}
	}
	if e.key != 0 {
		s.dropped++
		s.unused += (float64(s.now-e.last) - s.unused) / float64(min(s.dropped, 4096))
	}
	*e = entry{key: key}
	return e, false
}

// homeOf is a member's engine. Members of numbers beyond what an entry can name
// are taken for others that they are not, and seldom have their tag.
func (s *seen) homeOf(member uint32, epoch uint64) uint32 {
	return member<<tagBits | uint32(epoch*0x9e3779b97f4a7c15>>(64-tagBits))
}

func (s *seen) volume(member uint32) uint32 {
	if int(member) >= len(s.written) {
		return 0
	}
	return uint32(s.written[member] / grain)
}

func (s *seen) write(member uint32, tokens int) {
	if member >= 1<<(32-tagBits) {
		return
	}
	for int(member) >= len(s.written) {
		s.written = append(s.written, 0)
	}
	s.written[member] += uint64(max(tokens, 0))
}

// remembered is for how long something may be unused until it is dropped, in the
// mean; negative: nothing has been.
func (s *seen) remembered() time.Duration {
	if s.dropped == 0 {
		return -1
	}
	return time.Duration(s.unused * float64(tick))
}

func (s *seen) bytes() int {
	return s.taken*pageEntries*int(entryBytes) + len(s.pages)*8 + len(s.written)*8
}
