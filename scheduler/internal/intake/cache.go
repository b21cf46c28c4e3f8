package intake

import (
	"container/list"
	"crypto/sha256"
	"sync"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// digest names a document. It is a strong hash, because callers choose the
// documents and two of them must never share their tokens.
type digest [sha256.Size]byte

// rendered is a document as tokens. It is shared and never changed.
type rendered struct {
	tokens []byte // little-endian uint32
	items  []blockkey.Item
	salt   string
}

// entryCost is what an entry costs beside what it points to: list element,
// map slot, headers.
const entryCost = 320

func (r *rendered) size() int64 {
	n := int64(entryCost + cap(r.tokens) + len(r.salt))
	for _, it := range r.items {
		n += int64(len(it.ID)) + 32
	}
	return n
}

// cache keeps rendered documents, the longest unused going first at the bound
// of bytes.
type cache struct {
	limit int64
	keep  time.Duration

	mu                    sync.Mutex // guards what follows
	at                    map[digest]*list.Element
	order                 *list.List // of *entry, last used first
	bytes                 int64
	hits, misses, evicted uint64
}

type entry struct {
	key      digest
	rendered *rendered
	until    time.Time
}

func newCache(limit int64, keep time.Duration) *cache {
	return &cache{limit: limit, keep: keep, at: make(map[digest]*list.Element), order: list.New()}
}

func (c *cache) get(key digest) *rendered {
	c.mu.Lock()
	defer c.mu.Unlock()
	el, ok := c.at[key]
	if ok && time.Now().After(el.Value.(*entry).until) {
		c.dropLocked(el)
		ok = false
	}
	if !ok {
		c.misses++
		return nil
	}
	c.hits++
	c.order.MoveToFront(el)
	return el.Value.(*entry).rendered
}

func (c *cache) put(key digest, r *rendered) {
	size := r.size()
	if size > c.limit {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if el, ok := c.at[key]; ok {
		c.dropLocked(el)
	}
	for c.bytes+size > c.limit {
		c.dropLocked(c.order.Back())
		c.evicted++
	}
	c.at[key] = c.order.PushFront(&entry{key: key, rendered: r, until: time.Now().Add(c.keep)})
	c.bytes += size
}

func (c *cache) dropLocked(el *list.Element) {
	e := c.order.Remove(el).(*entry)
	delete(c.at, e.key)
	c.bytes -= e.rendered.size()
}

func (c *cache) stats(s *Stats) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Hits, s.Misses, s.Evicted, s.CacheBytes = c.hits, c.misses, c.evicted, c.bytes
}

// flights lets equal documents that arrive together be asked for once. The
// first caller asks, on his own goroutine and time; the others wait for it.
type flights struct {
	mu   sync.Mutex // guards open
	open map[digest]*flight
}

// flight is one question under way. Its results are set before landed closes.
type flight struct {
	landed    chan struct{}
	rendered  *rendered
	err       error
	abandoned bool // the caller who asked gave up
}

// join returns the flight for the key, and whether the caller has to make it.
func (f *flights) join(key digest) (_ *flight, mine bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl, ok := f.open[key]; ok {
		return fl, false
	}
	fl := &flight{landed: make(chan struct{})}
	f.open[key] = fl
	return fl, true
}

func (f *flights) land(key digest, fl *flight) {
	f.mu.Lock()
	delete(f.open, key)
	f.mu.Unlock()
	close(fl.landed)
}
